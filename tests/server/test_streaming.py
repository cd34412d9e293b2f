"""Frames: their bytes, comments in silence, errors as the last frame, a client that goes at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from starlette.requests import Request

from mlxr.core.errors import InvalidRequest
from mlxr.server.activity import Activity
from mlxr.server.errors import ClientGone, ServerError
from mlxr.server.streaming import CONNECTION, KEEP_ALIVE, NDJSON, SSE, EventStream, ndjson, sse, until_disconnected
from mlxr.server.streaming import Frames as PouredFrames

Frames = AsyncGenerator[bytes, None]


class Connection:
    """The two functions of an ASGI server; `leave` is the client closing its end."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.gone = asyncio.Event()
        self.breaks = False
        self.ended = False
        self.scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "headers": []}
        self.row = Activity().open(self.scope, None, AsyncExitStack())

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.breaks:
            raise OSError("the connection is closed")
        self.sent.append(message.get("body", b""))
        self.ended = message["type"] == "http.response.body" and not message["more_body"]

    def request(self) -> Request:
        return Request(self.scope, self.receive)


def run(
    make: Callable[[], Frames], leave_s: float | None = None, *, media_type: str = SSE, breaks: bool = False
) -> Connection:
    """Stream the frames over a connection that the client leaves after `leave_s`; ClientGone is passed on."""

    async def main() -> Connection:
        connection = Connection()
        connection.breaks = breaks
        if leave_s is not None:
            asyncio.get_running_loop().call_later(leave_s, connection.gone.set)
        response = EventStream(
            connection.request(),
            make(),
            media_type=media_type,
            on_error=lambda error: f"error {error.status} {error.field}".encode(),
            keep_alive_s=0.02,
        )
        await response({"type": "http"}, connection.receive, connection.send)  # type: ignore[arg-type]
        return connection

    return asyncio.run(main())


def test_frames_as_bytes() -> None:
    assert sse({"a": "ü"}) == 'data: {"a":"ü"}\n\n'.encode()
    assert sse({"a": 1}, "ping") == b'event: ping\ndata: {"a":1}\n\n'
    assert sse("[DONE]") == b"data: [DONE]\n\n"
    assert sse({"text": "two\nlines\r\n"}) == b'data: {"text":"two\\nlines\\r\\n"}\n\n'
    assert ndjson({"a": None}) == b'{"a":null}\n'
    assert ndjson({"a": "\ud800"}) == b'{"a":"\\ud800"}\n'
    assert ndjson({"a": float("nan")}) == b'{"a":null}\n'  # as in whole replies


def test_all_frames_arrive_in_order() -> None:
    async def frames() -> Frames:
        for number in range(5):
            yield b"%d" % number

    connection = run(frames)
    assert b"".join(connection.sent) == b"01234"
    assert connection.ended


@pytest.mark.parametrize(("media_type", "comments"), [(SSE, True), (NDJSON, False)])
def test_silence_is_filled_where_comments_are_known(media_type: str, comments: bool) -> None:
    async def frames() -> Frames:
        yield b"first"
        await asyncio.sleep(0.1)
        yield b"last"

    sent = run(frames, media_type=media_type).sent
    assert (KEEP_ALIVE in sent) == comments
    assert [frame for frame in sent if frame and frame != KEEP_ALIVE] == [b"first", b"last"]


def test_an_error_is_the_last_frame() -> None:
    async def frames() -> Frames:
        yield b"first"
        raise InvalidRequest("stop", "is wrong")

    connection = run(frames)
    assert connection.sent[-2:] == [b"error 400 stop", b""]
    assert connection.row.failure is not None
    assert connection.row.failure.reason == "stop: is wrong"


def test_an_unforeseen_error_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async def frames() -> Frames:
        yield b"first"
        raise RuntimeError("inner secret")

    connection = run(frames)
    assert connection.sent[-2] == b"error 500 None"
    assert "inner secret" in caplog.text


