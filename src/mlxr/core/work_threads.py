"""Threads for work that may take long, such as a pull, a look into the catalogue or a model that is read.

They are daemons, unlike those of Python's executors: no process waits at its end for work that hangs in the system.
How many there are is bounded, and how much may wait for them too. Knows nothing of what the work is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from mlxr.core.errors import Busy, EngineStopped, MlxrError

T = TypeVar("T")
LEAST_URGENT = 19  # the greatest niceness: such a thread has only the time that nobody else wants


class Stop(threading.Event):
    """Tells work on another thread to stop, which looks between two pieces; a wait in the system is cut short."""

    def __init__(self) -> None:
        super().__init__()
        self._cuts: dict[object, Callable[[], None]] = {}
        self._lock = threading.Lock()

    def set(self) -> None:
        """Tell it, and cut short what it waits for."""
        super().set()
        with self._lock:
            cuts = list(self._cuts.values())
        for cut in cuts:
            cut()

    @contextlib.contextmanager
    def cutting(self, cut: Callable[[], None]) -> Iterator[None]:
        """While the block runs, `cut()` ends its wait; it is called at once where the work was told to stop before."""
        key = object()
        with self._lock:
            self._cuts[key] = cut
        try:
            if self.is_set():
                cut()
            yield
        finally:
            with self._lock:
                del self._cuts[key]


class WorkThreads:
    """At most `count` threads, each started when there is work that no other one is free for.

    `max_waiting` is how many pieces of work may wait for a thread, None for any number; more are refused, with an error
    of the kind `refusal` that says `what` they are and the `remedy`. So is a piece that has waited for `patience_s`.
    `niceness` is added to that of their process, where threads have one of their own: work that lets go of the
    interpreter gives way so to threads that compute.
    """

    def __init__(
        self,
        name: str,
        count: int,
        *,
        max_waiting: int | None = None,
        patience_s: float | None = None,
        what: str = "pieces of work",
        remedy: str = "try again later",
        refusal: type[MlxrError] = Busy,
        niceness: int = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._name, self._count, self._niceness = name, count, niceness
        self._max_waiting, self._patience_s = max_waiting, patience_s
        self._clock = clock
        self._what, self._remedy, self._refusal = what, remedy, refusal
        self._waiting: deque[_Work] = deque()
        self._changed = threading.Condition()
        self._threads = self._free = 0
        self._is_stopped = False

    @property
    def busy(self) -> int:
        """Pieces of work that are being done."""
        return self._threads - self._free

    def submit(self, work: Callable[..., T], *arguments: object) -> Future[T]:
        """Return the future of what `work(*arguments)` returns; it fails with Busy, or EngineStopped after `stop`."""
        future: Future[T] = Future()
        piece = _Work(future, partial(work, *arguments), self._clock())
        with self._changed:
            if self._is_stopped:
                piece.refuse(EngineStopped())
            elif self._free > len(self._waiting):
                self._waiting.append(piece)
                self._changed.notify()
            elif self._threads < self._count:
                self._waiting.append(piece)
                self._threads += 1
                self._free += 1  # until it has taken what it was started for
                number = self._threads
                threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True).start()
            elif self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
                piece.refuse(self._explain())
            else:
                self._waiting.append(piece)
        return future

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Return what `work(*arguments)` does on one of the threads; once begun, it goes on if this is cancelled."""
        return await asyncio.wrap_future(self.submit(work, *arguments))

    def start(self, work: Callable[[Stop], T]) -> asyncio.Task[T]:
        """Begin work that is told to stop when the task is cancelled; raises a refusal here and not in the task."""
        stop = Stop()
        future = self.submit(work, stop)
        if future.done() and (refused := future.exception()) is not None:
            raise refused

        async def wait() -> T:
            return await asyncio.wrap_future(future)

        task = asyncio.create_task(wait())
        task.add_done_callback(lambda _: stop.set())  # also for one that is cancelled before it runs
        return task

    def stop(self) -> None:
        """Refuse what waits and let the threads end; what is being done is not waited for."""
        with self._changed:
            self._is_stopped = True
            for piece in self._waiting:
                piece.refuse(EngineStopped())
            self._waiting.clear()
            self._changed.notify_all()

    def _explain(self) -> MlxrError:
        waiting = f" and {len(self._waiting)} wait" if self._waiting else ""
        return self._refusal(f"{self._count} {self._what} are under way{waiting}, no more may be; {self._remedy}")

    def _serve(self) -> None:
        if self._niceness:
            _give_way(self._niceness)
        while (piece := self._take()) is not None:
            late_s = self._clock() - piece.since_s
            if self._patience_s is not None and late_s > self._patience_s:
                piece.refuse(self._refusal(f"what others asked for took {late_s:.0f} s and goes on; {self._remedy}"))
            else:
                piece.run()
            with self._changed:  # before the result is told, as whoever waits for it may come back at once
                self._free += 1
            piece.settle()
            del piece  # and with it what it returned, before the next one is waited for

    def _take(self) -> _Work | None:
        with self._changed:
            while not self._waiting and not self._is_stopped:
                self._changed.wait()
            if not self._waiting:
                self._threads -= 1
                self._free -= 1
                return None
            self._free -= 1
            return self._waiting.popleft()


class QuickExecutor(ThreadPoolExecutor):
    """An event loop's default executor over `threads`: a loop that ends does not wait for what they do."""

    def __init__(self, threads: WorkThreads) -> None:
        # asyncio accepts only a ThreadPoolExecutor; none of what that would set up is used
        self._work_threads = threads

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Return the future of what the call returns."""
        return self._work_threads.submit(partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Begin nothing more; what is being done is not waited for."""
        self._work_threads.stop()


class _Work:
    """A call, when it was asked for, and the future of what it returns."""

    def __init__(self, future: Future[Any], do: Callable[[], object], since_s: float) -> None:
        self._future, self._do, self.since_s = future, do, since_s
        self._tell: Callable[[], None] | None = None

    def refuse(self, error: Exception) -> None:
        """Let it fail with `error`."""
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(error)

    def run(self) -> None:
        """Do it, unless nobody waits for it any more; `settle` tells what came of it."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._tell = partial(self._future.set_result, self._do())
        except BaseException as error:
            self._tell = partial(self._future.set_exception, error)

    def settle(self) -> None:
        """Let the future have the result."""
        if self._tell is not None:
            self._tell()


def _give_way(niceness: int) -> None:
    """Let this thread be so much less urgent than the others; where threads share a priority, change nothing."""
    if os.uname().sysname == "Linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            urgency = os.getpriority(os.PRIO_PROCESS, thread) + niceness
            os.setpriority(os.PRIO_PROCESS, thread, min(urgency, LEAST_URGENT))
