"""Fails when this tree decodes or reads prompts more than 5 % slower than another commit of it.

    python bench/gate.py [--ref COMMIT] [--minutes 6] [--shape tinyllama-1.1b] [--type q4_k_m] [--threads N]
    python bench/gate.py --ref COMMIT --drag 0.1    # every decode step sleeps a tenth of its time: must fail

The other commit (the last tag, unless --ref names one) is unpacked and built in build/gate, once. Both trees then hold
the same model file, each in a process of its own, and compute in turns; they begin alternately. A round gives one ratio
of times for each case. Rounds continue until the confidence interval of the median ratio lies on one side of the limit,
or the time is over; then the median alone decides, and the output says so. Exit: 0 as fast, 1 slower, 2 failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import comb
from pathlib import Path

from compare import MODELS, ROOT, Progress, find_model
from comparison.child import Child
from mlxr.core.errors import MlxrError
from synthetic import SHAPES

CACHE = ROOT / "build" / "gate"
LIMIT = 0.05  # share of the speed that may be lost
CONFIDENCE = 0.99  # of an interval; high, because the rounds are checked again and again
SETTLE_S = 0.05  # until threads of the side that has just computed stop spinning
DEPTH_TOKENS = 128  # of context before decode
Measure = Callable[[Child], float]
CASES: Mapping[str, Measure] = {
    "decode": lambda side: float(side.ask("decode", {"steps": 32})),
    "prefill": lambda side: float(side.ask("prefill", {"tokens": 512})),
}


@dataclass(slots=True)
class Ratios:
    """The rounds of one case: seconds of this tree divided by seconds of the other one."""

    found: list[float] = field(default_factory=list)
    limit: float = 1 / (1 - LIMIT)  # the ratio of times at which that share of speed is lost

    @property
    def median(self) -> float:
        """Return the median ratio."""
        return statistics.median(self.found)

    def find_interval(self) -> tuple[float, float]:
        """Return an interval that holds the true median with the confidence above, whatever the distribution.

        It reaches from the k-th smallest ratio to the k-th largest one, with the largest k that is certain enough. With
        too few rounds it is unbounded.
        """
        count, tail, rank = len(self.found), 0.0, 0
        while rank < count // 2 and 2 * (tail + comb(count, rank) / 2**count) <= 1 - CONFIDENCE:
            tail += comb(count, rank) / 2**count
            rank += 1
        ordered = sorted(self.found)
        return (ordered[rank - 1], ordered[-rank]) if rank else (0.0, float("inf"))

    def judge(self) -> bool | None:
        """Return True if the case is slower than allowed, None while the interval lies on both sides of the limit."""
        low, high = self.find_interval()
        if low > self.limit:
            return True
        return False if high < self.limit else None

    def describe(self) -> str:
        """Return the median and the interval, as speed of this tree in percent of the other one's."""
        low, high = self.find_interval()
        least = 100 / high
        most = f"{100 / low:.1f}" if low else "?"
        return f"{100 / self.median:.1f} % of the speed ({least:.1f} to {most}, {len(self.found)} rounds)"


def run_rounds(
    cases: Mapping[str, Callable[[bool], float]], time_is_over: Callable[[], bool]
) -> Iterator[tuple[str, Ratios]]:
    """Measure in turns until every case is decided or the time is over; yields a case for each new ratio.

    A case returns seconds: of this tree if called with True, of the other one with False.
    """
    ratios = {name: Ratios() for name in cases}
    first = True
    while not time_is_over():
        undecided = [name for name, row in ratios.items() if row.judge() is None]
        if not undecided:
            return
        for name in undecided:
            times = {is_ours: cases[name](is_ours) for is_ours in (first, not first)}
            ratios[name].found.append(times[True] / times[False])
            yield name, ratios[name]
        first = not first


def decide(results: Mapping[str, Ratios], say: Callable[[str], None]) -> bool:
    """Report each case, and return True if one is slower than allowed."""
    slower = False
    for name, ratios in results.items():
        verdict = ratios.judge()
        is_slower = ratios.median > ratios.limit if verdict is None else verdict
        word = "SLOWER than allowed" if is_slower else "as fast as it has to be"
        doubt = " (by the median alone: the machine is too restless for more)" if verdict is None else ""
        say(f"{name}: {ratios.describe()}: {word}{doubt}")
        slower = slower or is_slower
    return slower


