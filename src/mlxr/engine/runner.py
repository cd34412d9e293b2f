"""Runs the model over a batch, and is the only place that touches the arena between steps.

`build_batch` makes the ragged batch of a step from parts of sequences: integer arrays that say what to compute and
where. `Runner` computes its logits and hidden states; the caller commits the written tokens to the page tables once it
has used them. `Pool` makes one vector of the hidden states of a text, chunk by chunk; they are added up one after
another in float64, so that neither the chunks nor the batch can change a bit. A text by itself (`score_tokens`) and the
prompt of a request (`PromptScores`) get the log-probability of every token after the first; logits are made for some
tokens at a time, so that at most MAX_LOGITS_BYTES are held. Knows no requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from mlxr.cache.arena import ModelArena
from mlxr.cache.kv_cache import KVCache
from mlxr.cache.page_table import RELEASED, SequenceTable
from mlxr.cache.shapes import LayerCache
from mlxr.core.frozen import frozen
from mlxr.core.types import TokenInfo, TokenLogprob
from mlxr.engine.pictures import Encoder, Pictures
from mlxr.engine.request import Pooling
from mlxr.kernels.ragged import RaggedBatch
from mlxr.models.adapter import Adapter

Ints = npt.NDArray[np.int32]
FEW_TOKENS = 16  # of each sequence, all of them wanted: up to so many, a batch is built row by row
FEW = 32  # sequences: for more, whole arrays are faster than row by row


@frozen
class BatchPart:
    """The next tokens of one sequence: they go right after what `table` holds.

    The logits of the last `output_tokens` of them are wanted, the hidden states of the last `hidden_tokens`, and those
    of the last `kept_tokens` for a head that drafts. `adapter` updates the weights for them. `table` must have been
    prepared for all of them.
    """

    table: SequenceTable
    token_ids: Sequence[int]
    output_tokens: int
    hidden_tokens: int = 0
    adapter: Adapter | None = None
    kept_tokens: int = 0
    second_start: int | None = None  # the token of the sequence from which on types are 1
    pictures: Pictures | None = None  # of the prompt of the sequence
    sums: bool = False  # the sum of the hidden states will do

    @property
    def start_token(self) -> int:
        """The position of its first token in the sequence."""
        return self.table.length_tokens

    @property
    def wanted_tokens(self) -> int:
        """Tokens at the end that must go through the whole model."""
        return max(self.output_tokens, self.hidden_tokens, self.kept_tokens)


def build_batch(parts: Sequence[BatchPart]) -> RaggedBatch:
    """Return one batch of all `parts` in their order; the wanted rows come out in the same order."""
    batch = _build(parts)
    if any(part.second_start is not None for part in parts):
        batch = batch.with_types(_number_types(parts))
    return batch.with_adapters(tuple(part.adapter for part in parts)) if any(part.adapter for part in parts) else batch


def _number_types(parts: Sequence[BatchPart]) -> Ints:
    """Return the type of each token: 1 in the second of two texts, else 0."""
    types: list[Ints] = []
    for part in parts:
        positions = np.arange(len(part.token_ids)) + part.table.length_tokens
        types.append((positions >= (np.inf if part.second_start is None else part.second_start)).astype(np.int32))
    return np.concatenate(types)


def _build(parts: Sequence[BatchPart]) -> RaggedBatch:
    if len(parts) <= FEW and all(len(part.token_ids) == part.wanted_tokens == 1 for part in parts):
        return _build_decode(parts)
    if len(parts) <= FEW and all(0 < len(part.token_ids) == part.wanted_tokens <= FEW_TOKENS for part in parts):
        return _build_few(parts)
    counts = np.array([len(part.token_ids) for part in parts], dtype=np.int32)
    starts = np.array([part.table.length_tokens for part in parts], dtype=np.int32)
    wanted = np.array([part.wanted_tokens for part in parts], dtype=np.int32)
    query_starts = np.zeros(len(parts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    owners = np.repeat(np.arange(len(parts), dtype=np.int32), counts)
    rows = np.arange(len(owners), dtype=np.int32)
    positions = (starts - query_starts[:-1])[owners] + rows
    page_size = np.int32(parts[0].table.page_size)  # one for all
    indices, offsets = np.divmod(positions, page_size)
    groups = len(parts[0].table.paged)

    def find_places(group: int) -> tuple[Ints, Ints]:
        page_table = _stack_tables([part.table.paged[group].pages for part in parts])
        return page_table[owners, indices] * page_size + offsets, page_table

    slots, page_table = find_places(0) if groups else _place_nowhere(len(owners), len(parts))
    batch = RaggedBatch(
        token_ids=np.fromiter(chain.from_iterable(part.token_ids for part in parts), np.int32, len(owners)),
        positions=positions,
        slots=slots,
        query_starts=query_starts,
        context_lengths=starts + counts,
        page_table=page_table,
        output_rows=rows[rows >= (query_starts[1:] - wanted)[owners]],
    )
    if groups > 1:
        batch = batch.with_groups(find_places(group) for group in range(1, groups))
    return _add_states(batch, parts)


def _build_decode(parts: Sequence[BatchPart]) -> RaggedBatch:
    """Do `build_batch` for one token each."""
    tables = [part.table for part in parts]
    batch = build_single(tables, [part.token_ids[0] for part in parts], [table.length_tokens for table in tables])
    return _add_states(batch, parts)


def _build_few(parts: Sequence[BatchPart]) -> RaggedBatch:
    """Do `build_batch` for a few tokens of each sequence, all of them wanted, such as drafts."""
    tables, counts = [part.table for part in parts], [len(part.token_ids) for part in parts]
    token_ids = [*chain.from_iterable(part.token_ids for part in parts)]
    spans = [
        range(table.length_tokens, table.length_tokens + count) for table, count in zip(tables, counts, strict=True)
    ]
    size, groups = tables[0].page_size, len(tables[0].paged)

    def find_places(group: int) -> tuple[list[int], Ints]:
        own = [table.paged[group].pages for table in tables]
        pairs = ((pages, position) for pages, span in zip(own, spans, strict=True) for position in span)
        return [pages[position // size] * size + position % size for pages, position in pairs], _stack_tables(own)

    places = [find_places(group) for group in range(groups)] or [([RELEASED] * len(token_ids), _no_pages(len(parts)))]
    batch = RaggedBatch.of_few_tokens(token_ids, [*chain.from_iterable(spans)], places[0][0], counts, places[0][1])
    if groups > 1:
        batch = batch.with_groups((np.array(slots, dtype=np.int32), table) for slots, table in places[1:])
    return _add_states(batch, parts)


def build_single(tables: Sequence[SequenceTable], token_ids: Sequence[int], positions: Sequence[int]) -> RaggedBatch:
    """Return a batch of one token of each sequence at positions whose pages are there; states are ignored."""
    size, groups = tables[0].page_size, len(tables[0].paged)

    def find_places(group: int) -> tuple[list[int], Ints]:
        own = [table.paged[group].pages for table in tables]
        slots = [
            pages[position // size] * size + position % size for pages, position in zip(own, positions, strict=True)
        ]
        return slots, _stack_tables(own)

    if groups:
        slots, page_table = find_places(0)
    else:
        no_slots, page_table = _place_nowhere(len(tables), len(tables))
        slots = no_slots.tolist()
    batch = RaggedBatch.of_single_tokens([*token_ids], [*positions], slots, page_table)
    if groups > 1:
        places = map(find_places, range(1, groups))
        batch = batch.with_groups((np.array(slots, dtype=np.int32), table) for slots, table in places)
    return batch


def _place_nowhere(tokens: int, sequences: int) -> tuple[Ints, Ints]:
    """Return slots and page table for a model that keeps states alone."""
    return np.full(tokens, RELEASED, dtype=np.int32), _no_pages(sequences)


def _no_pages(sequences: int) -> Ints:
    return np.empty((sequences, 0), dtype=np.int32)


def _add_states(batch: RaggedBatch, parts: Sequence[BatchPart]) -> RaggedBatch:
    """Return the batch with the slots of its sequences' states, if the model has any."""
    tables = [part.table.states for part in parts if part.table.states is not None]
    if not tables:
        return batch
    rows = [[table.state, table.spare, table.find_next()] for table in tables]
    reads, writes, nexts = np.array(rows, dtype=np.int32).T.copy()
    return batch.with_states(reads, writes, nexts)


