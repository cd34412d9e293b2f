"""Our server and vLLM's own on one GPU, one after the other, under the same load.

    python bench/serving.py --case llama-8b-bf16 --case llama-8b-q4_k_m --vllm-site FOLDER --json FILE
    python bench/serving.py --case tiny-bf16 --device mlx-cpu --load 4x30+8 --seconds 2      # ours alone, without a GPU

Weights are random: ours lie in a GGUF file that is made if missing, vLLM makes its own (AWQ beside Q4_K_M). Prompts are
random token ids, none of which comes twice, so no prefix is found again; answers are greedy, streamed as text and have
exactly as many tokens as were asked for. Both servers run with their defaults, except vLLM's without FlashInfer's
sampler, and only one runs at a time.

`closed` loads: CLIENTSxPROMPT+ANSWER, all clients at once, each with its next request as soon as its last answer is
there; output tokens (of answers of one token: prompt tokens) in a second. The `open` load has the lengths of the first
closed one: requests come at random (Poisson) at `--share` of the requests in a second that vLLM, or without it ours,
took in the closed one, the same for both; percentiles of the time to the first token and between two pieces of text.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_comparison.cases import NAMES, OURS, VLLM, VLLM_4BIT
from gpu_comparison.machine import name_device
from gpu_comparison.vllm_folder import write_folder
from http_client import Connection, Refused
from mlxr.core.errors import MlxrError
from server_process import ServerProcess, start_own
from synthetic import SHAPES, Shape, write_model

DEFAULT_LOADS = ("64x500+200", "128x1000+100", "64x500+1", "1x2048+1")
START_S = 300.0
ANSWER_S = 120.0  # for one request; then a load is given up
IDLE_MIB = 2048
MODEL_NAME = "served"
Row = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """A load: the number of clients at once, and the tokens of their prompts and answers."""

    clients: int
    prompt: int
    answer: int

    @staticmethod
    def parse(text: str) -> Load:
        """Read a load in the form of the command line. Raises ValueError if it is none."""
        clients, _, rest = text.partition("x")
        prompt, _, answer = rest.partition("+")
        return Load(int(clients), int(prompt), int(answer))

    @property
    def name(self) -> str:
        """The load as text, in the form that `parse` reads."""
        return f"{self.clients}x{self.prompt}+{self.answer}"


@dataclass
class Heard:
    """The results of requests: seconds until the first piece of text and between two, tokens, and faults."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)


