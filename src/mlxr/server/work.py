"""The threads on which routes do what may take long, by kind, so that no kind holds up another.

What only looks at a file for a moment runs on the event loop's own threads (`asyncio.to_thread`), which are daemons too
(`listen`). Everything that may wait for a lock, a hub or a slow disk belongs here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from mlxr.core.errors import Unavailable
from mlxr.core.work_threads import Stop, WorkThreads
from mlxr.registry import Registry
from mlxr.server.activity import in_flight
from mlxr.server.bodies import Bodies
from mlxr.server.parts import parts_of

T = TypeVar("T")
LOOKS, CHANGES, UPLOADS = 4, 2, 4
MAX_PULLS = 8  # at a time; more are refused
MAX_MAKES = 4  # models that are created, quantised or imported, and adapters that are read, at a time
MAX_WAITING_MAKES = 60
PATIENCE_S = 4.0  # for which a request waits for a thread that looks into the catalogue, or changes it


class ServerWork:
    """The threads of one server over `registry`, whose requests wait for others only a short time."""

    def __init__(self, registry: Registry) -> None:
        self.registry, self.patient_registry = registry, registry.wait_longer()
        held = f"{registry.folder}: the catalogue of models is held; end the process that holds it, or try again"
        self.looks = WorkThreads("mlxr-look", LOOKS, patience_s=PATIENCE_S, remedy=held, refusal=Unavailable)
        self.changes = WorkThreads("mlxr-change", CHANGES, patience_s=PATIENCE_S, remedy=held, refusal=Unavailable)
        self.uploads = WorkThreads("mlxr-upload", UPLOADS)
        ended = "wait until one of them has ended, or close the connection of one, which stops it"
        self.pulls = WorkThreads("mlxr-pull", MAX_PULLS, max_waiting=0, what="pulls", remedy=ended)
        self.makes = WorkThreads(
            "mlxr-make", MAX_MAKES, max_waiting=MAX_WAITING_MAKES, what="models or adapters", remedy=ended
        )

        self._short_bodies, self._long_bodies = WorkThreads("mlxr-body", 2), WorkThreads("mlxr-long-body", 1)
        self.bodies = Bodies(self._short_bodies, self._long_bodies)

    def stop(self) -> None:
        """Begin nothing more; what is being done is not waited for."""
        for threads in (self.looks, self.changes, self.uploads, self.pulls, self.makes):
            threads.stop()
        for threads in (self._short_bodies, self._long_bodies):
            threads.stop()


def work_of(request: Request) -> ServerWork:
    """The threads of the server that the request came to."""
    return parts_of(request).work


async def look(request: Request, work: Callable[..., T], *arguments: object) -> T:
    """Return what `work(*arguments)` finds in the catalogue or in files; raises Unavailable where it cannot soon."""
    return await work_of(request).looks.run(work, *arguments)


async def change(request: Request, work: Callable[[Registry], T]) -> T:
    """Return what a short change of the registry returns; raises Unavailable where the catalogue is held."""
    threads = work_of(request)
    return await threads.changes.run(work, threads.registry)


def start_make(request: Request, work: Callable[[Registry, Stop], T]) -> asyncio.Task[T]:
    """Begin a long change of the registry, which is told to stop when the request ends. Raises Busy."""
    return _start(request, work_of(request).makes, work)


def start_pull(request: Request, work: Callable[[Registry, Stop], T]) -> asyncio.Task[T]:
    """The same for a pull."""
    return _start(request, work_of(request).pulls, work)


def _start(request: Request, threads: WorkThreads, work: Callable[[Registry, Stop], T]) -> asyncio.Task[T]:
    registry = work_of(request).patient_registry
    task = threads.start(lambda stop: work(registry, stop))
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # the client may have left
    in_flight(request).stack.callback(task.cancel)
    return task
