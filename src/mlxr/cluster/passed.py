"""Replies as the front passes them on to a client: whole, or as they grow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlxr.cluster.lines import Incoming

logger = logging.getLogger(__name__)
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
