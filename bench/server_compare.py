"""Our server and llama_cpp.server on the same files, in turns: overhead of a request, and many chats at once.

    python bench/server_compare.py --peer-python .venv-peers/bin/python              # both cases
    python bench/server_compare.py --only overhead --rounds 6 --peer-python PYTHON

`overhead`: /v1/completions with max_tokens 1 on the demo model from 16 clients, each as soon as its last answer is
there; requests per second, and the time until the answer begins. `chats`: 16 streamed chats at once on TinyLlama's
shape in Q4_K_M (random weights, made when missing); tokens per second of all together. A round is ours, then theirs;
the ratios are taken round by round, their median counts. No prompt comes twice. The peer runs with
all threads and does not give up one request for the next, which its defaults do. Without --peer-python ours is
measured alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compare import MODELS
from http_client import Connection
from mlxr.core.settings import resolve
from mlxr.loading import find_model
from mlxr.registry.record import Changes
from mlxr.service.catalogue import open_registry
from server_process import ServerProcess, start_own, start_peer
from synthetic import SHAPES, show_progress, write_model

CLIENTS = 16
CHAT_NAME = "bench-chat"
SHAPE, RECIPE = "tinyllama-1.1b", "q4_k_m"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
MIN_OVERHEAD_RATIO, MIN_CHAT_RATIO = 1.5, 2.5


@dataclass(frozen=True)
class Round:
    """One side's turn: what it did in a second (requests or tokens), and how long first bytes took."""

    per_s: float
    first_median_s: float
    first_p99_s: float


def summarise(count: float, seconds: float, first_s: list[float]) -> Round:
    """The figures of a turn."""
    ordered = sorted(first_s)
    return Round(count / seconds, ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)])


async def ask_one_token(server: ServerProcess, seconds: float) -> Round:
    """As many answers of one token as 16 clients get in so many seconds."""
    first_s: list[float] = []
    turn = time.time_ns() % 10**9
    start_s = time.perf_counter()

    async def live(client: int) -> None:
        connection = Connection("127.0.0.1", server.port)
        count = 0
        while time.perf_counter() < start_s + seconds:
            body = {"prompt": f"import module_{turn}_{client}_{count}\n", "max_tokens": 1, "temperature": 0.0}
            reply, first = await connection.post("/v1/completions", body)
            assert reply["usage"]["completion_tokens"] <= 1, reply  # llama.cpp does not count an end token
            first_s.append(first)
            count += 1
        connection.close()

    await asyncio.gather(*(live(client) for client in range(CLIENTS)))
    return summarise(len(first_s), time.perf_counter() - start_s, first_s)


async def chat_at_once(server: ServerProcess, tokens: int) -> Round:
    """16 chats of so many tokens each, begun together and streamed. No cache knows their prompts from earlier turns."""
    turn = time.time_ns() % 10**9
    first_s: list[float] = []
    counts: list[int] = []
    start_s = time.perf_counter()

    async def live(client: int) -> None:
        connection = Connection("127.0.0.1", server.port)
        question = f"{turn}: tell the tale of house number {client}, {'which is old, ' * 4}and of those who live there."
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": tokens,
            "temperature": 0.0,
            "stream": True,
        }
        pieces, reason = 0, None
        async for event in connection.stream("/v1/chat/completions", body):
            choice = event["choices"][0]
            if choice["delta"].get("content"):
                pieces += 1
                if pieces == 1:
                    first_s.append(time.perf_counter() - start_s)
            reason = choice["finish_reason"] or reason
        counts.append(tokens if reason == "length" else pieces)  # several tokens may make one piece of text
        connection.close()

    await asyncio.gather(*(live(client) for client in range(CLIENTS)))
    return summarise(sum(counts), time.perf_counter() - start_s, first_s)


Turn = Callable[[ServerProcess], Awaitable[Round]]


def compare(sides: list[ServerProcess], turn: Turn, rounds: int) -> list[dict[str, Round]]:
    """All sides in turns, after one turn each that does not count."""
    for side in sides:
        asyncio.run(turn(side))  # type: ignore[arg-type]
    return [{side.name: asyncio.run(turn(side)) for side in sides} for _ in range(rounds)]  # type: ignore[arg-type]


def report(name: str, unit: str, results: list[dict[str, Round]], bound: float) -> dict[str, Any]:
    """Print a case; its figures for the file."""
    medians = {
        side: {key: statistics.median(asdict(row[side])[key] for row in results) for key in asdict(results[0][side])}
        for side in results[0]
    }
    print(f"{name}:")
    for side, row in medians.items():
        times = f"first after {row['first_median_s'] * 1000:.1f} ms (p99 {row['first_p99_s'] * 1000:.1f} ms)"
        print(f"  {side:18} {row['per_s']:8.1f} {unit}/s   {times}")
    figures: dict[str, Any] = {"sides": medians, "rounds": [{s: asdict(r) for s, r in row.items()} for row in results]}
    if len(medians) == 2:
        own, peer = medians
        ratios = [row[own].per_s / row[peer].per_s for row in results]
        first = [row[peer].first_median_s / row[own].first_median_s for row in results]
        figures |= {"ratio": statistics.median(ratios), "first_ratio": statistics.median(first), "bound": bound}
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"  ratio {figures['ratio']:.2f} ({spread}), first {figures['first_ratio']:.2f}; bound {bound}")
    return figures


def run_overhead(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """The case `overhead`."""
    with ExitStack() as stack:
        sides = [stack.enter_context(start_own(folder, "demo", "--threads", str(chosen.threads)))]
        if chosen.peer_python:
            path = find_model("demo")
            sides.append(stack.enter_context(start_peer(folder, chosen.peer_python, path, chosen.threads)))
        results = compare(sides, lambda side: ask_one_token(side, chosen.seconds), chosen.rounds)
    return report("overhead", "requests", results, MIN_OVERHEAD_RATIO)


def run_chats(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """The case `chats`."""
    model = chosen.model or MODELS / f"{SHAPE}-{RECIPE}.gguf"
    if not model.exists():
        model.parent.mkdir(parents=True, exist_ok=True)
        write_model(model, SHAPES[SHAPE], RECIPE, 0, show_progress)
    settings = resolve({"models_folder": folder / "models"})
    open_registry(settings).import_file(model, CHAT_NAME, Changes(template=CHAT_TEMPLATE))
    flags = ("--threads", str(chosen.threads), "--arena-bytes", "512M")
    with ExitStack() as stack:
        sides = [stack.enter_context(start_own(folder, CHAT_NAME, *flags))]
        if chosen.peer_python:
            own = ("--chat_format", "llama-2", "--n_ctx", "1024")
            sides.append(stack.enter_context(start_peer(folder, chosen.peer_python, model, chosen.threads, *own)))
        results = compare(sides, lambda side: chat_at_once(side, chosen.tokens), chosen.chat_rounds)
    return report("chats", "tokens", results, MIN_CHAT_RATIO)


CASES = {"overhead": run_overhead, "chats": run_chats}


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, help="an interpreter that has llama-cpp-python[server]")
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4, help="of overhead")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn of overhead")
    parser.add_argument("--chat-rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48, help="of each chat")
    parser.add_argument("--model", type=Path, help="a Llama model in GGUF instead of the one with random weights")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, run in CASES.items():
            if chosen.only in (None, name):
                figures[name] = run(Path(folder), chosen)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")
    missed = [name for name, row in figures.items() if row.get("ratio", row.get("bound", 0)) < row.get("bound", 0)]
    for name in missed:
        print(f"MISSED: {name}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
