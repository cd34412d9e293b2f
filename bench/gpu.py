"""Measure decode and prefill on a GPU beside mlx-lm and transformers, in turns on the same device.

    python bench/gpu.py --json bench/results/gpu/h200.json          # every case that something is wanted of
    python bench/gpu.py --case llama-8b-q4_k_m:8 --rounds 3 --without transformers
    python bench/gpu.py --write-docs bench/results/gpu/h200.json    # measure nothing, write docs/gpu.md and its plot

Weights are random and made on the device. Of every case each engine holds its contexts, then all of them decode (or
compute a prompt) one after another, round by round. Ours runs through the engine, requests and events included. A peer
that is not installed is left out by name. Exit code 1 with --check when a target is missed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_comparison.cases import MLX_LM, TARGETS, TRANSFORMERS, Case
from gpu_comparison.ours import Ours
from gpu_comparison.peers import MlxLm, Transformers
from gpu_comparison.report import find_misses, format_table, write_docs
from mlxr.core.errors import MlxrError
from synthetic import Shape

ROOT = Path(__file__).parents[1]
MODULES = {MLX_LM: ("mlx_lm", "mlx_lm"), TRANSFORMERS: ("torch", "transformers")}
ROUNDS, STEPS, WARM_STEPS = 5, 24, 8
MAX_TRANSFORMERS_CONTEXT = 4096  # its static cache and masks of longer ones take the others' memory
COPY_NUMBERS = 1 << 30


def find_peers(without: list[str]) -> dict[str, str]:
    """Why peers are left out, by name."""
    skipped = {}
    for name, modules in MODULES.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if name in without:
            skipped[name] = "not asked for"
        elif missing:
            skipped[name] = f"{' and '.join(missing)} not installed"
    return skipped


def measure_all(given: argparse.Namespace) -> dict[str, Any]:
    """All cases, model by model; `rows` grow as they are measured and are written each time."""
    skipped = find_peers(given.without)
    results: dict[str, Any] = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": name_device(given.device),
        "versions": read_versions(skipped),
        "skipped": skipped,
        "rounds": given.rounds,
        "copy_bytes_per_s": measure_copy(given.device),
        "rows": [],
    }
    print(f"{results['device']}: copy {results['copy_bytes_per_s'] / 1e9:,.0f} GB/s", flush=True)
    end_s = time.monotonic() + 60 * given.minutes
    cases = [Case.parse(text) for text in given.case or TARGETS]
    for key in dict.fromkeys((case.shape, case.type_name) for case in cases):
        chosen = [case for case in cases if (case.shape, case.type_name) == key]
        for row in measure_model(given, chosen, skipped, end_s):
            results["rows"].append(row)
            if given.json is not None:
                given.json.parent.mkdir(parents=True, exist_ok=True)
                given.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


def measure_model(
    given: argparse.Namespace, cases: list[Case], skipped: Mapping[str, str], end_s: float
) -> Iterator[dict[str, Any]]:
    """The cases of one model."""
    room = WARM_STEPS + given.rounds * given.steps + 8
    shape = cases[0].model
    shape = replace(shape, context_length=max(shape.context_length, *(case.context + room for case in cases)))
    engines = [make() for make in list_engines(given.device, shape, cases[0].type_name, skipped)]
    for case in cases:
        if time.monotonic() > end_s:
            print(f"{case.name}: no time left", flush=True)
            continue
        start_s = time.monotonic()
        taking_part = [one for one in engines if one.name != TRANSFORMERS or case.context <= MAX_TRANSFORMERS_CONTEXT]
        yield from measure_case(given, case, taking_part)
        print(f"{case.name}: took {time.monotonic() - start_s:.0f} s", flush=True)
    engines.clear()
    gc.collect()


def list_engines(device: str, shape: Shape, type_name: str, skipped: Mapping[str, str]) -> Iterator[Callable[[], Any]]:
    """Ours, and the peers that have something like the type."""
    yield lambda: Ours(device, shape, type_name)
    if MLX_LM not in skipped:
        yield lambda: MlxLm(device, shape, quantized=type_name != "bf16")
    if TRANSFORMERS not in skipped and type_name == "bf16":
        yield lambda: Transformers(device, shape)


def measure_case(given: argparse.Namespace, case: Case, engines: list[Any]) -> list[dict[str, Any]]:
    """Round by round, each engine in turn; a row for each."""
    rounds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for engine in engines:
        engine.start(case, WARM_STEPS + given.rounds * given.steps)
        for _ in range(1 if case.kind == "prefill" else 0):
            engine.prefill()
        if case.kind == "decode":
            engine.decode(WARM_STEPS)
    for _ in range(given.rounds):
        for engine in engines:
            second = engine.prefill() if case.kind == "prefill" else statistics.median(engine.decode(given.steps))
            rounds[engine.name].append(case.tokens / second)
    rows = []
    for engine in engines:
        speed = statistics.median(rounds[engine.name])
        row = {"case": case.name, "engine": engine.name, "rounds": rounds[engine.name], "tokens_per_s": speed}
        rows.append(row | {"ms": 1000 * case.tokens / speed, "note": engine.note, **engine.measure_bytes()})
        engine.stop()
        print(f"{engine.name:14s} {case.name:30s} {speed:10,.0f} tokens/s {row_text(rows[-1])}", flush=True)
    gc.collect()
    return rows


def row_text(row: Mapping[str, Any]) -> str:
    """The rest of a line while it runs."""
    low, high = min(row["rounds"]), max(row["rounds"])
    return f"({low:,.0f} to {high:,.0f}), {row['ms']:.3f} ms, peak {row['peak_bytes'] / 2**30:.2f} GiB {row['note']}"


def measure_copy(device: str) -> float:
    """Bytes per second that a large copy on the device reads and writes; 0 where there is no GPU to copy on."""
    if device not in ("cuda", "metal"):
        return 0.0
    import mlx.core as mx

    mx.set_default_device(mx.gpu)
    array = mx.random.normal((COPY_NUMBERS,)).astype(mx.bfloat16)
    mx.eval(array)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        mx.eval(mx.abs(array))
        mx.synchronize()
        times.append(time.perf_counter() - start)
    del array
    mx.clear_cache()
    return 2 * 2 * COPY_NUMBERS / min(times)


def name_device(device: str) -> str:
    """The GPU's own name, and the driver's version where there is one to ask."""
    if device == "cuda":
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        except (OSError, subprocess.SubprocessError):
            return "an NVIDIA GPU"
        name, _, driver = said.splitlines()[0].partition(", ")
        return f"{name} (driver {driver})"
    if device == "metal":
        import mlx.core as mx

        return str(mx.device_info().get("device_name", "an Apple GPU"))
    return device


def read_versions(skipped: Mapping[str, str]) -> dict[str, str]:
    """Of what takes part."""
    packages = {"mlxr": "mlxr", "MLX": "mlx"}
    if MLX_LM not in skipped:
        packages["mlx-lm"] = "mlx-lm"
    if TRANSFORMERS not in skipped:
        packages |= {"transformers": "transformers", "PyTorch": "torch"}
    found = {}
    for name, package in packages.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = "from source"
    return found


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", action="append", metavar="CASE", help="SHAPE-TYPE:BATCH[@CONTEXT] or :prefill@TOKENS")
    parser.add_argument("--without", action="append", default=[], choices=MODULES, help="leave a peer out")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a round of decoding")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no case after so long")
    parser.add_argument("--json", type=Path, help="write results there")
    parser.add_argument("--check", action="store_true", help="fail when a target is missed")
    parser.add_argument("--write-docs", type=Path, metavar="JSON", help="measure nothing, write docs")
    given = parser.parse_args(arguments)
    for text in given.case or ():
        try:
            Case.parse(text)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    if min(given.rounds, given.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    return given


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, print and write."""
    given = parse_arguments(arguments)
    try:
        if given.write_docs is not None:
            write_docs(ROOT, json.loads(given.write_docs.read_text()))
            return 0
        results = measure_all(given)
    except (MlxrError, OSError) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    print(format_table(results))
    misses = find_misses(results)
    for miss in misses:
        print(f"missed: {miss}")
    return 1 if misses and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
