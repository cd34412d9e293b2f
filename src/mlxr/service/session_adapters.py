"""The adapters of a session on an event loop: read on a thread of their own, so that no stream waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mlxr.core.work_threads import WorkThreads
from mlxr.loading import Adapter, add_adapters
from mlxr.registry import AdapterRecord
from mlxr.service.adapters import Adapters


class SessionAdapters(Adapters):
    """`Adapters` whose files are those of records. The methods that are awaited belong on one loop."""

    _reader: WorkThreads | None = None

    async def bring(self, record: AdapterRecord) -> Adapter:
        """The adapter of a record, read first if need be; one is read at a time. Raises as `Adapters.provide` does."""
        found = self.peek(record.name, record.digest)
        if found is None:
            found = await self._require_reader().run(self.provide, record.name, record.path, record.digest)
        return found

    async def bring_sum(self, shares: Sequence[tuple[AdapterRecord, float]]) -> Adapter | None:
        """The sum of the adapters of records in their order, each so many times; else as `bring`."""
        return add_adapters([(await self.bring(record), factor) for record, factor in shares])

    async def unload_and_wait(self, name: str) -> None:
        """Forget an adapter, and wait until no answer has it any more."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()

        def on_gone() -> None:
            loop.call_soon_threadsafe(gone.set)

        self.release(name, on_gone)
        await gone.wait()

    def stop(self) -> None:
        """End the thread that reads; what waits for it is not read."""
        if self._reader is not None:
            self._reader.stop()

    def _require_reader(self) -> WorkThreads:
        if self._reader is None:
            self._reader = WorkThreads("mlxr-adapters", 1)
        return self._reader
