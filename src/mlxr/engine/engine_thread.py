"""Runs an engine on a thread of its own for all callers: requests go in, events come out as they happen.

A `Worker`'s thread owns the engine. It runs what others ask for between two steps, steps, and hands the events out;
`EngineThread` is its public side. Its coroutines block no loop, and events travel to the loop of whoever asked, all of
one step at once. Programs without a loop call the methods that wait, and get events on the engine's thread. Requests
may come from several loops and threads. Knows no text and no streams.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from mlxr.core.errors import EngineStopped, QueueFull, RequestFailed
from mlxr.core.stats import LiveReading, PageRecord
from mlxr.core.types import FinishReason, Usage
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.runner import Floats
from mlxr.engine.sequence import TokenEvent
from mlxr.engine.stats import EngineReport, EngineStats
from mlxr.models.footprint import StepWork

logger = logging.getLogger(__name__)
T = TypeVar("T")
Receiver = Callable[[TokenEvent], None]
PATIENCE_S = 0.25  # that a reader of figures waits for a step to end
KEEP_S = 2.0  # between readings while steps follow one another: on a GPU a reading waits for its queue


class Job:
    """A request under way, and the answers that still grow (their last usage by index).

    Events go to `receiver`, which is called on `loop`. Without a loop it is called on the engine's thread, where it
    must neither fail nor wait. Once submitted, only the worker's thread reads or writes a job.
    """

    def __init__(self, request: EngineRequest, receiver: Receiver, loop: asyncio.AbstractEventLoop | None) -> None:
        self._request: EngineRequest | None = request
        self.id = 0  # until the engine has given one, which is above 0
        self.loop = loop
        self.receiver = receiver
        self.growing = {index: Usage(len(request.token_ids), 0) for index in range(request.answers)}

    def start(self, engine: Engine) -> None:
        """Give the request to the engine, and forget it once it is accepted, as it may be large."""
        assert self._request is not None
        self.id = engine.submit(self._request)
        self._request = None

    def note(self, event: TokenEvent) -> None:
        """Record the usage, or the end, of an answer from an event for the receiver."""
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
        self._held_back: deque[Job] = deque()  # until the engine's queue has room
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # of `_stop_at_s`: nothing may be queued once the thread has taken its last look
        self._stop_at_s: float | None = None
        self._broken = self._ending = False
        self.is_computing = False  # a step, which nothing can interrupt
        self.before_step: Callable[[Engine], None] | None = None
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
        """Start requests before the next step; when one is refused, none of them runs, and the future has the error.

        With `waits_for_room` a full queue does not refuse them: they start as soon as it has room.
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
        """Refuse new calls, go on for at most `drain_s` seconds while requests grow, then end and set the future."""
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
        """Stop at once, and wait for the thread to end."""
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
        self.is_computing = True
        try:
            if self.before_step is not None:
                self.before_step(self._engine)
            events = self._engine.step()
            self.is_computing = False
        except Exception as error:  # the engine deals with a failing model itself; this is the engine's own failure
            self.is_computing = False
            logger.exception("the engine failed; %d requests end", len(self._open))
            self._fail_all(f"the engine failed: {type(error).__name__}: {error}")
        else:
            self._hand_out(events)

    def _fail_all(self, error: str) -> None:
        """End every request; an engine that cannot even release them is broken."""
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
            except RuntimeError:  # the loop is closed, so its receivers are gone
                for job, _ in batch:
                    self._cancel(job)
                    self._open.pop(job.id, None)

    def _end(self) -> None:
        """Cancel what is left, close the engine, refuse calls that still wait."""
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


class Figures(Generic[T]):
    """Keeps what `read` says of an engine, so that whoever asks during a long step gets it without waiting.

    It is read when this object is made, before steps at most once in KEEP_S, and when somebody asks between steps.
    """

    def __init__(self, worker: Worker, read: Callable[[Engine], T]) -> None:
        self._worker, self._read = worker, read
        self._kept: tuple[float, T] = worker.post(self._keep).result()
        worker.before_step = self._renew

    def _keep(self, engine: Engine) -> tuple[float, T]:
        self._kept = time.monotonic(), self._read(engine)
        return self._kept

    def _renew(self, engine: Engine) -> None:
        if time.monotonic() - self._kept[0] < KEEP_S:
            return
        try:
            self._keep(engine)
        except Exception:  # the answers go on without
            logger.exception("the engine's figures cannot be read")

    async def get(self) -> tuple[T, float]:
        """Return the figures and their age in seconds, 0 if they are of now; raises EngineStopped after `stop`."""
        asked = asyncio.wrap_future(self._worker.post(self._keep))
        try:
            while not (await asyncio.wait([asked], timeout=PATIENCE_S))[0]:
                if self._worker.is_computing:
                    taken_s, figures = self._kept
                    return figures, time.monotonic() - taken_s
            return asked.result()[1], 0.0
        finally:
            asked.cancel()


