"""Measures our server and llama.cpp's on the same files, in turns: overhead of a request, and many chats at once.

    python bench/server_compare.py --llama-server PATH                               # both cases
    python bench/server_compare.py --only chats --clients 16 --llama-server PATH --peer-python PYTHON

`overhead`: /v1/completions with max_tokens 1 on the demo model from 16 clients, each of which asks again as soon as its
answer is there; requests per second, and the time until the answer begins. `chats`: 1, 4, 16 and 64 clients begin a
streamed chat at the same moment, on TinyLlama's shape in Q4_K_M (random weights, made if missing) or on --model; tokens
per second of all together, and the time until the first text. No prompt comes twice. A round is one turn of each
server; the ratios are taken round by round, and their median counts.

Our server runs with its defaults. `llama-server` runs with its defaults and 16 slots, flash attention and 1,024 tokens
of context for each slot. `llama_cpp.server`, the single-file server of the Python binding, answers one request at a
time; it runs with all threads and, unlike its defaults, does not abort a request for the next one. Without a peer, ours
is measured alone.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
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
from server_process import ServerProcess, start_llama_server, start_own, start_peer
from synthetic import SHAPES, show_progress, write_model

CLIENTS = 16
CHAT_NAME = "bench-chat"
SHAPE, RECIPE = "tinyllama-1.1b", "q4_k_m"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Our rate must be at least this multiple of a peer's. A request of one token costs our Python some 3 ms of a core,
# twice as much as llama-server in C++.
BOUNDS = {
    "overhead": {"llama_cpp.server": 1.5, "llama-server": 0.4},
    "chats": {"llama_cpp.server": 1.0, "llama-server": 1.0},
}


@dataclass(frozen=True)
class Round:
    """One server's turn: requests or tokens in a second, and the seconds until an answer began."""

    per_s: float
    first_median_s: float
    first_p95_s: float


def summarise(count: float, seconds: float, first_s: list[float]) -> Round:
    """The figures of a turn in which `count` requests or tokens took so many seconds."""
    ordered = sorted(first_s)
    return Round(count / seconds, statistics.median(ordered), ordered[int(len(ordered) * 0.95)])


async def ask_one_token(server: ServerProcess, seconds: float) -> Round:
    """Let 16 clients get answers of one token for so many seconds."""
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


async def chat_at_once(server: ServerProcess, clients: int, tokens: int) -> Round:
    """Begin so many streamed chats of so many tokens each together. Their prompts are new to every server."""
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
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        texts, count, reason, began_s = 0, 0, None, None
        async for event in connection.stream("/v1/chat/completions", body):
            count = (event.get("usage") or {}).get("completion_tokens", count)
            for choice in event["choices"]:
                reason = choice["finish_reason"] or reason
                texts += bool(choice["delta"].get("content"))
            if texts and began_s is None:
                began_s = time.perf_counter() - start_s
        first_s.append(began_s or time.perf_counter() - start_s)
        # llama_cpp.server counts nothing in a stream; several tokens may make one piece of text.
        counts.append(count or (tokens if reason == "length" else texts))
        connection.close()

    await asyncio.gather(*(live(client) for client in range(clients)))
    return summarise(sum(counts), time.perf_counter() - start_s, first_s)


Turn = Callable[[ServerProcess], Awaitable[Round]]


def compare(sides: Sequence[ServerProcess], turn: Turn, rounds: int) -> list[dict[str, Round]]:
    """Let all servers have their turns, after one turn each that does not count."""
    for side in sides:
        asyncio.run(turn(side))  # type: ignore[arg-type]
    return [{side.name: asyncio.run(turn(side)) for side in sides} for _ in range(rounds)]  # type: ignore[arg-type]


