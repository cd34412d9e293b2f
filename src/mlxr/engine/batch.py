"""From pieces of sequences to the ragged batch of one step: integer arrays that say what to compute and where.

Knows page tables and tokens, no model and no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxr.cache.page_table import PageTable
from mlxr.kernels.ragged import RaggedBatch

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BatchPart:
    """The next tokens of one sequence: they go right after what `table` holds.

    The logits of the last `output_tokens` of them are wanted, or their hidden states where the part `embeds`. `table`
    must have been prepared for all of them.
    """

    table: PageTable
    token_ids: Sequence[int]
    output_tokens: int
    embeds: bool = False

    def positions(self) -> Ints:
        """Position of each token in its sequence."""
        start = self.table.length_tokens
        return np.arange(start, start + len(self.token_ids), dtype=np.int32)

    def slots(self) -> Ints:
        """Where each token's K and V go: page * page_size + offset."""
        indices, offsets = np.divmod(self.positions(), np.int32(self.table.page_size))
        first = int(indices[0])
        pages = np.array(self.table.pages[first : int(indices[-1]) + 1], dtype=np.int32)
        slots: Ints = pages[indices - first] * np.int32(self.table.page_size) + offsets
        return slots


def build_batch(parts: Sequence[BatchPart]) -> RaggedBatch:
    """One batch of all `parts` in their order; the logits come out in the same order."""
    if all(len(part.token_ids) == part.output_tokens == 1 for part in parts):
        return _build_decode(parts)
    query_starts = np.zeros(len(parts) + 1, dtype=np.int32)
    np.cumsum([len(part.token_ids) for part in parts], out=query_starts[1:])
    return RaggedBatch(
        token_ids=np.array([token for part in parts for token in part.token_ids], dtype=np.int32),
        positions=np.concatenate([part.positions() for part in parts]),
        slots=np.concatenate([part.slots() for part in parts]),
        query_starts=query_starts,
        context_lengths=np.array([part.table.length_tokens + len(part.token_ids) for part in parts], dtype=np.int32),
        page_table=_stack_tables([part.table.pages for part in parts]),
        output_rows=np.concatenate(
            [
                np.arange(end - part.output_tokens, end, dtype=np.int32)
                for part, end in zip(parts, query_starts[1:].tolist(), strict=True)
            ]
        ),
    )


def _build_decode(parts: Sequence[BatchPart]) -> RaggedBatch:
    """`build_batch` for one token each, with few calls: between steps nothing is in the caches, and memory waits."""
    rows = []
    for row, part in enumerate(parts):
        table = part.table
        position, size = table.length_tokens, table.page_size
        slot = table.pages[position // size] * size + position % size
        rows.append((part.token_ids[0], position, slot, position + 1, row))
    token_ids, positions, slots, lengths, output_rows = np.array(list(zip(*rows, strict=True)), dtype=np.int32)
    return RaggedBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_starts=np.arange(len(parts) + 1, dtype=np.int32),
        context_lengths=lengths,
        page_table=_stack_tables([part.table.pages for part in parts]),
        output_rows=output_rows,
    )


def _stack_tables(tables: Sequence[list[int]]) -> Ints:
    """(S, longest table) page ids, padded with -1."""
    if len(tables) == 1:
        return np.array(tables, dtype=np.int32)
    stacked = np.full((len(tables), max(map(len, tables))), -1, dtype=np.int32)
    for row, pages in zip(stacked, tables, strict=True):
        row[: len(pages)] = pages
    return stacked
