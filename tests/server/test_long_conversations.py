"""Conversations that outgrow the context of a model with a strict template: every dialect goes on with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from running_server import RunningServer, start_server

from mlxr.core.types import SamplingParams
from mlxr.registry import Changes
from mlxr.server.request_fields import ANSWER_SHARE, drop_oldest
from mlxr.service.requests import ChatRequest

TEMPLATES = Path(__file__).parents[1] / "tokenizers" / "templates"
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
TURNS = 40


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose models have a context that is soon full."""
    server = start_server(tmp_path_factory.mktemp("small"), context_tokens=160)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(small: RunningServer) -> Iterator[httpx.Client]:
    with small.client() as client:
        yield client


@pytest.fixture(scope="module", params=["gemma3", "mistral-tools", "qwen3.5"])
def model(small: RunningServer, request: pytest.FixtureRequest) -> str:
    registry = small.app.state.parts.registry
    changes = Changes(template=(TEMPLATES / f"{request.param}.jinja").read_text())
    registry.derive(request.param, registry.get("demo"), changes)
    return str(request.param)


def make_turns(count: int) -> list[dict[str, object]]:
    turns: list[dict[str, object]] = [SYSTEM]
    for number in range(count):
        turns += [
            {"role": "user", "content": f"{number}: a few words that take some room"},
            {"role": "assistant", "content": "Yes."},
        ]
    return turns[:-1]


def send_ollama(client: httpx.Client, model: str, talk: Sequence[object]) -> httpx.Response:
    options = {"num_predict": 1}
    return client.post("/api/chat", json={"model": model, "messages": talk, "options": options, "stream": False})


def send_response(client: httpx.Client, model: str, talk: Sequence[object]) -> httpx.Response:
    body = {"model": model, "input": talk, "truncation": "auto", "max_output_tokens": 1, "store": False}
    return client.post("/v1/responses", json=body)


def send_chat(client: httpx.Client, model: str, talk: Sequence[object]) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"model": model, "messages": talk, "max_tokens": 1})


def send_llamacpp(client: httpx.Client, model: str, talk: Sequence[object]) -> httpx.Response:
    return client.post("/chat/completions", json={"model": model, "messages": talk, "n_predict": 1, "max_tokens": 1})


def send_message(client: httpx.Client, model: str, talk: Sequence[Any]) -> httpx.Response:
    others = talk[1:] if talk[0] == SYSTEM else talk
    return client.post(
        "/v1/messages", json={"model": model, "system": "Be brief.", "messages": others, "max_tokens": 1}
    )


Send = Callable[[httpx.Client, str, Sequence[Any]], httpx.Response]


@pytest.mark.parametrize("send", [send_ollama, send_response])
@pytest.mark.parametrize("turns", [1, TURNS // 2, TURNS - 1, TURNS])
def test_where_the_server_shortens(client: httpx.Client, model: str, send: Send, turns: int) -> None:
    for talk in (
        make_turns(turns),
        make_turns(turns + 1)[2:],
        [*make_turns(turns), {"role": "user", "content": "Eh?"}],
    ):
        reply = send(client, model, talk)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("send", [send_chat, send_llamacpp, send_message])
def test_where_the_client_shortens(client: httpx.Client, model: str, send: Send) -> None:
    """It hears that the context is full, drops the oldest message, and asks again."""
    talk, refused = make_turns(TURNS), 0
    for _ in range(2 * TURNS):
        reply = send(client, model, talk)
        if reply.status_code == 200:
            break
        assert reply.status_code == 400
        assert re.search("maximum context length is 160 tokens|too long: .* > 160", reply.json()["error"]["message"])
        refused += 1
        del talk[1]
    assert reply.status_code == 200
    assert refused
    for dropped in range(1, 4):  # and so it goes on
        assert send(client, model, [SYSTEM, *talk[1 + dropped :]]).status_code == 200


@pytest.mark.parametrize("send", [send_ollama, send_response, send_chat, send_llamacpp, send_message])
def test_instructions_in_the_middle_and_neighbours_are_answered(client: httpx.Client, model: str, send: Send) -> None:
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}
    for talk in ([SYSTEM, user, SYSTEM], [user, answer, SYSTEM, user], [user, user], [answer, answer, user]):
        reply = send(client, model, talk)
        assert reply.status_code == 200, reply.text
    assert send(client, model, [user, answer, answer]).status_code == 200  # the last one is continued


# --- what goes, and how much work that is -----------------------------------------------------------------------------


class Counting:
    """A session that counts ten tokens for each message and refuses some conversations."""

    def __init__(self, context_tokens: int) -> None:
        self.context_tokens = context_tokens
        self.asked: list[str] = []

    def encode_chat(self, wanted: ChatRequest) -> list[int]:
        """Ten tokens for a message."""
        self.asked.append(show(wanted))
        return [0] * (10 * len(wanted.messages))


def make_request(letters: str, **options: Any) -> ChatRequest:
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
    talk: list[Mapping[str, object]] = []
    for letter in letters:
        talk.append({"role": roles[letter], "content": letter, **({"tool_calls": [CALL]} if letter == "c" else {})})
    return ChatRequest(talk, SamplingParams(**options))


def show(request: ChatRequest) -> str:
    return "".join(str(message["content"]) for message in request.messages)


@pytest.mark.parametrize(
    ("letters", "messages", "left"),
    [
        ("suau", 5, "suau"),
        ("suau", 4, "su"),
        ("suauau", 6, "suau"),
        ("auau", 4, "uau"),  # a beginning by the assistant is no turn of the user's
        ("usauadu", 7, "usauadu"[1:].replace("a", "", 1)),  # instructions stay where they are
        ("auau", 3, "u"),
        ("uauctctau", 8, "uctctau"),
        ("uauctctau", 7, "u"),
        ("uauctct", 7, "uctct"),
        ("uauctct", 5, "uct"),
        ("uauctct", 3, "ct"),
        ("suctt", 4, "sctt"),
        ("uuuu", 4, "uuu"),
        ("uuaa", 4, "uua"),
        ("uuauu", 4, "uu"),
        ("uauaua", 4, "ua"),  # the last one is continued
        ("t", 1, "t"),
        ("ss", 1, "ss"),
        ("ctctct", 5, "ctct"),
    ],
)
def test_what_goes_first(letters: str, messages: int, left: str) -> None:
    session: Any = Counting(10 * messages)
    assert show(drop_oldest(session, make_request(letters, max_tokens=1))) == left


def test_an_answer_has_room_where_turns_must_go() -> None:
    session: Any = Counting(400)
    assert show(drop_oldest(session, make_request("ua" * 19 + "u"))) == "ua" * 19 + "u"
    assert len(drop_oldest(session, make_request("ua" * 20 + "u")).messages) == 400 // 10 * 3 // 4 - 1
    assert len(drop_oldest(session, make_request("ua" * 20 + "u", max_tokens=10)).messages) == 39
    assert ANSWER_SHARE == 4


def test_few_conversations_are_tried() -> None:
    session: Any = Counting(500)
    drop_oldest(session, make_request("ua" * 8000 + "u"))
    assert len(session.asked) <= 15
    session = Counting(500)
    drop_oldest(session, make_request("ua" * 10))
    assert len(session.asked) == 1


def test_a_conversation_that_no_prefix_fits_keeps_what_must_stay() -> None:
    session = SimpleNamespace(context_tokens=10, encode_chat=lambda wanted: [0] * 99)
    assert show(drop_oldest(session, make_request("suauctct"))) == "sct"  # type: ignore[arg-type]