def report(case: str, label: str, unit: str, results: list[dict[str, Round]]) -> dict[str, Any]:
    """Print the figures of a case and return them for the file."""
    own, *peers = results[0]
    medians = {
        side: {key: statistics.median(asdict(row[side])[key] for row in results) for key in asdict(results[0][side])}
        for side in results[0]
    }
    print(f"{label}:")
    for side, row in medians.items():
        times = f"first after {row['first_median_s'] * 1000:8.1f} ms (95th percentile {row['first_p95_s'] * 1000:.1f})"
        print(f"  {side:18} {row['per_s']:8.1f} {unit}/s   {times}")
    ratios = {}
    for peer in peers:
        rates = [row[own].per_s / row[peer].per_s for row in results]
        first = [row[peer].first_median_s / row[own].first_median_s for row in results]
        bound = BOUNDS[case][peer]
        ratios[peer] = {"rate": statistics.median(rates), "first": statistics.median(first), "bound": bound}
        spread = f"{min(rates):.2f} to {max(rates):.2f}"
        print(f"  rate {ratios[peer]['rate']:.2f} times {peer}'s ({spread}), first {ratios[peer]['first']:.2f} times")
    return {"sides": medians, "ratios": ratios, "rounds": [{s: asdict(r) for s, r in row.items()} for row in results]}


def start_sides(stack: ExitStack, folder: Path, chosen: argparse.Namespace, name: str, path: Path) -> list[Any]:
    """Start our server on the model `name` and the peers that were asked for on its file."""
    sides = [stack.enter_context(start_own(folder, name))]
    if chosen.peer_python:
        own = () if name == "demo" else ("--chat_format", "llama-2", "--n_ctx", "1024")
        sides.append(stack.enter_context(start_peer(folder, chosen.peer_python, path, chosen.threads, *own)))
    if chosen.llama_server:
        own = () if chosen.model or name == "demo" else ("--jinja", "--chat-template", CHAT_TEMPLATE)
        sides.append(stack.enter_context(start_llama_server(folder, chosen.llama_server, path, *own)))
    return sides


def run_overhead(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Run the case `overhead`."""
    with ExitStack() as stack:
        sides = start_sides(stack, folder, chosen, "demo", find_model("demo"))
        results = compare(sides, lambda side: ask_one_token(side, chosen.seconds), chosen.rounds)
    return {"overhead": report("overhead", "overhead, 16 clients", "requests", results)}


def run_chats(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Run the case `chats` with each number of clients."""
    model = chosen.model or MODELS / f"{SHAPE}-{RECIPE}.gguf"
    if not model.exists():
        model.parent.mkdir(parents=True, exist_ok=True)
        write_model(model, SHAPES[SHAPE], RECIPE, 0, show_progress)
    changes = Changes() if chosen.model else Changes(template=CHAT_TEMPLATE)
    open_registry(resolve({"models_folder": folder / "models"})).import_file(model, CHAT_NAME, changes)
    figures = {}
    with ExitStack() as stack:
        sides = start_sides(stack, folder, chosen, CHAT_NAME, model)
        for clients in chosen.clients:
            turn = functools.partial(chat_at_once, clients=clients, tokens=chosen.tokens)
            results = compare(sides, turn, chosen.chat_rounds)
            label = f"chats, {clients} client{'s' if clients > 1 else ''}"
            figures[label] = report("chats", label, "tokens", results)
    return figures


CASES = {"overhead": run_overhead, "chats": run_chats}


def main() -> int:
    """Run the cases that the command line asks for; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's own server, a program")
    parser.add_argument("--peer-python", type=Path, help="an interpreter that has llama-cpp-python[server]")
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of llama_cpp.server")
    parser.add_argument("--rounds", type=int, default=4, help="of overhead")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn of overhead")
    parser.add_argument("--chat-rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64], help="of the chats")
    parser.add_argument("--tokens", type=int, default=48, help="of each chat")
    parser.add_argument("--model", type=Path, help="a chat model in GGUF instead of the one with random weights")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, run in CASES.items():
            if chosen.only in (None, name):
                figures |= run(Path(folder), chosen)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")
    missed = [
        f"{label}: {ratio['rate']:.2f} times {peer}'s rate, wanted {ratio['bound']}"
        for label, row in figures.items()
        for peer, ratio in row["ratios"].items()
        if ratio["rate"] < ratio["bound"]
    ]
    for line in missed:
        print(f"MISSED: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
