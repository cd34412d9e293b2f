"""An engine on a thread of its own, for programs with an event loop: requests go in, events come out as they happen.

`AsyncEngine` is the face of a `Worker`, whose thread owns the engine. A request is submitted and cancelled by calls
that run between two steps, and its events travel to the loop of whoever asked, all of one step at once. So nothing
here blocks a loop, and requests may come from several loops and threads. Knows no text.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from mlxr.core.errors import RequestFailed
from mlxr.core.live import PageRecord
from mlxr.core.types import SamplingParams
from mlxr.engine.constraint import TokenConstraint
from mlxr.engine.engine import Engine
from mlxr.engine.live import LiveReading
from mlxr.engine.page_exchange import PageExchange
from mlxr.engine.pooling import Floats, Pooling
from mlxr.engine.sequence import TokenEvent
from mlxr.engine.stats import EngineReport, EngineStats
from mlxr.engine.worker import Job, Receiver, Worker
from mlxr.models.adapter import Adapter
from mlxr.models.step_work import StepWork

T = TypeVar("T")


class AsyncEngine:
    """The asynchronous face of `engine`, which nobody else may touch from now on.

        async with AsyncEngine(engine) as server:
            async for event in server.generate(token_ids, SamplingParams(max_tokens=20)):
                ...

    The thread starts here and ends with `stop`, at the latest when the object or the program goes. `pages` exchanges
    pages with other processes; it is None where the engine has no `exchange`.
    """

    def __init__(self, engine: Engine) -> None:
        exchange = engine.exchange
        self._worker = Worker(engine)
        self.pages = None if exchange is None else PageExchange(self._worker, exchange)
        self._finalizer = weakref.finalize(self, self._worker.stop_and_join)

    def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        client: str | None = None,
        deadline_s: float | None = None,
        uses_cache: bool = True,
        boundary_tokens: Collection[int] = (),
        constraint: TokenConstraint | None = None,
    ) -> TokenStream:
        """Events of one request until all its answers have ended; nothing happens before the first is asked for.

        Arguments and refusals are those of `Engine.submit`. After `stop`, EngineStopped is raised.
        """
        prompt = list(token_ids)
        submit = _submitter(prompt, params, priority, client, deadline_s, uses_cache, boundary_tokens, constraint)
        return TokenStream(self._worker, submit, prompt_tokens=len(prompt), answers=params.n)

    async def embed(
        self,
        token_ids: Sequence[int],
        pooling: Pooling,
        *,
        priority: int = 0,
        client: str | None = None,
        deadline_s: float | None = None,
        adapter: Adapter | None = None,
    ) -> Floats:
        """The embedding of a text, (hidden size,) and not normalised; see `Engine.submit_embedding`.

        Arguments and refusals are the same. Raises RequestFailed when the text was accepted and could not be computed.
        Cancelling the call ends the request.
        """
        text = list(token_ids)

        def submit(engine: Engine) -> int:
            return engine.submit_embedding(
                text, pooling, priority=priority, client=client, deadline_s=deadline_s, adapter=adapter
            )

        async with TokenStream(self._worker, submit, prompt_tokens=len(text), answers=1) as events:
            last = await anext(events)
        if last.embedding is None:
            raise RequestFailed(str(last.finish_reason), last.error or "the request was cancelled")
        return last.embedding

    async def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        receiver: Receiver,
        *,
        priority: int = 0,
        client: str | None = None,
        deadline_s: float | None = None,
        uses_cache: bool = True,
        boundary_tokens: Collection[int] = (),
        constraint: TokenConstraint | None = None,
        scores_prompt: bool = False,
        adapter: Adapter | None = None,
    ) -> Ticket:
        """Start a request whose events go to `receiver`, called on the running loop, whoever reads them and when.

        Arguments and refusals are those of `Engine.submit`, raised here. After `stop`, EngineStopped is raised.
        """
        job = Job(
            _submitter(
                token_ids,
                params,
                priority,
                client,
                deadline_s,
                uses_cache,
                boundary_tokens,
                constraint,
                scores_prompt=scores_prompt,
                adapter=adapter,
            ),
            prompt_tokens=len(token_ids),
            answers=params.n,
            loop=asyncio.get_running_loop(),
            receiver=receiver,
        )
        try:
            await asyncio.wrap_future(self._worker.submit(job))
        except BaseException:
            self._worker.cancel(job)  # whoever gave up waiting may have been accepted a moment later
            raise
        return Ticket(self._worker, job)

    async def stats(self) -> EngineStats:
        """The engine's numbers between two steps."""
        return await self._call(lambda engine: engine.stats())

    async def read_report(self, *, whole: bool = False) -> EngineReport:
        """What there is to do and which pages can be found, for one reader; see `Engine.read_report`."""
        return await self._call(lambda engine: engine.read_report(whole=whole))

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine's thread and return its result; blocks, so not for a thread with a running loop."""
        return self._worker.post(lambda _: work()).result()

    async def run_between_steps(self, work: Callable[[], T]) -> T:
        """What `work()` returns, on the engine's thread while it computes nothing; answers pause for as long."""
        return await self._call(lambda _: work())

    async def read_live(self, work: StepWork, *, full: bool) -> LiveReading:
        """What happened since the last reading, read between two steps; see `Live.read`."""
        return await self._call(lambda engine: engine.live.read(work, full=full))

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
    """A request under way, for whoever may want to end it."""

    def __init__(self, worker: Worker, job: Job) -> None:
        self._worker, self._job = worker, job

    def cancel(self, index: int | None = None) -> None:
        """Stop the request, or one of its answers, before the next step; its last events still come."""
        self._worker.cancel(self._job, index)


