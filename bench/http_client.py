"""A small HTTP client for load: one connection each and little work per byte, so that the server dominates the time.

Supports the servers here: HTTP/1.1 with a length or in chunks, answers as JSON or as server-sent events.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any


class Refused(Exception):
    """The server answered with another status than 200."""


class Connection:
    """A connection that is opened when needed and kept until something goes wrong."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """Return the JSON answer, and the seconds until its first byte."""
        start_s = time.perf_counter()
        reader, is_chunked, length = await self._send(path, body)
        first_s = time.perf_counter() - start_s
        data = b"".join([piece async for piece in _chunks(reader)]) if is_chunked else await reader.readexactly(length)
        return json.loads(data), first_s

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a streamed answer. Leaving early closes the connection."""
        lines = self.stream_lines(path, body)
        try:
            async for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
        finally:
            await lines.aclose()  # type: ignore[attr-defined]

    async def stream_lines(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield the lines of a streamed answer unchanged, without their ends. Leaving early closes the connection."""
        reader, is_chunked, _ = await self._send(path, body)
        if not is_chunked:
            self.close()
            raise Refused("the answer is no stream")
        rest, is_whole = b"", False
        try:
            async for piece in _chunks(reader):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line
            is_whole = True
        finally:
            if not is_whole:
                self.close()

    def close(self) -> None:
        """Close the connection, even in the middle of an answer."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _send(self, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, bool, int]:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\nContent-Length: "
        message = f"{head}{len(data)}\r\n\r\n".encode() + data
        is_reused = self._streams is not None
        try:
            reader, status, headers = await self._exchange(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.close()
            if not is_reused:
                raise
            reader, status, headers = await self._exchange(message)  # some servers close a connection after a while
        is_chunked, length = headers.get("transfer-encoding") == "chunked", int(headers.get("content-length", 0))
        if status != 200:
            text = b"" if is_chunked else await reader.readexactly(length)
            self.close()
            raise Refused(f"{status}: {text[:500]!r}")
        return reader, is_chunked, length

    async def _exchange(self, message: bytes) -> tuple[asyncio.StreamReader, int, dict[str, str]]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        reader, writer = self._streams
        writer.write(message)
        return reader, *_parse_head(await reader.readuntil(b"\r\n\r\n"))


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return int(first.split()[1]), {name.lower(): value.strip().lower() for name, _, value in pairs}


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
