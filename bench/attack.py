"""A server under attack, and what another client notices of it.

    python bench/attack.py                                     # 500 templates, 300 schemas, 80 floods, 200 connections
    python bench/attack.py --templates 20 --schemas 20 --floods 8 --connections 20 --json FILE

One client reads a streamed answer over and over, first alone and then while others send what `hostile` makes: chat
templates that never end, schemas that no machine can compile, prompts of megabytes, requests that are never finished.
Compared are the 99th percentiles of the time between two tokens. At the end memory must have come back, no request may
have been answered with an internal error, and SIGTERM must end the server within its drain time, in the middle of all
that. Ends with exit code 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from hostile import make_flood, make_schema, make_template
from http_client import Connection, Refused
from server_process import ServerProcess, start_own

AT_ONCE = 4
DRAIN_S = 5.0
MAX_DELAY_S = 0.1
MAX_GROWTH_BYTES = 200 * 2**20
ANSWER_TOKENS = 48
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALVES = (
    b"",
    b"POST /v1",
    HEAD,
    HEAD + b"Content-Length: 100\r\n\r\n{",
    HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\n',
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffff\r\n",
)
Attack = Callable[[int], Awaitable[str]]


def watch(port: int, is_over: Event, found: Queue[list[float]]) -> None:
    """Read answers until told to stop, in a process of its own; put the times between their tokens into `found`."""

    async def read() -> list[float]:
        gaps: list[float] = []
        connection, turn = Connection("127.0.0.1", port), 0
        while not is_over.is_set():
            turn += 1
            body = {"prompt": f"import os  # {turn}\n", "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True}
            last_s = time.perf_counter()
            async for _ in connection.stream("/v1/completions", body):
                now_s = time.perf_counter()
                gaps.append(now_s - last_s)
                last_s = now_s
            await asyncio.sleep(0.02)
        connection.close()
        return gaps

    found.put(asyncio.run(read()))


class Watcher:
    """The other client, for as long as the context lasts; then `gaps_s` are its times between two tokens, in order."""

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._is_over, self._found = context.Event(), context.Queue()
        self._process = context.Process(target=watch, args=(port, self._is_over, self._found))
        self.gaps_s: list[float] = []

    def __enter__(self) -> Watcher:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.gaps_s = sorted(self._found.get(timeout=60))
        self._process.join()

    @property
    def p99_s(self) -> float:
        """The 99th percentile of the gaps between two tokens, in seconds."""
        return self.gaps_s[int(len(self.gaps_s) * 0.99)]


async def post(port: int, path: str, body: dict[str, Any]) -> str:
    """The status of an answer, as a word."""
    connection = Connection("127.0.0.1", port)
    try:
        await connection.post(path, body)
        return "200"
    except Refused as refusal:
        return str(refusal).partition(":")[0]
    except (ConnectionError, asyncio.IncompleteReadError):
        return "closed"
    finally:
        connection.close()


def make_attacks(port: int) -> dict[str, Attack]:
    """Return what is done with attempt number `index`, by the kind of attack; each gives the status it got."""

    async def template(index: int) -> str:
        made = {"model": f"t{index}", "from": "demo", "template": make_template(index), "stream": False}
        status = await post(port, "/api/create", made)
        if status != "200":
            return status
        messages = [{"role": "user", "content": "Hi"}]
        chat = {"model": f"t{index}", "messages": messages, "stream": False, "options": {"num_predict": 4}}
        return await post(port, "/api/chat", {**chat, "keep_alive": 0})  # its memory comes back at once

    async def schema(index: int) -> str:
        wanted = {"type": "json_schema", "json_schema": {"name": "hostile", "schema": make_schema(index)}}
        messages = [{"role": "user", "content": "Hi"}]
        return await post(
            port, "/v1/chat/completions", {"messages": messages, "response_format": wanted, "max_tokens": 16}
        )

    async def flood(index: int) -> str:
        return await post(port, *make_flood(index))

    async def connection(index: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HALVES[index % len(HALVES)])
        try:
            async with asyncio.timeout(10):
                reply = await reader.read(64)
        except (TimeoutError, ConnectionError):
            return "open"
        finally:
            writer.transport.abort()
        return reply.split(b" ")[1].decode() if b" " in reply else "closed"

    return {"templates": template, "schemas": schema, "floods": flood, "connections": connection}


async def run_attack(attack: Attack, attempts: int, at_once: int) -> Counter[str]:
    """Statuses of all attempts, of which so many are under way together."""
    room, statuses = asyncio.Semaphore(at_once), Counter[str]()

    async def attempt(index: int) -> None:
        async with room:
            statuses[await attack(index)] += 1

    await asyncio.gather(*map(attempt, range(attempts)))
    return statuses


def read_resident_bytes(server: ServerProcess) -> int:
    """Memory of the server's process."""
    lines = server.read("/metrics").splitlines()
    return int(float(next(line for line in lines if line.startswith("mlxr_process_resident_bytes ")).split()[1]))


