"""Compare a GPU's peak memory with weights, arena and workspace: after loading, a prompt, and decode.

    python bench/gpu_memory.py --device cuda --model FILE --arena 1 --batch 1 --batch 32 --out FILE
    python bench/gpu_memory.py --device cuda --random llama-8b-bf16 --random llama-8b-q4_k_m

Models are loaded from files as usual (bench/synthetic.py writes them), or made at random on the device, each in a
process of its own. Each line gives the peak of arrays since the line before, with those of recorded steps, and its
difference from the sum of the stated sizes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gpu_comparison.cases import Case
from gpu_comparison.ours import Ours
from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.kernels.context import Context
from mlxr.loading import load
from mlxr.models import Decoder

DECODE_TOKENS = 24
ALLOWED = 0.03


@dataclass
class Watch:
    """Prints the peak memory of each stage of a model."""

    ctx: Context
    weight_bytes: int
    rows: list[dict[str, Any]] = field(default_factory=list)

    def note(self, stage: str, arena_bytes: int) -> None:
        """Print one line, and reset the peak."""
        gpu, mx = self.ctx.gpu, self.ctx.gpu.mx
        stated_bytes = self.weight_bytes + arena_bytes + gpu.workspace.nbytes
        peak_bytes = mx.get_peak_memory() + gpu.held_bytes
        row = {
            "stage": stage,
            "weight_bytes": self.weight_bytes,
            "arena_bytes": arena_bytes,
            "workspace_bytes": gpu.workspace.nbytes,
            "peak_bytes": peak_bytes,
            "held_bytes": gpu.held_bytes,
            "kept_bytes": mx.get_cache_memory(),
            "peak_over_stated": peak_bytes / stated_bytes,
        }
        self.rows.append(row)
        sizes = " ".join(f"{name.removesuffix('_bytes')} {row[name] / 2**20:.0f}" for name in row if "_bytes" in name)
        print(f"{stage:18s} {sizes} MiB; peak is {100 * peak_bytes / stated_bytes:.1f} % of the stated sum", flush=True)
        mx.reset_peak_memory()


def measure(model: Decoder, watch: Watch, given: argparse.Namespace) -> None:
    """Run all stages of one loaded model."""
    watch.note("load", 0)
    config, random = model.config, np.random.default_rng(0)
    engine = Engine(
        model,
        watch.ctx,
        ModelSettings(
            arena_bytes=int(given.arena * 2**30),
            context_tokens=min(config.context_length, max(given.prompt) + DECODE_TOKENS),
            max_batch_tokens=max(given.prompt),
            prefill_chunk_tokens=max(given.prompt),
            max_sequences=max(given.batch),
        ),
        eos_ids=(),
        prefix_sharing=False,
    )
    taken_bytes = engine.stats().arena_bytes
    watch.note("arena", taken_bytes)

    def run(batch: int, prompt_tokens: int, answer_tokens: int) -> float:
        for _ in range(batch):
            prompt = random.integers(3, config.vocab_size, prompt_tokens).tolist()
            engine.submit(
                EngineRequest(prompt, SamplingParams(max_tokens=answer_tokens, ignore_eos=True, temperature=0))
            )
        start_s = time.perf_counter()
        while engine.has_work:
            engine.step()
        return time.perf_counter() - start_s

    for wanted_tokens in sorted(given.prompt):
        prompt_tokens = min(wanted_tokens, engine.context_tokens - 1)
        for _ in range(2):
            took_s = run(1, prompt_tokens, 1)
            watch.note(f"prompt {prompt_tokens}", taken_bytes)
        print(f"{prompt_tokens / took_s:.0f} tokens/s", flush=True)
    for batch in given.batch:
        run(batch, 4, DECODE_TOKENS)
        watch.note(f"decode batch {batch}", taken_bytes)


def measure_file(path: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a model from its file."""
    start_s = time.perf_counter()
    with load(path, device=given.device) as loaded:
        print(f"{path}: loaded in {time.perf_counter() - start_s:.1f} s", flush=True)
        watch = Watch(loaded.ctx, loaded.weight_bytes)
        measure(loaded.model, watch, given)
    return watch.rows


def measure_random(name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a model with random weights that the device made."""
    case = Case.parse(f"{name}:1")
    context_tokens = max(case.model.context_length, max(given.prompt) + DECODE_TOKENS)
    ours = Ours(given.device, replace(case.model, context_length=context_tokens), case.type_name)
    print(f"{name}: made", flush=True)
    watch = Watch(ours.ctx, ours.model.weight_bytes)
    measure(ours.model, watch, given)
    return watch.rows


def run_apart(option: str, name: str, arguments: list[str]) -> list[dict[str, Any]]:
    """Measure one model in a process of its own, which prints the rows after a mark; returns the rows."""
    command = [sys.executable, __file__, *arguments, option, name, "--apart"]
    rows: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("rows "):
                rows = json.loads(line.removeprefix("rows "))
            else:
                print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(f"{name}: exit code {process.returncode}")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, print and write. Exit code 1 with --check if no stage is near enough."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", action="append", default=[], metavar="FILE")
    parser.add_argument("--random", action="append", default=[], metavar="SHAPE-TYPE")
    parser.add_argument("--arena", type=float, default=1.0, help="GiB of the arena")
    parser.add_argument("--prompt", action="append", type=int, metavar="TOKENS", help="default: 2048")
    parser.add_argument("--batch", action="append", type=int, help="default: 1, 8, 32 and 128")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help="fail when a model's peak is not within 3 percent")
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.batch, given.prompt = given.batch or [1, 8, 32, 128], given.prompt or [2048]
    ways: list[tuple[str, Callable[..., Any], str]] = [("--model", measure_file, name) for name in given.model]
    ways += [("--random", measure_random, name) for name in given.random]
    if given.apart:
        ((_, measure_one, name),) = ways
        print("rows", json.dumps(measure_one(name, given)), flush=True)
        return 0
    told = ["--device", given.device, "--arena", str(given.arena), *(f"--batch={one}" for one in given.batch)]
    told += [f"--prompt={one}" for one in given.prompt]
    results, misses = {}, 0
    for option, _, name in ways:
        rows = results[name] = run_apart(option, name, told)
        most = max(rows, key=lambda row: row["peak_bytes"])
        share = most["peak_bytes"] / sum(rows[-1][f"{part}_bytes"] for part in ("weight", "arena", "workspace"))
        misses += not abs(share - 1) <= ALLOWED
        print(f"{name}: at most {100 * share:.1f} % of what is stated in the end, in {most['stage']}", flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps({"device": given.device, "models": results}, indent=1) + "\n")
    return 1 if misses and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
