"""Draws the tokens of one step: the next one of each answer, and those after its drafts as long as these are right.

Every token is drawn as if it were the only one of a step. Where logits lie in the host's memory, a place is drawn when
the one before it was right. On a GPU one launch draws from all rows, where no rule of sampling looks at the tokens
before; else the logits are brought to the host. Knows no pages.
"""

from __future__ import annotations

import itertools

from mlxr.engine.chunk import Chunk
from mlxr.engine.runner import Floats
from mlxr.kernels.context import Context
from mlxr.kernels.rows import repeat_rows
from mlxr.kernels.sample import SampleResult, fetch_logits, sample

Drafted = list[tuple[Chunk, int]]  # with the row of the first logits of each


class Drawing:
    """From `logits` (R, vocabulary), which are those that `chunks` want, in their order.

    `goes_on`: the next step is likely to compute the drawn tokens and nothing else, so a GPU may begin with it.
    """

    __slots__ = ("_all", "_ctx", "_goes_on", "_logits", "chunks", "starts")

    def __init__(self, ctx: Context, logits: Floats, chunks: list[Chunk], *, goes_on: bool) -> None:
        self._ctx, self._logits, self._goes_on = ctx, logits, goes_on
        self.chunks = [chunk for chunk in chunks if chunk.draws_token]
        rows = itertools.accumulate((chunk.output_rows for chunk in self.chunks), initial=0)
        self.starts = list(rows)[: len(self.chunks)]
        self._all: list[SampleResult] | None = None  # of all rows, where they are drawn at once

    @property
    def drafted(self) -> Drafted:
        """The chunks with drafts."""
        return [pair for pair in zip(self.chunks, self.starts, strict=True) if pair[0].draft]

    def draw_first(self) -> list[SampleResult]:
        """The next token of each chunk, and of each of its followers, who see the same logits."""
        if not self.drafted:
            return self._sample(self._logits, self.chunks)
        if self._ctx.gpu is not None:
            if all(chunk.sequence.sampler.knows_ahead for chunk in self.chunks):
                places = [
                    (chunk.sequence.sampler, place) for chunk in self.chunks for place in range(chunk.output_rows)
                ]
                rows = [sampler.row(place) for sampler, place in places]
                self._all = sample(self._ctx, self._logits, rows, goes_on=False)
                return [self._all[start] for start in self.starts]
            self._logits = fetch_logits(self._ctx, self._logits)
        return self._sample(self._logits[self.starts], self.chunks)

    def draw(self, drafted: Drafted, place: int) -> list[SampleResult]:
        """The tokens after the first `place` drafted ones, which were right."""
        rows = [row + place for _, row in drafted]
        if self._all is not None:
            return [self._all[row] for row in rows]
        chosen = self._logits[rows[0] : rows[0] + 1] if len(rows) == 1 else self._logits[rows]
        return self._sample(chosen, [chunk for chunk, _ in drafted])

    def _sample(self, logits: Floats, chunks: list[Chunk]) -> list[SampleResult]:
        answers = [answer for chunk in chunks for answer in (chunk.sequence, *chunk.sequence.followers)]
        if len(answers) > len(chunks):
            logits = repeat_rows(self._ctx, logits, [chunk.sequence.width for chunk in chunks])
        return sample(self._ctx, logits, [answer.sampler.row() for answer in answers], goes_on=self._goes_on)
