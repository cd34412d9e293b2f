"""Our engine and llama.cpp on the same model files, in turns, compared with the limits of the machine.

    python bench/compare.py --peer-python .venv-peers/bin/python                    # the whole table, TinyLlama's shape
    python bench/compare.py --shape llama-3-8b --peer-python PYTHON --update --json FILE      # keeps its other cases
    python bench/compare.py --shape gpt-oss-20b --apart --pairs 2 --peer-python PYTHON   # one side in memory at a time
    python bench/compare.py --quick                                                 # about a minute, our engine alone
    python bench/compare.py --only 'q8_0/*' '*/decode-*' --pairs 9 ...              # some cases
    python bench/compare.py --write-docs bench/results/cpu/*/*.json                 # tables and plots, no measuring

Model files have random weights and are made when missing. Each side is a process that stays loaded; a round is: the
probe (memory reads and int8 products per second), ours, theirs. Ratios are taken round by round, their median counts.
llama.cpp comes through llama-cpp-python in the interpreter of --peer-python, with its own defaults; fused attention and
(with several sequences) one cache for all are tried both ways for each case, and the faster is taken. Our side is the
whole engine, sampling included; theirs is `llama_decode` without sampling. Without --peer-python only our engine and
the probe are measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from comparison.apart import ApartSession, Name
from comparison.cases import BUSY, BY_NAME, PLANS, QUICK, Case
from comparison.child import Child
from comparison.machine import Bystanders, describe_machine, read_commit, read_version
from comparison.report import find_misses, format_table, list_doubts, write_docs
from comparison.session import Session, Sides
from mlxr.core.errors import MlxrError
from synthetic import SHAPES, show_progress, write_model

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "build" / "bench-models"
MODEL_CONTEXT = 20_480  # one file for all sizes of context
Results = dict[str, Any]
Save = Callable[[Results], None]


class Progress:
    """Writes lines with the time since the beginning to stderr, and knows the end of the allowed time."""

    def __init__(self, minutes: float) -> None:
        self._start_s = time.monotonic()
        self._end_s = self._start_s + 60 * minutes

    def say(self, text: str) -> None:
        """Print one line on stderr, with the time since the start before it."""
        seconds = int(time.monotonic() - self._start_s)
        print(f"{seconds // 60:3}:{seconds % 60:02} {text}", file=sys.stderr, flush=True)

    @property
    def left_s(self) -> float:
        """The seconds until the end of the allowed time."""
        return self._end_s - time.monotonic()


def find_model(folder: Path, shape: str, weight_type: str, progress: Progress) -> Path:
    """The file of a shape and type, made if it is missing."""
    path = folder / f"{shape}-{weight_type}.gguf"
    if not path.exists():
        progress.say(f"writing {path}")
        folder.mkdir(parents=True, exist_ok=True)
        write_model(path, replace(SHAPES[shape], context_length=MODEL_CONTEXT), weight_type, 0, show_progress)
    return path


def choose_plan(given: argparse.Namespace) -> dict[str, list[Case]]:
    """The cases of each weight type, in the order of growing contexts. Raises MlxrError if --only fits none."""
    plan = QUICK if given.quick else PLANS[given.shape]
    chosen = {
        weight_type: [
            BY_NAME[name]
            for name in names
            if any(fnmatch(f"{weight_type}/{name}", pattern) for pattern in given.only or ["*"])
        ]
        for weight_type, names in plan.items()
    }
    if not any(chosen.values()):
        known = ", ".join(f"{weight_type}/{name}" for weight_type, names in plan.items() for name in names)
        raise MlxrError(f"--only fits none of the cases; there are {known}")
    return {
        weight_type: sorted(cases, key=lambda case: (case.context_tokens, case.sequences, case.depth_tokens))
        for weight_type, cases in chosen.items()
        if cases
    }


def measure_model(
    given: argparse.Namespace, weight_type: str, cases: Sequence[Case], progress: Progress, results: Results, save: Save
) -> None:
    """Measure all cases of one weight type into `results`, saved after each."""
    path = find_model(given.models, given.shape, weight_type, progress)
    logs = Path(tempfile.gettempdir())
    settings = dict(setting.split("=", 1) for setting in given.setting)
    with ExitStack() as stack:

        def start(name: str, python: Path, module: str) -> Child:
            return stack.enter_context(Child(name, python, f"comparison.{module}", logs / f"compare-{module}.log"))

        if given.apart:
            measure_apart(given, path, cases, progress, start("probe", Path(sys.executable), "limits"), results)
            return
        sides = Sides(
            start("probe", Path(sys.executable), "limits"),
            start("mlxr", Path(sys.executable), "ours"),
            None if given.peer_python is None else start("llama.cpp", given.peer_python, "llama"),
        )
        probe = sides.probe.ask("open", {"threads": given.threads})
        progress.say(f"{weight_type}: opening {path.name}")
        session = Session(sides, path, given.threads, settings, given.pairs, progress.say)
        results["models"][weight_type], results["probe"] = session.opened, probe
        if session.opened["theirs"] is not None:
            results["versions"]["llama.cpp"] = session.opened["theirs"]["version"]
        shared = None
        for case in cases:
            if progress.left_s <= 0:
                results["skipped"].append(f"{weight_type}/{case.name}")
                progress.say(f"{weight_type}/{case.name}: skipped, the time is over (--minutes)")
                continue
            if shared is not None and shared != (case.context_tokens, case.sequences):
                session.drop_contexts()
            shared = (case.context_tokens, case.sequences)
            row = {"type": weight_type, **session.measure(case, max(60.0, progress.left_s + 300))}
            progress.say(format_outcome(row))
            results["rows"].append(row)
            save(results)
        session.close()


def measure_apart(
    given: argparse.Namespace, path: Path, cases: Sequence[Case], progress: Progress, probe: Child, results: Results
) -> None:
    """Measure all cases of a model that only one side at a time can have in memory, into `results`."""
    weight_type = path.stem.removeprefix(f"{given.shape}-")
    programs = {"ours": ("mlxr", Path(sys.executable), "ours"), "theirs": ("llama.cpp", given.peer_python, "llama")}

    def start(which: Name) -> Child:
        name, python, module = programs[which]
        return Child(name, python, f"comparison.{module}", Path(tempfile.gettempdir()) / f"compare-{module}.log")

    results["probe"] = probe.ask("open", {"threads": given.threads})
    settings = dict(setting.split("=", 1) for setting in given.setting)
    sides = Sides(probe, probe, None if given.peer_python is None else probe)
    session = ApartSession(sides, path, given.threads, settings, given.pairs, progress.say, start=start)
    rows = [{"type": weight_type, **row} for row in session.measure_all(cases, 600)]
    results["rows"] += rows
    results["models"][weight_type] = session.opened
    if session.opened["theirs"] is not None:
        results["versions"]["llama.cpp"] = session.opened["theirs"]["version"]
    for row in rows:
        progress.say(format_outcome(row))


def format_outcome(row: Results) -> str:
    """The results of a case in one line."""
    text = f"{row['type']}/{row['case']}: {row['ours_tokens_per_s']:.1f} tokens/s, {row['share']:.0%} of the probe"
    if row["ratio"] is not None:
        text += f", {row['ratio']:.2f} × llama.cpp ({row['theirs_tokens_per_s']:.1f})"
    doubts = list_doubts(row)
    return text + (f"; not to be relied on: {', '.join(doubts)}" if doubts else "")


def wait_until_idle(most_s: float, progress: Progress) -> None:
    """Wait until other processes leave the machine idle for a second, at most `most_s`."""
    end_s = time.monotonic() + most_s
    while True:
        bystanders = Bystanders([])
        time.sleep(1.0)
        share = bystanders.measure()
        if share <= BUSY:
            return
        if time.monotonic() >= end_s:
            progress.say(f"the machine is busy: others use {share:.0%} of it, the figures will not be worth much")
            return


def measure_all(given: argparse.Namespace, save: Save) -> Results:
    """Measure all that was asked for; `save` gets the results so far after each case, as some take many minutes."""
    progress = Progress(given.minutes)
    plan = choose_plan(given)
    wait_until_idle(given.wait_s, progress)
    results: Results = {
        "shape": given.shape,
        "threads": given.threads,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "commit": read_commit(),
        "versions": {"mlxr": read_version()},
        "models": {},
        "rows": [],
        "skipped": [],
    }
    for weight_type, cases in plan.items():
        measure_model(given, weight_type, cases, progress, results, save)
        save(results)
    return results


def update(old: Results, new: Results) -> Results:
    """Return `new` with the rows of `old` that it lacks. Raises MlxrError if they were not measured alike."""
    for name in ("shape", "threads", "machine"):
        if old[name] != new[name]:
            raise MlxrError(f"--update: the file has {name} {old[name]}, this run {new[name]}; write to another file")
    keys = {(row["type"], row["case"]) for row in new["rows"]}
    kept = [row for row in old["rows"] if (row["type"], row["case"]) not in keys]
    return {
        **new,
        "rows": kept + new["rows"],
        "models": {**old["models"], **new["models"]},
        "versions": {**old["versions"], **new["versions"]},
    }


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; returns the options, with defaults for those not given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", choices=PLANS, default="tinyllama-1.1b")
    parser.add_argument("--peer-python", type=Path, help="an interpreter that has llama_cpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, help="rounds of each case (5, with --quick 3)")
    parser.add_argument("--only", nargs="+", metavar="TYPE/CASE", help="patterns such as q4_k_m/prefill-*")
    parser.add_argument("--apart", action="store_true", help="one side at a time, for models that fill the memory")
    parser.add_argument("--quick", action="store_true", help="three cases of one type")
    parser.add_argument("--minutes", type=float, help="begin no case after so long (60, with --quick 5)")
    parser.add_argument("--wait-s", type=float, default=30.0, help="wait so long at most for an idle machine")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE", help="of our engine")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of the model files")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a figure misses what is wanted")
    parser.add_argument("--update", action="store_true", help="keep the cases in that file which were not measured now")
    parser.add_argument("--write-docs", type=Path, nargs="+", metavar="JSON", help="measure nothing, write docs")
    given = parser.parse_args(arguments)
    given.pairs = given.pairs or (3 if given.quick else 5)
    given.minutes = given.minutes or (5 if given.quick else 60)
    if given.update and given.json is None:
        parser.error("--update needs --json")
    if bad := [setting for setting in given.setting if "=" not in setting]:
        parser.error(f"--setting {bad[0]}: expected NAME=VALUE")
    if given.peer_python is not None:
        given.peer_python = given.peer_python.absolute()
    return given


def name_results(path: Path) -> str:
    """The name of a file in the document's marks: its folder, which is the machine's name, and its own name."""
    return f"{path.absolute().parent.name}/{path.stem}"


def run(given: argparse.Namespace) -> int:
    """Measure or write; returns the exit code."""
    if given.write_docs:
        write_docs(ROOT, {name_results(path): json.loads(path.read_text()) for path in given.write_docs})
        return 0
    old = json.loads(given.json.read_text()) if given.update and given.json.exists() else None

    def save(results: Results) -> None:
        if given.json is not None:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps(results if old is None else update(old, results), indent=1) + "\n")

    results = measure_all(given, save)
    if old is not None:
        results = update(old, results)
    print(format_table(results))
    misses = find_misses(results)
    for miss in misses:
        print(f"missed: {miss}")
    return 1 if misses and given.check else 0


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run, print the table."""
    try:
        return run(parse_arguments(arguments))
    except (MlxrError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
