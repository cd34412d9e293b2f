"""The thread that owns an engine: it runs what others ask for between two steps, steps, and hands the events out.

Each request comes with a receiver of its events, and the loop on which that is called, if any. Knows nothing of
streams; see `async_engine`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from mlxr.core.errors import EngineStopped, QueueFull
from mlxr.core.types import FinishReason, Usage
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent

logger = logging.getLogger(__name__)
T = TypeVar("T")
Receiver = Callable[[TokenEvent], None]


class Job:
    """A request under way, and which of its answers still grow (their last usage by index).

    Events go to `receiver`, which is called on `loop`, or without a loop on the engine's thread, where it must not fail
    and not wait. Once submitted, only the worker's thread reads or writes it.
    """

    __slots__ = ("_request", "growing", "id", "loop", "receiver")

    def __init__(self, request: EngineRequest, receiver: Receiver, loop: asyncio.AbstractEventLoop | None) -> None:
        self._request: EngineRequest | None = request
        self.id = 0  # until the engine has given one; its own are above
        self.loop = loop
        self.receiver = receiver
        self.growing = {index: Usage(len(request.token_ids), 0) for index in range(request.answers)}

    def start(self, engine: Engine) -> None:
        """Give the request to the engine. What was asked, which may be large, is forgotten once it is accepted."""
        assert self._request is not None
        self.id = engine.submit(self._request)
        self._request = None

    def note(self, event: TokenEvent) -> None:
        """Keep the books of what the receiver gets."""
        self.growing[event.index] = event.usage
        if event.finish_reason is not None:
            del self.growing[event.index]

    def end(self, reason: FinishReason, error: str | None = None) -> list[TokenEvent]:
        """Make the events that end all answers that still grow."""
        return [
            TokenEvent(self.id, None, usage, index=index, finish_reason=reason, error=error)
            for index, usage in self.growing.items()
        ]


class Worker:
    """One engine and its thread, which starts here. All methods may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[int, Job] = {}
        self._held_back: deque[Job] = deque()  # those that wait until the engine's queue has room
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # of `_stop_at_s`: nothing may be queued once the thread has taken its last look
        self._stop_at_s: float | None = None
        self._broken = self._ending = False
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="mlxr-engine", daemon=True)
        self._thread.start()

    def post(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function` on the engine between two steps. Raises EngineStopped once `stop` was called."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    if self._ending:
                        raise EngineStopped
                    future.set_result(function(self._engine))
                except BaseException as error:
                    future.set_exception(error)

        with self._lock:
            if self._stop_at_s is not None:
                raise EngineStopped
            self._calls.put(run)
        return future

    def submit(self, jobs: Sequence[Job], *, waits_for_room: bool = False) -> Future[None]:
        """Start requests before the next step; when one is refused, none of them runs, and the future tells of it.

        Those that `wait for room` are not refused because the queue is full: they are started as soon as it is not.
        """

        def start(_: Engine) -> None:
            try:
                for job in jobs:
                    self._start(job, waits_for_room=waits_for_room)
            except BaseException:
                for job in jobs:
                    self._drop(job)
                raise

        return self.post(start)

    def _start(self, job: Job, *, waits_for_room: bool) -> None:
        try:
            job.start(self._engine)
        except QueueFull:
            if not waits_for_room:
                raise
            self._held_back.append(job)
        else:
            self._open[job.id] = job

    def _drop(self, job: Job) -> None:
        """End a request whose events nobody gets."""
        if job in self._held_back:
            self._held_back.remove(job)
        if self._open.pop(job.id, None) is not None:
            self._engine.cancel(job.id)

    def _start_held_back(self) -> None:
        """Start what was held back, as far as there is room now."""
        while self._held_back:
            job = self._held_back.popleft()
            try:
                job.start(self._engine)
            except QueueFull:
                self._held_back.appendleft(job)
                return
            except Exception as error:
                self._give([(job, event) for event in job.end(FinishReason.ERROR, str(error))])
            else:
                self._open[job.id] = job

    def cancel(self, job: Job, index: int | None = None) -> None:
        """End a request, or one of its answers, before the next step, at whatever stage.

        Fit for finalisers, as it takes no lock.
        """
        self._calls.put(lambda: self._cancel(job, index))

    def stop(self, drain_s: float) -> Future[None]:
        """Refuse new calls, go on for at most `drain_s` seconds while requests grow, then end; done when ended."""
        with self._lock:
            stop_at_s = time.monotonic() + drain_s
            self._stop_at_s = stop_at_s if self._stop_at_s is None else min(self._stop_at_s, stop_at_s)
            self._calls.put(lambda: None)  # wakes a thread that waits
        return self._ended

    def join(self) -> None:
        """Wait for the thread to end."""
        if threading.current_thread() is not self._thread:  # a finaliser may run anywhere
            self._thread.join()

    def stop_and_join(self) -> None:
        """`stop` at once, and wait for it."""
        self.stop(0.0)
        self.join()

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._run_calls(wait=not (self._engine.has_work or self._held_back))
                self._start_held_back()
                if self._engine.has_work and not self._is_over():
                    self._step()
        finally:
            self._end()

    def _is_over(self) -> bool:
        if self._broken:
            return True
        if self._stop_at_s is None:
            return False
        has_more = self._engine.has_work or self._held_back or self._calls.qsize()
        return time.monotonic() >= self._stop_at_s or not has_more

    def _run_calls(self, *, wait: bool) -> None:
        """Run all calls that are there; with `wait`, until there is at least one."""
        while True:
            try:
                self._calls.get(block=wait)()
            except queue.Empty:
                return
            wait = False

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except Exception as error:  # the engine deals with a failing model itself; this is the engine's own failure
            logger.exception("the engine failed; %d requests end", len(self._open))
            self._fail_all(f"the engine failed: {type(error).__name__}: {error}")
        else:
            self._hand_out(events)

    def _fail_all(self, error: str) -> None:
        """End every request; an engine that cannot even let go of them is of no further use."""
        for job in list(self._open.values()):
            try:
                self._engine.cancel(job.id)
            except Exception:
                logger.exception("request %d cannot be cancelled", job.id)
            self._hand_out(job.end(FinishReason.ERROR, error))
        self._broken = self._engine.has_work

    def _cancel(self, job: Job, index: int | None = None) -> None:
        if job in self._held_back:
            self._held_back.remove(job)
            self._give([(job, event) for event in job.end(FinishReason.CANCELLED)])
        if job.id not in self._open:
            return
        try:
            events = self._engine.cancel(job.id, index)
        except Exception as error:
            logger.exception("request %d cannot be cancelled", job.id)
            self._broken = True
            events = job.end(FinishReason.ERROR, f"the engine failed: {type(error).__name__}: {error}")
        self._hand_out(events)

    def _hand_out(self, events: Iterable[TokenEvent]) -> None:
        """Give events to the requests that are open."""
        told = []
        for event in events:
            job = self._open.get(event.sequence_id)
            if job is not None:
                told.append((job, event))
                job.note(event)
                if not job.growing:
                    del self._open[event.sequence_id]
        self._give(told)

    def _give(self, told: Iterable[tuple[Job, TokenEvent]]) -> None:
        """Call the receivers: here, or with one call for each loop."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Job, TokenEvent]]] = defaultdict(list)
        for job, event in told:
            if job.loop is None:
                job.receiver(event)
            else:
                batches[job.loop].append((job, event))
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_receive, batch)
            except RuntimeError:  # the loop is closed, so nobody is there any more
                for job, _ in batch:
                    self._cancel(job)
                    self._open.pop(job.id, None)

    def _end(self) -> None:
        """Cancel what is left, close the engine, refuse what still waits."""
        with self._lock:
            self._stop_at_s = 0.0
        self._ending = True
        try:
            for job in [*self._open.values(), *self._held_back]:
                self._cancel(job)
            self._engine.close()
        except Exception:
            logger.exception("the engine did not close well")
        finally:
            self._run_calls(wait=False)  # which are refused now
            self._ended.set_result(None)


def _receive(batch: Iterable[tuple[Job, TokenEvent]]) -> None:
    for job, event in batch:
        job.receiver(event)
