"""Threads for work that may take long, such as a pull, a look-up in the catalogue or reading a model.

They are daemons, unlike those of Python's executors: a process does not wait at its end for work that hangs in the
system. The number of threads and of waiting pieces of work is bounded. Knows nothing of the work itself.
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
LEAST_URGENT = 19  # the greatest niceness: such a thread gets only time that no other one wants


class Stop(threading.Event):
    """Tells work on another thread to stop: the work checks it now and then, and waits in the system are cut short."""

    def __init__(self) -> None:
        super().__init__()
        self._cuts: dict[object, Callable[[], None]] = {}
        self._lock = threading.Lock()

    def set(self) -> None:
        """Tell the work to stop, and cut its wait short."""
        super().set()
        with self._lock:
            cuts = list(self._cuts.values())
        for cut in cuts:
            cut()

    @contextlib.contextmanager
    def cutting(self, cut: Callable[[], None]) -> Iterator[None]:
        """Let `set` call `cut()` to end waits of the block; calls it at once if the work was told to stop before."""
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
    """At most `count` threads, each started when there is work and no thread is free.

    At most `max_waiting` pieces of work may wait for a thread (None: any number); more are refused with an error of the
    class `refusal` that names `what` they are and the `remedy`. So is a piece that has waited for `patience_s`.
    `niceness` is added to that of the process, on systems where each thread has its own: work that releases the
    interpreter then gives way to threads that compute.
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
        """The number of pieces of work that are being done."""
        return self._threads - self._free

    def submit(self, work: Callable[..., T], *arguments: object) -> Future[T]:
        """Return the future result of `work(*arguments)`; it fails with `refusal`, or EngineStopped after `stop`."""
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
                self._free += 1  # until it has taken its first piece
                number = self._threads
                threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True).start()
            elif self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
                piece.refuse(self._explain())
            else:
                self._waiting.append(piece)
        return future

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Return the result of `work(*arguments)` on one of the threads; begun work continues if this is cancelled."""
        return await asyncio.wrap_future(self.submit(work, *arguments))

    def start(self, work: Callable[[Stop], T]) -> asyncio.Task[T]:
        """Begin work that is told to stop if the task is cancelled; a refusal is raised here, not in the task."""
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
        """Refuse waiting work and let the threads end, without waiting for running work."""
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
            give_way(self._niceness)
        while (piece := self._take()) is not None:
            late_s = self._clock() - piece.since_s
            if self._patience_s is not None and late_s > self._patience_s:
                piece.refuse(self._refusal(f"what others asked for took {late_s:.0f} s and goes on; {self._remedy}"))
            else:
                piece.run()
            with self._changed:  # before the result is set, as its waiter may submit again at once
                self._free += 1
            piece.settle()
            del piece  # and its result, before the wait for the next one

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
    """An event loop's default executor over `threads`: a loop that ends does not wait for their work."""

    def __init__(self, threads: WorkThreads) -> None:
        # asyncio accepts only a ThreadPoolExecutor; nothing that it would set up is used
        self._work_threads = threads

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Return the future result of the call."""
        return self._work_threads.submit(partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Begin nothing more; does not wait for running work."""
        self._work_threads.stop()


class _Work:
    """A call, the time when it was submitted, and its future result."""

    def __init__(self, future: Future[Any], do: Callable[[], object], since_s: float) -> None:
        self._future, self._do, self.since_s = future, do, since_s
        self._tell: Callable[[], None] | None = None

    def refuse(self, error: Exception) -> None:
        """Let it fail with `error`."""
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(error)

    def run(self) -> None:
        """Make the call, unless its future was cancelled; `settle` sets the result."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._tell = partial(self._future.set_result, self._do())
        except BaseException as error:
            self._tell = partial(self._future.set_exception, error)

    def settle(self) -> None:
        """Set the future's result."""
        if self._tell is not None:
            self._tell()


def give_way(niceness: int) -> None:
    """Lower this thread's priority by `niceness`; changes nothing where threads share one priority."""
    if os.uname().sysname == "Linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            urgency = os.getpriority(os.PRIO_PROCESS, thread) + niceness
            os.setpriority(os.PRIO_PROCESS, thread, min(urgency, LEAST_URGENT))
