"""From pieces of sequences to the ragged batch of one step: integer arrays that say what to compute and where.

Knows page tables and tokens, no model and no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from mlxr.cache.page_table import RELEASED, SequenceTable
from mlxr.kernels.ragged import RaggedBatch
from mlxr.models.adapter import Adapter

Ints = npt.NDArray[np.int32]
FEW_TOKENS = 16  # of a sequence, all of them wanted
FEW = 32  # sequences: for more, arrays as a whole are faster than row by row


@dataclass(frozen=True, slots=True)
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

    @property
    def wanted_tokens(self) -> int:
        """How many tokens at the end must go through the whole model."""
        return max(self.output_tokens, self.hidden_tokens, self.kept_tokens)


def build_batch(parts: Sequence[BatchPart]) -> RaggedBatch:
    """One batch of all `parts` in their order; the wanted rows come out in the same order."""
    batch = _build(parts)
    return batch.with_adapters(tuple(part.adapter for part in parts)) if any(part.adapter for part in parts) else batch


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
    """`build_batch` for one token each."""
    tables = [part.table for part in parts]
    batch = build_single(tables, [part.token_ids[0] for part in parts], [table.length_tokens for table in tables])
    return _add_states(batch, parts)


def _build_few(parts: Sequence[BatchPart]) -> RaggedBatch:
    """`build_batch` for a few tokens of each sequence, which are all wanted, as those of drafts."""
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
    """One token of each sequence in the places given, whose pages are there; states are not looked at."""
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
    """Slots and page table of a model that keeps states alone."""
    return np.full(tokens, RELEASED, dtype=np.int32), _no_pages(sequences)


def _no_pages(sequences: int) -> Ints:
    return np.empty((sequences, 0), dtype=np.int32)


def _add_states(batch: RaggedBatch, parts: Sequence[BatchPart]) -> RaggedBatch:
    """The batch with the slots of its sequences' states, if the model has any."""
    tables = [part.table.states for part in parts if part.table.states is not None]
    if not tables:
        return batch
    rows = [[table.state, table.spare, table.find_next()] for table in tables]
    reads, writes, nexts = np.array(rows, dtype=np.int32).T.copy()
    return batch.with_states(reads, writes, nexts)


def _stack_tables(tables: Sequence[list[int]]) -> Ints:
    """(S, longest table) page ids, padded with -1."""
    if len(tables) == 1:
        return np.array(tables, dtype=np.int32)
    lengths = np.array([len(pages) for pages in tables])
    stacked = np.full((len(tables), lengths.max()), -1, dtype=np.int32)
    pages = np.fromiter(chain.from_iterable(tables), np.int32, lengths.sum())
    stacked[np.arange(stacked.shape[1]) < lengths[:, None]] = pages
    return stacked
