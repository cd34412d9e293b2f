"""Measures how much of a conversation is computed again in its next turn, on models with recurrent layers or others.

    python bench/resume.py [--model FILE | --shape qwen3.5-0.8b] [--turns 20] [--conversations 8] [--restart]
    python bench/resume.py --shape qwen3.5-0.8b --type q4_k_m --beginning-tokens 8192 --peer-python PYTHON

A real `mlxr serve` gets conversations over one long beginning (instructions and tools), turn by turn and in turns. As
agents do, a turn keeps the messages before it and adds one; every second turn drops the message that was answered last
(a result of a tool), but not its answer. The tokens that could be kept are the common beginning of a prompt and of the
prompt and answer of the turn before. The tokens are random, and messages end with the token that ends an answer. The
last prompt of two conversations is also computed anew, for its time. Exit code 1 if more than 5 % of the tokens that
could be kept are computed again. With an interpreter that has llama_cpp, `Llama` of llama-cpp-python runs the first
turns of the same conversations, with its own answers, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from comparison.child import Child
from http_client import Connection
from mlxr.loading import load
from server_process import ServerProcess, start_own
from synthetic import SHAPES, Shape, show_progress, write_model

MAX_SHARE = 0.05
MAX_ANEW = 2  # conversations whose last prompt is computed anew
MADE_UP_IDS = range(300, 1500)
REAL = SHAPES["qwen3.5-0.8b"]
CHANGES = {
    **REAL.changes,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
SMALL = replace(
    REAL, layers=4, hidden=256, heads=4, kv_heads=2, ffn=512, vocab_size=2048, context_length=32_768, changes=CHANGES
)
CHOICES: dict[str, Shape] = {"small": SMALL, **SHAPES}
Answer = Callable[[list[int], int], dict[str, Any]]


class Conversation:
    """Messages of random tokens after a `beginning` that all conversations have in common."""

    def __init__(self, seed: int, beginning: list[int], end_id: int, message_tokens: int) -> None:
        self._chance = random.Random(seed)
        self._beginning, self._end_id, self._message_tokens = beginning, end_id, message_tokens
        self._messages: list[list[int]] = []
        self._known: list[int] = []

    def ask(self) -> tuple[list[int], int]:
        """Return the next prompt, and the number of its tokens that could be kept from the turn before."""
        self._messages.append([*self._chance.choices(MADE_UP_IDS, k=self._message_tokens), self._end_id])
        prompt = [*self._beginning, *(token_id for message in self._messages for token_id in message)]
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, self._known, strict=False))
        kept_tokens = min(sum(1 for _ in equal), len(prompt) - 1)
        self._known = prompt
        return prompt, kept_tokens

    def hear(self, answer: list[int], turn: int) -> None:
        """Keep an answer, and in every second turn drop the message that it answers."""
        self._known = [*self._known, *answer]
        self._messages.append([*answer, self._end_id])
        if turn % 2:
            del self._messages[-2]


async def complete(server: ServerProcess, prompt: list[int], tokens: int, *, cached: bool = True) -> dict[str, Any]:
    """Return the reply to a prompt of token ids, in the format of llama.cpp's server."""
    connection = Connection("127.0.0.1", server.port)
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True, "return_tokens": True}
    reply, _ = await connection.post("/completion", {**body, "cache_prompt": cached})
    connection.close()
    return reply


