"""Pages that replicas of one cluster fetch from each other: the state of the peers, fetching, and lending.

Replicas prove themselves by a token, which the front makes when it starts and sends in its reply to each report.

Fetching: the front names the replica that has pages of a prompt. Pages that are here already are not asked for. Pages
that come in time and pass their check wait in the inbox, where the request's look-up finds them; the rest is computed.
So a failed fetch costs at most the time that it may take. A thread reads the connection, since checking a page keeps
the processor busy for a while.

Lending: requests without the token are refused. The size of a request is checked before it is read; replies are bounded
by the setting `fetch_bytes` and in time, and few are sent at once, since lent pages cannot be evicted meanwhile.

An ask is little-endian: magic `MLXRWANT`, version, groups of the model, names, names known up to a boundary, most bytes
wanted; then the id of each group's model (32 bytes each), the names (32 bytes each), and for each group a bit for each
name that is there already, the first in the lowest bit. The reply is the pages one after the other in their form on
disk (`cache/store`). The reader allocates only the known size of a page, for names that it asked for, once each, within
the bytes that it reserved; each page must pass its checksum before it counts.
"""

from __future__ import annotations

import asyncio
import hmac
import http.client
import logging
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from time import monotonic
from urllib.parse import urlsplit

import numpy as np
from prometheus_client import CollectorRegistry, Counter
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from mlxr.cache.prefix import KEY_BYTES
from mlxr.cache.store import HEADER_BYTES, EntryError, PageName, allocate_payload, prove_entry, read_header
from mlxr.cluster.page_exchange import Delivery, Here, Lack, PageExchange
from mlxr.cluster.router import Link
from mlxr.core.errors import EngineStopped
from mlxr.core.frozen import frozen
from mlxr.core.work_threads import WorkThreads

MAGIC, VERSION = b"MLXRWANT", 1
MAX_NAMES, MAX_GROUPS = 65_536, 64
_HEAD = struct.Struct("<8sIIIIQ")
MAX_ASK_BYTES = _HEAD.size + MAX_GROUPS * KEY_BYTES + MAX_NAMES * KEY_BYTES + MAX_GROUPS * MAX_NAMES // 8

ReadInto = Callable[[memoryview], int]  # fills a part of the buffer; returns how many bytes, 0 at the end


class Refusal(StrEnum):
    """The reason why pages did not come, or not all of them."""

    UNREACHABLE = "unreachable"  # no connection, or it broke
    LATE = "late"  # the time was up
    AVOIDED = "avoided"  # it was unreachable or late a moment ago, so it was not asked
    BUSY = "busy"  # here or there, too many fetch already
    FORBIDDEN = "forbidden"  # the peer does not accept our token
    MODEL = "model"  # the peer has another model, or pages of another form
    FAILED = "failed"  # any other refusal
    HALF_SENT = "half_sent"  # the stream ended within a page
    NOT_ASKED = "not_asked"  # a page that was not asked for, twice, too large, or beyond the bytes that were wanted
    DAMAGED = "damaged"  # a page whose checksum is wrong, or something else in its place


class Refused(Exception):  # caught by the fetcher; the pages are computed instead
    """No further page is taken; `cause` says why."""

    def __init__(self, cause: Refusal) -> None:
        self.cause = cause
        super().__init__(cause.value)


@frozen
class Ask:
    """A request for the pages `names` of `models`, except those that are there according to `lack`."""

    models: tuple[bytes, ...]
    names: list[bytes]
    lack: Lack
    max_bytes: int

    def pack(self) -> bytes:
        """The ask as bytes."""
        head = _HEAD.pack(MAGIC, VERSION, len(self.models), len(self.names), self.lack.pages, self.max_bytes)
        here = (np.packbits(np.array(row, dtype=bool), bitorder="little").tobytes() for row in self.lack.here)
        return b"".join((head, *self.models, *self.names, *here))

    @classmethod
    def parse(cls, data: bytes) -> Ask:
        """Reverse `pack`; raises ValueError that names the fault."""
        if len(data) < _HEAD.size:
            raise ValueError(f"an ask has at least {_HEAD.size} bytes, not {len(data)}")
        magic, version, groups, names, pages, max_bytes = _HEAD.unpack(data[: _HEAD.size])
        if magic != MAGIC or version != VERSION:
            raise ValueError("not an ask of this version")
        if not 1 <= groups <= MAX_GROUPS or names > MAX_NAMES or pages > names:
            raise ValueError(f"{groups} groups, {names} names and {pages} pages are no ask")
        row_bytes = (names + 7) // 8
        if len(data) != _HEAD.size + (groups + names) * KEY_BYTES + groups * row_bytes:
            raise ValueError(f"{groups} groups and {names} names are not {len(data)} bytes")
        keys = [data[at : at + KEY_BYTES] for at in range(_HEAD.size, len(data) - groups * row_bytes, KEY_BYTES)]
        rows = np.frombuffer(data[len(data) - groups * row_bytes :], dtype=np.uint8).reshape(groups, row_bytes)
        here: Here = np.unpackbits(rows, axis=1, count=names, bitorder="little").astype(bool).tolist()
        return cls(tuple(keys[:groups]), keys[groups:], Lack(pages, here), max_bytes)

    def list_wanted(self) -> set[PageName]:
        """The names of all pages that may be sent."""
        return {
            (group, name)
            for group, row in enumerate(self.lack.here)
            for name, is_here in zip(self.names, row, strict=True)
            if not is_here
        }


