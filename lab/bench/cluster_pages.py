"""What it costs to fetch the pages of a prompt from another replica, and what it saves: two replicas on this machine.

    python lab/bench/cluster_pages.py MODEL [--tokens 512 1024 2048] [--rounds 3] [--threads 1] [--json FILE]

For each length one replica computes a prompt, and the other one answers it twice: one that it must compute whole, and
one whose pages it fetches. Both run in this process, with `--threads` each, and talk over the loopback. Seconds are
those to the whole reply of one token, measured by the client; bytes and seconds of the fetch are the replica's metrics.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from mlxr.cluster.page_transfer import PEER, TOKEN
from mlxr.cluster.replica import Replica, Reply, Report
from mlxr.core.settings import resolve

SECRET = "of this measurement"


async def send(_: Report) -> Reply:
    """A front that hears all and says the token."""
    return Reply(wants_whole=False, token=SECRET)


def start(model: str, threads: int, folder: str, name: str) -> Replica:
    """A replica that is ready."""
    given = {"default_model": model, "threads": threads, "port": 0, "models_folder": folder, "arena_bytes": "1G"}
    replica = Replica(resolve({**given, "fetch_timeout_s": 60.0, "drain_s": 0.0}, {}), name, send)
    replica.wait_ready()
    while replica._server.report is None:
        time.sleep(0.05)
    time.sleep(0.5)
    return replica


def ask(replica: Replica, prompt: list[int], peer: str | None = None) -> tuple[float, int, str]:
    """Seconds, cached tokens and the answer."""
    headers = {} if peer is None else {PEER.decode(): peer, TOKEN.decode(): SECRET}
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    start_s = time.perf_counter()
    reply = httpx.post(f"{replica.url}/v1/completions", json=body, headers=headers, timeout=600).json()
    seconds = time.perf_counter() - start_s
    cached = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return seconds, cached, reply["choices"][0]["text"]


def read_counts(replica: Replica) -> tuple[float, float]:
    """Bytes fetched and seconds waited for them so far."""
    text = httpx.get(f"{replica.url}/metrics").text
    found = [re.search(rf"^mlxr_{name}_total (.+)$", text, re.MULTILINE) for name in ("fetched_bytes", "fetch_seconds")]
    size, seconds = (float(match[1]) if match else 0.0 for match in found)
    return size, seconds


def measure(first: Replica, second: Replica, tokens: int, rounds: int) -> dict[str, Any]:
    """Medians over the rounds for prompts of one length."""
    computed, fetched, sizes, waits = [], [], [], []
    for number in range(rounds):
        chance = random.Random(tokens * 1000 + number)
        there, here = ([chance.randrange(10, 500) for _ in range(tokens)] for _ in range(2))
        _, _, expected = ask(first, there)
        computed.append(ask(second, here)[0])
        before = read_counts(second)
        seconds, cached, text = ask(second, there, first.url)
        after = read_counts(second)
        if text != expected or cached < tokens - 64:
            raise SystemExit(f"{cached} of {tokens} tokens were fetched, and the answer is {text!r}, not {expected!r}")
        fetched.append(seconds)
        sizes.append(after[0] - before[0])
        waits.append(after[1] - before[1])
    return {
        "tokens": tokens,
        "computed_s": statistics.median(computed),
        "fetched_s": statistics.median(fetched),
        "bytes": statistics.median(sizes),
        "fetch_s": statistics.median(waits),
        "bytes_per_s": statistics.median(size / wait for size, wait in zip(sizes, waits, strict=True)),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        replicas = [start(given.model, given.threads, folder, name) for name in ("a", "b")]
        measure(replicas[0], replicas[1], 128, 1)
        results = [measure(replicas[0], replicas[1], tokens, given.rounds) for tokens in given.tokens]
        for replica in replicas:
            replica._server.should_exit = True
            replica._thread.join()
    print("| tokens | computed | fetched | of it the fetch | MB | MB/s |\n|---:|---:|---:|---:|---:|---:|")
    for row in results:
        print(
            f"| {row['tokens']:,} | {row['computed_s']:.3f} s | {row['fetched_s']:.3f} s | {row['fetch_s']:.3f} s "
            f"| {row['bytes'] / 1e6:.1f} | {row['bytes_per_s'] / 1e6:.0f} |"
        )
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