class Asker:
    """Asks one server for answers, never twice for the same prompt."""

    def __init__(self, server: ServerProcess, vocab_size: int, seed: int) -> None:
        self._port, self._vocab_size = server.port, vocab_size
        self._random = random.Random(seed)

    def connect(self) -> Connection:
        """A new connection."""
        return Connection("127.0.0.1", self._port)

    async def ask(self, connection: Connection, load: Load, heard: Heard) -> None:
        """Make one request from its first byte to its last."""
        body = {  # each server has one model, so no name is needed
            "prompt": self._random.choices(range(256, max(257, self._vocab_size - 256)), k=load.prompt),
            "max_tokens": load.answer,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start_s = time.perf_counter()
        times, last = [], b""
        async for line in connection.stream_lines("/v1/completions", body):
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                last = line
        usage = (json.loads(last[6:]).get("usage") or {}) if last else {}
        if usage.get("completion_tokens") != load.answer:
            heard.wrong.append(f"{usage.get('completion_tokens')} of {load.answer} tokens: {last[:200]!r}")
            return
        times.pop()  # the last event has counts and no text
        heard.tokens += load.answer
        heard.first_s.append(times[0] - start_s)
        heard.gaps_s += [b - a for a, b in itertools.pairwise(times)]

    async def try_to_ask(self, connection: Connection, load: Load, heard: Heard) -> None:
        """`ask`, but errors are noted in `heard`."""
        try:
            await asyncio.wait_for(self.ask(connection, load, heard), ANSWER_S)
        except (Refused, OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
            heard.wrong.append(f"{type(error).__name__}: {error}")
            connection.close()


async def run_closed(asker: Asker, load: Load, requests: int) -> tuple[Heard, float]:
    """Let all clients make so many requests each, one after the other; returns the results and the seconds."""
    heard = Heard()
    connections = [asker.connect() for _ in range(load.clients)]
    start_s = time.perf_counter()

    async def live(connection: Connection) -> None:
        for _ in range(requests):
            await asker.try_to_ask(connection, load, heard)
        connection.close()

    await asyncio.gather(*(live(connection) for connection in connections))
    return heard, time.perf_counter() - start_s


async def run_open(asker: Asker, load: Load, rate: float, seconds: float, seed: int) -> tuple[Heard, float]:
    """Make random requests, `rate` in a second, each on a connection of its own, and wait for all of them."""
    heard, generator = Heard(), random.Random(seed)
    waiting: set[asyncio.Task[None]] = set()
    start_s = due_s = time.perf_counter()

    async def live() -> None:
        connection = asker.connect()
        await asker.try_to_ask(connection, load, heard)
        connection.close()

    while (due_s := due_s + generator.expovariate(rate)) < start_s + seconds:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        waiting.add(asyncio.create_task(live()))
    await asyncio.gather(*waiting)
    return heard, time.perf_counter() - start_s


def find_share(values: list[float], share: float) -> float:
    """The value that a `share` of all values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def sum_up(heard: Heard, took_s: float, load: Load) -> Row:
    """The figures of a load."""
    counted = load.prompt * len(heard.first_s) if load.answer == 1 else heard.tokens
    row: Row = {
        "requests": len(heard.first_s),
        "requests_per_s": len(heard.first_s) / took_s,
        "tokens_per_s": counted / took_s,
        "pieces": len(heard.gaps_s) + len(heard.first_s),
        "wrong": heard.wrong[:5],
    }
    for name, values in (("first", heard.first_s), ("gap", heard.gaps_s)):
        row |= {f"{name}_p{share}_s": find_share(values, share / 100) for share in (50, 90, 99)}
    return row


def run_loads(server: ServerProcess, shape: Shape, given: argparse.Namespace, rate: float | None) -> Row:
    """Run all loads on one server. Without a rate the open load follows the server's own pace."""
    asker = Asker(server, shape.vocab_size, seed=time.time_ns() % 10**9)
    row: Row = {"closed": {}, "wrong": []}
    for load in given.load:
        asyncio.run(run_closed(asker, load, 1))  # warms up
        rounds = [sum_up(*asyncio.run(run_closed(asker, load, given.requests)), load) for _ in range(given.rounds)]
        figures = {key: statistics.median(one[key] for one in rounds) for key in rounds[0] if key != "wrong"}
        row["wrong"] += [text for one in rounds for text in one["wrong"]]
        row["closed"][load.name] = figures | {"rounds": [one["tokens_per_s"] for one in rounds]}
        print(
            f"  {load.name}: {figures['tokens_per_s']:,.0f} tokens/s, {row['closed'][load.name]['rounds']}", flush=True
        )
    first = given.load[0]
    if given.seconds > 0:
        rate = rate or given.share * row["closed"][first.name]["requests_per_s"]
        figures = sum_up(*asyncio.run(run_open(asker, first, rate, given.seconds, seed=1)), first)
        row["wrong"] += figures.pop("wrong")
        row["open"] = figures | {"load": first.name, "rate": rate, "share": given.share}
        told = ", ".join(
            f"{what} p{share} {1000 * figures[f'{key}_p{share}_s']:.1f} ms"
            for what, key in (("first", "first"), ("gap", "gap"))
            for share in (50, 99)
        )
        print(f"  open, {rate:.1f} requests/s: {told}", flush=True)
    return row


def make_file(folder: Path, name: str, type_name: str) -> Path:
    """Make our model's file; raises MlxrError if the disk has no room for it."""
    path = folder / f"{name}-{type_name}.gguf"
    if not path.exists():
        scratch = path.with_suffix(".part")
        write_model(scratch, SHAPES[name], type_name, 0, lambda *_: None)
        scratch.replace(path)
    return path


def start_vllm(folder: Path, model: Path, given: argparse.Namespace) -> ServerProcess:
    """Start vLLM's server with its defaults on a folder without weights."""
    command = [given.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL_NAME, "--load-format", "dummy", "--host", "127.0.0.1", "--port", "PORT"]
    environment = {
        "PYTHONPATH": str(given.vllm_site or ""),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    return ServerProcess(
        VLLM, [*command, *given.vllm_flag], "/health", folder / "vllm.log", environment, ready_s=START_S
    )


def measure(case: str, given: argparse.Namespace, folder: Path) -> list[Row]:
    """Measure vLLM, then ours, in this order, as the open load follows vLLM's pace."""
    name = next((name for name in NAMES if case.startswith(name + "-")), None)
    if name is None:
        raise MlxrError(f"{case!r} is no SHAPE-TYPE of {', '.join(NAMES)}")
    shape, type_name = SHAPES[NAMES[name]], case.removeprefix(f"{name}-")
    rows: list[Row] = []
    rate: float | None = None
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(make_file, given.folder or folder, NAMES[name], type_name)
        if given.vllm_site or given.vllm_python != sys.executable:
            engine = VLLM_4BIT if type_name == "q4_k_m" else VLLM
            model = write_folder(folder / "vllm" / case, shape, type_name, has_vocabulary=True)
            row = take_turn(engine, case, lambda: start_vllm(folder, model, given), shape, given, None, making.result)
            rows.append(row)
            rate = row.get("open", {}).get("rate")
        path = making.result()
    flags = [] if given.device is None else ["--device", given.device]
    start = lambda: start_own(folder, str(path), *flags, *given.flag, ready_s=START_S)  # noqa: E731
    rows.append(take_turn(OURS, case, start, shape, given, rate))
    if not given.keep:
        path.unlink()
    return rows


def take_turn(
    engine: str, case: str, start: Any, shape: Shape, given: argparse.Namespace, rate: float | None, wait: Any = None
) -> Row:
    """Run a server from its start to its end; the row reports a failure."""
    row: Row = {"model": case, "engine": engine}
    begun_s = time.monotonic()
    try:
        with start() as server:
            print(f"{engine} {case}: ready after {time.monotonic() - begun_s:.0f} s", flush=True)
            if wait is not None:
                wait()  # our file may be written during the start, but not during the measurement
            row |= run_loads(server, shape, given, rate)
    except (MlxrError, OSError, IndexError) as error:
        row["failed"] = f"{type(error).__name__}: {error}"
        print(f"{engine} {case}: {row['failed']}", flush=True)
    wait_for_memory()
    return row


def wait_for_memory() -> None:
    """Wait until the GPU, if any, is empty again: a server's processes may outlive the first of them."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    for _ in range(40):
        try:
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        except (OSError, subprocess.SubprocessError):
            return
        if max(int(line) for line in said.split()) < IDLE_MIB:
            return
        time.sleep(0.5)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", required=True, metavar="SHAPE-TYPE")
    parser.add_argument("--load", action="append", type=Load.parse, metavar="CLIENTSxPROMPT+ANSWER")
    parser.add_argument("--requests", type=int, default=1, help="of a client in a round")
    parser.add_argument("--rounds", type=int, default=3, help="of a closed load")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the open load; 0: none")
    parser.add_argument("--share", type=float, default=0.7, help="of the closed load's requests in a second")
    parser.add_argument("--device", help="of our server, instead of its default")
    parser.add_argument("--flag", action="append", default=[], help="of our server")
    parser.add_argument("--vllm-site", type=Path, metavar="FOLDER", help="where vLLM is installed")
    parser.add_argument("--vllm-python", default=sys.executable, help="an interpreter that has vLLM, or runs it")
    parser.add_argument("--vllm-flag", action="append", default=[], help="of vLLM's server")
    parser.add_argument("--folder", type=Path, help="for our files, instead of a temporary one")
    parser.add_argument("--keep", action="store_true", help="do not delete our files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the figures into FILE, beside what it has")
    given = parser.parse_args(arguments)
    given.load = given.load or [Load.parse(text) for text in DEFAULT_LOADS]
    return given


def write_rows(path: Path | None, rows: list[Row], device: str) -> None:
    """Put the rows into a file of `bench/gpu.py`, or a new one, in place of those of the same model and engine."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    found: Row = json.loads(path.read_text()) if path.exists() else {}
    new = {(row["model"], row["engine"]) for row in rows}
    kept = [row for row in found.get("served", []) if (row["model"], row["engine"]) not in new]
    found.setdefault("made", datetime.now(UTC).isoformat(timespec="seconds"))
    found.setdefault("device", device)
    path.write_text(json.dumps(found | {"served": [*kept, *rows]}, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, print and write."""
    given = parse_arguments(arguments)
    device = name_device(given.device or "cuda")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in given.case:
            try:
                rows += measure(case, given, Path(folder))
            except MlxrError as error:
                print(f"serving: {error}", file=sys.stderr)
                return 2
            write_rows(given.json, rows, device)
        failed = [row for row in rows if row.get("failed") or row.get("wrong")]
        for row in failed:
            print(f"failed: {row['engine']} {row['model']}: {row.get('failed') or row['wrong']}", file=sys.stderr)
            log = Path(folder) / ("mlxr.log" if row["engine"] == OURS else "vllm.log")
            if row.get("failed") and log.exists():
                print(log.read_text(errors="replace")[-6000:], file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
