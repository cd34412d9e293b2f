"""Replicas die in every place of a reply, on real sockets; the client gets its whole answer from the others."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from itertools import product
from typing import Any

import pytest
from starlette.requests import Request

from mlxr.cluster.front import Front
from mlxr.cluster.prefix_table import PageDelta
from mlxr.cluster.replica import PLAN, Report
from mlxr.cluster.router import Load

FRAMES = [b"data: " + json.dumps({"index": 0, "content": f"word {number} "}).encode() + b"\n\n" for number in range(6)]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
REPLY = HEAD + b"".join(b"%x\r\n%s\r\n" % (len(frame), frame) for frame in FRAMES) + b"0\r\n\r\n"
PLANNED = json.dumps({"keys": "", "tokens": 5}).encode()
PLAN_REPLY = b"HTTP/1.1 200 OK\r\n%s: 1\r\ncontent-length: %d\r\n\r\n%s" % (PLAN, len(PLANNED), PLANNED)
DEATHS = [0, 1, 9, len(HEAD) - 1, len(HEAD), len(HEAD) + 1, *range(len(HEAD) + 20, len(REPLY), 37), len(REPLY) - 1]


class FakeReplica:
    """Speaks HTTP; dies after so many bytes of its `dying` reply, with all of its connections."""

    def __init__(self, name: str, *, is_reset: bool) -> None:
        self.name, self._is_reset = name, is_reset
        self.dies_after: int | None = None
        self.answered = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def die(self) -> None:
        self._server.close()
        for writer in self._writers:
            if self._is_reset:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            reply = PLAN_REPLY if PLAN in head else REPLY
            if reply is REPLY and self.dies_after is not None:
                writer.write(REPLY[: self.dies_after])
                await asyncio.sleep(0)
                self.die()
                return
            self.answered += reply is REPLY
            writer.write(reply)
        self._writers.discard(writer)
        writer.close()


def new_loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loops that a front may have: Ray takes uvloop if it is installed."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    try:
        import uvloop
    except ImportError:
        return loops
    return {**loops, "uvloop": uvloop.new_event_loop}


async def ask(front: Front) -> tuple[int, bytes]:
    """Status and body of one reply of the front."""
    left = asyncio.Event()
    told = iter([{"type": "http.request", "body": b"{}"}])

    async def receive() -> dict[str, Any]:
        message = next(told, None)
        if message is None:
            await left.wait()
        return message or {"type": "http.disconnect"}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/completion", "query_string": b"", "headers": []}
    request = Request({**scope, "scheme": "http", "server": ("front", 80)}, receive)
    response = await front.answer(request)
    await response(request.scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


async def survive(death: int, *, is_reset: bool, is_idle: bool) -> None:
    replicas = [FakeReplica(name, is_reset=is_reset) for name in "abc"]
    for replica in replicas:
        await replica.start()
    front = Front()
    try:
        for replica, waiting in zip(replicas, (0, 500, 1000), strict=True):
            load = Load(waiting, 0, 1000.0, 0.0)
            await front.note(Report(replica.name, replica.url, 32, False, load, PageDelta(0, (), whole=True)))
        whole = (200, b"".join(FRAMES))
        for _ in range(4):  # so that there are connections to all that are free
            assert await ask(front) == whole
        for replica in replicas[:2]:
            replica.dies_after = death
        if is_idle:
            replicas[1].die()
        assert await asyncio.gather(*(ask(front) for _ in range(3))) == [whole] * 3
        assert replicas[2].answered >= 1
    finally:
        if front._watching is not None:
            front._watching.cancel()
        for member in front.fleet.members:
            await member.lines.close()
        for replica in replicas:
            replica.die()


@pytest.mark.parametrize("loop", new_loops().values(), ids=new_loops())
@pytest.mark.parametrize(("is_reset", "is_idle"), [*product((False, True), repeat=2)])
def test_answers_go_on_wherever_a_replica_dies(
    loop: Callable[[], asyncio.AbstractEventLoop], is_reset: bool, is_idle: bool
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        for death in DEATHS:
            dying: Awaitable[None] = survive(death, is_reset=is_reset, is_idle=is_idle)
            runner.run(asyncio.wait_for(dying, 20))
