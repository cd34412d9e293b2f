"""Servers of tools by command and by address: which are allowed, their answers, and their bounds."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tool_server
from running_server import MakeServer, RunningServer, start_server
from tool_server import TOOLS, Handler, serve

from mlxr.core.errors import SettingError
from mlxr.core.settings import resolve
from mlxr.server import mcp
from mlxr.server.mcp import McpFailure, ToolServers

COMMAND = f"{sys.executable} {Path(tool_server.__file__)}"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve() as url:
        yield url


@pytest.fixture(scope="module")
def server(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that allows a program, two that cannot run, and one address with what lies below it."""
    commands = [f"tools={COMMAND}", "gone=/no/such/program", "mute=sh -c 'echo no printer >&2; exit 4'"]
    origin = address.removesuffix("/mcp")
    running = start_server(
        tmp_path_factory.mktemp("registry"),
        mcp_commands=commands,
        mcp_urls=[address, f"{origin}/old", f"{origin}/moved"],
    )
    yield running
    running.stop()


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def call(client: httpx.Client, server: str, tool: str, **arguments: Any) -> tuple[int, Any]:
    body = {"server": server, "key": "secret", "tool": tool, "arguments": arguments}
    reply = client.post("/v1/admin/mcp/call", json=body)
    return reply.status_code, reply.json() if reply.status_code == 200 else reply.json()["error"]["message"]


def test_a_program_and_an_address_list_and_call_their_tools(client: httpx.Client, address: str) -> None:
    assert client.get("/v1/admin/mcp").json()["commands"] == ["tools", "gone", "mute"]
    for place in ("tools", address):
        listed = client.post("/v1/admin/mcp/tools", json={"server": place, "key": "secret"}).json()["tools"]
        assert [tool["name"] for tool in listed] == [tool["name"] for tool in TOOLS]
        assert (listed[1]["description"], listed[1]["parameters"]) == ("Adds two numbers", TOOLS[1]["inputSchema"])
        assert call(client, place, "add", a=2, b=3) == (200, {"text": "5", "is_error": False})
        assert call(client, place, "echo", text="ü\n")[1]["text"] == "ü\n\n[image image/png: not shown]"
        assert call(client, place, "fail") == (200, {"text": "the printer burns", "is_error": True})
        status, words = call(client, place, "nothing")
        assert (status, words) == (502, f"{place}: refuses tools/call: no tool is called nothing")
    sent = dict(Handler.asked)
    assert sent["tools/call"]["mcp-session-id"] == "s1"
    assert sent["tools/call"]["mcp-protocol-version"] == "2025-06-18"
    assert "" in sent
    assert "mcp-session-id" not in next(headers for method, headers in Handler.asked)


def test_errors_name_the_server_and_what_helps(client: httpx.Client, address: str) -> None:
    origin = address.removesuffix("/mcp")
    for place, key, status, words in [
        ("nobody", None, 404, "nobody: the setting mcp_commands has no such name; it has tools, gone, mute"),
        ("gone", None, 502, "gone: /no/such/program cannot be started"),
        ("mute", None, 502, "mute: ended with code 4 after 'no printer'"),
        (address, None, 502, "status 401: wants a key"),
        (f"{origin}/old", "secret", 502, "older transport"),
        (f"{origin}/moved", "secret", 502, "redirects to http://127.0.0.1:1/mcp"),
        (f"{origin}/mcp2", "secret", 403, "is not allowed; the owner can add it to the setting mcp_urls"),
        (f"{origin}/mcp/../admin", "secret", 403, "is not allowed"),
        (f"{origin}/mcp/%2e%2e/admin", "secret", 404, "is no address"),
        ("ftp://example.com", None, 404, "is no address"),
    ]:
        body = {"server": place} | ({"key": key} if key else {})
        reply = client.post("/v1/admin/mcp/tools", json=body)
        assert reply.status_code == status, reply.text
        assert words in reply.json()["error"]["message"]


def test_a_program_is_bounded_and_started_again(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXR_API_KEYS", "secret")
    assert "MLXR_API_KEYS" not in call(client, "tools", "environment")[1]["text"].split()
    assert "more than 4 MiB, and was ended" in call(client, "tools", "long")[1]
    assert call(client, "tools", "end")[1] == "tools: ended with code 3 after 'out of paper'"
    assert call(client, "tools", "add", a=1, b=1)[1]["text"] == "2"
    monkeypatch.setattr(mcp, "CALL_S", 0.2)
    assert call(client, "tools", "slow")[1] == "tools: did not answer tools/call within 0.2 s"
    assert call(client, "tools", "add", a=1, b=2)[1]["text"] == "3"
    monkeypatch.setattr(mcp, "MAX_RESULT_CHARACTERS", 3)
    assert call(client, "tools", "echo", text="abcdef")[1]["text"] == "abc\n… (cut)"
    monkeypatch.setattr(mcp, "MAX_TOOLS", 3)
    reply = client.post("/v1/admin/mcp/tools", json={"server": "tools"})
    assert "has more than 3 tools" in reply.json()["error"]["message"]


@pytest.mark.slow
def test_programs_end_with_the_server(make_server: MakeServer, tmp_path: Path) -> None:
    """Also a program that does not end when its input is closed, and the processes that it started."""
    pids = tmp_path / "pids"
    stubborn = f"sh -c 'trap \"\" TERM; sleep 60 & echo $$ $! >{pids}; {COMMAND}; sleep 60'"
    running = make_server(mcp_commands=[f"stubborn={stubborn}"])
    with running.client() as client:
        assert call(client, "stubborn", "add", a=1, b=1)[0] == 200
    running.stop()
    for pid in map(int, pids.read_text().split()):
        end_s = time.monotonic() + 5
        while _runs(pid):
            assert time.monotonic() < end_s
            time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_is_not_listed_must_be_public() -> None:
    async def connect(url: str, **settings: Any) -> None:
        await ToolServers(resolve(settings, {})).connect(url)

    for url in ("http://127.0.0.1:9/mcp", "http://localhost/mcp", "http://[::1]/", "http://[::ffff:10.0.0.1]/",
                "http://169.254.169.254/latest", "http://0.0.0.0:1/", "http://224.0.0.1/"):  # fmt: skip
        with pytest.raises(McpFailure, match=r"no public address|cannot be resolved"):
            asyncio.run(connect(url, mcp_urls=["*"]))
        with pytest.raises(McpFailure, match="not allowed"):
            asyncio.run(connect(url))


@pytest.mark.parametrize("name", ["mcp_commands", "mcp_urls"])
def test_settings_that_mean_nothing_are_refused(name: str) -> None:
    wrong = {
        "mcp_commands": ["files", "files=", "a b=ls", "x='"],
        "mcp_urls": ["localhost:9000", "http://a:b@c/", "ftp://c"],
    }
    for value in wrong[name]:
        with pytest.raises(SettingError, match=name):
            ToolServers(resolve({name: [value]}, {}))
    assert os.environ.get("MLXR_MCP_URLS") is None
