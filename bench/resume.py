"""How much of a conversation is computed again when it goes on, on models with recurrent layers or others.

    python bench/resume.py [--model FILE | --shape qwen3.5-0.8b] [--turns 20] [--conversations 8] [--restart]

A real `mlxr serve` gets conversations over one long beginning (instructions and tools), turn by turn and in turns. As
agents do, a turn keeps the messages before it and adds one; every second turn drops the message that was answered last
(a result of a tool), but not its answer. What could have been kept is what a prompt has in common with the prompt and
answer of the turn before. The tokens are random, and messages end with the token that ends an answer. The last prompt
of each conversation is also computed anew, for its time. Exit code 1 when more than 5 % of what could have been kept is
computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from http_client import Connection
from mlxr.loading import load
from mlxr.models.recurrence_config import make_flags
from mlxr.models.specs import GatedDelta
from server_process import ServerProcess, start_own
from synthetic import SHAPES, Shape, show_progress, write_model

MAX_SHARE = 0.05
MADE_UP_IDS = range(300, 1500)
REAL = SHAPES["qwen3.5-0.8b"]
CHANGES = {
    **REAL.changes,
    "head_dim": 64,
    "rope_dim": 16,
    "recurrence": GatedDelta(2, 2, 128, 128, 4),
    "recurrent_layers": make_flags(4, 4),
}
SMALL = replace(
    REAL, layers=4, hidden=256, heads=4, kv_heads=2, ffn=512, vocab_size=2048, context_length=32_768, changes=CHANGES
)
CHOICES: dict[str, Shape] = {"small": SMALL, **SHAPES}


class Conversation:
    """Messages of random tokens after a `beginning` that all conversations have in common."""

    def __init__(self, seed: int, beginning: list[int], end_id: int, message_tokens: int) -> None:
        self._chance = random.Random(seed)
        self._beginning, self._end_id, self._message_tokens = beginning, end_id, message_tokens
        self._messages: list[list[int]] = []
        self._known: list[int] = []

    def ask(self) -> tuple[list[int], int]:
        """The next prompt, and how many of its tokens the turn before has left to be kept."""
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
    """The reply to a prompt of token ids, in the words of llama.cpp's server."""
    connection = Connection("127.0.0.1", server.port)
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True, "return_tokens": True}
    reply, _ = await connection.post("/completion", {**body, "cache_prompt": cached})
    connection.close()
    return reply


def take_turn(server: ServerProcess, talk: Conversation, turn: int, answer_tokens: int) -> dict[str, Any]:
    """One prompt and its answer."""
    prompt, kept_tokens = talk.ask()
    reply = asyncio.run(complete(server, prompt, answer_tokens))
    talk.hear(reply["tokens"], turn)
    timings = reply["timings"]
    return {
        "prompt_tokens": len(prompt),
        "could_be_kept_tokens": kept_tokens,
        "cached_tokens": timings["cache_n"],
        "again_tokens": max(0, kept_tokens - timings["cache_n"]),
        "first_ms": timings["prompt_ms"],
    }


def talk_all(given: argparse.Namespace, talks: list[Conversation], start: Callable[[], ServerProcess]) -> Any:
    """All turns of all conversations, then the time of their next prompts computed anew."""
    rows, server = [], start()
    try:
        for turn in range(given.turns):
            if turn and given.restart:
                server.__exit__(None, None, None)
                server = start()
            rows += [{"turn": turn, **take_turn(server, talk, turn, given.answer_tokens)} for talk in talks]
        anew = [asyncio.run(complete(server, talk.ask()[0], 1, cached=False))["timings"]["prompt_ms"] for talk in talks]
    finally:
        server.__exit__(None, None, None)
    return rows, anew


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file instead of a made-up one")
    parser.add_argument("--shape", choices=CHOICES, default="small", help="of the made-up model, in Q8_0")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--conversations", type=int, default=1)
    parser.add_argument("--beginning-tokens", type=int, default=3000)
    parser.add_argument("--message-tokens", type=int, default=120)
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--restart", action="store_true", help="stop and start the server between turns")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def main() -> int:
    """Exit code 1 when too much is computed again."""
    given = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="mlxr-resume-") as name:
        folder = Path(name)
        model = given.model or folder / "model.gguf"
        if given.model is None:
            write_model(model, CHOICES[given.shape], "q8_0", 0, show_progress)
        with load(model) as loaded:
            end_id = min(loaded.tokenizer.eos_ids)
        beginning = [*random.Random(0).choices(MADE_UP_IDS, k=given.beginning_tokens), end_id]
        talks = [Conversation(seed, beginning, end_id, given.message_tokens) for seed in range(given.conversations)]
        store = ("--store-bytes", str(4 << 30), "--store-folder", str(folder / "store")) if given.restart else ()
        rows, anew = talk_all(given, talks, lambda: start_own(folder, str(model), *store))
    later = [row for row in rows if row["turn"]]
    kept, again = (sum(row[part] for row in later) for part in ("could_be_kept_tokens", "again_tokens"))
    figures = {
        "kept_tokens": kept,
        "again_tokens": again,
        "again_share": again / kept if kept else 0.0,
        "first_median_ms": statistics.median(row["first_ms"] for row in later) if later else None,
        "anew_median_ms": statistics.median(anew),
        "turns": rows,
    }
    print(json.dumps({part: value for part, value in figures.items() if part != "turns"}, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(figures["again_share"] > MAX_SHARE)


if __name__ == "__main__":
    sys.exit(main())