def _stack_tables(tables: Sequence[list[int]]) -> Ints:
    """Return (S, longest table) page ids, padded with -1."""
    if len(tables) == 1:
        return np.array(tables, dtype=np.int32)
    lengths = np.array([len(pages) for pages in tables])
    stacked = np.full((len(tables), lengths.max()), -1, dtype=np.int32)
    pages = np.fromiter(chain.from_iterable(tables), np.int32, lengths.sum())
    stacked[np.arange(stacked.shape[1]) < lengths[:, None]] = pages
    return stacked


Floats = npt.NDArray[np.float32]


class ModelShape(Protocol):
    """The parts of a model's configuration that the engine reads."""

    @property
    def cache_layers(self) -> Sequence[LayerCache]:
        """The shape of what each layer keeps in the cache."""

    @property
    def heads(self) -> int:
        """Number of query heads."""

    @property
    def vocab_size(self) -> int:
        """Token ids are from 0 to vocab_size - 1."""

    @property
    def context_length(self) -> int:
        """Most tokens the model was made for."""

    @property
    def is_causal(self) -> bool:
        """True if no token sees later ones; else each text goes through the model in one step."""


class Model(Protocol):
    """A model that the engine runs; `mlxr.models` has the real ones."""

    @property
    def config(self) -> ModelShape:
        """The model's sizes: layers, heads, vocabulary, context."""

    def forward(self, batch: RaggedBatch, arena: ModelArena) -> Floats:
        """Compute the batch, write its K and V into the arena; return logits (R, vocab_size) of its output rows."""

    def forward_hidden(self, batch: RaggedBatch, arena: ModelArena) -> Floats:
        """Do `forward` without its last operator: return states (R, hidden size) after the final norm."""

    def project(self, hidden: Floats, adapters: Sequence[Adapter | None] = ()) -> Floats:
        """Return the logits of such states, as `forward` gives them; `adapters` has that of each, or is empty."""


