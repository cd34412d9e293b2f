"""What comes of a step: sequences get the tokens that were drawn for them, drafts are verified, answers end.

Knows no model: the engine has computed the logits, and a `Drawing` draws from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from mlxr.cache.kv_cache import KVCache
from mlxr.core.types import FinishReason
from mlxr.engine.chunk import Chunk
from mlxr.engine.drawing import Drawing
from mlxr.engine.live import Live
from mlxr.engine.pooling import Floats
from mlxr.engine.requests import RequestTable
from mlxr.engine.scheduler import Scheduler
from mlxr.engine.sequence import Sequence, TokenEvent
from mlxr.engine.stats import Work
from mlxr.kernels.sample import NO_TOKEN, SampleResult

logger = logging.getLogger(__name__)
_NO_TOKEN_TEXT = "no token is possible: the model, the logit_bias and the grammar together rule out all of them"


class Postprocess:
    """Takes in what steps of one engine make of their chunks, and gives the events of that."""

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
        self, chunks: list[Chunk], results: list[SampleResult], hidden: list[Floats], start_s: float
    ) -> list[TokenEvent]:
        """Count the step, give each sequence its token or its states, and let go of those that end."""
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
            reader = sequence.scores if sequence.pool is None else sequence.pool
            if reader is not None and chunk.hidden_tokens:
                reader.add(next(remaining_hidden), is_first=not sequence.table.length_tokens)
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
        """Draw on from each draft for as long as what was drawn last is what was drafted; the rest is dropped.

        The first token of each chunk has been drawn. An accepted token counts as written only then: the cache never
        hears of the others, whose places the next step writes over. A state that has gone past the last right token is
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
        answers = [answer for chunk in chunks for answer in (chunk.sequence, *chunk.sequence.followers)]
        return self._requests.end(answers, FinishReason.ERROR, text)

    def _commit(self, sequence: Sequence, tokens: int) -> None:
        """The next `tokens` pending tokens of a sequence are written."""
        sequence.replay_tokens = 0
        self._cache.commit(sequence.table, sequence.tokens, tokens, sequence.judge_state(tokens))

    def _part(self, leader: Sequence) -> list[Sequence]:
        """All answers that a sequence stands for, each on its own from now on, sharing the pages of the prompt."""
        followers, leader.followers = leader.followers, []
        for follower in followers:
            follower.follow(leader, self._cache.fork(leader.table))
            self._scheduler.join(follower)
        return [leader, *followers]

    def _accept(self, sequence: Sequence, result: SampleResult, now: float) -> list[TokenEvent]:
        if result.token_id == NO_TOKEN:
            return self._requests.end([sequence], FinishReason.ERROR, sequence.sampler.error or _NO_TOKEN_TEXT)
        reason = sequence.append(result, now)
        events = sequence.report(result, reason, now)
        if reason is not None:
            self._requests.forget(sequence)
        return [told for event in events for told in self._requests.deliver(sequence, event)]


def _is_accepted(chunk: Chunk, place: int) -> bool:
    """Whether the answer goes on and its last token is the drafted one in this place."""
    sequence = chunk.sequence
    goes_on = not sequence.has_ended and place < len(chunk.draft)
    return goes_on and sequence.tokens[-1] == chunk.draft[place]
