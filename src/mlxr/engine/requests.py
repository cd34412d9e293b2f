"""The requests of an engine: checks them, gives out the events of their answers, and ends them.

`Limits` refuses what an engine cannot serve; its errors name the field, what was asked and what there is. `Admission`
makes one sequence for each answer. `RequestTable` queues them, and every event of an answer leaves through it. An
answer that ends returns its pages. Knows no batch: `scheduler` chooses what runs when, and `postprocess` takes in the
results of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import chain
from typing import cast

import numpy as np

from mlxr.cache.kv_cache import KVCache
from mlxr.core.errors import ContextFull, InvalidRequest, OutOfPages, QueueFull
from mlxr.core.frozen import frozen
from mlxr.core.types import FinishReason
from mlxr.engine.request import EngineRequest, MaskSource, Pooling
from mlxr.engine.runner import Floats, Pool, PromptScores, Runner
from mlxr.engine.scheduler import MAX_PRIORITY, MIN_PRIORITY, FairQueue, Scheduler, Throughput, compute_arrival
from mlxr.engine.sequence import Boundaries, Sequence, TokenEvent
from mlxr.engine.speculative import DrafterMaker
from mlxr.engine.speculative.drafters import StateTail
from mlxr.engine.speculative.planner import look_up
from mlxr.engine.stats import Live, Work

NO_ANSWERS = "is an encoder, which writes no text; it makes vectors of texts, or ranks them"


@frozen
class Limits:
    """The bounds of one engine; all methods raise InvalidRequest or return.

    `pages` is the number of pages of tokens that a sequence can have when it is alone in the arena.
    """

    vocab_size: int
    context_tokens: int
    pages: int
    page_size: int
    max_running: int
    is_causal: bool = True

    def check_tokens(self, field: str, token_ids: Collection[int]) -> None:
        """Raise InvalidRequest unless there are tokens and all are in the vocabulary."""
        if not token_ids:
            raise InvalidRequest(field, "has no tokens")
        self._check_vocabulary(field, token_ids)

    def check_prompt(self, request: EngineRequest) -> None:
        """Check that the model writes text, that all tokens that the request names are in the vocabulary, and that all
        its answers can grow together."""
        params = request.params
        if not self.is_causal:
            raise InvalidRequest("model", NO_ANSWERS)
        self.check_tokens("prompt", request.token_ids)
        self._check_vocabulary("logit_bias", params.logit_bias)
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("prediction_ids", request.prediction_ids)
        if () in request.dry_breaker_ids:
            raise InvalidRequest("dry_breaker_ids", "has a breaker without tokens")
        self._check_vocabulary("dry_breaker_ids", [*chain.from_iterable(request.dry_breaker_ids)])
        if params.streams > self.max_running:
            raise InvalidRequest(
                "n" if params.best_of is None else "best_of",
                f"{params.streams} answers cannot grow together, the engine runs at most {self.max_running}; ask for "
                "fewer or raise the settings max_sequences and max_batch_tokens",
            )
        if request.constraint is not None and request.constraint.needs_end and params.ignore_eos:
            raise InvalidRequest("ignore_eos", "cannot be combined with a grammar, which ends with an end token")

    def check_urgency(self, request: EngineRequest) -> None:
        """Check that the priority is in its range and the deadline above 0."""
        priority, deadline_s = request.priority, request.deadline_s
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise InvalidRequest("priority", f"must be from {MIN_PRIORITY} to {MAX_PRIORITY}, got {priority}")
        if deadline_s is not None and not deadline_s > 0:
            raise InvalidRequest("deadline_s", f"must be above 0 seconds, got {deadline_s}")

    def choose_end(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Return the most tokens that prompt and answer may have together: as many as asked for, within the context.

        Raises ContextFull if the prompt fills the context. Without `max_tokens` the arena is a bound too; with it,
        OutOfPages says what the request would need.
        """
        if prompt_tokens >= self.context_tokens:
            raise ContextFull.of("prompt", prompt_tokens, self.context_tokens)
        arena_tokens = self.pages * self.page_size + 1  # the last token of an answer is never written
        asked_tokens = max(arena_tokens - prompt_tokens, 1) if max_tokens is None else max(max_tokens, 1)
        end_tokens = min(prompt_tokens + asked_tokens, self.context_tokens)
        if end_tokens > arena_tokens:
            raise OutOfPages(self._pages_for(end_tokens - 1), self.pages, self.page_size)
        return end_tokens

    def check_text(self, request: EngineRequest) -> None:
        """Check that the tokens of a text to embed are in the vocabulary and fit in the context and the arena."""
        self.check_tokens("input", request.token_ids)
        tokens = len(request.token_ids)
        if tokens > self.context_tokens:
            reason = (
                f"is too large: this model's maximum context length is {self.context_tokens} tokens, the input has "
                f"{tokens}"
            )
            raise ContextFull("input", reason, tokens, self.context_tokens)
        if self._pages_for(tokens) > self.pages:
            raise InvalidRequest(
                "input",
                f"needs {self._pages_for(tokens)} cache pages of {self.page_size} tokens, the arena has {self.pages}; "
                "shorten it or raise the setting arena_bytes",
            )

    def check_score(self, tokens: int) -> None:
        """Check that a text of `tokens` tokens can be scored."""
        if not self.is_causal:
            raise InvalidRequest("model", NO_ANSWERS)
        if not 2 <= tokens <= self.context_tokens:
            raise InvalidRequest(
                "token_ids", f"scoring takes from 2 tokens to the context of {self.context_tokens}, got {tokens}"
            )

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _check_vocabulary(self, field: str, token_ids: Collection[int]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            foreign = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
            raise InvalidRequest(field, f"token {foreign} is not from 0 to {self.vocab_size - 1}")


class OpenRequest:
    """A request while any of its answers grows; `growing` holds those that have not ended.

    With `best_of` above `n`, events are held until the last answer has ended. Then all events of the `n` answers with
    the highest mean log-probability are given out at once, the best answer first.
    """

    def __init__(self, asked: EngineRequest, sequences: Iterable[Sequence], arrival: float) -> None:
        self.asked, self._arrival = asked, arrival
        self.growing = {sequence.index: sequence for sequence in sequences}
        self._held: dict[int, list[TokenEvent]] = {index: [] for index in self.growing}
        self._means: dict[int, float] = {}

    def is_late(self, now: float) -> bool:
        """Return True if the deadline of the request has passed."""
        deadline_s = self.asked.deadline_s
        return deadline_s is not None and now - self._arrival >= deadline_s

    def deliver(self, sequence: Sequence, event: TokenEvent) -> list[TokenEvent]:
        """Take in `event` of one of the answers; return the events that may be given out now."""
        if event.finish_reason is not None:
            del self.growing[sequence.index]
            self._means[sequence.index] = sequence.mean_logprob
        if self.asked.params.streams == self.asked.params.n:
            return [event]
        self._held[sequence.index].append(event)
        return [] if self.growing else self._rank()

    def _rank(self) -> list[TokenEvent]:
        """Return the events of the `n` best answers under their new numbers; answers that failed come last."""
        order = sorted(self._held, key=self._sort_key)[: self.asked.params.n]
        return [replace(event, index=rank) for rank, index in enumerate(order) for event in self._held[index]]

    def _sort_key(self, index: int) -> tuple[bool, float, int]:
        return self._held[index][-1].error is not None, -self._means[index], index


class RequestTable:
    """Holds the requests of one engine that have not ended; at most `max_waiting` sequences wait for their turn."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KVCache,
        fair_queue: FairQueue,
        work: Work,
        live: Live,
        *,
        max_waiting: int,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._cache, self._fair_queue, self._live = scheduler, cache, fair_queue, live
        self._work, self._max_waiting, self._clock = work, max_waiting, clock
        self._throughput = Throughput()
        self._requests: dict[int, OpenRequest] = {}

    def check_room(self) -> None:
        """Raise QueueFull, with an estimate of when there will be room, if no more answers may wait."""
        waiting = len(self._scheduler.waiting)
        if waiting >= self._max_waiting:
            self._work.refused_requests += 1
            growing = [sequence.end_tokens - len(sequence.tokens) for sequence in self._scheduler.running]
            raise QueueFull(waiting, self._max_waiting, self._throughput.estimate_room_s(min(growing, default=1)))

    def add(self, request: OpenRequest, sequences: list[Sequence], now: float) -> None:
        """Queue a request by the share of its client. Its first answer stands for all until the prompt is computed."""
        leader, *leader.siblings = sequences
        priority = request.asked.priority
        answers = 0 if leader.pool is not None else len(sequences)
        arrival = self._fair_queue.enter(request.asked.client, priority, now, leader.prompt_tokens, answers)
        for sequence in sequences:
            sequence.rank = (compute_arrival(arrival, priority), sequence.id, sequence.index)
        self._requests[leader.id] = request
        self._scheduler.add(leader)

    def count_step(self, seconds: float, tokens: int) -> None:
        """Take the duration of a step with `tokens` tokens into the estimates of throughput."""
        self._throughput.count_step(seconds)
        self._fair_queue.count_step(seconds, tokens)

    def list_growing(self, request_id: int | None = None) -> list[Sequence]:
        """Return the answers that have not ended, of all requests or of one, which may have ended."""
        requests = self._requests
        chosen = requests.values() if request_id is None else [requests[request_id]] if request_id in requests else []
        return [sequence for request in chosen for sequence in request.growing.values()]

    def deliver(self, sequence: Sequence, event: TokenEvent) -> list[TokenEvent]:
        """Take in an event of an answer; return those that may be given out now. The last one ends the request."""
        if self._live.record is not None and event.finish_reason is not None:
            self._live.record.note_end(sequence, event.finish_reason, event.error)
        request = self._requests[sequence.id]
        events = request.deliver(sequence, event)
        if not request.growing:
            del self._requests[sequence.id]
            self._fair_queue.leave(request.asked.client, request.asked.priority)
            self._throughput.count_end(self._clock(), is_idle=not self._requests)
        return events

    def end(self, sequences: Iterable[Sequence], reason: FinishReason, error: str | None = None) -> list[TokenEvent]:
        """End answers at any stage; return their last events."""
        events, now = [], self._clock()
        for sequence in sequences:
            self.forget(sequence)
            events += self.deliver(sequence, sequence.report_end(reason, now, error))
        return events

    def end_late(self, now: float) -> list[TokenEvent]:
        """End the answers of requests whose time is over; return their last events."""
        events = []
        for request in [request for request in self._requests.values() if request.is_late(now)]:
            self._work.late_answers += len(request.growing)
            text = (
                f"the deadline of {request.asked.deadline_s:g} s has passed; raise deadline_s or ask for fewer tokens"
            )
            events += self.end(list(request.growing.values()), FinishReason.DEADLINE, text)
        return events

    def forget(self, sequence: Sequence) -> None:
        """Return the pages of an answer that ends, unless others still wait for the prompt in them."""
        sequence.has_ended = True
        answers = self._requests[sequence.id].growing.values()
        leader = next((answer for answer in answers if sequence in answer.siblings), None)
        if leader is not None:
            leader.siblings.remove(sequence)
        elif sequence.siblings:
            heir, *heir.siblings = sequence.siblings
            heir.follow(sequence, sequence.table)
            self._scheduler.replace(sequence, heir)
        else:
            self._scheduler.remove(sequence)
            sequence.rest(self._cache.release)


class Admission:
    """Checks requests, makes a sequence for each of their answers, and queues these.

    `eos_ids` end answers that do not ignore them, and `open_drafter` makes the drafter of an answer. With `has_head`,
    answers keep their last states for a head that drafts. Recurrent layers keep a snapshot every `spacing_tokens`
    tokens; 0 means that there are no such layers. The log-probabilities of prompts are computed `score_tokens` at a
    time. Without `drafts_pictures`, drafts after prompts with pictures come from the text alone.
    """

    def __init__(
        self,
        requests: RequestTable,
        cache: KVCache,
        runner: Runner,
        limits: Limits,
        *,
        eos_ids: frozenset[int],
        open_drafter: DrafterMaker | None,
        has_head: bool,
        drafts_pictures: bool,
        spacing_tokens: int,
        score_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._requests, self._cache, self._runner, self._limits = requests, cache, runner, limits
        self._eos_ids, self._has_head, self._clock = eos_ids, has_head, clock
        self._score_tokens, self._drafts_pictures = score_tokens, drafts_pictures
        self.open_drafter, self.spacing_tokens = open_drafter, spacing_tokens
        self._ids = itertools.count(1)

    def submit(self, request: EngineRequest) -> int:
        """Queue a request and return its id; `Engine.submit` lists the errors."""
        self._limits.check_urgency(request)
        if request.pooling is not None:
            self._limits.check_text(request)
            end_tokens = len(request.token_ids) + 1  # all of them are written
        else:
            self._limits.check_prompt(request)
            end_tokens = self._limits.choose_end(len(request.token_ids), request.params.max_tokens)
        self._requests.check_room()
        now, request_id = self._clock(), next(self._ids)
        if request.pooling is not None:
            sequences = [self._open_text(request_id, request, end_tokens, now)]
        else:
            scores = self._open_scores(request) if request.scores_prompt else None
            sequences = [
                self._open_answer(request_id, request, index, end_tokens, scores, now)
                for index in range(request.params.streams)
            ]
        self._requests.add(OpenRequest(request, sequences, now), sequences, now)
        return request_id

    def _open_text(self, request_id: int, request: EngineRequest, end_tokens: int, now: float) -> Sequence:
        table = self._cache.open_private_table()
        assert request.pooling is not None
        ranks = request.pooling == "rank"
        kind = cast(Pooling, self._runner.rank_pooling) if ranks else request.pooling
        label_ids = list(request.label_ids)
        if label_ids:
            self._limits.check_tokens("label_ids", label_ids)

        def finish(vector: Floats) -> Floats:
            if not label_ids:
                return self._runner.finish(vector, ranks=ranks)
            logits: Floats = np.asarray(self._runner.project(vector[None], request.adapter))[0]
            return logits[label_ids]

        pool = Pool(kind, finish, request.unpooled)
        return Sequence(request_id, request, table=table, stop_ids=(), end_tokens=end_tokens, asked_s=now, pool=pool)

    def _open_answer(
        self,
        request_id: int,
        request: EngineRequest,
        index: int,
        end_tokens: int,
        scores: PromptScores | None,
        now: float,
    ) -> Sequence:
        params, constraint, adapter = request.params, request.constraint, request.adapter
        keeps_pages = request.uses_cache and not request.scores_prompt
        may_draft = request.draft_tokens != 0 and params.max_tokens != 0
        pictures, namespace = request.pictures, adapter.digest if adapter else b""
        name_page = None if pictures is None else pictures.name_page
        is_seen = pictures is None or self._drafts_pictures
        return Sequence(
            request_id,
            request,
            table=self._cache.open_private_table(),
            stop_ids=params.stop_token_ids | (frozenset() if params.ignore_eos else self._eos_ids),
            end_tokens=end_tokens,
            index=index,
            asked_s=now,
            keys=self._cache.start_keys(namespace, name_page) if keeps_pages else None,
            boundaries=self._plan_boundaries(request) if keeps_pages else None,
            scores=scores,
            masks=None
            if constraint is None
            else MaskSource(constraint.fork(), self._limits.vocab_size, end_tokens - len(request.token_ids)),
            open_drafter=self.open_drafter if is_seen or self.open_drafter is None else look_up,
            tail=StateTail() if self._has_head and may_draft and is_seen else None,
        )

    def _plan_boundaries(self, request: EngineRequest) -> Boundaries | None:
        if not self.spacing_tokens:
            return None
        prompt_tokens = len(request.token_ids)
        return Boundaries(self._cache.page_size, self.spacing_tokens, prompt_tokens, request.boundary_tokens)

    def _open_scores(self, request: EngineRequest) -> PromptScores:
        return PromptScores(
            list(request.token_ids),
            request.params.logprobs or 0,
            lambda hidden: self._runner.project(hidden, request.adapter),
            self._score_tokens,
        )
