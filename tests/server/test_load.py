"""Many streams at once, and clients that leave some: every answer is the same as alone, and every page comes back.

The long form, with 256 clients for minutes, is bench/server_load.py.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass

import httpx
import pytest
from running_server import MakeServer, read_engine, used_pages, wait_until

CLIENTS = 48
ROUNDS = 2
QUESTIONS = ("What does os.path.join do?", "What is json.dumps?", "How do I read a file?", "What does shutil.copy do?")


@dataclass(frozen=True)
class Answer:
    """The contents of a stream: its text, each token's spelling in order, and the server's count of tokens."""

    text: str
    tokens: tuple[str, ...]
    counted: int


def make_body(number: int) -> dict[str, object]:
    """One of 16 different requests: greedy and drawn, short and long, some with a beginning in common."""
    return {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "You know the Python standard library. " * (1 + number % 2)},
            {"role": "user", "content": QUESTIONS[number % 4]},
        ],
        "max_tokens": 12 + number % 5 * 6,
        "temperature": 0.0 if number % 3 else 1.0,
        "seed": number % 16,
        "logprobs": True,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(client: httpx.AsyncClient, number: int, leave_after: int | None = None) -> Answer | None:
    """Stream one answer; return None if the client left after so many chunks."""
    texts: list[str] = []
    tokens: list[str] = []
    counted = chunks = 0
    async with client.stream("POST", "/v1/chat/completions", json=make_body(number % 16)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            chunks += 1
            if leave_after is not None and chunks > leave_after:
                return None
            for choice in chunk["choices"]:
                texts.append(choice["delta"].get("content") or "")
                tokens += [token["token"] for token in (choice["logprobs"] or {}).get("content", [])]
            if chunk.get("usage"):
                counted = chunk["usage"]["completion_tokens"]
    return Answer("".join(texts), tuple(tokens), counted)


async def load(url: str, seed: int) -> None:
    """Ask 16 questions one after the other, then all clients at once, a quarter of which leave; compare."""
    draw = random.Random(seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        alone = [await ask(client, number) for number in range(16)]
        for _ in range(ROUNDS):
            leaving = {number: draw.randrange(10) for number in range(CLIENTS) if number % 4 == 3}
            order = draw.sample(range(CLIENTS), CLIENTS)
            together = await asyncio.gather(*(ask(client, number, leaving.get(number)) for number in order))
            expected = [None if number in leaving else alone[number % 16] for number in order]
            assert together == expected
    for answer in alone:
        assert answer is not None
        assert len(answer.tokens) == answer.counted


@pytest.mark.slow
def test_48_streams_of_which_a_quarter_leave(make_server: MakeServer) -> None:
    running = make_server(arena_bytes="24M", max_sequences=24, prefill_chunk_tokens=64, threads=None)
    asyncio.run(load(running.url, seed=1))
    with running.client() as client:
        wait_until(lambda: len(running.app.state.parts.activity) == 0)  # the last ones to leave
        assert used_pages(client) == 0
        engine = read_engine(client)
        assert engine["waiting_sequences"] == engine["running_sequences"] == 0
        assert engine["failed_steps"] == 0
        assert engine["free_pages"] + engine["cached_pages"] == engine["pages"]
        assert len(client.get("/v1/admin/requests").json()["requests"]) == 1
