"""What watching the engine costs: decode speed of a server with and without a watcher of `/v1/admin/live`, in turns.

    python lab/bench/live.py [MODEL ...] [--batch 1 8] [--tokens 192] [--pairs 20] [--watchers 1] [--threads N]

A pair is two rounds right after one another, one of them watched, in random order. In a round `batch` requests decode
`tokens` tokens side by side; the server's own clock tells how long that took. The cost of a pair is how much longer the
watched round took; what counts is the median over all pairs, with the interval that holds it at 95 %. Beside it stands
the same for the processor time of the server, which other programs on the machine disturb less; with `--threads 1` no
thread of it waits for another. The watcher reads everything and does nothing with it. Exit code 1 if watching costs 2 %
or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from http_client import Connection
from server_process import ServerProcess, start_own

MAX_COST = 0.02
RESAMPLES = 2000
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Share:
    """The median of the pairs' costs, and where it lies with 95 %."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:+.2%} ({self.low:+.2%} to {self.high:+.2%})"


@dataclass(frozen=True)
class Round:
    """Milliseconds that decoding took, and seconds of processor time that the server used meanwhile."""

    decode_ms: float
    processor_s: float


@dataclass(frozen=True)
class Cost:
    """What watching costs with one model and batch, as shares of the time that is taken without."""

    model: str
    batch: int
    ms_per_token: float
    time: Share
    processor_time: Share
    watched_bytes: int


class Bench:
    """One server and its clients."""

    def __init__(self, server: ServerProcess, tokens: int, draw: random.Random) -> None:
        self._server, self._port, self._tokens, self._draw = server, server.port, tokens, draw
        self.watched_bytes = 0

    async def measure(self, batch: int, pairs: int, watchers: int) -> tuple[list[Round], list[Round]]:
        """Each round without and with watchers, pair by pair."""
        plain: list[Round] = []
        watched: list[Round] = []
        await self._run(batch)
        for _ in range(pairs):
            for is_watched in self._draw.sample([False, True], 2):
                async with AsyncExitStack() as stack:
                    for _ in range(watchers if is_watched else 0):
                        await stack.enter_async_context(self._watch())
                    (watched if is_watched else plain).append(await self._run(batch))
        return plain, watched

    async def _run(self, batch: int) -> Round:
        start_s = self._server.read_processor_s()
        times = await asyncio.gather(*map(self._ask, range(batch)))
        return Round(statistics.mean(times), self._server.read_processor_s() - start_s)

    async def _ask(self, number: int) -> float:
        connection = Connection(HOST, self._port)
        body = {"prompt": f"{number}. The module offers", "n_predict": self._tokens, "ignore_eos": True}
        answer, _ = await connection.post("/completion", {**body, "temperature": 0})
        connection.close()
        timings = answer["timings"]
        if timings["predicted_n"] != self._tokens:
            raise SystemExit(f"an answer has {timings['predicted_n']} tokens instead of {self._tokens}")
        return float(timings["predicted_ms"])

    @asynccontextmanager
    async def _watch(self) -> AsyncIterator[None]:
        """A watcher that has its snapshot already."""
        reader, writer = await asyncio.open_connection(HOST, self._port)
        writer.write(f"GET /v1/admin/live HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        await reader.readuntil(b"event: snapshot\n")
        reading = asyncio.create_task(self._read(reader))
        try:
            yield
        finally:
            reading.cancel()
            writer.transport.abort()
            await asyncio.sleep(0.3)  # so that the server has noticed before the next round

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1 << 16):
            self.watched_bytes += len(data)


def compare(watched: Sequence[float], plain: Sequence[float], draw: random.Random) -> Share:
    """How much more the watched rounds took; the interval comes from drawing the pairs anew."""
    costs = [one / other - 1 for one, other in zip(watched, plain, strict=True)]
    medians = sorted(statistics.median(draw.choices(costs, k=len(costs))) for _ in range(RESAMPLES))
    return Share(statistics.median(costs), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)])


def measure_model(model: str, args: argparse.Namespace) -> list[Cost]:
    """The costs for each batch."""
    draw, costs = random.Random(0), []
    flags = [] if args.threads is None else ["--threads", str(args.threads)]
    with tempfile.TemporaryDirectory() as folder, start_own(Path(folder), model, *flags) as server:
        for batch in args.batch:
            bench = Bench(server, args.tokens, draw)
            plain, watched = asyncio.run(bench.measure(batch, args.pairs, args.watchers))
            cost = Cost(
                Path(model).stem,
                batch,
                statistics.median(one.decode_ms for one in plain) / (args.tokens - 1),
                compare([one.decode_ms for one in watched], [one.decode_ms for one in plain], draw),
                compare([one.processor_s for one in watched], [one.processor_s for one in plain], draw),
                bench.watched_bytes // args.pairs,
            )
            print(
                f"{cost.model}, batch {batch}, {cost.ms_per_token:.2f} ms per token: watching costs {cost.time} of the "
                f"time, {cost.processor_time} of processor time; {cost.watched_bytes} bytes per round",
                flush=True,
            )
            costs.append(cost)
    return costs


def main() -> int:
    """Measure all models; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["demo"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--watchers", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    costs = [cost for model in args.models for cost in measure_model(model, args)]
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")
    return int(any(cost.time.median >= MAX_COST for cost in costs))


if __name__ == "__main__":
    sys.exit(main())