def take_pages(read_into: ReadInto, ask: Ask, page_bytes: Sequence[int], delivery: Delivery) -> int:
    """Read pages to the end of the stream, check each and put it into `delivery`; returns their number.

    Raises Refused at the first bad page; those before it stay.
    """
    wanted, header = ask.list_wanted(), bytearray(HEADER_BYTES)
    pages = 0
    while _fill(read_into, memoryview(header)):
        try:
            model, key, nbytes = read_header(bytes(header))
            group = ask.models.index(model)
        except (EntryError, ValueError):
            raise Refused(Refusal.DAMAGED) from None
        name = group, key
        if name not in wanted or nbytes != page_bytes[group]:
            raise Refused(Refusal.NOT_ASKED)
        wanted.remove(name)
        payload = allocate_payload(page_bytes[group])
        if not _fill(read_into, payload.data):
            raise Refused(Refusal.HALF_SENT)
        try:
            prove_entry(bytes(header), payload)
        except EntryError:
            raise Refused(Refusal.DAMAGED) from None
        if not delivery.put(name, payload):
            raise Refused(Refusal.NOT_ASKED)
        pages += 1
    return pages


def _fill(read_into: ReadInto, target: memoryview) -> bool:
    """Fill `target`; returns False at the end of the stream, raises Refused if it ends within."""
    filled = 0
    while filled < len(target):
        count = read_into(target[filled:])
        if not count:
            if filled:
                raise Refused(Refusal.HALF_SENT)
            return False
        filled += count
    return True


PAGES_PATH = "/cluster/pages"
PEER, TOKEN = b"x-mlxr-peer", b"x-mlxr-token"  # headers: the replica to fetch pages from, and the token that allows it
WEIGHT = 0.3  # of the newest measurement
KEPT_S = 60.0  # then a speed is unknown again: a bad link may have become good


class LinkSpeed:
    """The bytes per second of the last fetches, 0 if not known."""

    def __init__(self) -> None:
        self._bytes_per_s = self._at_s = 0.0

    def note(self, size_bytes: int, seconds: float) -> None:
        """Take in a fetch that brought so many bytes."""
        now_s, known = monotonic(), self.read()
        measured = max(1.0, size_bytes / max(seconds, 1e-6))
        self._bytes_per_s = measured if known == 0 else (1 - WEIGHT) * known + WEIGHT * measured
        self._at_s = now_s

    def read(self) -> float:
        """Return the speed, 0 if not known."""
        return self._bytes_per_s if monotonic() - self._at_s < KEPT_S else 0.0


class PeerCounts:
    """The metrics of a replica about fetched and lent pages."""

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
    """The state that fetching and lending share. `token` is empty until the front sends it, `exchange` None until the
    model is loaded."""

    def __init__(self, registry: CollectorRegistry, max_bytes: int, timeout_s: float) -> None:
        self.token = ""
        self.exchange: PageExchange | None = None
        self.counts, self.speed = PeerCounts(registry), LinkSpeed()
        self.max_bytes, self.timeout_s = max_bytes, timeout_s

    def admits(self, token: str) -> bool:
        """Return True if `token` is the cluster's."""
        return bool(self.token) and hmac.compare_digest(token.encode(), self.token.encode())

    def describe_link(self) -> Link | None:
        """The sizes and the speed of fetches; None if pages cannot be fetched."""
        exchange = self.exchange
        if exchange is None or not self.max_bytes or not self.timeout_s:
            return None
        return Link(exchange.linked_bytes, exchange.boundary_bytes, self.max_bytes, self.timeout_s, self.speed.read())


MAX_FETCHES = 4
MEASURED_BYTES = 2**18  # fewer say little about the speed of a link
AVOIDED_S = 10.0  # a lost replica is not asked again for so long
CAUSES = {403: Refusal.FORBIDDEN, 409: Refusal.MODEL, 503: Refusal.BUSY}


class Fetcher:
    """Fetches for one replica; for its event loop."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._threads = WorkThreads("mlxr-fetch", MAX_FETCHES)
        self._fetches = 0
        self._avoided: dict[str, float] = {}  # lost replicas, and the time until which they are not asked
        self._coming: dict[bytes, asyncio.Future[None]] = {}  # by the first page that is on its way

    @property
    def is_fetching(self) -> bool:
        """True if pages are on their way."""
        return bool(self._coming)

    def from_peer(self, url: str | None) -> PeerPages:
        """The pages of the replica at `url` for one request; None: only those that are on their way for others."""
        return PeerPages(self, url)

    async def fetch(self, url: str | None, names: Sequence[bytes]) -> Delivery | None:
        """Bring those of the pages `names` that the replica at `url` has; None if nothing was asked for.

        Waits for pages that are on their way for another request. The caller closes the delivery. Raises EngineStopped.
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
        """Wait for pages no longer than allowed, and count them."""
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
        """Bring the pages `names` that there are; failures do not stop the request."""
        with suppress(EngineStopped):  # submitting the request raises it again
            return await self._fetcher.fetch(self._url, names)
        return None


class _Connection:
    """One connection to a replica: a thread reads it, another may close it to stop waiting."""

    def __init__(self, url: str, peers: Peers) -> None:
        self._url, self._token, self._timeout_s = url, peers.token, peers.timeout_s
        self._socket: socket.socket | None = None
        self._is_closed = False

    def read(self, ask: Ask, page_bytes: Sequence[int], delivery: Delivery) -> int:
        """Send the ask and take the pages; raises Refused, OSError or HTTPException."""
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
        """End the wait of `read`. May be called more than once, from any thread."""
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
