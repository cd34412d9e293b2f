"""What the catalogue said of a name: asked for again after a moment, and used as it is while nobody can tell.

So a request for a model that is loaded never waits for a disk that hangs or for a process that holds the catalogue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from mlxr.core.errors import Busy, Unavailable
from mlxr.core.work_threads import WorkThreads

V = TypeVar("V")
FRESH_S = 1.0  # how long an answer is taken for granted
GRACE_S = 0.05  # how long a look may take before what was known is used instead
MAX_NAMES = 1000  # which come from strangers


class Remembered(Generic[V]):
    """Answers of `look(name)`, which runs on `threads`. Belongs to one event loop, but for `forget`."""

    def __init__(self, look: Callable[[str], V], threads: WorkThreads, clock: Callable[[], float]) -> None:
        self._look, self._threads, self._clock = look, threads, clock
        self._known: dict[str, tuple[float, V]] = {}
        self._looking: dict[str, tuple[float, asyncio.Task[V]]] = {}
        self._changes = 0  # of what is looked at

    async def find(self, name: str) -> V:
        """What `look` returns. Raises what it raises, unless that is Unavailable or Busy and an answer is known."""
        known = self._known.get(name)
        if known is not None and self._clock() - known[0] <= FRESH_S:
            return known[1]
        since_s, task = self._begin(name)
        if known is not None:
            await asyncio.wait({task}, timeout=max(0.0, since_s + GRACE_S - asyncio.get_running_loop().time()))
            if not task.done() or isinstance(task.exception(), Unavailable | Busy):
                return known[1]
        return await asyncio.shield(task)

    def forget(self) -> None:
        """Ask again for every name; called, from any thread, after what is looked at was changed."""
        self._changes += 1
        self._known.clear()
        self._looking.clear()

    def _begin(self, name: str) -> tuple[float, asyncio.Task[V]]:
        """When the look that is under way was begun, which is now where there was none, and its task."""
        found = self._looking.get(name)
        if found is None:
            task = asyncio.create_task(self._ask(name, self._changes))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # may have nobody to tell
            found = self._looking[name] = asyncio.get_running_loop().time(), task
        return found

    async def _ask(self, name: str, changes: int) -> V:
        try:
            value = await self._threads.run(self._look, name)
        except (Unavailable, Busy):
            known = self._known.get(name)
            if known is not None and changes == self._changes:
                self._known[name] = self._clock(), known[1]  # so that not every request asks in vain
            raise
        except Exception:
            if changes == self._changes:
                self._known.pop(name, None)
            raise
        else:
            if len(self._known) >= MAX_NAMES:
                self._known.clear()
            if changes == self._changes:
                self._known[name] = self._clock(), value
            return value
        finally:
            if changes == self._changes:
                self._looking.pop(name, None)
