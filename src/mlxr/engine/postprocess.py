"""Takes in the results of a step: draws tokens, verifies drafts, gives sequences their tokens, ends answers.

The engine has computed the logits. `Drawing` draws from them: the next token of each answer, and those after its drafts
as long as these are right. Every token is drawn as if it were the only one of a step. With logits in the host's memory,
a place is drawn once the one before it was right. On a GPU, one launch draws from all rows if no rule of sampling looks
at the tokens before; else the logits are brought to the host. `Postprocess` gives the sequences what was drawn. Knows
no model.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import cast

from mlxr.cache.kv_cache import KVCache
from mlxr.core.types import FinishReason
from mlxr.engine.requests import RequestTable
from mlxr.engine.runner import Floats, StateSum
from mlxr.engine.scheduler import Chunk, Scheduler
from mlxr.engine.sequence import Sequence, TokenEvent
from mlxr.engine.stats import Live, Work
from mlxr.kernels.arrays import repeat_rows
from mlxr.kernels.context import Context
from mlxr.kernels.sample import NO_TOKEN, SampleResult, fetch_logits, sample

Drafted = list[tuple[Chunk, int]]  # with the row of the first logits of each
logger = logging.getLogger(__name__)
_NO_TOKEN_TEXT = "no token is possible: the model, the logit_bias and the grammar together rule out all of them"


class Drawing:
    """Draws tokens from `logits` (R, vocabulary), the rows that `chunks` want, in their order.

    `goes_on`: the next step is likely to compute the drawn tokens and nothing else, so a GPU may begin with it.
    """

    def __init__(self, ctx: Context, logits: Floats, chunks: list[Chunk], *, goes_on: bool) -> None:
        self._ctx, self._logits, self._goes_on = ctx, logits, goes_on
        wanted = [(chunk, rows) for chunk in chunks if (rows := chunk.output_rows)]
        self.chunks = [chunk for chunk, _ in wanted]
        self.starts = list(itertools.accumulate((rows for _, rows in wanted), initial=0))[:-1]
        self.drafted: Drafted = [pair for pair in zip(self.chunks, self.starts, strict=True) if pair[0].draft]
        self._all: list[SampleResult] | None = None  # of all rows, where they are drawn at once

    def draw_first(self) -> list[SampleResult]:
        """Return the next token of each chunk, and of each of its siblings, which use the same logits."""
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
        """Return the tokens after the first `place` drafted ones, which were right."""
        rows = [row + place for _, row in drafted]
        if self._all is not None:
            return [self._all[row] for row in rows]
        chosen = self._logits[rows[0] : rows[0] + 1] if len(rows) == 1 else self._logits[rows]
        return self._sample(chosen, [chunk for chunk, _ in drafted])

    def _sample(self, logits: Floats, chunks: list[Chunk]) -> list[SampleResult]:
        answers = [answer for chunk in chunks for answer in (chunk.sequence, *chunk.sequence.siblings)]
        if len(answers) > len(chunks):
            logits = repeat_rows(self._ctx, logits, [chunk.sequence.width for chunk in chunks])
        return sample(self._ctx, logits, [answer.sampler.row() for answer in answers], goes_on=self._goes_on)


class Postprocess:
    """Takes in the results of one engine's steps, and returns their events."""

    def __init__(
        self,
        requests: RequestTable,
        cache: KVCache,
        scheduler: Scheduler,
        work: Work,
        live: Live,
        clock: Callable[[], float],
    ) -> None:
        self._requests, self._cache, self._scheduler = requests, cache, scheduler
        self._work, self._live, self._clock = work, live, clock

    def take_first(
        self, chunks: list[Chunk], results: list[SampleResult], hidden: list[Floats | StateSum], start_s: float
    ) -> list[TokenEvent]:
        """Count the step, give each sequence its token or its states, and end those that are complete."""
        self._work.steps += 1
        now, events, remaining, remaining_hidden = self._clock(), [], iter(results), iter(hidden)
        for chunk in chunks:
            sequence, completes = chunk.sequence, chunk.completes
            sequence.watch.start(start_s)
            computed_tokens = sequence.computed_tokens
            if chunk.waits_for_draft:
                self._work.count_drafted(chunk)
            else:
                self._work.count(chunk)
            if chunk.hidden_tokens:
                states, is_first = next(remaining_hidden), not sequence.table.length_tokens
                if sequence.pool is not None:
                    sequence.pool.add(states, is_first=is_first)
                elif sequence.scores is not None:
                    sequence.scores.add(cast(Floats, states), is_first=is_first)
            if not chunk.waits_for_draft:
                self._commit(sequence, chunk.tokens)
            for event in sequence.report_progress(computed_tokens, now):
                events += self._requests.deliver(sequence, event)
            if completes and not sequence.draws:
                reason = FinishReason.LENGTH if sequence.pool is None else FinishReason.STOP
                events += self._requests.end(self._part(sequence), reason)
            elif completes:
                for answer in self._part(sequence):
                    events += self._accept(answer, next(remaining), now)
        return events

    def verify_drafts(self, drawing: Drawing) -> list[TokenEvent]:
        """Draw on from each draft as long as the last token drawn is the drafted one; the rest is dropped.

        The first token of each chunk has been drawn. Only accepted tokens count as written: the cache never hears of
        the others, and the next step writes over their places. A state that has gone past the last right token is
        dropped: the tokens up to there are computed once more, from the state before.
        """
        events: list[TokenEvent] = []
        drafted = drawing.drafted
        place, waiting = 0, [chunk for chunk, _ in drafted if chunk.waits_for_draft]
        while drafted := [pair for pair in drafted if _is_accepted(pair[0], place)]:
            place += 1
            for chunk, _ in drafted:
                self._work.count_accepted(chunk)
                if not chunk.waits_for_draft:
                    self._commit(chunk.sequence, 1)
            try:
                results = drawing.draw(drafted, place)
            except Exception as error:  # as in the engine's `step`
                logger.exception("drawing from drafts failed")
                return events + self.fail([chunk for chunk, _ in drafted], error)
            now = self._clock()
            for (chunk, _), result in zip(drafted, results, strict=True):
                events += self._accept(chunk.sequence, result, now)
        for chunk in waiting:
            sequence = chunk.sequence
            if sequence.has_ended:
                continue
            if sequence.pending_tokens == chunk.rows + 1:
                self._work.count_written(chunk)
                self._commit(sequence, chunk.rows)
            else:
                sequence.replay_tokens = sequence.pending_tokens - 1
        return events

    def fail(self, chunks: list[Chunk], error: Exception) -> list[TokenEvent]:
        """End the answers of a step whose computation failed; return their last events."""
        self._work.failed_steps += 1
        if self._live.record is not None:
            self._live.record.note_failure(str(error))
        text = f"the step failed: {type(error).__name__}: {error}"
        answers = [answer for chunk in chunks for answer in (chunk.sequence, *chunk.sequence.siblings)]
        return self._requests.end(answers, FinishReason.ERROR, text)

    def _commit(self, sequence: Sequence, tokens: int) -> None:
        """Count the next `tokens` pending tokens of a sequence as written."""
        sequence.replay_tokens = 0
        self._cache.commit(sequence.table, sequence.tokens, tokens, sequence.judge_state(tokens))

    def _part(self, leader: Sequence) -> list[Sequence]:
        """Return all answers that a sequence stands for, each on its own from now on, on forks of the pages."""
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            sibling.follow(leader, self._cache.fork(leader.table))
            self._scheduler.join(sibling)
        return [leader, *siblings]

    def _accept(self, sequence: Sequence, result: SampleResult, now: float) -> list[TokenEvent]:
        if result.token_id == NO_TOKEN:
            return self._requests.end([sequence], FinishReason.ERROR, sequence.sampler.error or _NO_TOKEN_TEXT)
        reason = sequence.append(result, now)
        events = sequence.report(result, reason, now)
        if reason is not None:
            self._requests.forget(sequence)
        return [told for event in events for told in self._requests.deliver(sequence, event)]


def _is_accepted(chunk: Chunk, place: int) -> bool:
    """Return True if the answer goes on and its last token is the drafted one in this place."""
    sequence = chunk.sequence
    goes_on = not sequence.has_ended and place < len(chunk.draft)
    return goes_on and sequence.tokens[-1] == chunk.draft[place]
