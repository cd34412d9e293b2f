"""How many pages of each group of layers sequences want: what admission promises them. Integers only.

A group that keeps everything wants a page for every page of tokens. One with a window wants those of the window, which
do not become more while a sequence grows, and while its prompt is computed those of the chunk. Recurrent layers want
the slots of a state, however long a sequence is.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from mlxr.cache.shapes import GroupShape
from mlxr.engine.sequence import Sequence

Pages = tuple[int, ...]  # of each group


@dataclass(frozen=True, slots=True)
class PageBudget:
    """The shapes of the groups, and how many tokens at most are computed in a step, and of one prompt in a step."""

    shapes: Items[GroupShape]
    page_size: int
    max_batch_tokens: int
    prefill_chunk_tokens: int

    def promise(self, running: Iterable[Sequence]) -> Pages:
        """Pages that running sequences will want soon, beyond those they hold."""
        running = list(running)
        return tuple(self._promise_group(number, running) for number in range(len(self.shapes)))

    def want(self, candidate: Sequence) -> Pages:
        """Pages that a sequence holds while all of its tokens are computed, however many of them are cached."""
        tokens, chunk_tokens = len(candidate.tokens), self._count_chunk(candidate)
        return tuple(shape.count_peak(tokens, chunk_tokens, self.page_size) for shape in self.shapes)

    def hold(self, cached_tokens: int) -> Pages:
        """Pages that a table holds which was found with so many tokens, all in full pages."""
        boundary = cached_tokens // self.page_size
        return tuple(boundary - shape.first_needed(boundary, self.page_size) for shape in self.shapes)

    def _promise_group(self, number: int, running: Items[Sequence]) -> int:
        shape, page_size = self.shapes[number], self.page_size
        missing_pages = chunk_pages = chunks = 0
        for sequence in running:
            tokens = len(sequence.tokens)
            ahead_pages = shape.count_resting(tokens + page_size, page_size)  # of every answer one ahead
            worst_pages = shape.count_resting(sequence.end_tokens - 1, page_size)
            held_pages = sequence.table.groups[number].count_held()
            fork_pages = len(sequence.siblings) * shape.fork_pages
            missing_pages += max(0, min(ahead_pages, worst_pages) + fork_pages - held_pages)
            if not sequence.is_decoding:
                peak_pages = shape.count_peak(tokens, self._count_chunk(sequence), page_size)
                chunk_pages += peak_pages - shape.count_resting(tokens, page_size)
                chunks += 1
        return missing_pages + min(chunk_pages, self.max_batch_tokens // page_size + chunks)

    def _count_chunk(self, sequence: Sequence) -> int:
        return min(sequence.pending_tokens, self.prefill_chunk_tokens, self.max_batch_tokens)


def count_room(available: Pages, promised: Pages) -> Pages:
    """Pages of each group that are not promised; below zero where more is promised than there is."""
    return tuple(map(int.__sub__, available, promised))


def fits(wanted: Pages, held: Pages, room: Pages) -> bool:
    """Whether what is wanted beyond what is held has room in every group."""
    return all(want - have <= free for want, have, free in zip(wanted, held, room, strict=True))