def run_git(*arguments: str) -> str:
    """Return the output of git. Raises MlxrError with its message if it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise MlxrError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def find_commit(ref: str | None) -> str:
    """Return the commit to compare with: the one named, or that of the last tag. Raises MlxrError if there is none."""
    try:
        name = ref or run_git("describe", "--tags", "--abbrev=0")
    except MlxrError as error:
        raise MlxrError(
            f"there is no release to compare with, so name a commit (--ref, or make's REF=): {error}"
        ) from None
    return run_git("rev-parse", "--verify", f"{name}^{{commit}}")


def build_tree(commit: str, say: Callable[[str], None]) -> Path:
    """Return the folder with the commit's files and its native module, which are kept from one run to the next."""
    folder = CACHE / commit
    if (folder / ".built").exists():
        return folder
    say(f"building {commit[:10]} in {folder.relative_to(ROOT)} (some minutes, once)")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = folder / "tree.tar"
    run_git("archive", f"--output={archive}", commit, "bench", "csrc", "src", "CMakeLists.txt", "pyproject.toml")
    shutil.unpack_archive(archive, folder)
    archive.unlink()
    tools = Path(sys.executable).parent
    nanobind = subprocess.run(
        [sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    options = {"MLXR_INPLACE": "ON", "Python_EXECUTABLE": sys.executable, "nanobind_DIR": nanobind}
    options |= {"CMAKE_MAKE_PROGRAM": str(tools / "ninja"), "CMAKE_BUILD_TYPE": "Release"}
    configure = [
        *("-S", folder, "-B", folder / "build", "-G", "Ninja"),
        *(f"-D{key}={options[key]}" for key in options),
    ]
    for arguments in (configure, ["--build", folder / "build"]):
        done = subprocess.run([tools / "cmake", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise MlxrError(f"{commit[:10]} cannot be built:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (folder / ".built").touch()
    return folder


def measure(given: argparse.Namespace, other: Path, progress: Progress) -> dict[str, Ratios]:
    """Return the ratios of all cases, each tree's own engine measured by the tree's own side."""
    path = find_model(MODELS, given.shape, given.type, progress)
    logs = Path(tempfile.gettempdir())
    with ExitStack() as stack:

        def start(name: str, tree: Path | None) -> Child:
            log = logs / f"gate-{name}.log"
            side = stack.enter_context(Child(name, Path(sys.executable), "comparison.ours", log, tree))
            side.ask("open", {"model": str(path), "threads": given.threads, "settings": {}})
            side.ask("start", {"context_tokens": DEPTH_TOKENS + 512, "sequences": 1, "option": None})
            side.ask("hold", {"sequences": 1, "tokens": DEPTH_TOKENS})
            return side

        sides = {True: start("this", None), False: start("other", other)}
        if given.drag:
            sides[True].ask("drag", {"share": given.drag})

        def make_case(case: Measure) -> Callable[[bool], float]:
            def run(is_ours: bool) -> float:
                time.sleep(SETTLE_S)
                return case(sides[is_ours])

            return run

        cases = {name: make_case(case) for name, case in CASES.items()}
        for case in cases.values():  # untimed
            case(True), case(False)
        results: dict[str, Ratios] = {}
        for name, ratios in run_rounds(cases, lambda: progress.left_s <= 0):
            results[name] = ratios
        return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns its exit status."""
    parser = argparse.ArgumentParser(description="Fails when this tree is more than 5 % slower than another commit.")
    parser.add_argument("--ref", help="the commit to compare with; the last tag, unless given")
    parser.add_argument("--minutes", type=float, default=6, help="after which the medians decide")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--type", default="q4_k_m", help="of the weights")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--drag", type=float, default=0.0, help="sleep so much of each decode step, to see the gate fail"
    )
    given = parser.parse_args(arguments)
    try:
        commit = find_commit(given.ref)
        tree = build_tree(commit, Progress(0).say)
        progress = Progress(given.minutes)
        results = measure(given, tree, progress)
        if len(results) < len(CASES):
            raise MlxrError("not one round was over in time; give it more --minutes")
        return int(decide(results, progress.say))
    except MlxrError as error:
        print(f"bench/gate.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
