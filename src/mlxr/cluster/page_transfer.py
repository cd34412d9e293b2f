"""Pages that replicas of one cluster fetch from each other: what a replica knows of the others, fetching, and lending.

Replicas know each other by a token, which the front makes when it starts and tells with its reply to each report.

Fetching: the front names the replica that has pages of a prompt. What is here already is not asked for. All that comes
within the time and is proved right waits in the inbox, where the request's look-up finds it; the rest is computed. So a
fetch that fails in whatever way costs at most the time that it may take. The connection is read by a thread, since a
page takes the processor for a while to prove.

Lending: requests without the token are refused. What is read is bounded before it is read, what is sent by the bytes of
the setting `fetch_bytes` and in time, and few are answered at once, since pages that are lent cannot be evicted
meanwhile.
"""

from __future__ import annotations

import asyncio
import hmac
import http.client
import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from mlxr.cache.inbox import Delivery
from mlxr.cluster.load import Link
from mlxr.cluster.page_exchange import PageExchange
from mlxr.cluster.page_wire import MAX_ASK_BYTES, MAX_NAMES, Ask, Refusal, Refused, take_pages
from mlxr.core.errors import EngineStopped
from mlxr.core.work_threads import WorkThreads

PAGES_PATH = "/cluster/pages"
PEER, TOKEN = b"x-mlxr-peer", b"x-mlxr-token"  # headers: where pages can be fetched, and who may say so
WEIGHT = 0.3  # of the newest measurement
KEPT_S = 60.0  # after which a speed is unknown again: a link that was bad may be good


class LinkSpeed:
    """Bytes per second of the last fetches, 0 where that is not known."""

    def __init__(self) -> None:
        self._bytes_per_s = self._at_s = 0.0

    def note(self, size_bytes: int, seconds: float) -> None:
        """A fetch brought so many bytes."""
        now_s, known = monotonic(), self.read()
        measured = max(1.0, size_bytes / max(seconds, 1e-6))
        self._bytes_per_s = measured if known == 0 else (1 - WEIGHT) * known + WEIGHT * measured
        self._at_s = now_s

    def read(self) -> float:
        """Return the speed, as far as it is known."""
        return self._bytes_per_s if monotonic() - self._at_s < KEPT_S else 0.0


class PeerCounts:
    """The metrics of a replica about pages that travel."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pages = Counter("mlxr_fetched_pages", "Cache pages that came from other replicas", registry=registry)
        self.bytes = Counter("mlxr_fetched_bytes", "Bytes of such pages", registry=registry)
        self.seconds = Counter("mlxr_fetch_seconds", "Seconds that requests waited for such pages", registry=registry)
        self.refusals = Counter(
            "mlxr_fetch_refusals", "Fetches that brought less than was asked for", ["cause"], registry=registry
        )
        self.lent_pages = Counter("mlxr_lent_pages", "Cache pages sent to other replicas", registry=registry)
        self.lent_bytes = Counter("mlxr_lent_bytes", "Bytes of such pages", registry=registry)


class Peers:
    """`token` is empty until the front has told it, `exchange` None until the model is loaded."""

    def __init__(self, registry: CollectorRegistry, max_bytes: int, timeout_s: float) -> None:
        self.token = ""
        self.exchange: PageExchange | None = None
        self.counts, self.speed = PeerCounts(registry), LinkSpeed()
        self.max_bytes, self.timeout_s = max_bytes, timeout_s

    def admits(self, token: str) -> bool:
        """Whether `token` is the cluster's."""
        return bool(self.token) and hmac.compare_digest(token.encode(), self.token.encode())

    def describe_link(self) -> Link | None:
        """What it takes to fetch pages; None where none can be."""
        exchange = self.exchange
        if exchange is None or not self.max_bytes or not self.timeout_s:
            return None
        return Link(exchange.linked_bytes, exchange.boundary_bytes, self.max_bytes, self.timeout_s, self.speed.read())


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
    """A source of pages for one request (`service.cluster_hooks`): one replica, or None."""

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


logger = logging.getLogger(__name__)
MAX_LOANS = 4
GRACE_S = 1.0  # beyond the time that the asker waits


class Denied(Exception):  # an answer with a status, not an error of ours
    """The ask is answered with `status`."""

    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(reason)


class Lender:
    """Lends the pages of `peers.exchange`."""

    def __init__(self, peers: Peers) -> None:
        self._peers, self._loans = peers, 0

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request for pages."""
        try:
            exchange = self._check(scope)
            self._loans += 1
            try:
                async with asyncio.timeout(self._peers.timeout_s + GRACE_S):
                    ask = await _read_ask(receive)
                    if ask.models != exchange.models:
                        raise Denied(409, "pages of another model")
                    await self._send_pages(exchange, ask, send)
            finally:
                self._loans -= 1
        except Denied as denied:
            await JSONResponse({"error": denied.reason}, denied.status)(scope, receive, send)
        except EngineStopped:
            await JSONResponse({"error": "stopping"}, 503)(scope, receive, send)
        except TimeoutError:  # the connection is closed in the middle
            logger.warning("a replica did not take its pages in time")

    def _check(self, scope: Scope) -> PageExchange:
        headers = dict(scope["headers"])
        if not self._peers.admits(headers.get(TOKEN, b"").decode("latin-1")):
            raise Denied(403, "not of this cluster")
        if scope["method"] != "POST":
            raise Denied(405, "POST what is wanted")
        if self._peers.exchange is None:
            raise Denied(409, "this replica shares no pages")
        if self._loans >= MAX_LOANS:
            raise Denied(503, "too many fetch pages at the moment")
        return self._peers.exchange

    async def _send_pages(self, exchange: PageExchange, ask: Ask, send: Send) -> None:
        max_bytes = min(ask.max_bytes, self._peers.max_bytes)
        async with exchange.lend(ask.names, ask.lack, max_bytes) as loan:
            headers = [(b"content-type", b"application/octet-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for lent in loan.pages:
                read = await exchange.read(lent)
                if read is None:
                    break
                header, payload = read
                await send({"type": "http.response.body", "body": header, "more_body": True})
                await send({"type": "http.response.body", "body": payload.tobytes(), "more_body": True})
                self._peers.counts.lent_pages.inc()
                self._peers.counts.lent_bytes.inc(payload.nbytes)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _read_ask(receive: Receive) -> Ask:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Denied(400, "the ask broke off")
        body += message.get("body", b"")
        if len(body) > MAX_ASK_BYTES:
            raise Denied(413, f"an ask has at most {MAX_ASK_BYTES} bytes")
        if not message.get("more_body", False):
            break
    try:
        return Ask.parse(bytes(body))
    except ValueError as error:
        raise Denied(400, str(error)) from None
