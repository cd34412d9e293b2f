"""`mlxr serve` with a device of MLX: a chat, a stream, texts to embed, a JSON schema, and eight clients at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxr.kernels.gpu.mlx import find_gpu

pytest.importorskip("mlx.core", reason="mlx is not installed")
for name in ("fastapi", "httpx", "uvicorn"):
    pytest.importorskip(name)

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from questions import ANSWER, MESSAGES  # noqa: E402
from running_server import RunningServer, start_server  # noqa: E402

REAL = Path(__file__).parents[1] / "real"
CLIENTS = 8
GPU = find_gpu()
DEVICES = ["mlx-cpu", *([] if GPU is None else [GPU])]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "big": {"type": "boolean"}},
    "required": ["name", "big"],
    "additionalProperties": False,
}
MAX_EMBEDDING_DIFFERENCE = 0.02  # of vectors of length 1: the CPU rounds activations to 8 bits, a GPU to 16


@pytest.fixture(scope="module", params=DEVICES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    made = start_server(tmp_path_factory.mktemp("registry"), device=request.param, threads=None)
    yield made
    made.stop()


def ask(server: RunningServer, messages: list[dict[str, str]], **options: Any) -> str:
    """The text of an answer."""
    with server.client() as client:
        body = {"model": "demo", "messages": messages, "temperature": 0, **options}
        reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def test_a_question_is_answered(server: RunningServer) -> None:
    assert ask(server, MESSAGES) == ANSWER


def test_a_stream_says_the_same(server: RunningServer) -> None:
    body = {"model": "demo", "messages": MESSAGES, "temperature": 0, "stream": True}
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines if json.loads(line)["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER


def test_texts_are_embedded_as_on_the_cpu(server: RunningServer, tmp_path: Path) -> None:
    body = {"model": "demo", "input": ["os.path.join joins paths.", "x", "A list is a sequence. " * 30]}
    on_cpu = start_server(tmp_path, device="cpu")
    try:
        vectors = []
        for one in (server, on_cpu):
            with one.client() as client:
                rows = client.post("/v1/embeddings", json=body).json()["data"]
            vectors.append(np.array([row["embedding"] for row in rows]))
    finally:
        on_cpu.stop()
    found, expected = (array / np.linalg.norm(array, axis=1, keepdims=True) for array in vectors)
    assert np.linalg.norm(found - expected, axis=1).max() < MAX_EMBEDDING_DIFFERENCE


def test_json_keeps_to_its_schema(server: RunningServer) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    value = json.loads(ask(server, MESSAGES, response_format=wanted, temperature=1, seed=1, max_tokens=200))
    assert set(value) == {"name", "big"}
    assert isinstance(value["big"], bool)


def test_eight_clients_at_once_get_what_each_gets_alone(server: RunningServer) -> None:
    """Half of them have a penalty; the host draws their tokens beside those that the device draws."""
    names = [row["name"] for row in json.loads((REAL / "questions.json").read_text())["functions"]][:CLIENTS]
    chats = [[{"role": "user", "content": f"What does {name} do?"}] for name in names]
    options = [{"frequency_penalty": 0.5 * (number % 2), "max_tokens": 60} for number in range(CLIENTS)]
    alone = [ask(server, chat, **given) for chat, given in zip(chats, options, strict=True)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        together = list(clients.map(lambda chat, given: ask(server, chat, **given), chats, options))
    assert together == alone
    assert len(set(alone)) == CLIENTS
