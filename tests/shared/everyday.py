"""Chooses which tests a run is made of: all of them, those of every day, or the quick ones.

- `--thorough`, as in continuous integration: every test; `--exhaustive` has random ones at full length (amounts.py).
- Every day: tests that are marked `slow` are left out. Of a test whose package is changed so many cases run that each
  value of each parameter is in one; where it is marked `sampled(n)`, every n-th of these. Of other packages one case of
  each test runs, and of those that start servers and commands, every second test; those of tests/project always run, as
  they look at all packages. Of the folders that take longest, the GPU's kernels and the page, it is the first case of
  each test marked `smoke`, unless their sources are changed.
- `--quick`: of the packages that are changed, the first case of each test, and all cases that run every day of the
  files of tests that are changed; of the folders that need no model, the first case of each test.

"Changed" means beside the branch that this one came from: git's upstream of HEAD, else HEAD itself.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

ROOT = Path(__file__).parents[2]
SMOKE = {  # folder of tests: the sources that they are about
    "gpu": re.compile(r"src/mlxr/kernels/(gpu/|.*(gpu\w*\.py|\.body|\.h)$)|tests/gpu/"),
    "page": re.compile(r"web/|src/mlxr/server/page|tests/page/"),
}
HALVED = ("server", "cli", "service")  # every second test runs unless the package is changed
WHOLE = "project"  # these tests look at all packages
ALWAYS_QUICK = ("plain", "project", "formats", "tokenizers", "templates", "cache")
# The tests of a package lie in the folder of its name, with these exceptions.
TESTS_OF = {
    "csrc": ("kernels", "models"),
    "adapters": ("models", "cli"),
    "conversion": ("models", "cli"),
    "core": ("plain", "service"),
    "llm": ("cli",),
    "loading": ("cli", "models"),
    "model_files": ("cli", "models"),
    "kernels": ("kernels",),
}


def choose(cases: Sequence[Any], *, is_quick: bool, changed: Iterable[str]) -> list[Any]:
    """Return the cases of a run that is not thorough, in their order. `changed` are paths below the root."""
    changed = list(changed)
    touched = find_touched(changed)
    kept = set[int]()
    for group in _group(case for case in cases if not case.get_closest_marker("slow")):
        folder, path = _folder(group[0]), _path(group[0])
        is_smoke = folder in SMOKE and not any(SMOKE[folder].match(path) for path in changed)
        is_changed = folder in touched or path in changed or (folder in SMOKE and not is_smoke)
        if is_smoke:
            chosen = group[:1] if group[0].get_closest_marker("smoke") and not is_quick else []
        elif is_quick and path not in changed:
            chosen = group[:1] if is_changed or folder in ALWAYS_QUICK else []
        else:
            sampled = group[0].get_closest_marker("sampled")
            chosen = cover(group)[:: sampled.args[0] if sampled else 1]
            if not is_changed and folder != WHOLE:
                chosen = [] if folder in HALVED and _hash(group[0]) % 2 else [stand_in(chosen)]
        kept.update(map(id, chosen))
    return [case for case in cases if id(case) in kept]


def cover(cases: Sequence[Any]) -> list[Any]:
    """Return some of the cases of one test, in their order, so that each value of each parameter is in one."""
    wanted = [_values(case) for case in cases]
    missing = set().union(*wanted)
    kept = set[int]()
    if not missing:
        return list(cases)
    while missing:
        best = max(range(len(cases)), key=lambda at: (len(wanted[at] & missing), -at))
        kept.add(best)
        missing -= wanted[best]
    return [cases[at] for at in sorted(kept)]


def stand_in(cases: Sequence[Any]) -> Any:
    """Return the case of one test that stands for all, the same in each run. Its place is made of the test's name, so
    that it is not the first, and often the plainest, of every test.
    """
    return cases[_hash(cases[0]) // 2 % len(cases)]


def find_touched(changed: Iterable[str]) -> set[str]:
    """Return the folders of tests whose subject has changed."""
    touched = set[str]()
    for path in changed:
        parts = path.removeprefix("src/mlxr/").split("/")
        name = parts[0].removesuffix(".py")
        if path.startswith(("src/mlxr/", "csrc/")):
            touched |= set(TESTS_OF.get(name, (name,)))
    return touched


def list_changed(root: Path = ROOT) -> list[str]:
    """Return the paths that differ from where this branch came from, new files included; none outside a checkout."""
    upstream = _git(root, "merge-base", "HEAD", "@{upstream}") or ["HEAD"]
    return _git(root, "diff", "--name-only", upstream[0]) + _git(root, "ls-files", "--others", "--exclude-standard")


def _git(root: Path, *words: str) -> list[str]:
    run = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return run.stdout.split("\n")[:-1] if run.returncode == 0 else []


def _group(cases: Iterable[Any]) -> list[list[Any]]:
    groups = defaultdict[str, list[Any]](list)
    for case in cases:
        groups[case.nodeid.partition("[")[0]].append(case)
    return list(groups.values())


def _values(case: Any) -> set[tuple[str, int]]:
    spec = getattr(case, "callspec", None)
    return set(spec.indices.items()) if spec is not None else set()


def _hash(case: Any) -> int:
    """Return a number made of the test's name."""
    return crc32(case.nodeid.partition("[")[0].encode())


def _path(case: Any) -> str:
    return case.path.relative_to(ROOT).as_posix() if case.path.is_relative_to(ROOT) else case.path.as_posix()


def _folder(case: Any) -> str:
    parts = _path(case).split("/")
    return parts[1] if len(parts) > 1 else ""


def mark(config: pytest.Config) -> None:
    """Tell pytest of the markers."""
    config.addinivalue_line("markers", "slow: takes more than a second or two; left out of everyday runs")
    config.addinivalue_line("markers", "sampled(n): of the cases that would run every day, every n-th does")
    config.addinivalue_line("markers", "smoke: a test of the GPU's kernels or of the page that runs every day")
