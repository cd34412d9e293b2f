"""Measure decode and prefill on a GPU beside mlx-lm and transformers, in turns on the same device.

    python bench/gpu.py --json bench/results/gpu/h200.json          # every case that something is wanted of
    python bench/gpu.py --case llama-8b-q4_k_m:8 --rounds 3 --without transformers
    python bench/gpu.py --write-docs bench/results/gpu/h200.json    # measure nothing, write docs/gpu.md and its plot

Weights are random and made on the device. Each engine is a process of its own, so that its memory is its own. Of every
case each holds its contexts, then all of them decode (or compute a prompt) one after another, round by round. Ours runs
through the engine, requests and events included. A peer that is not installed, or fails, is left out by name. Exit code
1 when ours fails, or with --check misses a target.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from comparison.child import Child
from gpu_comparison.cases import OURS, TARGETS, Case
from gpu_comparison.machine import MODULES, find_missing, measure_copy, name_device, read_versions
from gpu_comparison.report import find_misses, format_table, write_docs
from gpu_comparison.session import Session
from mlxr.core.errors import MlxrError

ROOT = Path(__file__).parents[1]


def measure_all(given: argparse.Namespace) -> dict[str, Any]:
    """All cases, model by model; what is there so far is written after each."""
    session = Session(given.device, given.rounds, given.steps, find_missing(given.without), start_side)
    results: dict[str, Any] = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": name_device(given.device),
        "versions": read_versions(session.skipped),
        "rounds": given.rounds,
        "copy_bytes_per_s": measure_copy(given.device),
        "skipped": session.skipped,
        "failed": session.failed,
        "rows": [],
    }
    print(f"{results['device']}: copy {results['copy_bytes_per_s'] / 1e9:,.0f} GB/s", flush=True)
    end_s = time.monotonic() + 60 * given.minutes
    cases = [Case.parse(text) for text in given.case or TARGETS]
    if given.update and given.json.exists():
        names = {case.name for case in cases}
        before = json.loads(given.json.read_text())
        results["rows"] = [row for row in before["rows"] if row["case"] not in names]
        results["versions"] = before["versions"] | results["versions"]
    with closing(session):
        for key in dict.fromkeys((case.shape, case.type_name) for case in cases):
            chosen = [case for case in cases if (case.shape, case.type_name) == key]
            for rows in session.measure(chosen, end_s):
                results["rows"] += rows
                if given.json is not None:
                    given.json.parent.mkdir(parents=True, exist_ok=True)
                    given.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


def start_side(name: str) -> Child:
    """An engine's process."""
    log = Path(tempfile.gettempdir()) / f"gpu-{name}.log"
    return Child(name, Path(sys.executable), "gpu_comparison.side", log)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", action="append", metavar="CASE", help="SHAPE-TYPE:BATCH[@CONTEXT] or :prefill@TOKENS")
    parser.add_argument("--without", action="append", default=[], choices=MODULES, help="leave a peer out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24, help="of a round of decoding")
    parser.add_argument("--minutes", type=float, default=7.5, help="begin no case after so long")
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
    for what, error in results["failed"].items():
        print(f"failed: {what}: {error}")
    return 1 if (misses and given.check) or any(what.startswith(OURS) for what in results["failed"]) else 0


if __name__ == "__main__":
    sys.exit(main())
