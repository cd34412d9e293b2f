"""Runs the model over a batch, and is the only place that touches the arena between steps.

Knows no requests: parts of sequences go in, logits and hidden states come out. The caller commits the written tokens
to the page tables once it has made use of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from mlxr.cache.arena import ModelArena
from mlxr.cache.kv_cache import KVCache
from mlxr.cache.page_table import SequenceTable
from mlxr.cache.shapes import LayerCache
from mlxr.engine.batch import BatchPart, build_batch, build_single
from mlxr.kernels.ragged import RaggedBatch
from mlxr.models.adapter import Adapter

Floats = npt.NDArray[np.float32]


class ModelShape(Protocol):
    """What the engine must know of a model's configuration."""

    @property
    def cache_layers(self) -> Sequence[LayerCache]:
        """What each layer keeps of the tokens."""

    @property
    def heads(self) -> int:
        """Number of query heads."""

    @property
    def vocab_size(self) -> int:
        """Token ids are from 0 to vocab_size - 1."""

    @property
    def context_length(self) -> int:
        """Most tokens the model was made for."""


class Model(Protocol):
    """What the engine runs: `mlxr.models` has the real ones."""

    @property
    def config(self) -> ModelShape:
        """The model's sizes: layers, heads, vocabulary, context."""

    def forward(self, batch: RaggedBatch, arena: ModelArena) -> Floats:
        """Compute the batch, write its K and V into the arena; logits (R, vocab_size) of the batch's output rows."""

    def forward_hidden(self, batch: RaggedBatch, arena: ModelArena) -> Floats:
        """`forward` without its last operator: states (R, hidden size) after the final norm."""

    def project(self, hidden: Floats, adapters: Sequence[Adapter | None] = ()) -> Floats:
        """The logits of such states, as `forward` gives them; `adapters` has that of each, or is empty."""


class TappedModel(Model, Protocol):
    """A model whose stream can be looked at between its layers, for heads that draft from that."""

    def forward_tapped(self, batch: RaggedBatch, arena: ModelArena, taps: Sequence[int]) -> tuple[Floats, Floats]:
        """`forward_hidden`, and the stream of these rows before each of the layers `taps`, side by side."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Holds what a batch gives: the wanted logits of all parts, (R, vocab_size), and states of parts that want any.

    `kept` has for each part the states that a head reads, or none.
    """

    logits: Floats
    hidden: list[Floats]
    kept: list[Floats | None]


def reserve_pages(cache: KVCache, arena: ModelArena, table: SequenceTable, tokens: int) -> None:
    """Make room for `tokens` more positions and do the copies that shared pages ask for; OutOfPages if it fails."""
    copies = cache.prepare(table, tokens)
    if not copies:
        return
    try:
        arena.copy_pages(copies)
    except BaseException:
        cache.release(table)  # a page without its contents must not be taken for written
        raise


class Runner:
    """One model with its arena and the books of the arena's pages.

    The states that are kept for a head are the model's stream before the layers `taps`, or None: the hidden ones.
    """

    def __init__(self, model: Model, arena: ModelArena, cache: KVCache, taps: tuple[int, ...] | None = None) -> None:
        self._taps = taps
        self._model = model
        self._arena = arena
        self._cache = cache

    def reserve(self, table: SequenceTable, tokens: int) -> None:
        """`reserve_pages` in this arena."""
        reserve_pages(self._cache, self._arena, table, tokens)

    def commit(self, table: SequenceTable, token_ids: Sequence[int], tokens: int) -> None:
        """Count `tokens` more positions of `table` as written; `token_ids` are those of the sequence from its start."""
        self._cache.commit(table, token_ids, tokens)

    def forward(self, parts: Sequence[BatchPart]) -> Outputs:
        """Compute one batch of all `parts`, whose pages are reserved; what is wanted of them, in their order."""
        batch = build_batch(parts)
        hidden: list[Floats] = []
        kept: list[Floats | None] = [None] * len(parts)
        wanted_rows = sum(part.output_tokens for part in parts)
        if any(part.hidden_tokens or part.kept_tokens for part in parts):
            if self._taps is None or not any(part.kept_tokens for part in parts):
                states = tapped = np.asarray(self._model.forward_hidden(batch, self._arena))
            else:
                states, tapped = cast(TappedModel, self._model).forward_tapped(batch, self._arena, self._taps)
            ends = np.cumsum([part.wanted_tokens for part in parts])
            outputs = [states[end - part.output_tokens : end] for part, end in zip(parts, ends, strict=True)]
            adapters = [part.adapter for part in parts for _ in range(part.output_tokens)]
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

    def forward_single(
        self, tables: Sequence[SequenceTable], token_ids: Sequence[int], positions: Sequence[int]
    ) -> Floats:
        """Compute one token of each sequence in the places given, which need not follow what counts as written."""
        return self._model.forward(build_single(tables, token_ids, positions), self._arena)

    def project(self, hidden: Floats, adapter: Adapter | None = None) -> Floats:
        """The logits of hidden states, (R, vocab_size), all of which the adapter updates if there is one."""
        return self._model.project(hidden, [adapter] * len(hidden))
