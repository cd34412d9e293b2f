"""How much sooner the first token comes when the prompt's beginning is cached: in memory, or on disk after a restart.

    python lab/bench/prefix.py MODEL [--prefix-tokens 2000] [--repeat 3] [--json FILE]

Every round makes up a new beginning. One process computes it, then serves the same beginning with another end from
memory; a second process, started afterwards on the same store, serves that prompt from disk, and once more from an
engine that shares nothing, so that the answers can be compared. Times run from the request to its first token; a
request of another text goes first in each process, so that none pays for a cold start. The files were just written,
so the system may still have them in memory; how fast the disk itself is, is not measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from mlxr.core.errors import MlxrError
from mlxr.core.settings import resolve
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.service.opening import build_engine, open_model

MAX_MEMORY_SHARE, MAX_DISK_SHARE = 0.06, 0.15
WARM_UP_TOKENS = 64
STORE_BYTES = 8 << 30


def time_answer(engine: Engine, token_ids: list[int], params: SamplingParams) -> dict[str, Any]:
    """Milliseconds to the first token, all tokens, and how many tokens of the prompt came from the cache."""
    start_s = time.perf_counter()
    engine.submit(EngineRequest(token_ids, params))
    times_s, events = [], []
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise MlxrError(event.error)
            times_s.append(time.perf_counter())
            events.append(event)
    return {
        "first_token_ms": 1000 * (times_s[0] - start_s),
        "token_ids": [event.token_id for event in events],
        "cached_tokens": events[-1].usage.cached_tokens,
    }


def draw(seed: int, count: int, vocab_size: int) -> list[int]:
    """Draw `count` random token ids; the same seed gives the same ids."""
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(count)]


def run_phase(given: argparse.Namespace, phase: str, seed: int, folder: Path) -> list[dict[str, Any]]:
    """The answers of one process; see the module."""
    sizes = {"threads": given.threads, "context_tokens": given.context_tokens, "max_sequences": 4}
    stored = resolve(sizes | {"kv_cache": "paged", "store_bytes": STORE_BYTES, "store_folder": folder})
    params = SamplingParams(max_tokens=given.answer_tokens, ignore_eos=True)
    with open_model(given.model, stored) as loaded:
        vocab_size = loaded.config.vocab_size
        prefix = draw(seed, given.prefix_tokens, vocab_size)
        first, second = (prefix + draw(seed + end, given.tail_tokens, vocab_size) for end in (1, 2))
        with closing(build_engine(loaded, stored)) as engine:
            time_answer(engine, draw(seed + 3, WARM_UP_TOKENS, vocab_size), params)
            wanted = (first, second) if phase == "computed" else (second,)
            answers = [time_answer(engine, token_ids, params) for token_ids in wanted]
        if phase == "restored":
            with closing(build_engine(loaded, resolve(sizes | {"kv_cache": "simple"}))) as engine:
                answers.append(time_answer(engine, second, params))
    return answers


def run_process(given: argparse.Namespace, phase: str, seed: int, folder: Path) -> list[dict[str, Any]]:
    """`run_phase` in a process of its own."""
    command = [sys.executable, __file__, given.model, "--phase", phase, "--seed", str(seed), "--store", str(folder)]
    for name in ("prefix_tokens", "tail_tokens", "answer_tokens", "threads", "context_tokens"):
        value = getattr(given, name)
        command += [] if value is None else ["--" + name.replace("_", "-"), str(value)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    answers: list[dict[str, Any]] = json.loads(output)
    return answers


def measure_round(given: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    """One beginning: computed, found in memory, found on disk."""
    computed, shared = run_process(given, "computed", seed, folder)
    restored, alone = run_process(given, "restored", seed, folder)
    if not shared["token_ids"] == restored["token_ids"] == alone["token_ids"]:
        raise SystemExit(f"the answers differ: {shared}, {restored}, {alone}")
    return {
        "computed_ms": computed["first_token_ms"],
        "memory_ms": shared["first_token_ms"],
        "disk_ms": restored["first_token_ms"],
        "memory_share": shared["first_token_ms"] / computed["first_token_ms"],
        "disk_share": restored["first_token_ms"] / computed["first_token_ms"],
        "cached_tokens": [shared["cached_tokens"], restored["cached_tokens"]],
    }


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; --phase, --seed and --store are for the processes that the script starts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--prefix-tokens", type=int, default=2000)
    parser.add_argument("--tail-tokens", type=int, default=16)
    parser.add_argument("--answer-tokens", type=int, default=8)
    parser.add_argument("--context-tokens", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--phase", choices=("computed", "restored"), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 when the median of either share is above its bound."""
    given = parse_arguments(arguments)
    if given.phase is not None:
        print(json.dumps(run_phase(given, given.phase, given.seed, given.store)))
        return 0
    with tempfile.TemporaryDirectory(prefix="mlxr-prefix-") as folder:
        rounds = [measure_round(given, 10 * number, Path(folder)) for number in range(given.repeat)]
    for row in rounds:
        print(
            f"computed {row['computed_ms']:.1f} ms, from memory {row['memory_ms']:.1f} ms ({row['memory_share']:.2%}), "
            f"from disk {row['disk_ms']:.1f} ms ({row['disk_share']:.2%}), cached tokens {row['cached_tokens']}"
        )
    memory_share = statistics.median(row["memory_share"] for row in rounds)
    disk_share = statistics.median(row["disk_share"] for row in rounds)
    passed = memory_share <= MAX_MEMORY_SHARE and disk_share <= MAX_DISK_SHARE
    print(
        f"median: memory {memory_share:.2%} (at most {MAX_MEMORY_SHARE:.0%}), disk {disk_share:.2%} "
        f"(at most {MAX_DISK_SHARE:.0%}): {'passed' if passed else 'FAILED'}"
    )
    if given.json is not None:
        given.json.write_text(json.dumps({"model": given.model, "rounds": rounds, "passed": passed}, indent=2) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
