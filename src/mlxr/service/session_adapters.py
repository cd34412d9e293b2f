"""The adapters of a session on an event loop: read on a thread of their own, so that no stream waits for that."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from mlxr.loading import Adapter
from mlxr.registry import AdapterRecord
from mlxr.service.adapters import Adapters

_TIMES = " × "  # between an adapter's name and a factor, which names of adapters cannot have


class SessionAdapters(Adapters):
    """`Adapters` whose files are those of records. The methods that are awaited belong on one loop."""

    _reader: ThreadPoolExecutor | None = None

    async def bring(self, record: AdapterRecord, factor: float = 1.0) -> Adapter:
        """The adapter of a record, read first if need be; one is read at a time. Raises as `Adapters.provide` does.

        With a `factor` other than 1 it is read for itself, and multiplied by it.
        """
        name = record.name if factor == 1.0 else f"{record.name}{_TIMES}{factor!r}"
        found = self.peek(name, record.digest)
        if found is None:
            found = await asyncio.get_running_loop().run_in_executor(
                self._require_reader(), self.provide, name, record.path, record.digest, factor
            )
        return found

    async def unload_and_wait(self, name: str) -> None:
        """Forget an adapter, and wait until no answer has it any more."""
        loop = asyncio.get_running_loop()
        for own in [one for one in self.names if one == name or one.startswith(name + _TIMES)]:
            gone = asyncio.Event()

            def on_gone(gone: asyncio.Event = gone) -> None:
                loop.call_soon_threadsafe(gone.set)

            self.release(own, on_gone)
            await gone.wait()

    def stop(self) -> None:
        """End the thread that reads; what waits for it is not read."""
        if self._reader is not None:
            self._reader.shutdown(wait=False, cancel_futures=True)

    def _require_reader(self) -> ThreadPoolExecutor:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "mlxr-adapters")
        return self._reader
