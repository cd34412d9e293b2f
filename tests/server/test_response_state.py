"""Responses that go on from earlier ones, and what Codex sends, through the real `openai` client."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from questions import ANSWER, MESSAGES
from running_server import MakeServer

from mlxr.core.errors import SettingError
from mlxr.server.errors import ServerError
from mlxr.server.openai.replies import Head
from mlxr.server.openai.response_reply import OutputMessage, OutputText
from mlxr.server.openai.response_request import MessageItem, ReferenceItem, ResponseRequest, list_items
from mlxr.server.openai.responses import ResponseStore, begin_response

MESSAGES = MESSAGES[0]["content"]
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
PLAN = {"type": "function", "name": "plan", "strict": False, "parameters": {"type": "object", "properties": {}}}
DOCS = {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [{**PLAN, "name": "search"}]}
SHELL = {"type": "local_shell"}
SEARCH = {"type": "web_search", "external_web_access": False}
FIND = {"type": "tool_search", "execution": "client", "description": "", "parameters": {}}
FOUND = {"type": "namespace", "name": "mcp__mail", "description": "", "tools": [{**PLAN, "name": "send"}]}
CODEX = {
    "model": "gpt-5-codex",
    "instructions": "You are a coding agent.",
    "tools": [PLAN, PATCH, DOCS, SHELL, SEARCH, FIND],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"x-codex-installation-id": "1"},
    "text": {"verbosity": "low"},
    "max_output_tokens": 8,
}
HISTORY: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Edit it."}], "phase": None},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "eA=="},
    {"type": "custom_tool_call", "status": "completed", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"},
    {"type": "function_call", "call_id": "c2", "namespace": "mcp__docs", "name": "search", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "found"}]},
    {
        "type": "local_shell_call",
        "call_id": "c3",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None},
    },
    {"type": "function_call_output", "call_id": "c3", "output": "a.py"},
    {"type": "tool_search_call", "call_id": "c4", "status": "completed", "execution": "client", "arguments": {"q": 1}},
    {"type": "tool_search_output", "call_id": "c4", "status": "completed", "execution": "client", "tools": [FOUND]},
    {"type": "additional_tools", "role": "developer", "tools": [{**PLAN, "name": "late"}, PLAN]},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "id": "msg_1"},
    {"type": "message", "role": "user", "content": MESSAGES},
]


@pytest.fixture(scope="module")
def ai(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(ai: openai.OpenAI, wanted: object, **options: object) -> Response:
    return ai.responses.create(model="demo", input=wanted, temperature=0, **options)  # type: ignore[call-overload, no-any-return]


def count(ai: openai.OpenAI, wanted: object, **options: object) -> int:
    return ai.responses.input_tokens.count(model="demo", input=wanted, **options).input_tokens  # type: ignore[arg-type]


def test_a_response_goes_on_from_an_earlier_one(ai: openai.OpenAI) -> None:
    first = ask(ai, MESSAGES, instructions="Be kind.")
    assert (first.store, first.output_text) == (True, ANSWER)  # type: ignore[attr-defined]
    whole = [{"role": "user", "content": MESSAGES}, {"role": "assistant", "content": ANSWER}]
    second = ask(ai, "And then?", previous_response_id=first.id, max_output_tokens=4)
    assert second.usage is not None
    assert second.usage.input_tokens == count(ai, [*whole, {"role": "user", "content": "And then?"}])
    assert second.previous_response_id == first.id
    (*_, last) = ai.responses.create(
        model="demo", input="Go on.", previous_response_id=second.id, stream=True, temperature=0, max_output_tokens=4
    )
    assert last.type == "response.incomplete"
    turns = [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": second.output_text}]
    asked = count(ai, [*whole, *turns, {"role": "user", "content": "Go on."}])
    assert last.response.usage is not None
    assert last.response.usage.input_tokens == asked == count(ai, "Go on.", previous_response_id=second.id)
    assert ai.responses.retrieve(last.response.id).output == last.response.output
    referred = [whole[0], {"type": "item_reference", "id": first.output[0].id}]
    assert count(ai, referred) == count(ai, whole)


def test_what_is_not_kept_is_not_found(ai: openai.OpenAI) -> None:
    kept, passing = ask(ai, "Hi", max_output_tokens=1), ask(ai, "Hi", max_output_tokens=1, store=False)
    assert passing.store is False  # type: ignore[attr-defined]
    ai.responses.delete(kept.id)
    for response_id in (kept.id, passing.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            ai.responses.retrieve(response_id)
        with pytest.raises(openai.BadRequestError) as refused:
            ask(ai, "Hi", previous_response_id=response_id)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_response_belongs_to_its_key(make_server: MakeServer) -> None:
    server = make_server(api_keys="one,two")
    with server.client("one") as one, server.client("two") as two:
        made = one.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 1}).json()
        path = f"/v1/responses/{made['id']}"
        reference = {"input": [{"type": "item_reference", "id": made["output"][0]["id"]}]}
        assert (one.get(path).json(), two.get(path).status_code) == (made, 404)
        assert two.post("/v1/responses", json={"input": "Hi", "previous_response_id": made["id"]}).status_code == 400
        assert two.post("/v1/responses/input_tokens", json=reference).status_code == 400
        assert (two.delete(path).status_code, one.delete(path).status_code) == (404, 200)


def test_nothing_is_kept_without_room(make_server: MakeServer) -> None:
    with make_server(responses_bytes=0).client() as client:
        made = client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 1}).json()
        assert made["store"] is False
        assert client.get(f"/v1/responses/{made['id']}").status_code == 404


@pytest.mark.parametrize("is_file", [False, True])
def test_the_store_is_bounded(is_file: bool, tmp_path: Path) -> None:
    asyncio.run(fill_store(tmp_path / "kept.sqlite" if is_file else None))


async def fill_store(path: Path | None) -> None:
    store = ResponseStore(8000, path)
    body = ResponseRequest.model_validate({"input": "x" * 500})
    for number in range(40):
        before = f"resp_{number - 1}" if number else None
        output = [OutputMessage(id=f"msg_{number}", status="completed", content=[OutputText(text="y")])]
        begun = begin_response(body, Head(f"resp_{number}", 1, "m", "fp"), is_kept=True)
        update = {"status": "completed", "output": output, "previous_response_id": before}
        store.keep("me", begun.model_copy(update=update), list_items(body.input))
        if number < 3:
            assert len(await store.find_history("me", f"resp_{number}")) == 2 * (number + 1)
    if path is not None:  # and all of it outlives the server
        await store.stop()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        store = ResponseStore(8000, path)
    found = [number for number in range(40) if await holds(store, f"resp_{number}")]
    assert 3 < len(found) < 12
    assert found[-1] == 39
    assert isinstance(await store.find_item("me", ReferenceItem(type="item_reference", id="msg_39")), MessageItem)
    lost = ReferenceItem(type="item_reference", id="msg_0")
    assert await store.find_item("me", lost) is lost
    with pytest.raises(ServerError, match="previous_response_id"):
        await store.find_history("me", "resp_39")  # its beginning is gone
    assert not await holds(store, "resp_39", "another")
    await store.stop()


async def holds(store: ResponseStore, response_id: str, owner: str = "me") -> bool:
    try:
        return bool(await store.find(owner, response_id))
    except ServerError:
        return False


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    for name, write in (("text", lambda path: path.write_text("x" * 5000)), ("catalogue", make_table)):
        write(tmp_path / name)
        with pytest.raises(SettingError, match=r"responses_file: .*cannot be used"):
            ResponseStore(8000, tmp_path / name)


def make_table(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE models (name TEXT)")


def test_tools_that_only_a_service_has_are_refused_with_a_hint(client: httpx.Client) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    asked = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}], "tools": [search]}
    code = {"type": "code_interpreter", "container": {"type": "auto"}}
    for path, body in (("/v1/messages", asked), ("/v1/responses", {"input": "Hi", "tools": [code]})):
        refused = client.post(path, json=body)
        assert refused.status_code == 400
        assert body["tools"][0]["type"] in refused.text  # type: ignore[index]
        assert "offer a function that your program runs" in refused.text


def test_a_conversation_is_made_short(ai: openai.OpenAI, client: httpx.Client) -> None:
    first = ask(ai, MESSAGES, instructions="Be kind.")
    assert first.output[0].phase == "final_answer"  # type: ignore[union-attr]
    wanted = [{"role": "user", "content": "And then?"}]
    short = ai.responses.compact(model="demo", input=wanted, previous_response_id=first.id)  # type: ignore[arg-type]
    assert short.object == "response.compaction"
    assert short.usage.output_tokens > 0
    *said, summary = [item.model_dump(exclude_none=True, warnings=False) for item in short.output]
    assert [item["content"][0]["text"] for item in said] == [MESSAGES, "And then?"]
    assert summary["type"] == "compaction"
    reply = ask(ai, [*said, summary, {"role": "user", "content": "Go on."}], max_output_tokens=4)
    assert reply.usage is not None
    assert reply.usage.input_tokens > count(ai, [*said, {"role": "user", "content": "Go on."}])
    foreign = {"input": [{"type": "compaction", "encrypted_content": "gAAAAAB="}]}
    refused = client.post("/v1/responses", json=foreign)
    assert refused.status_code == 400
    assert "input[0].encrypted_content" in refused.text


def test_a_long_input_loses_its_oldest_items(ai: openai.OpenAI) -> None:
    long = [{"role": "user", "content": f"{number} " + "words and more words " * 10} for number in range(90)]
    asked = [{"role": "system", "content": "Be brief."}, *long, {"role": "user", "content": MESSAGES}]
    assert 1900 < count(ai, asked, truncation="auto") < 2048
    reply = ask(ai, asked, truncation="auto", max_output_tokens=1)
    assert reply.truncation == "auto"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(ai, asked, truncation="disabled")


@pytest.mark.slow
def test_all_that_codex_sends_is_taken(make_server: MakeServer) -> None:
    with make_server().client() as client:
        reply = client.post("/v1/responses", json={**CODEX, "input": HISTORY, "stream": True})
        assert reply.status_code == 200, reply.text
        assert "event: response.completed" in reply.text or "event: response.incomplete" in reply.text
        named = reply.headers["x-mlxr-ignored"].split(", ")
        assert {"model", "tools[].web_search", "input[].web_search_call"} <= set(named)
        assert {"client_metadata", "text.verbosity", "reasoning.summary"} <= set(named)


@pytest.mark.parametrize(
    ("choice", "kind", "names"),
    [
        ({"type": "custom", "name": "apply_patch"}, "custom_tool_call", ("apply_patch", None)),
        ({"type": "function", "name": "search", "namespace": "mcp__docs"}, "function_call", ("search", "mcp__docs")),
        ({"type": "function", "name": "send", "namespace": "mcp__mail"}, "function_call", ("send", "mcp__mail")),
        ({"type": "function", "name": "late"}, "function_call", ("late", None)),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "plan"}, SEARCH]},
         "function_call", ("plan", None)),
    ],
)  # fmt: skip
def test_calls_come_back_in_their_kind(
    client: httpx.Client, choice: object, kind: str, names: tuple[str, str | None]
) -> None:
    asked = {
        **CODEX,
        "model": "demo",
        "input": HISTORY,
        "tool_choice": choice,
        "temperature": 0,
        "max_output_tokens": 40,
    }
    reply = client.post("/v1/responses", json=asked)
    assert reply.status_code == 200, reply.text
    (item,) = reply.json()["output"]
    assert (item["type"], item["name"], item.get("namespace")) == (kind, *names)
