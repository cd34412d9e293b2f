"""Connections from the front to one replica, and the replies that come over them and are passed on to clients.

Each connection is a client of httpx of its own: httpx's pool looks at all of its connections for every request, which
takes most of a processor when there are hundreds. Connections that are free wait on a stack, so the one used last is
used next, and those that are never needed any more are let go by the replica.

A reply is passed on whole, or as it grows; when a client leaves, the replica's answer is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import httpx
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlxr.cluster.frames import separator_of

logger = logging.getLogger(__name__)
CONNECT_S = 5.0
MAX_FREE = 256  # connections that are kept for later
FREE_S = 30.0  # after which a free connection is not used again
LIMITS = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=FREE_S)
Headers = Sequence[tuple[bytes, bytes]]


class Gone(Exception):  # not an error of ours
    """The replica counts as dead, cannot be reached, or broke off in the middle of an answer."""


Connect = Callable[[], httpx.AsyncClient]


def connect() -> httpx.AsyncClient:
    """A client for one connection. Replicas speak plain HTTP, and no proxy of the environment stands before them."""
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    return httpx.AsyncClient(limits=LIMITS, timeout=timeout, trust_env=False, verify=False)


class Lines:
    """Connections to the replica at `url`, each made by `connect`."""

    def __init__(self, url: str, connect: Connect) -> None:
        self._url, self._connect = url, connect
        self._free: list[httpx.AsyncClient] = []
        self._waits: set[asyncio.Timeout] = set()  # of those that wait for the replica
        self._is_closed = False

    async def send(self, method: str, path: str, headers: Headers, body: bytes) -> Incoming:
        """The reply as soon as its head is there; close it. Raises Gone."""
        client = self._free.pop() if self._free else self._connect()
        request = client.build_request(method, self._url + path, headers=list(headers), content=body)
        try:
            async with self.wait():
                return Incoming(self, client, await client.send(request, stream=True))
        except BaseException:
            await self.give_back(client)
            raise

    async def give_back(self, client: httpx.AsyncClient) -> None:
        """A connection is free."""
        if self._is_closed or len(self._free) >= MAX_FREE:
            await _end(client)
        else:
            self._free.append(client)

    async def close(self) -> None:
        """The replica has died: whoever waits for it is told, and all connections end."""
        self._is_closed = True
        for wait in self._waits:
            wait.reschedule(0.0)
        free, self._free = self._free, []
        for client in free:
            await _end(client)

    @asynccontextmanager
    async def wait(self) -> AsyncIterator[None]:
        """Around whatever waits for the replica; raises Gone for all that goes wrong, and once it has died.

        Which errors there are is up to the library, the system and the event loop; none of them may end an answer that
        can go on elsewhere.
        """
        if self._is_closed:
            raise Gone("it has died")
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except Exception as error:
            raise Gone(f"{type(error).__name__}: {error}") from error


class Incoming:
    """A reply that has begun."""

    def __init__(self, lines: Lines, client: httpx.AsyncClient, reply: httpx.Response) -> None:
        self._lines, self._client, self._reply = lines, client, reply
        self._is_closed = False
        self.status: int = reply.status_code
        self.headers = reply.headers

    @property
    def separator(self) -> bytes | None:
        """What ends a frame, where the reply is an answer in frames; else None."""
        return separator_of(self.headers.get("content-type", "")) if self.status == 200 else None

    async def read(self) -> AsyncIterator[bytes]:
        """The bytes as they come; raises Gone."""
        chunks = self._reply.aiter_raw()
        while True:
            async with self._lines.wait():
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            yield chunk

    async def read_all(self) -> bytes:
        """The whole body, and close; raises Gone."""
        try:
            async with self._lines.wait():
                return await self._reply.aread()
        finally:
            await self.close()

    async def close(self) -> None:
        """Let go of it, so that a replica that still answers stops."""
        if not self._is_closed:
            self._is_closed = True
            try:
                await _end(self._reply)
            finally:
                await self._lines.give_back(self._client)


async def _end(ending: httpx.AsyncClient | httpx.Response) -> None:
    """Close it; whatever goes wrong concerns nobody any more."""
    try:
        await ending.aclose()
    except Exception as error:
        logger.info("a connection ended badly: %r", error)


HOP_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "content-length"})
TOLD_BY_RAY = frozenset({"x-request-id"})


class PassedStream(StreamingResponse):
    """An answer as it grows. When the client leaves, the frames are closed, and with them the replica's answer.

    `leave` is called at the end in any case, as frames that nobody has begun to read cannot close what they read from.
    """

    def __init__(self, frames: AsyncIterator[bytes], reply: Incoming, leave: Callable[[], Awaitable[None]]) -> None:
        super().__init__(frames, reply.status)
        self.raw_headers = read_headers(reply)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all frames, or as many as the client stays for."""
        del scope
        try:
            await self._send_while_there(receive, send)
        finally:
            await self._leave()

    async def _send_while_there(self, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        watching = asyncio.ensure_future(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait([sending, watching], return_when=asyncio.FIRST_COMPLETED)
            if not sending.done() and (error := watching.exception()) is not None:
                logger.warning("whether a client leaves cannot be seen: %r", error)
                await asyncio.wait([sending])
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            watching.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
            if isinstance(self.body_iterator, AsyncGenerator):
                await self.body_iterator.aclose()


def copy_reply(reply: Incoming, content: bytes) -> Response:
    """A reply that was read whole."""
    copy = Response(content, reply.status)
    copy.raw_headers = [*read_headers(reply), (b"content-length", str(len(content)).encode())]
    return copy


def read_headers(reply: Incoming) -> list[tuple[bytes, bytes]]:
    """Pick the headers for the client, without those of one connection and the id, which Ray Serve tells itself."""
    return [
        (name.lower(), value)
        for name, value in reply.headers.raw
        if name.decode("latin-1").lower() not in HOP_HEADERS | TOLD_BY_RAY
    ]
