"""Bounds of a request's body: its parts are counted exactly, block by block, before it is parsed."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest
from running_server import RunningServer

from mlxr.core.errors import ContextFull, InvalidRequest
from mlxr.server import work
from mlxr.server.errors import ServerError
from mlxr.server.work import MAX_NUMBERS, MAX_PARTS, _Count, _cut, check_parts
from mlxr.service.chat import SizeBound
from mlxr.service.messages import parse_arguments


def count_value(value: Any) -> tuple[int, int]:
    """Commas and beginnings of lists and objects in the JSON of a value, and numbers in lists."""
    if isinstance(value, list):
        inner = [count_value(part) for part in value]
        numbers = sum(isinstance(part, int | float) and not isinstance(part, bool) for part in value)
        return 1 + max(0, len(value) - 1) + sum(a for a, _ in inner), numbers + sum(b for _, b in inner)
    if isinstance(value, dict):
        inner = [count_value(part) for part in value.values()]
        return 1 + max(0, len(value) - 1) + sum(a for a, _ in inner), sum(b for _, b in inner)
    return 0, 0


def make_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(8 if depth else 5)
    if kind >= 6:
        return [make_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == 5:
        return {make_text(rng) + str(number): make_value(rng, depth - 1) for number in range(rng.randrange(4))}
    return [make_text(rng), rng.randrange(-9, 99), -1.5e3, None, True][kind]


def make_text(rng: random.Random) -> str:
    return "".join(rng.choices('\\"[]{},1 -é\n', k=rng.randrange(9)))


@pytest.mark.parametrize("block_bytes", [1, 3, 64, 1 << 20])
def test_parts_are_counted_as_a_parser_would(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_BLOCK_BYTES", block_bytes)
    rng = random.Random(block_bytes)
    for _ in range(60):
        value = make_value(rng, 4)
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 1]))
        count = _Count()
        for block in _cut(text.encode()):
            count.add(block)
        assert (count.parts, count.numbers) == count_value(value), text


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (b"[]", "lists, objects"),
        (b"{}", "lists, objects"),
        (b'""', "lists, objects"),
        (b"null", "lists, objects"),
        (b"[1]", "lists, objects"),
        (b'{"a":1}', "lists, objects"),
        (b"1", "numbers in lists"),
        (b" -1.5e3", "numbers in lists"),
        (b"[" * 3, "lists, objects"),
    ],
)
def test_bodies_that_hold_too_much_are_refused(item: bytes, words: str) -> None:
    most = MAX_NUMBERS if "numbers" in words else MAX_PARTS
    data = b'{"prompt":"a","x":[' + b",".join([item] * (most + 2)) + b"]}"
    with pytest.raises(ServerError, match=f"holds more than {most} {words}") as caught:
        check_parts(data)
    assert (caught.value.status, caught.value.code, caught.value.closes) == (413, "too_large", True)


def test_long_texts_and_as_many_ids_as_are_allowed_pass() -> None:
    check_parts(json.dumps({"prompt": '[{,"\\' * 300_000}).encode())
    check_parts(b'{"prompt":[' + b",".join([b"7"] * MAX_NUMBERS) + b"]}")


def test_a_list_ends_at_its_first_wrong_item(client: httpx.Client) -> None:
    """The other wrong items do not become errors, which would take seconds."""
    many = ["a"] * 100_000
    refused = client.post("/detokenize", json={"tokens": many})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("tokens[0]: ")
    ids = [*range(20), *many]
    assert client.post("/v1/completions", json={"prompt": ids}).status_code == 400


@pytest.mark.one_server("the front has no route of its own for bodies")
def test_a_body_of_lists_is_refused_before_it_is_parsed(
    client: httpx.Client, running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b'{"prompt":"a","max_tokens":1,"x":[' + b"[]," * (MAX_PARTS // 2 + 1) + b"[]]}"

    def parse(*_: object, **__: object) -> None:
        raise AssertionError("it was parsed")

    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", parse)
        refused = client.post("/v1/completions", content=data)
    assert refused.status_code == 413
    assert refused.headers["connection"] == "close"
    assert not running.app.state.parts.work.bodies._held_bytes
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.one_server("the front has no route of its own for bodies")
def test_long_bodies_beyond_what_there_is_room_for_are_told_to_come_back(
    client: httpx.Client, running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "MAX_HELD_BYTES", 1 << 20)
    refused = client.post("/v1/completions", json={"prompt": "a" * (2 << 20)})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert not running.app.state.parts.work.bodies._held_bytes
    fits = client.post("/v1/completions", json={"prompt": "a" * (1 << 19), "max_tokens": 1})
    assert fits.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("text", ["[" + "[]," * 70_000 + "[]]", " " * (1 << 20) + "{}"])
def test_json_inside_the_texts_of_a_body_is_bounded_as_well(text: str) -> None:
    with pytest.raises(InvalidRequest, match="call: is longer than the arguments of a call may be"):
        parse_arguments(text, "call")


def test_ids_that_outnumber_the_context_are_counted_by_their_length() -> None:
    class Untouched(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("the ids were looked at")

    ids = Untouched(range(5000))
    with pytest.raises(ContextFull, match="prompt of 5000 tokens"):
        SizeBound(None, 4096).check("prompt", ids)  # type: ignore[arg-type]


def test_many_ids_are_decoded_beside_the_event_loop(client: httpx.Client) -> None:
    ids = [11, 12] * 20_000
    decoded = client.post("/detokenize", json={"tokens": ids}).json()["content"]
    assert decoded == client.post("/detokenize", json={"tokens": ids[:2]}).json()["content"] * 20_000
    assert client.post("/detokenize", json={"tokens": [*ids, 10**9]}).json()["error"]["message"].startswith("tokens: ")
    text = "import os\n" * 4000
    found = client.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in found] == client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert "".join(piece["piece"] for piece in found) == text
