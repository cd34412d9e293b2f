"""Connections from the front to one replica, and the replies that come over them and are passed on to clients.

Each connection is a client of httpx of its own: httpx's pool looks at all of its connections for every request, which
takes most of a processor when there are hundreds. Connections that are free wait on a stack, so the one used last is
used next, and those that are never needed any more are let go by the replica.

A reply is passed on whole, or as it grows; when a client leaves, the replica's answer is closed.

Streams of frames that are begun anew elsewhere and go on where they broke off.

An answer does not depend on where it is computed, so the second stream has the same frames as the first, but for times
and for what the cache had. `Continuation` keeps a short mark of each frame that was passed on, drops as many of the
repeated stream and compares them. Knows the two framings, server-sent events and lines of JSON, and of all dialects
only the names of what may differ.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlxr.core.errors import RequestFailed

MARK_BYTES = 8
# Times, speeds, and tokens found in the cache: these may differ when an answer is repeated.
VOLATILE = frozenset(
    {
        "created",
        "created_at",
        "completed_at",
        "timings",
        "usage",
        "total_duration",
        "load_duration",
        "prompt_eval_count",
        "prompt_eval_duration",
        "eval_duration",
        "tokens_cached",
    }
)
PROGRESS = "prompt_progress"  # frames with it tell how far the prompt is computed, and are no part of the answer
# Types of frames that are sent as soon as a request is accepted, before its prompt is computed.
OPENINGS = frozenset({"message_start", "ping", "response.created", "response.queued", "response.in_progress"})


class FrameReader:
    """Cuts the bytes of a stream into whole frames, each with the end mark that it came with."""

    def __init__(self, separator: bytes) -> None:
        self._separator, self._rest = separator, b""

    def push(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes."""
        *frames, self._rest = (self._rest + data).split(self._separator)
        return [frame + self._separator for frame in frames]

    def take_rest(self) -> bytes:
        """What the stream ends with behind its last whole frame."""
        rest, self._rest = self._rest, b""
        return rest


class Continuation:
    """Remembers how much of a stream a client has got. `begin` is called for each try, and `take` for each frame of it.

    `is_computed` once the current try has brought a token, so that its prompt is computed.
    """

    def __init__(self) -> None:
        self.is_computed = False
        self._passed: dict[int, list[bytes]] = {}  # marks by answer
        self._due: dict[int, deque[bytes]] = {}  # of the frames that the current try must repeat first
        self._is_repeat = False

    @property
    def has_begun(self) -> bool:
        """Whether the client has got any part of the answer."""
        return bool(self._passed)

    def begin(self) -> None:
        """The stream is made once more, from its start."""
        self._is_repeat, self.is_computed = self.has_begun, False
        self._due = {answer: deque(marks) for answer, marks in self._passed.items()}

    def take(self, frame: bytes) -> bool:
        """Whether the client gets the frame; raises RequestFailed where a repeated one is not what it was."""
        if frame.startswith(b":"):
            return True
        values = _read_values(frame)
        self.is_computed = self.is_computed or not values or not all(map(_is_opening, values))
        if any(PROGRESS in value for value in values):
            return not self._is_repeat
        answer, mark = _find_answer(values), _make_mark(frame, values)
        due = self._due.get(answer)
        if not due:
            self._passed.setdefault(answer, []).append(mark)
            return True
        if due.popleft() != mark:
            raise RequestFailed("error", "the answer broke off, and what was to go on from there is another answer")
        return False


def _read_values(frame: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a frame: of its lines of data, or the line that it is."""
    values = []
    for line in frame.splitlines():
        text = line[5:] if line.startswith(b"data:") else line
        if text.lstrip().startswith(b"{"):
            values.append(json.loads(text))
    return values


def _is_opening(value: dict[str, Any]) -> bool:
    """Whether an object may come before the first token."""
    choices = value.get("choices") or [{}]
    says_turn = "role" in choices[0].get("delta", {})
    return says_turn or PROGRESS in value or value.get("type") in OPENINGS


def _find_answer(values: list[dict[str, Any]]) -> int:
    """Which of several answers in one stream a frame belongs to: they may come in another order next time."""
    for value in values:
        choices = value.get("choices")
        if choices:
            return int(choices[0].get("index", 0))
        if isinstance(value.get("index"), int) and "content" in value:  # llama.cpp's
            return int(value["index"])
    return 0


def _make_mark(frame: bytes, values: list[dict[str, Any]]) -> bytes:
    text = json.dumps(list(map(_drop_volatile, values)), sort_keys=True).encode() if values else frame
    return hashlib.blake2b(text, digest_size=MARK_BYTES).digest()


def _drop_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _drop_volatile(part) for name, part in value.items() if name not in VOLATILE}
    return list(map(_drop_volatile, value)) if isinstance(value, list) else value


def separator_of(media_type: str) -> bytes | None:
    """What ends a frame of a stream of that type; None for what is no stream."""
    kind = media_type.partition(";")[0].strip()
    return {"text/event-stream": b"\n\n", "application/x-ndjson": b"\n"}.get(kind)


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