class PoolingShape(ModelShape, Protocol):
    """The configuration of a model that may rank."""

    @property
    def rank_pooling(self) -> str:
        """The states that rank a text: their `mean`, the first one (`cls`) or the `last`."""


class PoolingModel(Model, Protocol):
    """A model that turns the pooled states of a text into another vector, or ranks by them."""

    def finish(self, vector: Floats, *, ranks: bool = False) -> Floats:
        """Return the vector of a text, or with `ranks` the logits of labels, from the pooled states (hidden size,)."""


class TappedModel(Model, Protocol):
    """A model whose stream can be read between its layers, for heads that draft from it."""

    def forward_tapped(self, batch: RaggedBatch, arena: ModelArena, taps: Sequence[int]) -> tuple[Floats, Floats]:
        """Do `forward_hidden`; return also the stream of these rows before each of the layers `taps`, side by side."""


class SummingModel(Model, Protocol):
    """A model that can add up hidden states itself."""

    @property
    def sums_states(self) -> bool:
        """True if sums are cheaper to have than the states themselves."""

    def forward_sums(self, batch: RaggedBatch, arena: ModelArena, counts: Sequence[int]) -> Floats:
        """Do `forward_hidden`; return only sums (parts, hidden size) of the output rows, `counts` for each part."""


@frozen(eq=False)
class StateSum:
    """The sum (hidden size,) of the states of `tokens` tokens."""

    total: Floats
    tokens: int


