"""An engine on a thread of its own, which serves everybody: requests go in, events come out as they happen.

`AsyncEngine` is the face of a `Worker`, whose thread owns the engine. A request is submitted and cancelled by calls
that run between two steps. What is awaited blocks no loop, and its events travel to the loop of whoever asked, all of
one step at once; programs without a loop call what waits, and are told on the engine's thread. Requests may come from
several loops and threads. Knows no text.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from mlxr.cache.exchange import Exchange
from mlxr.core.errors import RequestFailed
from mlxr.core.live import LiveReading, PageRecord
from mlxr.engine.engine import Engine
from mlxr.engine.pooling import Floats
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent
from mlxr.engine.stats import EngineReport, EngineStats
from mlxr.engine.worker import Job, Receiver, Worker
from mlxr.models.step_work import StepWork

T = TypeVar("T")


class AsyncEngine:
    """The asynchronous face of `engine`, which nobody else may touch from now on.

        async with AsyncEngine(engine) as server:
            ticket = await server.submit(EngineRequest(token_ids, SamplingParams(max_tokens=20)), print)

    The thread starts here and ends with `stop`, at the latest when the object or the program goes. `exchange` is
    the engine's own, for whoever gives its pages to other processes.
    """

    def __init__(self, engine: Engine) -> None:
        self.exchange: Exchange | None = engine.exchange
        self._worker = Worker(engine)
        self._finalizer = weakref.finalize(self, self._worker.stop_and_join)

    async def submit(self, request: EngineRequest, receiver: Receiver) -> Ticket:
        """Start a request whose events go to `receiver`, called on the running loop, whoever reads them and when.

        Refusals are those of `Engine.submit`, raised here. After `stop`, EngineStopped is raised.
        """
        ticket = self.open(request, receiver, asyncio.get_running_loop())
        await self.start(ticket)
        return ticket

    def open(self, request: EngineRequest, receiver: Receiver, loop: asyncio.AbstractEventLoop | None = None) -> Ticket:
        """Make a request that can be started, once; without a `loop` its receiver is called on the engine's thread."""
        return Ticket(self._worker, Job(request, receiver, loop))

    async def start(self, ticket: Ticket) -> None:
        """Start a request; raises as `submit` does."""
        try:
            await asyncio.wrap_future(self._worker.submit([ticket.job]))
        except BaseException:
            ticket.cancel()  # whoever gave up waiting may have been accepted a moment later
            raise

    def start_all(self, tickets: Sequence[Ticket], *, waits_for_room: bool = False) -> None:
        """Start requests together and wait until they are accepted; when one is refused, none of them runs.

        With `waits_for_room` those that the queue cannot hold now are started as soon as it can. Raises as `submit`
        does; not for a thread with a running loop.
        """
        try:
            self._worker.submit([ticket.job for ticket in tickets], waits_for_room=waits_for_room).result()
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise

    async def embed(self, request: EngineRequest) -> Floats:
        """The embedding of a text, (hidden size,) and not normalised; see `Engine.submit`.

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
        """The engine's numbers between two steps."""
        return await self._call(lambda engine: engine.stats())

    async def read_report(self, *, whole: bool = False) -> EngineReport:
        """What there is to do and which pages can be found, for one reader; see `Engine.read_report`."""
        return await self._call(lambda engine: engine.read_report(whole=whole))

    def post(self, work: Callable[[Engine], T]) -> Future[T]:
        """Have `work` run on the engine's thread between two steps; returns at once."""
        return self._worker.post(work)

    def call(self, work: Callable[[Engine], T]) -> T:
        """Run `work` on the engine's thread and return its result; waits, so not for a thread with a running loop."""
        return self.post(work).result()

    async def run_between_steps(self, work: Callable[[Engine], T]) -> T:
        """`call` for a loop: run `work` while the engine computes nothing; answers pause for as long."""
        return await self._call(work)

    async def read_live(self, work: StepWork) -> LiveReading:
        """Return the state now, and what happened since the last reading, read between two steps; see `Live.read`."""
        return await self._call(lambda engine: engine.live.read(work))

    async def stop_live(self) -> None:
        """Record no longer what happens."""
        await self._call(lambda engine: engine.live.stop())

    async def describe_page(self, group: int, page: int) -> PageRecord | None:
        """One page of a group of the cache in full, None if there is no such page."""
        return await self._call(lambda engine: engine.live.describe_page(group, page))

    async def limit_cache(self, nbytes: int) -> None:
        """See `Engine.limit_cache`, between two steps."""
        await self._call(lambda engine: engine.limit_cache(nbytes))

    async def check(self) -> None:
        """Run `Engine.check` between two steps."""
        await self._call(lambda engine: engine.check())

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let those in flight end for at most `drain_s` seconds, cancel the rest, end the thread.

        Every stream gets its last events. May be called more than once; the shortest `drain_s` counts.
        """
        ended = self._worker.stop(drain_s)
        await asyncio.shield(asyncio.wrap_future(ended))
        self._worker.join()  # the thread has nothing left to do

    def close(self) -> None:
        """`stop` at once, for who has no loop; waits for the thread."""
        self._worker.stop_and_join()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _call(self, function: Callable[[Engine], T]) -> T:
        return await asyncio.wrap_future(self._worker.post(function))


class Ticket:
    """A request that can be started, and ended by whoever may want to."""

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
