"""Measure decode and prefill on a GPU in turns with mlx-lm, llama.cpp and transformers, each alone on the device.

    python bench/gpu.py --json bench/results/gpu/h200.json          # every case with a target
    python bench/gpu.py --case llama-8b-q4_k_m:8 --rounds 3 --without transformers --llama llama.cpp/build/bin
    python bench/gpu.py --write-docs bench/results/gpu/h200.json    # no measuring: lab/gpu-figures.md and its plot

Weights are random and made on the device. The engines take turns with each model, and a turn is a whole process: it
opens the model, goes through all its cases, some rounds each, and ends before the next begins. Nothing else is on the
device then: beside a process that only held a model and waited, mlx-lm was a quarter to a half slower with 1 and 32
sequences. Turns are repeated, so that drift of the machine shows. Our side runs through the engine, with requests and
events. A peer that is not installed, or fails, is left out by name. Exit code 1 if ours fails, or with --check misses a
target.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from comparison.child import Child
from gpu_comparison.cases import OURS, TARGETS, Case
from gpu_comparison.machine import MODULES, find_missing, name_device, read_versions
from gpu_comparison.report import find_misses, format_table, read_results, write_docs
from gpu_comparison.session import Session
from mlxr.core.errors import MlxrError

ROOT = Path(__file__).parents[1]


def measure_all(given: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases, model by model; the results so far are written after each case of a turn."""
    tools = "" if given.llama is None else str(given.llama.resolve())  # sides run in another folder
    missing = find_missing(given.without, tools)
    session = Session(given.device, given.turns, given.rounds, given.steps, missing, start_side, tools)
    before = read_results(given.json) if given.update and given.json.exists() else None
    results: dict[str, Any] = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": name_device(given.device),
        "versions": read_versions(session.skipped),
        "copy_bytes_per_s": measure_copy(given.device),
        "skipped": session.skipped,
        "failed": session.failed,
        "rows": [],
    }
    print(f"{results['device']}: copy {results['copy_bytes_per_s'] / 1e9:,.0f} GB/s", flush=True)
    end_s = time.monotonic() + 60 * given.minutes
    cases = [Case.parse(text) for text in given.case or TARGETS]
    kept = []
    if before is not None:
        names = {case.name for case in cases}
        kept = [row for row in before["rows"] if row["case"] not in names]
        results["versions"] = before.get("versions", {}) | results["versions"]
        again = [case.name for case in cases] + [f"{case.shape}-{case.type_name}" for case in cases]
        old = {what: why for what, why in before.get("failed", {}).items() if not any(one in what for one in again)}
        results["failed"] = old | results["failed"]
        results["served"] = before.get("served", [])
    for key in dict.fromkeys((case.shape, case.type_name) for case in cases):
        for _ in session.measure([case for case in cases if (case.shape, case.type_name) == key], end_s):
            results["rows"] = kept + session.list_rows(cases)
            write_results(given.json, results)
    write_results(given.json, results)
    return results


def write_results(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write the results so far, if a file is wanted."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


def measure_copy(device: str) -> float:
    """The bytes per second that a large copy reads and writes, measured in a process of its own; 0 without a GPU."""
    if device not in ("cuda", "metal"):
        return 0.0
    with closing(start_side("copy")) as side:
        return float(side.ask("measure_copy"))


def start_side(name: str) -> Child:
    """Start the process in which one engine is measured; returns the handle to it."""
    log = Path(tempfile.gettempdir()) / f"gpu-{name}.log"
    return Child(name, Path(sys.executable), "gpu_comparison.side", log)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; returns the options, with defaults for those not given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", action="append", metavar="CASE", help="SHAPE-TYPE:BATCH[@CONTEXT] or :prefill@TOKENS")
    parser.add_argument("--without", action="append", default=[], choices=MODULES, help="leave a peer out")
    parser.add_argument("--llama", type=Path, metavar="FOLDER", help="llama.cpp's tools, built with CUDA")
    parser.add_argument("--turns", type=int, default=2, help="of each engine, whole processes")
    parser.add_argument("--rounds", type=int, default=5, help="of a case in a turn")
    parser.add_argument("--steps", type=int, default=24, help="of a round of decoding")
    parser.add_argument("--minutes", type=float, default=10, help="begin no turn after so long")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results there")
    parser.add_argument("--update", action="store_true", help="keep what FILE has of other cases")
    parser.add_argument("--check", action="store_true", help="fail when a target is missed")
    parser.add_argument("--write-docs", type=Path, metavar="JSON", help="measure nothing, write docs")
    given = parser.parse_args(arguments)
    for text in given.case or ():
        try:
            Case.parse(text)
        except ValueError as error:
            parser.error(str(error))
    if given.update and given.json is None:
        parser.error("--update needs --json")
    if min(given.turns, given.rounds, given.steps) < 1:
        parser.error("--turns, --rounds and --steps must be at least 1")
    return given


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, print and write."""
    given = parse_arguments(arguments)
    try:
        if given.write_docs is not None:
            write_docs(ROOT, read_results(given.write_docs))
            return 0
        results = measure_all(given)
    except (MlxrError, OSError) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    print(format_table(results))
    misses = find_misses(results)
    for miss in misses:
        print(f"missed: {miss}")
    for what, error in results["failed"].items():
        print(f"failed: {what}: {error}")
    return 1 if (misses and given.check) or any(what.startswith(OURS) for what in results["failed"]) else 0


if __name__ == "__main__":
    sys.exit(main())
