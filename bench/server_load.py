"""Puts the server under load: hundreds of streaming clients, a quarter of which leave at random moments.

    python bench/server_load.py                                    # 256 clients for 2 minutes, the demo model
    python bench/server_load.py --clients 64 --seconds 20 --json FILE

Every answer is compared with that of the same request alone: text, tokens and their number, so none may be lost or come
twice. From the server's own metrics: memory after the warm-up against memory at the end, lag of its event loop, and
pages, which must all be free again. Ends with exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from http_client import Connection
from server_process import ServerProcess, start_own

REQUESTS = 24
WARM_SHARE = 0.25  # of the time; then memory counts as warm
MAX_GROWTH_BYTES = 24 * 2**20
MAX_LAG_S = 0.05
LAG_SHARE = 0.99
LAG = "mlxr_event_loop_lag_seconds"
QUESTIONS = ("What does os.path.join do?", "What is json.dumps?", "How do I read a file?", "What does shutil.copy do?")
Answer = tuple[str, tuple[str, ...], int]
Numbers = dict[str, float]


@dataclass
class Tally:
    """The results of the load."""

    answers: int = 0
    left: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)


def make_body(number: int) -> dict[str, Any]:
    """One of `REQUESTS` requests: greedy and drawn, short and long, some with a beginning in common."""
    return {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "You know the Python standard library. " * (1 + number % 3)},
            {"role": "user", "content": QUESTIONS[number % 4]},
        ],
        "max_tokens": 16 + number % 7 * 12,
        "temperature": 0.0 if number % 3 else 1.0,
        "seed": number,
        "logprobs": True,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(connection: Connection, number: int, leave_after: int | None, tally: Tally) -> Answer | None:
    """Return one answer, None if the client left after so many events."""
    texts: list[str] = []
    tokens: list[str] = []
    counted = events = 0
    start_s = time.perf_counter()
    stream = connection.stream("/v1/chat/completions", make_body(number))
    try:
        async for event in stream:
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            events += 1
            if events == 2:
                tally.first_s.append(time.perf_counter() - start_s)
            if leave_after is not None and events > leave_after:
                return None
            for choice in event["choices"]:
                texts.append(choice["delta"].get("content") or "")
                tokens += [token["token"] for token in (choice["logprobs"] or {}).get("content") or []]
            counted = event["usage"]["completion_tokens"] if event.get("usage") else counted
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
    return "".join(texts), tuple(tokens), counted


async def live(client: int, server: ServerProcess, alone: list[Answer], end_s: float, tally: Tally) -> None:
    """Be one client: request after request until the time is over; every fourth leaves early, in different ways."""
    draw = random.Random(client)
    connection = Connection("127.0.0.1", server.port)
    while time.monotonic() < end_s:
        number = draw.randrange(REQUESTS)
        leave_after = draw.randrange(12) if client % 4 == 3 else None
        try:
            answer = await ask(connection, number, leave_after, tally)
        except Exception as error:
            tally.errors.append(f"client {client}: {type(error).__name__}: {error}")
            connection.close()
            continue
        if answer is None:
            tally.left += 1
            continue
        tally.answers += 1
        tally.tokens += answer[2]
        if answer != alone[number]:
            tally.wrong.append(f"request {number}: {answer} instead of {alone[number]}")
    connection.close()


def read_numbers(server: ServerProcess) -> Numbers:
    """The samples of /metrics, by name and labels in their written form."""
    rows = (line.rsplit(" ", 1) for line in server.read("/metrics").splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


async def watch(server: ServerProcess, samples: list[tuple[float, Numbers]], start_s: float) -> None:
    """Read the metrics every few seconds."""
    while True:
        numbers = await asyncio.to_thread(read_numbers, server)
        samples.append((time.monotonic() - start_s, numbers))
        await asyncio.sleep(2.5)


async def load(server: ServerProcess, clients: int, seconds: float) -> tuple[Tally, list[tuple[float, Numbers]]]:
    """Run the requests alone, then all clients."""
    tally, samples = Tally(), []  # type: ignore[var-annotated]
    connection = Connection("127.0.0.1", server.port)
    alone: list[Answer] = []
    for number in range(REQUESTS):
        answer = await ask(connection, number, None, Tally())
        assert answer is not None
        assert len(answer[1]) == answer[2] == make_body(number)["max_tokens"], answer
        alone.append(answer)
    connection.close()
    start_s = time.monotonic()
    watching = asyncio.create_task(watch(server, samples, start_s))
    await asyncio.gather(*(live(client, server, alone, start_s + seconds, tally) for client in range(clients)))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    for _ in range(100):  # the server notices the last ones to leave a moment later
        await asyncio.sleep(0.1)
        numbers = await asyncio.to_thread(read_numbers, server)
        if numbers["mlxr_requests_in_flight"] == 1:
            break
    samples.append((time.monotonic() - start_s, numbers))
    return tally, samples


def judge(tally: Tally, samples: list[tuple[float, Numbers]], seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Return the figures, and the bounds that were missed."""
    warm = next(numbers for at_s, numbers in samples if at_s >= WARM_SHARE * seconds)
    first, last = samples[0][1], samples[-1][1]
    resident = "mlxr_process_resident_bytes"
    growth_bytes = last[resident] - warm[resident]
    label = f"{MAX_LAG_S:g}" if MAX_LAG_S else ""
    beats = last[f"{LAG}_count"] - first[f"{LAG}_count"]
    in_time = last[f'{LAG}_bucket{{le="{label}"}}'] - first[f'{LAG}_bucket{{le="{label}"}}']
    used_pages = sum(value for name, value in last.items() if name.startswith("mlxr_pages") and 'state="used"' in name)
    first_s = sorted(tally.first_s)
    figures = {
        **{name: value for name, value in asdict(tally).items() if isinstance(value, int)},
        "tokens_per_s": tally.tokens / seconds,
        "first_token_s_median": first_s[len(first_s) // 2],
        "warm_bytes": warm[resident],
        "growth_bytes": growth_bytes,
        "lag_in_bound": in_time / beats,
        "lag_mean_s": (last[f"{LAG}_sum"] - first[f"{LAG}_sum"]) / beats,
        "used_pages": used_pages,
    }
    missed = [*tally.errors[:5], *tally.wrong[:5]]
    if growth_bytes > MAX_GROWTH_BYTES:
        missed.append(f"memory grew by {growth_bytes / 2**20:.0f} MiB after the warm-up")
    if in_time < LAG_SHARE * beats:
        missed.append(f"only {in_time / beats:.1%} of the loop's beats came within {MAX_LAG_S * 1000:g} ms")
    if used_pages or last["mlxr_requests_in_flight"] != 1:
        missed.append(f"{used_pages:.0f} pages and {last['mlxr_requests_in_flight']:.0f} requests are left")
    return figures, missed


def main() -> int:
    """Run the load that the command line asks for; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--arena-bytes", "128M", "--max-sequences", str(chosen.max_sequences))
        with start_own(Path(folder), "demo", *flags) as server:
            tally, samples = asyncio.run(load(server, chosen.clients, chosen.seconds))
    figures, missed = judge(tally, samples, chosen.seconds)
    print(json.dumps(figures, indent=2))
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")
    for line in missed:
        print(f"MISSED: {line[:400]}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