@pytest.mark.parametrize("breaks", [False, True])
def test_a_client_that_goes_closes_the_generator(breaks: bool) -> None:
    closed = []

    async def frames() -> Frames:
        try:
            while True:
                yield b"more"
                await asyncio.sleep(0.005)
        finally:
            closed.append(True)

    with pytest.raises(ClientGone):
        run(frames, leave_s=0.05, breaks=breaks)
    assert closed or breaks  # a generator that never began has nothing to close


def test_a_client_that_takes_nothing_counts_as_gone() -> None:
    async def frames() -> Frames:
        while True:
            yield b"more"

    async def never(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def main() -> None:
        connection = Connection()
        stream = EventStream(
            connection.request(), frames(), media_type=SSE, on_error=lambda _: b"", keep_alive_s=60, patience_s=0.05
        )
        await stream({"type": "http"}, connection.receive, never)  # type: ignore[arg-type]

    with pytest.raises(ClientGone):
        asyncio.run(asyncio.wait_for(main(), 10))


def test_work_is_cancelled_when_nobody_waits_for_it() -> None:
    ended = []

    async def work() -> int:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(True)
        return 1

    async def main() -> None:
        connection = Connection()
        asyncio.get_running_loop().call_later(0.02, connection.gone.set)
        await until_disconnected(connection.request(), work())

    with pytest.raises(ClientGone):
        asyncio.run(main())
    assert ended


def test_the_result_and_the_error_of_work_pass_through() -> None:
    async def succeed() -> int:
        return 3

    async def fail() -> int:
        raise ServerError(404, "not_found", "no")

    async def main() -> None:
        request = Connection().request()
        assert await until_disconnected(request, succeed()) == 3
        with pytest.raises(ServerError):
            await until_disconnected(request, fail())

    asyncio.run(main())


class Writer:
    """A connection that writes past the application while it is ready; keeps all that was sent, in order."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.is_ready = True
        self.poured = 0

    def write(self, frame: bytes) -> None:
        self.poured += 1
        self._connection.sent.append(frame)

    def open_writer(self) -> Writer:
        return self


def test_frames_are_poured_while_the_writer_is_ready() -> None:
    async def main() -> tuple[list[bytes], int]:
        connection, queue, taken = Connection(), asyncio.Queue[bytes](), []
        writer = Writer(connection)

        async def frames() -> AsyncGenerator[bytes, None]:
            yield b"opening"
            while frame := await queue.get():
                yield frame

        stream = EventStream(
            connection.request(), PouredFrames(frames(), taken.append), media_type=SSE, on_error=lambda _: b""
        )
        scope = {"type": "http", "state": {CONNECTION: lambda: writer}}
        task = asyncio.ensure_future(stream(scope, connection.receive, connection.send))  # type: ignore[arg-type]
        while not taken or connection.sent[-1:] != [b"opening"]:
            await asyncio.sleep(0)
        own = taken[0]
        for number in range(6):
            writer.is_ready = number % 2 == 0
            if own.is_ready:
                own.write(b"%d" % number)
            else:
                queue.put_nowait(b"%d" % number)
                await asyncio.sleep(0.01)
        queue.put_nowait(b"")
        await task
        return connection.sent, writer.poured

    sent, poured = asyncio.run(main())
    assert b"".join(sent) == b"opening012345"
    assert poured == 3


@pytest.mark.parametrize("found", [None, lambda: None])
def test_frames_are_given_where_nobody_can_write_them(found: Any) -> None:
    async def frames() -> AsyncGenerator[bytes, None]:
        yield b"one"

    async def main() -> list[bytes]:
        connection, taken = Connection(), []
        stream = EventStream(
            connection.request(), PouredFrames(frames(), taken.append), media_type=SSE, on_error=lambda _: b""
        )
        state = {} if found is None else {CONNECTION: found}
        await stream({"type": "http", "state": state}, connection.receive, connection.send)  # type: ignore[arg-type]
        assert not taken
        return connection.sent

    assert b"".join(asyncio.run(main())) == b"one"
