"""Answers that grow: frames of bytes to a client, for as long as it listens.

Knows the two framings (server-sent events and one JSON object per line) but no dialect: those hand in an asynchronous
generator of frames. Beside it a task watches the connection. When the client goes, the generator is closed at once, and
with it everything that the request had started. Frames that are made while nothing else is being sent go past the
generator and all layers to the socket (`FrameWriter`): there are thousands in a second, and none of them wakes a task.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from time import monotonic
from typing import Any, Protocol, TypeVar

from pydantic_core import PydanticSerializationError, to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mlxr.server.activity import in_flight
from mlxr.server.errors import ClientGone, ServerError, to_error

logger = logging.getLogger(__name__)
T = TypeVar("T")
SSE = "text/event-stream"
NDJSON = "application/x-ndjson"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_S = 15.0
CONNECTION = "connection"  # in the state of a request's scope: a function that returns its `FrameConnection`, or None


def encode_json(value: object) -> bytes:
    """Return JSON on one line, without spaces; in UTF-8, or in ASCII if `value` holds half of a surrogate pair.

    Numbers that JSON cannot express (NaN, infinities) become null.
    """
    try:
        return to_json(value, inf_nan_mode="null")
    except PydanticSerializationError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def sse(value: object, event: str | None = None) -> bytes:
    """Return one server-sent event: `value` as JSON (text unchanged), after the name of the event if it has one."""
    data = value.encode() if isinstance(value, str) else encode_json(value)
    return b"data: %b\n\n" % data if event is None else b"event: %b\ndata: %b\n\n" % (event.encode(), data)


def ndjson(value: object) -> bytes:
    """Write a value as one line of JSON."""
    return encode_json(value) + b"\n"


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone. The body of the request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnected(request: Request, work: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T:
    """Return the result of `work`; if the client goes before, cancels it and raises ClientGone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _end(working, watching)


class FrameWriter(Protocol):
    """Writes frames to a client past the layers between application and socket, once a response has begun."""

    @property
    def is_ready(self) -> bool:
        """True if the client still listens and has taken everything written before."""

    def write(self, frame: bytes) -> None:
        """Write a frame, which is not empty; only while it `is_ready`."""


class FrameConnection(Protocol):
    """A connection to a client."""

    def open_writer(self) -> FrameWriter | None:
        """Return the writer for the response that has begun; None if it is not sent in HTTP's chunks."""


class Frames:
    """The frames of `generator`; those that do not depend on others can be poured: written past the generator.

    After `pour(writer)`, frames that come while the reader waits for the next one are written at once, as long as the
    writer is ready; all others come from the generator as before.
    """

    def __init__(self, generator: AsyncGenerator[bytes, None], pour: Callable[[FrameWriter], None]) -> None:
        self._generator, self.pour = generator, pour

    def __aiter__(self) -> AsyncGenerator[bytes, None]:
        return self._generator

    async def aclose(self) -> None:
        """End the frames early, and with them the answers."""
        await self._generator.aclose()


class EventStream(Response):
    """A response of frames. An error among them becomes `on_error(error)`, the last frame.

    If the client understands comments (`SSE`), one is sent after every 15 seconds of silence. A client that takes
    nothing for `patience_s` counts as gone.
    """

    def __init__(
        self,
        request: Request,
        frames: AsyncGenerator[bytes, None] | Frames,
        *,
        media_type: str,
        on_error: Callable[[ServerError], bytes],
        headers: Mapping[str, str] | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
        patience_s: float | None = None,
    ) -> None:
        self.status_code, self.media_type, self.background = 200, media_type, None
        self._request, self._frames, self._on_error = request, frames, on_error
        self._comment = KEEP_ALIVE if media_type == SSE else None
        self._keep_alive_s, self._patience_s = keep_alive_s, patience_s
        self._sent_s = monotonic()
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all frames, or raise ClientGone; sends no frame if only the head was asked for."""
        if scope.get("method") == "HEAD":
            await self._frames.aclose()
            await self._send_start(send)
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
            return
        sending = asyncio.ensure_future(self._send_all(scope, send))
        watching = asyncio.ensure_future(self._watch(receive, send))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise ClientGone
            sending.result()
        finally:
            await _end(sending, watching)
            await self._frames.aclose()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await self._send_start(send)
        try:
            if isinstance(self._frames, Frames):
                self._pour(self._frames, scope)
            async for frame in self._frames:
                await self._send_body(send, frame)
        except ClientGone:
            raise
        except Exception as error:
            failure = in_flight(self._request).failure = to_error(error)
            if failure.status == 500:
                logger.exception("a stream failed: %s", failure)
            await self._send_body(send, self._on_error(failure))
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    def _pour(self, frames: Frames, scope: Scope) -> None:
        """Let frames be written at once, if the server that runs the application can do so."""
        find = scope.get("state", {}).get(CONNECTION)
        connection: FrameConnection | None = None if find is None else find()
        writer = None if connection is None else connection.open_writer()
        if writer is not None:
            frames.pour(_NotingWriter(self, writer))

    def note_sent(self) -> None:
        """Note that something was sent just now."""
        self._sent_s = monotonic()

    async def _send_start(self, send: Send) -> None:
        await self._send(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _send_body(self, send: Send, frame: bytes) -> None:
        self.note_sent()
        await self._send(send, {"type": "http.response.body", "body": frame, "more_body": True})

    async def _send(self, send: Send, message: Message) -> None:
        try:
            if self._patience_s is None:
                await send(message)
            else:
                async with asyncio.timeout(self._patience_s):
                    await send(message)
        except OSError as error:
            raise ClientGone from error

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Return when the client has gone; until then fill silence with comments."""
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            while True:
                silent_s = monotonic() - self._sent_s
                if self._comment is not None and silent_s >= self._keep_alive_s:
                    await self._send_body(send, self._comment)
                    silent_s = 0.0
                timeout_s = None if self._comment is None else self._keep_alive_s - silent_s
                done, _ = await asyncio.wait({gone}, timeout=timeout_s)
                if done:
                    return
        finally:
            await _end(gone)


class _NotingWriter:
    """A writer that notes on `stream` when something is sent."""

    __slots__ = ("_stream", "_writer")

    def __init__(self, stream: EventStream, writer: FrameWriter) -> None:
        self._stream, self._writer = stream, writer

    @property
    def is_ready(self) -> bool:
        return self._writer.is_ready

    def write(self, frame: bytes) -> None:
        self._stream.note_sent()
        self._writer.write(frame)


async def _end(*tasks: Awaitable[Any]) -> None:
    """Cancel unfinished tasks and wait for them, so that nothing runs on after the request."""
    for task in tasks:
        assert isinstance(task, asyncio.Future)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
