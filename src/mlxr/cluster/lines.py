"""Connections from the front to one replica, and the replies that come over them.

Each connection is a client of httpx of its own: httpx's pool looks at all of its connections for every request, which
takes most of a processor when there are hundreds. Connections that are free wait on a stack, so the one used last is
used next, and those that are never needed any more are let go by the replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import httpx

from mlxr.cluster.frames import separator_of

T = TypeVar("T")
CONNECT_S = 5.0
MAX_FREE = 256  # connections that are kept for later
FREE_S = 30.0  # after which a free connection is not used again
BROKEN = (httpx.TransportError, httpx.StreamError)
LIMITS = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=FREE_S)
Headers = Sequence[tuple[bytes, bytes]]


class Gone(Exception):  # not an error of ours
    """The replica counts as dead, or cannot go on, in the middle of an answer."""


Connect = Callable[[], httpx.AsyncClient]


def connect() -> httpx.AsyncClient:
    """A client for one connection. Replicas speak plain HTTP, and no proxy of the environment stands before them."""
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    return httpx.AsyncClient(limits=LIMITS, timeout=timeout, trust_env=False, verify=False)


class Lines:
    """Connections to the replica at `url`, each made by `connect`. `gone` is set when the replica has died."""

    def __init__(self, url: str, gone: asyncio.Event, connect: Connect) -> None:
        self._url, self._gone, self._connect = url, gone, connect
        self._free: list[httpx.AsyncClient] = []
        self._is_closed = False

    async def send(self, method: str, path: str, headers: Headers, body: bytes) -> Incoming:
        """The reply as soon as its head is there; close it. Raises one of BROKEN, or Gone."""
        client = self._free.pop() if self._free else self._connect()
        request = client.build_request(method, self._url + path, headers=list(headers), content=body)
        try:
            sending = asyncio.ensure_future(client.send(request, stream=True))
            return Incoming(self, client, await self.unless_gone(sending))
        except BaseException:
            await self.give_back(client)
            raise

    async def give_back(self, client: httpx.AsyncClient) -> None:
        """A connection is free."""
        if self._is_closed or len(self._free) >= MAX_FREE:
            await client.aclose()
        else:
            self._free.append(client)

    async def close(self) -> None:
        """Let go of all connections; those that are in use follow when they are free."""
        self._is_closed = True
        free, self._free = self._free, []
        for client in free:
            await client.aclose()

    async def unless_gone(self, work: asyncio.Future[T]) -> T:
        """The result of `work`; raises Gone when the replica counts as dead before."""
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            both: list[asyncio.Future[Any]] = [work, gone]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Gone
            return work.result()
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)


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
        """The bytes as they come; raises one of BROKEN, or Gone."""
        chunks = self._reply.aiter_raw()
        while (chunk := await self._lines.unless_gone(asyncio.ensure_future(_take(chunks)))) is not None:
            yield chunk

    async def read_all(self) -> bytes:
        """The whole body, and close; raises one of BROKEN, or Gone."""
        try:
            return await self._lines.unless_gone(asyncio.ensure_future(self._reply.aread()))
        finally:
            await self.close()

    async def close(self) -> None:
        """Let go of it, so that a replica that still answers stops."""
        if not self._is_closed:
            self._is_closed = True
            try:
                await self._reply.aclose()
            finally:
                await self._lines.give_back(self._client)


async def _take(chunks: AsyncIterator[bytes]) -> bytes | None:
    """The next chunk, None at the end: a future cannot hold StopAsyncIteration."""
    return await anext(chunks, None)
