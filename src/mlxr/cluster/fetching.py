"""Fetches pages from another replica for a request that is about to be computed here.

The front names the replica that has them. What is here already is not asked for. All that comes within the time and is
proved right waits in the inbox, where the request's look-up finds it; the rest is computed. So a fetch that fails in
whatever way costs at most the time that it may take. The connection is read by a thread, since a page takes the
processor for a while to prove.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from urllib.parse import urlsplit

from mlxr.cache.inbox import Delivery
from mlxr.cluster.page_wire import MAX_NAMES, Ask, Refusal, Refused, take_pages
from mlxr.cluster.peers import PAGES_PATH, TOKEN, Peers
from mlxr.core.errors import EngineStopped
from mlxr.core.work_threads import WorkThreads
from mlxr.engine.page_exchange import PageExchange

MAX_FETCHES = 4
MEASURED_BYTES = 2**18  # fewer say little about the speed of a link
AVOIDED_S = 10.0  # during which a replica that was lost is not asked again
CAUSES = {403: Refusal.FORBIDDEN, 409: Refusal.MODEL, 503: Refusal.BUSY}


class Fetcher:
    """Fetches for one replica; for its event loop."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._threads = WorkThreads("mlxr-fetch", MAX_FETCHES)
        self._fetches = 0
        self._avoided: dict[str, float] = {}  # replicas that were lost, and until when they are not asked
        self._coming: dict[bytes, asyncio.Future[None]] = {}  # by the first page that is on its way

    @property
    def is_fetching(self) -> bool:
        """Whether pages are on their way."""
        return bool(self._coming)

    def from_peer(self, url: str | None) -> PeerPages:
        """The pages of the replica at `url`, for one request; of None those that are on their way for others."""
        return PeerPages(self, url)

    async def fetch(self, url: str | None, names: Sequence[bytes]) -> Delivery | None:
        """Bring what the replica at `url` has of the pages `names`; None if nothing was asked for.

        Those that are on their way for another request are waited for. The delivery is the caller's to close. Raises
        EngineStopped.
        """
        exchange, peers = self._peers.exchange, self._peers
        if exchange is None or not peers.max_bytes or not peers.timeout_s:
            return None
        coming = next((self._coming[name] for name in names if name in self._coming), None)
        if coming is not None:
            await asyncio.wait([coming])
        if url is None:
            return None
        names = list(names[:MAX_NAMES])
        lack = await exchange.seek(names)
        if lack.pages == len(names):
            return None
        self._avoided = {lost: until_s for lost, until_s in self._avoided.items() if monotonic() < until_s}
        if url in self._avoided or self._fetches >= MAX_FETCHES:
            cause = Refusal.AVOIDED if url in self._avoided else Refusal.BUSY
            peers.counts.refusals.labels(cause.value).inc()
            return None
        wanted_bytes = (len(names) - lack.pages) * exchange.linked_bytes + exchange.boundary_bytes
        delivery = exchange.open_delivery(min(wanted_bytes, peers.max_bytes))
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._coming.setdefault(names[lack.pages], arrival)
        try:
            ask = Ask(exchange.models, names, lack, delivery.limit_bytes)
            await self._fetch(url, ask, exchange, delivery)
        except BaseException:
            delivery.close()
            raise
        finally:
            arrival.set_result(None)
            if self._coming.get(names[lack.pages]) is arrival:
                del self._coming[names[lack.pages]]
        delivery.settle()
        return delivery

    async def _fetch(self, url: str, ask: Ask, exchange: PageExchange, delivery: Delivery) -> None:
        """Wait for pages no longer than is allowed, and count them."""
        counts, start_s, connection = self._peers.counts, monotonic(), _Connection(url, self._peers)
        self._fetches += 1
        reading = self._threads.submit(connection.read, ask, exchange.page_bytes, delivery)
        reading.add_done_callback(lambda _: connection.close())
        cause = None
        try:
            async with asyncio.timeout(self._peers.timeout_s):
                await asyncio.wrap_future(reading)
        except Refused as refused:
            cause = refused.cause
        except TimeoutError:
            cause = Refusal.LATE
        except (OSError, http.client.HTTPException):
            cause = Refusal.UNREACHABLE
        finally:
            self._fetches -= 1
            connection.close()
            seconds = monotonic() - start_s
            counts.seconds.inc(seconds)
            counts.pages.inc(len(delivery.names))
            counts.bytes.inc(delivery.held_bytes)
        if cause is not None:
            counts.refusals.labels(cause.value).inc()
        if cause in (Refusal.LATE, Refusal.UNREACHABLE):
            self._avoided[url] = monotonic() + AVOIDED_S
        if delivery.held_bytes >= (1 if cause is Refusal.LATE else MEASURED_BYTES):
            self._peers.speed.note(delivery.held_bytes, seconds)


class PeerPages:
    """A source of pages for one request (`service.page_source`): one replica, or None."""

    def __init__(self, fetcher: Fetcher, url: str | None) -> None:
        self._fetcher, self._url = fetcher, url

    async def bring(self, names: Sequence[bytes]) -> Delivery | None:
        """Bring what there is of the pages `names`; whatever happens, the request goes on."""
        with suppress(EngineStopped):  # which submitting the request will say
            return await self._fetcher.fetch(self._url, names)
        return None


class _Connection:
    """One connection to a replica, read by a thread and closed by whoever does not wait any longer."""

    def __init__(self, url: str, peers: Peers) -> None:
        self._url, self._token, self._timeout_s = url, peers.token, peers.timeout_s
        self._socket: socket.socket | None = None
        self._is_closed = False

    def read(self, ask: Ask, page_bytes: Sequence[int], delivery: Delivery) -> int:
        """Ask and take what comes; raises Refused, OSError or HTTPException."""
        try:
            parts = urlsplit(self._url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise Refused(Refusal.UNREACHABLE) from None
        if parts.scheme != "http" or host is None or port is None:
            raise Refused(Refusal.UNREACHABLE)
        connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        try:
            connection.connect()
            self._socket = connection.sock
            if self._is_closed:
                raise Refused(Refusal.LATE)
            headers = {TOKEN.decode(): self._token, "content-type": "application/octet-stream"}
            connection.request("POST", PAGES_PATH, ask.pack(), headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    raise Refused(CAUSES.get(response.status, Refusal.FAILED))
                return take_pages(response.readinto, ask, page_bytes, delivery)
        finally:
            connection.close()

    def close(self) -> None:
        """End what `read` waits for. May be called more than once, from any thread."""
        self._is_closed = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