class TokenStream:
    """Events of one request, as an asynchronous iterator that ends with the last of its answers.

    Closing it, or letting go of it, cancels what still grows. Belongs to the loop it was started on.
    """

    def __init__(
        self,
        worker: Worker,
        submit: Callable[[Engine], int],
        *,
        prompt_tokens: int,
        answers: int,
    ) -> None:
        self._worker = worker
        self._submit = submit
        self._prompt_tokens = prompt_tokens
        self._job: Job | None = None
        self._events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._growing = answers

    async def start(self) -> None:
        """Submit the request now, so that a refusal comes here and not with the first event. Once is enough."""
        if self._job is not None or not self._growing:
            return
        self._job = Job(
            self._submit,
            prompt_tokens=self._prompt_tokens,
            answers=self._growing,
            loop=asyncio.get_running_loop(),
            receiver=self._events.put_nowait,
        )
        try:
            await asyncio.wrap_future(self._worker.submit(self._job))
        except BaseException:
            self.close()  # whoever gave up waiting may have been accepted a moment later
            raise

    def cancel(self) -> None:
        """Stop the request before the next step; the last events of its answers can still be fetched."""
        if self._job is not None and self._growing:
            self._worker.cancel(self._job)

    def close(self) -> None:
        """Stop the request, if it still grows; there are no more events."""
        self.cancel()
        self._growing = 0

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        await self.start()
        if not self._growing:
            raise StopAsyncIteration
        event = await self._events.get()
        self._growing -= event.finish_reason is not None
        return event

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.cancel()


def _submitter(
    token_ids: Sequence[int],
    params: SamplingParams,
    priority: int,
    client: str | None,
    deadline_s: float | None,
    uses_cache: bool,
    boundary_tokens: Collection[int],
    constraint: TokenConstraint | None,
    *,
    scores_prompt: bool = False,
    adapter: Adapter | None = None,
) -> Callable[[Engine], int]:
    """What gives a request to the engine."""
    return lambda engine: engine.submit(
        token_ids,
        params,
        priority=priority,
        client=client,
        deadline_s=deadline_s,
        uses_cache=uses_cache,
        boundary_tokens=boundary_tokens,
        constraint=constraint,
        scores_prompt=scores_prompt,
        adapter=adapter,
    )
