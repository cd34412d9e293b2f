"""Lines of progress from a thread that works to the stream of a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from time import monotonic

from mlxr.server.json_models import JsonObject
from mlxr.server.streaming import ndjson

REPORT_S = 0.1  # pieces of a file come quicker than anybody reads


class Lines:
    """Made on the event loop. What was reported since a frame was taken goes into the next one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._lines: list[JsonObject] = []
        self._reported_s = 0.0

    def report(self, line: JsonObject, *, is_piece: bool) -> None:
        """Add a line, from any one thread. Of lines about pieces of one thing, most are left out."""
        if is_piece and monotonic() - self._reported_s < REPORT_S:
            return
        self._reported_s = monotonic()
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._add, line)

    async def follow(self, task: asyncio.Task[object]) -> AsyncGenerator[bytes, None]:
        """Frames until the task has ended; raises what it raised. A reader that goes away cancels it."""
        task.add_done_callback(lambda _: self._news.set())
        try:
            while not task.done():
                await self._news.wait()
                self._news.clear()
                if self._lines:
                    yield self._take()
            await task
        finally:
            task.cancel()
            await asyncio.wait({task})
        if self._lines:
            yield self._take()

    def _add(self, line: JsonObject) -> None:
        self._lines.append(line)
        self._news.set()

    def _take(self) -> bytes:
        lines, self._lines = self._lines, []
        return b"".join(map(ndjson, lines))
