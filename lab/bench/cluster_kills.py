"""A cluster under load whose replicas are killed: no answer may be lost, and none may differ.

    python lab/bench/cluster_kills.py    # 3 replicas, 256 streams, 2 minutes, a kill every 20 s
    python lab/bench/cluster_kills.py --streams 32 --seconds 45 --every 10 --json FILE

A single server answers a list of requests first, one after another. Then as many clients as `--streams` ask a cluster
for the same, in all dialects, greedy and drawn, each the next one as soon as its answer is complete, and one replica
after another is killed (SIGKILL), each time another one. All lines of every answer are compared with those of the
single server, byte for byte but for ids, times and the tokens that a cache had. An answer that ends with an error, or
does not end, is lost. Ends with exit code 1 when an answer is lost or differs, when none had to move to another
replica, or when a killed replica is not replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_process import ClusterProcess
from http_client import Connection
from server_process import start_own

REQUESTS = 30
SILENT_S = 120.0  # after so long without a line an answer counts as lost
QUESTIONS = ("What does os.path.join do?", "What is json.dumps?", "How do I read a file?", "What does shutil.copy do?")
SETTINGS = ("--threads", "1", "--arena-bytes", "128M", "--max-sequences", "64", "--drain-s", "10")
VARIES = re.compile("id|.*_id|created.*|completed_at|timings|.*_duration|.*cache.*|prompt_eval_count")
MOVED = r'mlxr_cluster_requests_total\{reason="continued"'
Body = dict[str, Any]


@dataclass
class Tally:
    """What came of the load. `silences_s` are the longest waits for a line, one for each answer."""

    answers: int = 0
    lines: int = 0
    different: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    silences_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)  # from each kill until all replicas take requests
    never_back: int = 0


def make_request(number: int) -> tuple[str, Body]:
    """One of `REQUESTS` streams: path and body. Every third is greedy, some have beginnings in common."""
    messages = [
        {"role": "system", "content": "You know the Python standard library. " * (1 + number % 3)},
        {"role": "user", "content": f"{QUESTIONS[number % 4]} Tell me all {number}."},
    ]
    tokens = 24 + number % 7 * 32
    drawn = {"temperature": 1.0, "seed": number} if number % 3 else {"temperature": 0.0}
    common = {"model": "demo", "stream": True, **drawn}
    match number % 5:
        case 0:
            return "/v1/completions", {**common, "prompt": f"{number} import os\n", "max_tokens": tokens, **ENDLESS}
        case 1:
            options = {"num_predict": tokens, **drawn, **ENDLESS}
            return "/api/chat", {"model": "demo", "messages": messages, "options": options}
        case 2:
            return "/v1/messages", {**common, "messages": messages[1:], "max_tokens": tokens}
        case 3:
            return "/v1/responses", {**common, "input": messages[1]["content"], "max_output_tokens": tokens}
        case _:
            several = {"n": 2, "logprobs": True, "stream_options": {"include_usage": True}}
            return "/v1/chat/completions", {**common, "messages": messages, "max_tokens": tokens, **several, **ENDLESS}


ENDLESS: Body = {"ignore_eos": True}  # where a dialect has a field for it


def strip_line(line: bytes) -> bytes:
    """A line of a stream without what differs between any two answers; raises RuntimeError for an error."""
    head, text = (b"data: ", line[6:]) if line.startswith(b"data: ") else (b"", line)
    if not text.startswith(b"{"):
        return line
    value = json.loads(text)
    if value.get("error") is not None or value.get("type") in ("error", "response.failed"):
        raise RuntimeError(line.decode())
    return head + json.dumps(_drop_varying(value), separators=(",", ":")).encode()


def _drop_varying(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _drop_varying(part) for name, part in value.items() if not VARIES.fullmatch(name)}
    return list(map(_drop_varying, value)) if isinstance(value, list) else value


async def ask(connection: Connection, number: int, tally: Tally) -> list[bytes]:
    """All lines of an answer."""
    lines: list[bytes] = []
    longest_s, start_s = 0.0, time.perf_counter()
    stream = connection.stream_lines(*make_request(number))
    try:
        last_s = start_s
        while True:
            async with asyncio.timeout(SILENT_S):
                line = await anext(stream, None)
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s) if lines else 0.0, now_s
            if line is None:
                break
            if not line or line.startswith(b":"):  # a comment keeps a connection alive
                continue
            if not lines:
                tally.first_s.append(now_s - start_s)
            lines.append(strip_line(line))
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
    tally.silences_s.append(longest_s)
    return sort_answers(lines)


def sort_answers(lines: list[bytes]) -> list[bytes]:
    """Lines of several answers in one stream, answer by answer, as they may take turns in any order."""
    return sorted(lines, key=_find_index)


def _find_index(line: bytes) -> int:
    found = re.search(rb'"choices":\[\{"index":(\d+)', line)
    return int(found[1]) if found else 1 << 20 if line.startswith(b"data: ") else 0


async def live(client: int, port: int, alone: Sequence[list[bytes]], end_s: float, tally: Tally) -> None:
    """One client: request after request until the time is over."""
    draw = random.Random(client)
    connection = Connection("127.0.0.1", port)
    while time.monotonic() < end_s:
        number = draw.randrange(REQUESTS)
        try:
            lines = await ask(connection, number, tally)
        except Exception as error:
            tally.lost.append(f"request {number}: {type(error).__name__}: {error}")
            connection.close()
            continue
        tally.answers += 1
        tally.lines += len(lines)
        if lines != alone[number]:
            tally.different.append(describe_difference(number, lines, alone[number]))
    connection.close()


def describe_difference(number: int, lines: list[bytes], expected: list[bytes]) -> str:
    """Where an answer is first another one."""
    at = next((at for at, pair in enumerate(zip(lines, expected, strict=False)) if pair[0] != pair[1]), -1)
    if at < 0:
        return f"request {number}: {len(lines)} lines instead of {len(expected)}"
    return f"request {number}, line {at} of {len(expected)}: {lines[at]!r} instead of {expected[at]!r}"


async def kill_on(cluster: ClusterProcess, chosen: argparse.Namespace, end_s: float, tally: Tally) -> None:
    """Kill one replica after another while the time is not over, and wait for each to be replaced."""
    next_s = time.monotonic() + chosen.every
    while next_s < end_s:
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        next_s += chosen.every
        victim, start_s = cluster.find_replicas()[0], time.monotonic()  # the oldest, as their numbers grow
        os.kill(victim, signal.SIGKILL)
        while not await is_replaced(cluster, victim, chosen.replicas):
            if time.monotonic() > start_s + SILENT_S:
                tally.never_back += 1
                return
            await asyncio.sleep(0.1)
        tally.back_s.append(time.monotonic() - start_s)
        print(f"killed {victim}; all are back after {tally.back_s[-1]:.1f} s", file=sys.stderr)


async def is_replaced(cluster: ClusterProcess, victim: int, replicas: int) -> bool:
    """Whether as many replicas as before run, and take requests, without the one that was killed."""
    running = cluster.find_replicas()
    if victim in running or len(running) < replicas:
        return False
    return await asyncio.to_thread(cluster.count_replicas) == replicas


async def ask_alone(port: int) -> list[list[bytes]]:
    """The lines of all requests, one after another."""
    connection = Connection("127.0.0.1", port)
    try:
        return [await ask(connection, number, Tally()) for number in range(REQUESTS)]
    finally:
        connection.close()


async def load(cluster: ClusterProcess, alone: Sequence[list[bytes]], chosen: argparse.Namespace) -> Tally:
    """All clients and all kills."""
    tally, end_s = Tally(), time.monotonic() + chosen.seconds
    killing = kill_on(cluster, chosen, end_s, tally)
    clients = (live(client, cluster.port, alone, end_s, tally) for client in range(chosen.streams))
    await asyncio.gather(killing, *clients)
    return tally


def summarise(tally: Tally, moved: int, seconds: float) -> dict[str, float]:
    """The figures to be shown."""
    first_s, silences_s = sorted(tally.first_s), sorted(tally.silences_s)
    return {
        "answers": tally.answers,
        "moved": moved,
        "different": len(tally.different),
        "lost": len(tally.lost),
        "kills": len(tally.back_s) + tally.never_back,
        "lines per second": tally.lines / seconds,
        "first line, median (s)": first_s[len(first_s) // 2],
        "first line, p99 (s)": first_s[len(first_s) * 99 // 100],
        "longest silence, median (s)": silences_s[len(silences_s) // 2],
        "longest silence, worst (s)": silences_s[-1],
        "all replicas back, worst (s)": max(tally.back_s, default=0.0),
    }


def judge(tally: Tally, moved: int) -> list[str]:
    """What is wrong."""
    wrong = [*tally.lost[:8], *tally.different[:8]]
    if not tally.answers:
        wrong.append("there is no answer")
    if not moved:
        wrong.append("no answer had to move, so nothing is proved")
    if tally.never_back:
        wrong.append(f"a killed replica was not replaced within {SILENT_S:g} s")
    return wrong


def main() -> int:
    """Run what the command line asks for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=20.0, metavar="SECONDS", help="between two kills")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with start_own(folder, "demo", *SETTINGS) as server:
            alone = asyncio.run(ask_alone(server.port))
        with ClusterProcess(folder, "demo", chosen.replicas, SETTINGS) as cluster:
            tally = asyncio.run(load(cluster, alone, chosen))
            moved = int(sum(cluster.count(MOVED)))
    figures = summarise(tally, moved, chosen.seconds)
    for title, value in figures.items():
        print(f"{title:32}{value:10.0f}" if isinstance(value, int) else f"{title:32}{value:10.2f}")
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")
    wrong = judge(tally, moved)
    for line in wrong:
        print(f"WRONG: {line[:600]}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
