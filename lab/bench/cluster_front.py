"""Measure what a request and a piece of an answer cost a cluster's front and Ray Serve's proxy, both one process each.

    python lab/bench/cluster_front.py [--replicas 2] [--requests 600] [--streams 64] [--json FILE]

Requests for one token with a short prompt, and then streams of many tokens, so many at once. Beside what came through
in a second, where all processes share the machine, it tells the processor time of both processes for each request and
for each piece, and the number of requests per second that would fill one core with that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from cluster_process import ClusterProcess, list_descendants, read_title
from http_client import Connection

PROCESSES = {"front": b"ServeReplica:mlxr:Front", "proxy": b"ProxyActor"}
PROMPT = "Once upon a time there was a very small computer that liked to read. " * 2
FLAGS = ("--threads", "1", "--arena-bytes", "128M", "--max-sequences", "64")
Work = Callable[[Connection, int], Coroutine[Any, Any, int]]


def read_processor_s(process: int) -> float:
    """Processor time that all threads of a process have used."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{process}/task").glob("*/schedstat")) / 1e9


async def ask_one(connection: Connection, number: int) -> int:
    """A request for one token."""
    await connection.post("/completion", {"prompt": f"{number} {PROMPT}", "n_predict": 1, "temperature": 0})
    return 1


async def ask_stream(connection: Connection, number: int, tokens: int = 128) -> int:
    """A stream of tokens; the number of its pieces."""
    body = {"prompt": f"{number} {PROMPT}", "n_predict": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return sum([1 async for _ in connection.stream("/completion", body)])


async def do_all(port: int, work: Work, count: int, at_once: int) -> int:
    """`count` times `work`, so many at once; the sum of what they tell."""
    left, done = iter(range(count)), 0

    async def do_some() -> None:
        nonlocal done
        connection = Connection("127.0.0.1", port)
        for number in left:
            pieces = await work(connection, number)
            done += pieces
        connection.close()

    await asyncio.gather(*(do_some() for _ in range(at_once)))
    return done


def measure(
    cluster: ClusterProcess, processes: dict[str, int], work: Work, count: int, at_once: int
) -> dict[str, float]:
    """Pieces per second, and milliseconds of each process for a piece."""
    before = {name: read_processor_s(process) for name, process in processes.items()}
    start_s = time.monotonic()
    done = asyncio.run(do_all(cluster.port, work, count, at_once))
    seconds = time.monotonic() - start_s
    used = {name: read_processor_s(process) - before[name] for name, process in processes.items()}
    return {"per second": done / seconds, **{f"{name} (ms)": 1000 * used[name] / done for name in used}}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        ClusterProcess(Path(name), "demo", chosen.replicas, FLAGS) as cluster,
    ):
        titles = {process: read_title(process) for process in list_descendants(cluster.process.pid)}
        processes = {
            name: next(process for process, title in titles.items() if part in title)
            for name, part in PROCESSES.items()
        }
        measure(cluster, processes, ask_one, 50, chosen.at_once)  # what happens once
        rows = {
            "requests": measure(cluster, processes, ask_one, chosen.requests, chosen.at_once),
            "pieces of streams": measure(cluster, processes, ask_stream, chosen.streams, chosen.at_once),
        }
    for title, row in rows.items():
        print(f"{title:20}" + "".join(f"  {name} {value:.2f}" for name, value in row.items()))
        for process in processes:
            print(f"{'':20}  {process} alone, on one core: {1000 / row[f'{process} (ms)']:.0f} per second")
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