async def end_in_the_middle(server: ServerProcess, attacks: dict[str, Attack]) -> float:
    """Seconds from SIGTERM, while attacks of every kind are under way, until the process has ended."""
    tasks = [asyncio.create_task(attacks[kind](index)) for index in range(6) for kind in attacks]
    await asyncio.sleep(1.0)
    start_s = time.monotonic()
    await asyncio.to_thread(server.__exit__, None, None, None)
    seconds = time.monotonic() - start_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return seconds


def run(server: ServerProcess, chosen: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The figures, and which bounds were missed."""
    attacks = make_attacks(server.port)
    for warming in (4, 5):  # these fill the cache, whose memory is the server's from then on
        asyncio.run(post(server.port, *make_flood(warming)))
    with Watcher(server.port) as alone:
        time.sleep(chosen.seconds)
    start_bytes = read_resident_bytes(server)
    figures: dict[str, Any] = {"alone_p99_s": alone.p99_s, "start_bytes": start_bytes}
    missed: list[str] = []
    for kind, attack in attacks.items():
        at_once = 50 if kind == "connections" else AT_ONCE
        start_s = time.monotonic()
        with Watcher(server.port) as watcher:
            statuses = asyncio.run(run_attack(attack, getattr(chosen, kind), at_once))
        row = {"p99_s": watcher.p99_s, "max_s": watcher.gaps_s[-1], "statuses": dict(sorted(statuses.items()))}
        grown_bytes = read_resident_bytes(server) - start_bytes
        figures[kind] = {**row, "seconds": time.monotonic() - start_s, "growth_bytes": grown_bytes}
        times = f"p99 {row['p99_s'] * 1000:.0f} ms, longest {row['max_s'] * 1000:.0f} ms"
        print(f"{kind}: {times}, {grown_bytes >> 20:+} MiB, {row['statuses']}", flush=True)
        if watcher.p99_s > alone.p99_s + MAX_DELAY_S:
            missed.append(f"{kind}: p99 {watcher.p99_s:.3f} s between two tokens, alone {alone.p99_s:.3f}")
        broken = [status for status in statuses if status.startswith("5") and status != "503"]
        if broken or statuses["open"]:
            missed.append(f"{kind}: {statuses}")
    figures["growth_bytes"] = read_resident_bytes(server) - start_bytes
    if figures["growth_bytes"] > MAX_GROWTH_BYTES:
        missed.append(f"memory grew by {figures['growth_bytes'] >> 20} MiB")
    figures["end_s"] = asyncio.run(end_in_the_middle(server, attacks))
    if figures["end_s"] > DRAIN_S + 2:
        missed.append(f"SIGTERM took {figures['end_s']:.1f} s, the drain time is {DRAIN_S:g} s")
    return figures, missed


def main() -> int:
    """Run the attacks that the command line asks for; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", type=int, default=500)
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--floods", type=int, default=80)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0, help="that the other client is alone first")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    flags = ("--pinned-models", "demo", "--arena-bytes", "128M", "--request-timeout-s", "3", "--drain-s", str(DRAIN_S))
    with tempfile.TemporaryDirectory() as folder, start_own(Path(folder), "demo", *flags) as server:
        figures, missed = run(server, chosen)
    text = json.dumps(figures, indent=2)
    print(text)
    if chosen.json:
        chosen.json.write_text(text + "\n")
    for line in missed:
        print(f"MISSED: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
