"""The requests that an engine has: how they enter the queue, what their answers give out, and how these end.

Knows no model and no batch. Every event of an answer leaves through here, and an answer that ends returns its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mlxr.cache.kv_cache import KVCache
from mlxr.core.errors import QueueFull
from mlxr.core.types import FinishReason
from mlxr.engine.live import Live
from mlxr.engine.pace import Pace
from mlxr.engine.request import Request
from mlxr.engine.scheduler import Scheduler, compute_arrival
from mlxr.engine.sequence import Sequence, TokenEvent
from mlxr.engine.shares import Shares
from mlxr.engine.stats import Work


class Answers:
    """The answers of one engine that have not ended. At most `max_waiting` wait for their turn."""

    __slots__ = ("_cache", "_clock", "_live", "_max_waiting", "_pace", "_requests", "_scheduler", "_shares", "_work")

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KVCache,
        shares: Shares,
        work: Work,
        live: Live,
        *,
        max_waiting: int,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._cache, self._shares, self._live = scheduler, cache, shares, live
        self._work, self._max_waiting, self._clock = work, max_waiting, clock
        self._pace = Pace()
        self._requests: dict[int, Request] = {}

    def check_room(self) -> None:
        """Raise QueueFull, with a guess when there will be room, when no more answers may wait."""
        waiting = len(self._scheduler.waiting)
        if waiting >= self._max_waiting:
            self._work.refused_requests += 1
            growing = [sequence.end_tokens - len(sequence.tokens) for sequence in self._scheduler.running]
            raise QueueFull(waiting, self._max_waiting, self._pace.estimate_room_s(min(growing, default=1)))

    def add(self, request: Request, sequences: list[Sequence], now: float) -> None:
        """Queue a request by the share of its client; its first answer stands for all until the prompt is computed."""
        leader, *leader.followers = sequences
        answers = 0 if leader.pool is not None else len(sequences)
        arrival = self._shares.enter(leader.client, leader.priority, now, leader.prompt_tokens, answers)
        for sequence in sequences:
            sequence.rank = (compute_arrival(arrival, leader.priority), sequence.id, sequence.index)
        self._requests[leader.id] = request
        self._scheduler.add(leader)

    def count_step(self, seconds: float, tokens: int) -> None:
        """Take in that a step with so many tokens took `seconds`, for what is told and reckoned of time."""
        self._pace.count_step(seconds)
        self._shares.count_step(seconds, tokens)

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
            self._shares.leave(request.client, request.priority)
            self._pace.count_end(self._clock(), is_idle=not self._requests)
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
            text = f"the deadline of {request.deadline_s:g} s has passed; raise deadline_s or ask for fewer tokens"
            events += self.end(list(request.growing.values()), FinishReason.DEADLINE, text)
        return events

    def forget(self, sequence: Sequence) -> None:
        """Return the pages of an answer that ends, unless others still wait for the prompt in them."""
        sequence.has_ended = True
        answers = self._requests[sequence.id].growing.values()
        leader = next((answer for answer in answers if sequence in answer.followers), None)
        if leader is not None:
            leader.followers.remove(sequence)
        elif sequence.followers:
            heir, *heir.followers = sequence.followers
            heir.follow(sequence, sequence.table)
            self._scheduler.replace(sequence, heir)
        else:
            self._scheduler.remove(sequence)
            sequence.rest(self._cache.release)