class EngineThread:
    """The asynchronous side of `engine`, which nobody else may touch from now on.

        async with EngineThread(engine) as server:
            ticket = await server.submit(EngineRequest(token_ids, SamplingParams(max_tokens=20)), print)

    The thread starts here and ends with `stop`, at the latest when the object or the program ends. `cache` is the
    engine's own, for code that gives its pages to other processes.
    """

    def __init__(self, engine: Engine) -> None:
        self.cache = engine.cache
        self._worker = Worker(engine)
        self._finalizer = weakref.finalize(self, self._worker.stop_and_join)

    async def submit(self, request: EngineRequest, receiver: Receiver) -> Ticket:
        """Start a request; its events go to `receiver`, which is called on the running loop.

        Raises the errors of `Engine.submit`, and EngineStopped after `stop`.
        """
        ticket = self.open(request, receiver, asyncio.get_running_loop())
        await self.start(ticket)
        return ticket

    def open(self, request: EngineRequest, receiver: Receiver, loop: asyncio.AbstractEventLoop | None = None) -> Ticket:
        """Make a request that can be started once; without a `loop` its receiver is called on the engine's thread."""
        return Ticket(self._worker, Job(request, receiver, loop))

    async def start(self, ticket: Ticket) -> None:
        """Start a request; raises as `submit` does."""
        try:
            await asyncio.wrap_future(self._worker.submit([ticket.job]))
        except BaseException:
            ticket.cancel()  # the request may have been accepted a moment after this gave up waiting
            raise

    def start_all(self, tickets: Sequence[Ticket], *, waits_for_room: bool = False) -> None:
        """Start requests together and wait until they are accepted; when one is refused, none of them runs.

        With `waits_for_room` those that the queue cannot hold now are started as soon as it can. Raises as `submit`
        does; not for a thread with a running loop.
        """
        try:
            self.begin_all(tickets, waits_for_room=waits_for_room).result()
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise

    def begin_all(self, tickets: Sequence[Ticket], *, waits_for_room: bool = False) -> Future[None]:
        """Do `start_all` without waiting; the future tells whether they were accepted."""
        return self._worker.submit([ticket.job for ticket in tickets], waits_for_room=waits_for_room)

    async def embed(self, request: EngineRequest) -> Floats:
        """Return the embedding of a text, (hidden size,) and not normalised; see `Engine.submit`.

        Raises RequestFailed when the text was accepted and could not be computed. Cancelling the call ends the request.
        """
        ended: asyncio.Future[TokenEvent] = asyncio.get_running_loop().create_future()
        ticket = await self.submit(request, lambda event: None if ended.done() else ended.set_result(event))
        try:
            last = await ended
        except asyncio.CancelledError:
            ticket.cancel()
            raise
        return read_embedding(last)

    async def stats(self) -> EngineStats:
        """Return the engine's numbers between two steps."""
        return await self.run_between_steps(lambda engine: engine.stats())

    async def read_report(self, *, whole: bool = False) -> EngineReport:
        """Return the load, and the pages that came and went since the last report; see `Engine.read_report`."""
        return await self.run_between_steps(lambda engine: engine.read_report(whole=whole))

    def keep_figures(self, read: Callable[[Engine], T]) -> Figures[T]:
        """Return figures that `read` makes on the engine's thread, for callers that do not wait for a step.

        May be called once. `read` must not hold this object, which would keep the thread alive. Waits, so not for a
        thread with a running loop.
        """
        return Figures(self._worker, read)

    def post(self, work: Callable[[Engine], T]) -> Future[T]:
        """Run `work` on the engine's thread between two steps; returns at once."""
        return self._worker.post(work)

    def call(self, work: Callable[[Engine], T]) -> T:
        """Run `work` on the engine's thread and return its result; waits, so not for a thread with a running loop."""
        return self.post(work).result()

    async def run_between_steps(self, work: Callable[[Engine], T]) -> T:
        """Do `call` for a loop: run `work` while the engine computes nothing; answers pause meanwhile."""
        return await asyncio.wrap_future(self._worker.post(work))

    async def read_live(self, work: StepWork) -> LiveReading:
        """Return the state now, and what happened since the last reading, read between two steps; see `Live.read`."""
        return await self.run_between_steps(lambda engine: engine.live.read(work))

    async def stop_live(self) -> None:
        """End the record of what happens."""
        await self.run_between_steps(lambda engine: engine.live.stop())

    async def describe_page(self, group: int, page: int) -> PageRecord | None:
        """Return one page of a group of the cache in full, None if there is no such page."""
        return await self.run_between_steps(lambda engine: engine.live.describe_page(group, page))

    async def limit_cache(self, nbytes: int) -> None:
        """Run `Engine.limit_cache` between two steps."""
        await self.run_between_steps(lambda engine: engine.limit_cache(nbytes))

    async def check(self) -> None:
        """Run `Engine.check` between two steps."""
        await self.run_between_steps(lambda engine: engine.check())

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let those in flight end for at most `drain_s` seconds, cancel the rest, end the thread.

        Every stream gets its last events. May be called more than once; the shortest `drain_s` counts.
        """
        ended = self._worker.stop(drain_s)
        await asyncio.shield(asyncio.wrap_future(ended))
        self._worker.join()  # the thread has nothing left to do

    def close(self) -> None:
        """Stop at once and wait for the thread, for programs without a loop."""
        self._worker.stop_and_join()

    async def __aenter__(self) -> EngineThread:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class Ticket:
    """A request that can be started, and cancelled by anybody."""

    def __init__(self, worker: Worker, job: Job) -> None:
        self._worker, self.job = worker, job

    def cancel(self, index: int | None = None) -> None:
        """Stop the request, or one of its answers, before the next step; its last events still come.

        Takes no lock, so it is fit for signal handlers and finalisers.
        """
        self._worker.cancel(self.job, index)


def read_embedding(event: TokenEvent) -> Floats:
    """Return the embedding that the last event of a text has; raise RequestFailed where there is none."""
    if event.embedding is None:
        raise RequestFailed(str(event.finish_reason), event.error or "the request was cancelled")
    return event.embedding
