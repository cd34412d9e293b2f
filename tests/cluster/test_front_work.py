"""The front tells the router when a prompt is computed and when a request leaves a replica, however it leaves.

Replicas are made up and report once, at the start. So all later knowledge of the router about their work comes from
the front.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from time import monotonic
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from mlxr.cache.prefix import PageKeys
from mlxr.cluster.front import Front
from mlxr.cluster.prefix_table import PageDelta
from mlxr.cluster.replica import PLAN, Report
from mlxr.cluster.router import Load, Router

PAGE, PAGES = 16, 46
TOKENS = PAGE * PAGES + 1
SSE, NDJSON = "text/event-stream", "application/x-ndjson"
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
Answer = Callable[[httpx.Request], Awaitable[httpx.Response]]
DIE = b"die"


class Client:
    """One request of a client, and the part of the answer that it gets until it leaves."""

    def __init__(self, path: str, body: object, *, leaves_at_head: bool = False) -> None:
        self.left, self.status = asyncio.Event(), 0
        self.got = asyncio.Queue[bytes]()
        self._leaves_at_head = leaves_at_head
        told = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

        async def receive() -> dict[str, Any]:
            message: dict[str, Any] | None = next(told, None)
            if message is None:
                await self.left.wait()
            return message or {"type": "http.disconnect"}

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        self.request = Request({**scope, "scheme": "http", "server": ("front", 80)}, receive)

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._leaves_at_head:
                self.left.set()
                await asyncio.sleep(0.01)
        elif message["body"]:
            self.got.put_nowait(message["body"])

    async def ask(self, front: Front) -> bytes:
        response = await front.answer(self.request)
        await response(self.request.scope, self.request.receive, self.send)
        pieces = []
        while not self.got.empty():
            pieces.append(self.got.get_nowait())
        return b"".join(pieces)


def run(answer: Answer, play: Callable[[Front, Router], Awaitable[None]], replicas: str = "ab") -> None:
    """Run `play` with a front of these replicas, which reply to all but plans with `answer`."""

    async def reply(request: httpx.Request) -> httpx.Response:
        if PLAN.decode() not in request.headers:
            return await answer(request)
        body = json.loads(request.content)
        tokens = TOKENS + body.get("turn", 0) * PAGE
        keys = PageKeys(b"model", PAGE).cover([body.get("text", 0)] * tokens, tokens // PAGE)
        plan = {"keys": b"".join(key[:8] for key in keys).hex(), "tokens": tokens}
        return httpx.Response(200, json=plan, headers={PLAN.decode(): "1"})

    async def play_all() -> None:
        front = Front(lambda: httpx.AsyncClient(transport=httpx.MockTransport(reply)))
        for name in replicas:
            load, delta = Load(0, 0, 0.0, 0.0), PageDelta(0, [], whole=True)
            await front.note(Report(name, f"http://{name}:1", PAGE, False, load, delta))
        router = front.fleet._router
        assert router is not None
        try:
            await play(front, router)
            assert not router._sent, "a request counts as work, and it has ended"
            router.check()
        finally:
            assert front._watching is not None
            front._watching.cancel()
            for member in front.fleet.members:
                await member.lines.close()

    asyncio.run(asyncio.wait_for(play_all(), 20))


def list_prompts(router: Router) -> list[int]:
    """List the prompts that count as work."""
    return [number for number, replica in router._sent.items() if number in replica.backlog]


def tell_frames(frames: AsyncIterator[bytes], media_type: str = SSE) -> httpx.Response:
    return httpx.Response(200, content=frames, headers={"content-type": media_type})


async def give(*frames: bytes) -> AsyncIterator[bytes]:
    for frame in frames:
        if frame == DIE:
            raise httpx.ReadError("the replica has died")
        yield frame


WHOLE = {
    "json": lambda: httpx.Response(200, json={"text": "word"}),
    "sse": lambda: tell_frames(give(TOKEN, b"data: [DONE]\n\n")),
    "ndjson": lambda: tell_frames(give(b'{"response":"word"}\n', b'{"done":true}\n'), NDJSON),
}


@pytest.mark.parametrize("whole", WHOLE.values(), ids=WHOLE)
def test_a_conversation_of_quick_answers_stays_where_its_pages_are(whole: Callable[[], httpx.Response]) -> None:
    """This holds even if the replicas are much faster than the router assumes, and report only much later."""
    answered: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        answered.append(request.url.host)
        return whole()

    async def play(front: Front, router: Router) -> None:
        homes = []
        for text in range(6):
            answered.clear()
            for turn in range(5):
                await Client("/v1/completions", {"text": text, "turn": turn}).ask(front)
                router.check()
            assert len(set(answered)) == 1, f"conversation {text} went to {answered}"
            homes.append(answered[0])
        assert {homes.count(name) for name in "ab"} == {3}

    run(answer, play)


def say(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
BEGUN = {
    "chat": ([say(ROLE)], TOKEN),
    "progress": ([say(ROLE), say({**ROLE, "prompt_progress": {"processed": 512}})], TOKEN),
    "silence": ([b": keep-alive\n\n"], say({"content": "word", "index": 0})),
    "messages": ([say({"type": "message_start"}) + say({"type": "ping"})], say({"type": "content_block_start"})),
    "responses": (
        [say({"type": "response.created"}), say({"type": "response.in_progress"})],
        say({"type": "response.output_item.added"}),
    ),
    "tools": ([], say({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]})),
    "only a mark": ([], b"data: [DONE]\n\n"),
}


@pytest.mark.parametrize(("before", "token"), BEGUN.values(), ids=BEGUN)
def test_the_prompt_counts_as_work_until_the_first_token(before: list[bytes], token: bytes) -> None:
    """Earlier frames, at the start or while the prompt is computed, say nothing about it."""
    computed, ended = asyncio.Event(), asyncio.Event()

    async def grow() -> AsyncIterator[bytes]:
        for frame in before:
            yield frame
        await computed.wait()
        yield token
        await ended.wait()

    async def answer(_: httpx.Request) -> httpx.Response:
        return tell_frames(grow())

    async def play(front: Front, router: Router) -> None:
        client = Client("/v1/chat/completions", {})
        asking = asyncio.create_task(client.ask(front))
        got = b""
        while len(got) < len(b"".join(before)) or not router._sent:
            got += await client.got.get() if before else b""
            await asyncio.sleep(0.001)
        assert list_prompts(router) == [1]
        computed.set()
        while not got.endswith(token):
            got += await client.got.get()
        assert not list_prompts(router)
        assert len(router._sent) == 1
        assert not asking.done()
        ended.set()
        await asking

    run(answer, play)


def in_turn(*replies: Callable[[], httpx.Response]) -> Answer:
    """Return one reply after the other, whichever replica is asked."""
    left = iter(replies)

    async def answer(_: httpx.Request) -> httpx.Response:
        return next(left)()

    return answer


def die() -> httpx.Response:
    raise httpx.ConnectError("nobody is there")


def refuse(status: int) -> Callable[[], httpx.Response]:
    return lambda: httpx.Response(status, json={"error": {"message": "no"}})


ENDS: dict[str, tuple[list[Callable[[], httpx.Response]], int]] = {
    "wrong request": ([refuse(400)], 400),
    "failure": ([refuse(500)], 500),
    "busy, then answered": ([refuse(429), WHOLE["json"]], 200),
    "both busy": ([refuse(429), refuse(429)], 429),
    "draining, then answered": ([refuse(503), WHOLE["sse"]], 200),
    "dead, then answered": ([die, WHOLE["json"]], 200),
    "dies before the first token": ([lambda: tell_frames(give(say(ROLE), DIE)), WHOLE["sse"]], 200),
    "dies after it": ([lambda: tell_frames(give(TOKEN, DIE)), WHOLE["sse"]], 200),
    "dies, then busy": ([lambda: tell_frames(give(TOKEN, DIE)), refuse(429), WHOLE["sse"]], 200),
    "dies, then wrong": ([lambda: tell_frames(give(TOKEN, DIE)), refuse(400)], 200),
    "no answer in the stream": ([lambda: tell_frames(give())], 200),
}


@pytest.mark.parametrize(("replies", "status"), ENDS.values(), ids=ENDS)
def test_no_end_of_a_request_leaves_its_prompt_behind(replies: list[Callable[[], httpx.Response]], status: int) -> None:
    async def play(front: Front, router: Router) -> None:
        del router
        client = Client("/v1/completions", {})
        await client.ask(front)
        assert client.status == status

    run(in_turn(*replies), play)


@pytest.mark.parametrize("when", ["before the head", "at the head", "before the first token", "after it"])
def test_a_client_that_leaves_takes_its_prompt_along(when: str) -> None:
    """Also if it leaves before the first frame of its answer: the connection is free again, too."""
    asked, closed = asyncio.Event(), asyncio.Event()

    async def grow() -> AsyncIterator[bytes]:
        yield TOKEN if when == "after it" else say(ROLE)
        await asyncio.Event().wait()

    class Stream(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for frame in grow():
                yield frame

        async def aclose(self) -> None:
            closed.set()

    async def answer(_: httpx.Request) -> httpx.Response:
        asked.set()
        if when == "before the head":
            await asyncio.Event().wait()
        return httpx.Response(200, stream=Stream(), headers={"content-type": SSE})

    async def play(front: Front, router: Router) -> None:
        client = Client("/v1/completions", {}, leaves_at_head=when == "at the head")
        asking = asyncio.create_task(client.ask(front))
        await asked.wait()
        assert list_prompts(router) == [1]
        if when == "before the head":  # of which Ray tells by a cancellation
            asking.cancel()
        elif when != "at the head":
            await client.got.get()
            assert len(list_prompts(router)) == (when != "after it")
            client.left.set()
        await asyncio.wait([asking])
        assert closed.is_set() == (when != "before the head")

    run(answer, play)


@pytest.mark.parametrize(("asked_s", "counts"), [(0.1, True), (0.5, False)])
def test_a_report_that_may_be_older_than_an_answer_brings_nothing_back(
    monkeypatch: pytest.MonkeyPatch, asked_s: float, counts: bool
) -> None:
    """It comes 3 s after the one before, and was made REPORT_S after that, or at any time from then on."""

    async def play(front: Front, router: Router) -> None:
        start_s = now_s = monotonic()
        monkeypatch.setattr("mlxr.cluster.front.monotonic", lambda: now_s)
        router._clock = lambda: now_s
        load = Load(TOKENS // 2, 1, 0.0, 0.03)
        for name in "ab":
            await front.note(Report(name, f"http://{name}:1", PAGE, False, Load(0, 0, 0.0, 0.0), PageDelta(1, [])))
        now_s = start_s + asked_s
        await Client("/v1/completions", {}).ask(front)
        now_s = start_s + 3.0
        (name,) = (name for name in "ab" if router._replicas[name].lately_tokens)
        await front.note(Report(name, f"http://{name}:1", PAGE, False, load, PageDelta(2, [])))
        replica = router._replicas[name]
        assert (replica.backlog.tokens > 0, replica.backlog.running > 0, replica.step_s > 0) == (counts,) * 3

    run(in_turn(WHOLE["json"]), play)