@frozen
class Outputs:
    """The results of a batch: the wanted logits of all parts, (R, vocab_size), and states of parts that want any.

    `kept` has for each part the states that a head reads, or None.
    """

    logits: Floats
    hidden: list[Floats | StateSum]
    kept: list[Floats | None]


def reserve_pages(cache: KVCache, arena: ModelArena, table: SequenceTable, tokens: int) -> None:
    """Make room for `tokens` more positions and do the copies that shared pages need; raises OutOfPages if it fails."""
    copies = cache.prepare(table, tokens)
    if not copies:
        return
    try:
        arena.copy_pages(copies)
    except BaseException:
        cache.release(table)  # a page without its contents must not be taken for written
        raise


class Runner:
    """One model with its arena, and the cache that keeps account of the arena's pages.

    The states that are kept for a head are the model's stream before the layers `taps`, or if None the hidden states.
    An `encoder` has the rows of pictures.
    """

    def __init__(
        self,
        model: Model,
        arena: ModelArena,
        cache: KVCache,
        taps: tuple[int, ...] | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self._taps, self._encoder = taps, encoder
        self._model = model
        self._arena = arena
        self._cache = cache

    def reserve(self, table: SequenceTable, tokens: int) -> None:
        """Do `reserve_pages` in this arena."""
        reserve_pages(self._cache, self._arena, table, tokens)

    def commit(self, table: SequenceTable, token_ids: Sequence[int], tokens: int) -> None:
        """Count `tokens` more positions of `table` as written; `token_ids` are those of the sequence from its start."""
        self._cache.commit(table, token_ids, tokens)

    def forward(self, parts: Sequence[BatchPart]) -> Outputs:
        """Compute one batch of all `parts`, whose pages are reserved; return what they want, in their order."""
        batch = build_batch(parts)
        if self._encoder is not None and any(part.pictures for part in parts):
            batch = batch.with_pictures(*self._encoder.place(parts))
        hidden: list[Floats | StateSum] = []
        kept: list[Floats | None] = [None] * len(parts)
        wanted_rows = sum(part.output_tokens for part in parts)
        if self._takes_sums(parts):
            counts = [part.hidden_tokens for part in parts if part.hidden_tokens]
            sums = cast(SummingModel, self._model).forward_sums(batch, self._arena, counts)
            hidden = [StateSum(total, tokens) for total, tokens in zip(sums, counts, strict=True)]
            logits = np.empty((0, self._model.config.vocab_size), np.float32)
        elif any(part.hidden_tokens or part.kept_tokens for part in parts):
            if self._taps is None or not any(part.kept_tokens for part in parts):
                states = tapped = np.asarray(self._model.forward_hidden(batch, self._arena))
            else:
                states, tapped = cast(TappedModel, self._model).forward_tapped(batch, self._arena, self._taps)
            ends = np.cumsum([part.wanted_tokens for part in parts])
            outputs = [states[end - part.output_tokens : end] for part, end in zip(parts, ends, strict=True)]
            adapters = [part.adapter for part in parts for _ in range(part.output_tokens)]
            logits = np.empty((0, self._model.config.vocab_size), np.float32)
            if wanted_rows:
                logits = self._model.project(np.concatenate(outputs), adapters)
            hidden = [
                states[end - part.hidden_tokens : end]
                for part, end in zip(parts, ends, strict=True)
                if part.hidden_tokens
            ]
            kept = [
                tapped[end - part.kept_tokens : end] if part.kept_tokens else None
                for part, end in zip(parts, ends, strict=True)
            ]
        else:
            logits = self._model.forward(batch, self._arena)
        wanted = (wanted_rows, self._model.config.vocab_size)
        if logits.shape != wanted:
            raise ValueError(f"the model gave logits of shape {logits.shape}, wanted {wanted}")
        return Outputs(logits, hidden, kept)

    def _takes_sums(self, parts: Sequence[BatchPart]) -> bool:
        """Return True if `forward_sums` gives all that is wanted of a batch."""
        wants = all(part.sums or not part.wanted_tokens for part in parts) and any(part.sums for part in parts)
        return wants and getattr(self._model, "sums_states", False)

    @property
    def is_causal(self) -> bool:
        """True if a text may go through the model in parts, and be continued."""
        return self._model.config.is_causal

    @property
    def rank_pooling(self) -> str:
        """The states of a text that rank it; see `PoolingShape`."""
        return cast(PoolingShape, self._model.config).rank_pooling

    def finish(self, vector: Floats, *, ranks: bool) -> Floats:
        """Return what the model makes of a pooled vector; see `PoolingModel`. Most models leave it as it is."""
        finish = getattr(self._model, "finish", None)
        return vector if finish is None else cast(PoolingModel, self._model).finish(vector, ranks=ranks)

    def forward_single(
        self, tables: Sequence[SequenceTable], token_ids: Sequence[int], positions: Sequence[int]
    ) -> Floats:
        """Compute one token of each sequence at the given positions, which may lie behind what counts as written."""
        return self._model.forward(build_single(tables, token_ids, positions), self._arena)

    def project(self, hidden: Floats, adapter: Adapter | None = None) -> Floats:
        """Return the logits (R, vocab_size) of hidden states, all with the same adapter, if there is one."""
        return self._model.project(hidden, [adapter] * len(hidden))


MAX_LOGITS_BYTES = 32 * 2**20  # of one chunk; the float64 work on it takes a few times as much
Doubles = npt.NDArray[np.float64]


class Pool:
    """Pools hidden states of one text after the final norm: their mean, the last, the first (`cls`), or all (`none`).

    `finish` turns the pooled state into the result: another vector, or logits of labels. A mean leaves the first
    `unpooled` states out.
    """

    __slots__ = ("_finish", "_left", "_parts", "_pooling", "_tokens", "_total", "_unpooled")

    def __init__(
        self, pooling: Pooling, finish: Callable[[Floats], Floats] = lambda vector: vector, unpooled: int = 0
    ) -> None:
        self._pooling, self._finish, self._unpooled = pooling, finish, unpooled if pooling == "mean" else 0
        self._left = self._unpooled  # still to leave out
        self._parts: list[Floats] = []  # of `none`
        self._total: npt.NDArray[np.float64] | None = None
        self._tokens = 0

    def count_wanted(self, tokens: int, *, is_first: bool, completes: bool) -> int:
        """Return the number of states that are needed at the end of a chunk of `tokens` tokens.

        `is_first`: the chunk begins the text. `completes`: it ends the text.
        """
        if self._pooling == "last":
            return int(completes)
        return tokens if self._pooling in ("mean", "none") or is_first else 0

    @property
    def takes_sums(self) -> bool:
        """True if `add` may get the sum of a chunk's wanted states in their place."""
        return self._pooling == "mean" and not self._unpooled

    def add(self, hidden: Floats | StateSum, *, is_first: bool) -> None:
        """Add the wanted states of the next chunk, (tokens, hidden size). After a preemption the first chunk comes
        again."""
        if is_first:
            self._total, self._tokens, self._parts, self._left = None, 0, [], self._unpooled
        if isinstance(hidden, StateSum):
            total = hidden.total.astype(np.float64)
            self._total = total if self._total is None else self._total + total
            self._tokens += hidden.tokens
            return
        if self._pooling == "none":
            self._parts.append(hidden)
            return
        tokens = len(hidden)
        hidden = hidden[:1] if self._pooling == "cls" else hidden[self._left :]
        self._left = max(self._left - tokens, 0)
        if len(hidden):
            states = hidden.astype(np.float64)
            if self._total is not None:
                states[0] += self._total
            self._total = np.add.reduce(states, axis=0)  # row after row: the last axis alone is added up in pairs
        self._tokens += len(hidden)

    def read(self) -> Floats:
        """Return what `finish` makes of the pooled state, (n,); for `none` all states, (tokens, hidden size)."""
        if self._parts:
            return np.concatenate(self._parts).astype(np.float32)
        if self._total is None:
            raise ValueError("nothing was added to the pool")
        return self._finish((self._total / self._tokens).astype(np.float32))


def choose_chunk_tokens(vocab_size: int, max_batch_tokens: int) -> int:
    """Return the number of tokens in a chunk whose logits stay within MAX_LOGITS_BYTES."""
    return max(1, min(max_batch_tokens, MAX_LOGITS_BYTES // (4 * vocab_size)))


def score_tokens(runner: Runner, table: SequenceTable, token_ids: Sequence[int], chunk_tokens: int) -> Doubles:
    """Return the natural log-probability of token_ids[1:], each given all before it, (len(token_ids) - 1,).

    `table` is an empty page table; the caller releases it. The prefix index is not used: the logits of all tokens are
    wanted, and texts that are scored should not drive out pages that requests share.
    """
    scores = np.empty(len(token_ids) - 1, dtype=np.float64)
    for start in range(0, len(scores), chunk_tokens):
        stop = min(start + chunk_tokens, len(scores))
        part = BatchPart(table, token_ids[start:stop], output_tokens=stop - start)
        runner.reserve(table, stop - start)
        logits = runner.forward([part]).logits
        runner.commit(table, token_ids, stop - start)
        scores[start:stop] = _pick_logprobs(logits, token_ids[start + 1 : stop + 1])
    return scores


class PromptScores:
    """Collects the log-probability of each of `token_ids` after those before it, and the `top` likeliest in its place.

    `project` makes logits of hidden states, of at most `chunk_tokens` at a time.
    """

    def __init__(
        self, token_ids: Sequence[int], top: int, project: Callable[[Floats], Floats], chunk_tokens: int
    ) -> None:
        self._token_ids, self._top, self._project, self._chunk_tokens = token_ids, top, project, chunk_tokens
        self._scored: list[TokenInfo] = []

    @property
    def is_open(self) -> bool:
        """True while states are needed: not all tokens are scored."""
        return len(self._scored) < len(self._token_ids)

    def add(self, hidden: Floats, *, is_first: bool) -> None:
        """Score the next tokens by their states, (tokens, hidden size). The first come again after a preemption."""
        if is_first:
            self._scored = [TokenInfo(TokenLogprob(self._token_ids[0], math.nan))]  # nothing is before it
        done = len(self._scored)
        targets = self._token_ids[done : done + len(hidden)]
        for first in range(0, len(targets), self._chunk_tokens):
            chosen = targets[first : first + self._chunk_tokens]
            logprobs = _normalise(self._project(hidden[first : first + len(chosen)]))
            self._scored += [self._describe(row, token_id) for row, token_id in zip(logprobs, chosen, strict=True)]

    def read(self) -> tuple[TokenInfo, ...]:
        """Return all tokens; the log-probability of the first is NaN."""
        return tuple(self._scored)

    def _describe(self, row: Doubles, token_id: int) -> TokenInfo:
        return TokenInfo(TokenLogprob(token_id, float(row[token_id])), _find_top(row, self._top))


def _find_top(row: Doubles, count: int) -> tuple[TokenLogprob, ...]:
    """Return the `count` likeliest tokens, the best first; of equally likely ones the lower id first."""
    if count == 0:
        return ()
    least = np.partition(row, -count)[-count:].min()
    best = np.flatnonzero(row >= least)
    order = best[np.argsort(-row[best], kind="stable")][:count]
    return tuple(TokenLogprob(int(token_id), float(row[token_id])) for token_id in order)


def _pick_logprobs(logits: Floats, token_ids: Sequence[int]) -> Doubles:
    """Return log softmax(logits)[token] of each row, in float64."""
    chosen: Doubles = _normalise(logits)[np.arange(len(token_ids)), np.asarray(token_ids)]
    return chosen


def _normalise(logits: Floats) -> Doubles:
    """Return log softmax(logits) of each row, in float64."""
    shifted = np.asarray(logits).astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