def answer_own(server: ServerProcess, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Return the server's answer, in the format of `take_turn`."""
    reply = asyncio.run(complete(server, prompt, tokens))
    timings = reply["timings"]
    return {"tokens": reply["tokens"], "cached_tokens": timings["cache_n"], "first_ms": timings["prompt_ms"]}


def take_turn(answer: Answer, talk: Conversation, turn: int, answer_tokens: int) -> dict[str, Any]:
    """Take one turn: a prompt and its answer; returns its figures."""
    prompt, kept_tokens = talk.ask()
    reply = answer(prompt, answer_tokens)
    talk.hear(reply["tokens"], turn)
    return {
        "turn": turn,
        "prompt_tokens": len(prompt),
        "could_be_kept_tokens": kept_tokens,
        "cached_tokens": reply["cached_tokens"],
        "again_tokens": max(0, kept_tokens - reply["cached_tokens"]),
        "first_ms": reply["first_ms"],
    }


def read_cache(server: ServerProcess) -> dict[str, float]:
    """The bytes in the cache and the store, and the number of snapshots, of an idle server."""
    values = {}
    for line in server.read("/metrics").splitlines():
        name, _, value = line.rpartition(" ")
        for part, sign, label in (
            ("cached_bytes", "mlxr_cache_bytes{", 'kind="cached"'),
            ("store_bytes", "mlxr_cache_bytes{", 'kind="store"'),
            ("snapshots", "mlxr_states{", 'state="snapshot"'),
        ):
            if name.startswith(sign) and label in name:
                values[part] = float(value)
    return values


def talk_all(given: argparse.Namespace, talks: list[Conversation], start: Callable[[], ServerProcess]) -> Any:
    """Run all turns of all conversations; returns their figures, the cache's, and times of prompts computed anew."""
    rows, server = [], start()
    try:
        for turn in range(given.turns):
            if turn and given.restart:
                server.__exit__(None, None, None)
                server = start()
            answer = partial(answer_own, server)
            rows += [take_turn(answer, talk, turn, given.answer_tokens) for talk in talks]
        kept = read_cache(server)
        anew = [
            asyncio.run(complete(server, talk.ask()[0], 1, cached=False))["timings"]["prompt_ms"]
            for talk in talks[:MAX_ANEW]
        ]
    finally:
        server.__exit__(None, None, None)
    return rows, kept, anew


def talk_to_peer(given: argparse.Namespace, model: Path, folder: Path, talks: list[Conversation]) -> Any:
    """Run the first turns of all conversations with llama.cpp."""
    context_tokens = given.beginning_tokens + given.peer_turns * (given.message_tokens + given.answer_tokens + 2) + 64
    with Child("llama.cpp", given.peer_python.absolute(), "comparison.talk", folder / "peer.log") as child:
        threads = os.cpu_count() or 1
        child.ask("open", {"model": str(model.resolve()), "threads": threads, "context_tokens": context_tokens})

        def answer(prompt: list[int], tokens: int) -> dict[str, Any]:
            reply: dict[str, Any] = child.ask("complete", {"prompt": prompt, "tokens": tokens})
            return reply

        rows = []
        for turn in range(given.peer_turns):
            for talk in talks:
                rows.append(take_turn(answer, talk, turn, given.answer_tokens))
                print(f"llama.cpp: {rows[-1]}", file=sys.stderr, flush=True)
        return rows


def sum_up(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum up the tokens computed again that could be kept, from the second turn on, and times to the first token."""
    later = [row for row in rows if row["turn"]]
    kept, again, tokens = (
        sum(row[part] for row in later) for part in ("could_be_kept_tokens", "again_tokens", "prompt_tokens")
    )
    return {
        "prompt_tokens": tokens,
        "kept_tokens": kept,
        "again_tokens": again,
        "again_share": again / kept if kept else 0.0,
        "first_median_ms": statistics.median(row["first_ms"] for row in later) if later else None,
        "first_worst_ms": max((row["first_ms"] for row in later), default=None),
    }


def report(figures: dict[str, Any], file: Path | None) -> None:
    """Print the figures without those of single turns, and write all of them to a file."""
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n")
    peer = {part: value for part, value in figures.get("peer", {}).items() if part != "turns"}
    print(json.dumps({**figures, "turns": len(figures["turns"]), "peer": peer}, indent=2), flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file instead of a made-up one")
    parser.add_argument("--shape", choices=CHOICES, default="small", help="of the made-up model")
    parser.add_argument("--type", default="q8_0", help="of its weights")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--conversations", type=int, default=1)
    parser.add_argument("--beginning-tokens", type=int, default=3000)
    parser.add_argument("--message-tokens", type=int, default=120)
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--restart", action="store_true", help="stop and start the server between turns")
    parser.add_argument("--peer-python", type=Path, help="an interpreter that has llama_cpp")
    parser.add_argument("--peer-turns", type=int, default=4, help="turns that it takes")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def main() -> int:
    """Run the conversations; returns exit code 1 if too much is computed again."""
    given = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="mlxr-resume-") as name:
        folder = Path(name)
        model = given.model or folder / "model.gguf"
        if given.model is None:
            write_model(model, CHOICES[given.shape], given.type, 0, show_progress)
        with load(model) as loaded:
            end_id = min(loaded.tokenizer.eos_ids)
        beginning = [*random.Random(0).choices(MADE_UP_IDS, k=given.beginning_tokens), end_id]

        def begin() -> list[Conversation]:
            return [Conversation(seed, beginning, end_id, given.message_tokens) for seed in range(given.conversations)]

        store = ("--store-bytes", str(4 << 30), "--store-folder", str(folder / "store")) if given.restart else ()
        rows, cache, anew = talk_all(given, begin(), lambda: start_own(folder, str(model), *store))
        figures: dict[str, Any] = {
            **sum_up(rows),
            "anew_median_ms": statistics.median(anew),
            **cache,
            "cached_bytes_per_conversation": cache["cached_bytes"] / given.conversations,
            "turns": rows,
        }
        report(figures, given.json)
        if given.peer_python is not None:
            peer = talk_to_peer(given, model, folder, begin())
            report({**figures, "peer": {**sum_up(peer), "turns": peer}}, given.json)
    return int(figures["again_share"] > MAX_SHARE)


if __name__ == "__main__":
    sys.exit(main())
