"""Pages of a running engine for other processes, and theirs for it: the asynchronous face of a cache's `Exchange`.

What touches the books of the cache is done between two steps. The bytes of pages are read beside the steps where they
lie in the host's memory; those of a device are read by the engine's thread, one page between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mlxr.cache.exchange import Exchange, Lack, LentPage, Loan
from mlxr.cache.inbox import Delivery
from mlxr.cache.store import allocate_payload, pack_header
from mlxr.core.errors import EngineStopped
from mlxr.engine.engine_thread import EngineThread

T = TypeVar("T")


class PageExchange:
    """See the module. `models`, `page_bytes` and the like are those of `Exchange`."""

    def __init__(self, engine: EngineThread, exchange: Exchange) -> None:
        self._engine, self._exchange = engine, exchange
        self.models, self.page_bytes, self.page_size = exchange.models, exchange.page_bytes, exchange.page_size
        self.linked_bytes, self.boundary_bytes = exchange.linked_bytes, exchange.boundary_bytes
        self.max_bytes = exchange.inbox.max_bytes

    def open_delivery(self, wanted_bytes: int) -> Delivery:
        """Room for pages that are to be brought."""
        return self._exchange.inbox.open(wanted_bytes)

    async def seek(self, names: Sequence[bytes]) -> Lack:
        """What there is of these pages; see `Exchange.seek`."""
        return await self._call(lambda: self._exchange.seek(names))

    @asynccontextmanager
    async def lend(self, names: Sequence[bytes], lack: Lack, max_bytes: int) -> AsyncIterator[Loan]:
        """Within, the pages that `Exchange.lend` chooses stay as they are."""
        lending = self._engine.post(lambda _: self._exchange.lend(names, lack, max_bytes))
        try:
            yield await asyncio.wrap_future(lending)
        finally:
            lending.add_done_callback(self._give_back)  # also of whoever has been cancelled while it was lent

    async def read(self, lent: LentPage) -> tuple[bytes, NDArray[np.uint8]] | None:
        """A page that is lent, as in the store: header and bytes. None where it is on disk no longer."""
        group, key = lent.name
        payload = allocate_payload(self.page_bytes[group])

        def export() -> bool:
            return self._exchange.export(lent, payload)

        is_free = lent.page is None or self._exchange.is_on_host
        if not (await asyncio.to_thread(export) if is_free else await self._call(export)):
            return None
        return await asyncio.to_thread(pack_header, self.models[group], key, payload), payload

    def _give_back(self, lending: Future[Loan]) -> None:
        if not lending.cancelled() and lending.exception() is None:
            with suppress(EngineStopped):
                self._engine.post(lambda _: self._exchange.give_back(lending.result()))

    async def _call(self, function: Callable[[], T]) -> T:
        return await self._engine.run_between_steps(lambda _: function())
