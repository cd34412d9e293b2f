"""If a request goes to a replica without its pages, the front, and nobody else, names one that has them."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from starlette.requests import Request

from mlxr.cache.prefix import PageKeys
from mlxr.cluster.front import Front
from mlxr.cluster.page_transfer import PEER, TOKEN
from mlxr.cluster.prefix_table import PageDelta
from mlxr.cluster.replica import PLAN, Report
from mlxr.cluster.router import Link, Load

PAGE = 32
KEYS = PageKeys(b"model", PAGE).cover([1] * (50 * PAGE), 50)
LINK = Link(page_bytes=1000, boundary_bytes=0, max_bytes=10**6, timeout_s=3.0)


def make_request(path: str, headers: dict[str, str]) -> Request:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"{}"}

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": raw}
    return Request({**scope, "scheme": "http", "server": ("front", 80)}, receive)


@pytest.mark.parametrize("waiting", [0, 5000])
def test_a_request_that_moves_is_told_where_its_pages_are(waiting: int) -> None:
    answered: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if PLAN.decode() in request.headers:
            plan = {"keys": b"".join(key[:8] for key in KEYS).hex(), "tokens": 50 * PAGE + 3}
            return httpx.Response(200, json=plan, headers={PLAN.decode(): "1"})
        answered.append(request)
        return httpx.Response(200, json={"text": "hello"})

    async def run() -> None:
        front = Front(lambda: httpx.AsyncClient(transport=httpx.MockTransport(answer)))
        loads = {"a": Load(waiting, 0, 1000.0, 0.0, LINK), "b": Load(0, 0, 1000.0, 0.0, LINK)}
        for name, pages in (("a", KEYS), ("b", [])):
            delta = PageDelta(0, pages, whole=True)
            reply = await front.note(Report(name, f"http://{name}:1", PAGE, False, loads[name], delta))
            assert (reply.wants_whole, len(reply.token) > 30) == (False, True)
        given = {PEER.decode(): "http://evil", TOKEN.decode(): "forged", "x-other": "kept"}
        response = await front.answer(make_request("/v1/completions", given))
        assert json.loads(response.body) == {"text": "hello"}
        assert front._watching is not None
        front._watching.cancel()
        for member in front.fleet.members:
            await member.lines.close()
        headers = answered[0].headers
        assert headers["x-other"] == "kept"
        if waiting:
            assert str(answered[0].url).startswith("http://b:1/")
            assert (headers[PEER.decode()], headers[TOKEN.decode()]) == ("http://a:1", reply.token)
        else:
            assert str(answered[0].url).startswith("http://a:1/")
            assert not {PEER.decode(), TOKEN.decode()} & set(headers)

    asyncio.run(run())
