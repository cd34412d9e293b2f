"""The Makefile names what a machine lacks before anything is downloaded or built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what `make run` looks at first, and a Python that cannot do anything."""
    for name in ("Makefile", "pyproject.toml", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bare-python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bare-python").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("variables", "compiler", "expected"),
    [
        (["PYTHON="], "c++", "mlxr needs Python 3.11 or newer with venv: install python3 and python3-venv"),
        (["PYTHON=./bare-python"], "no-such-compiler", "mlxr needs a C++20 compiler: install g++ or clang++"),
        (["PYTHON=./bare-python"], "true", "mlxr needs the C headers of ./bare-python: install python3-dev"),
    ],
    ids=["python", "compiler", "headers"],
)
def test_what_is_missing_is_said_in_one_line(
    variables: list[str], compiler: str, expected: str, checkout: Path
) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")} | {"CXX": compiler}
    command = ["make", "--no-print-directory", "run", *variables]
    run = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in run.stderr.splitlines() if not line.startswith("make: ")]
    assert run.returncode == 2
    assert len(lines) == 1
    assert lines[0].startswith(expected)
    assert not (checkout / ".venv").exists()


def test_an_environment_leaves_the_interpreter_as_it_is(checkout: Path) -> None:
    """It links to the system's, which belongs to root; a newer file there would have other environments built again."""
    interpreter = checkout / "interpreter"
    interpreter.write_text("")
    os.utime(interpreter, (1, 1))
    makes = f'if [ "$1" = -m ]; then mkdir -p .venv/bin && ln -s {interpreter} .venv/bin/python; fi'
    (checkout / "bare-python").write_text(f"#!/bin/sh\n{makes}\n")
    command = ["make", ".venv/bin/python", "PYTHON=./bare-python", "CXX=true"]
    subprocess.run(command, cwd=checkout, capture_output=True, check=True)
    assert (checkout / ".venv" / "bin" / "python").resolve() == interpreter
    assert interpreter.stat().st_mtime == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "files", "expected"),
    [
        ("run", {}, ["native"]),
        ("run", {".tiers": ""}, ["all"]),
        ("lint", {}, ["all"]),
        ("tiers", {}, ["all"]),
        ("tiers", {".installed": "native\n"}, ["all"]),
        ("tiers", {".installed": "all\n"}, []),
        ("test", {".installed": "native\n"}, ["all"]),
        ("test", {".installed": ""}, []),
        ("run", {".installed": "native\n"}, []),
        ("run", {".installed": "native\n", ".tiers": ""}, []),
    ],
)
def test_run_compiles_for_this_machine_and_all_else_adds_what_is_missing(
    target: str, files: dict[str, str], expected: list[str], checkout: Path
) -> None:
    bin_folder = checkout / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (checkout / "src" / "mlxr").mkdir(parents=True)
    for name in ("python", "pip", "mlxr", "ruff", "mypy", "clang-format"):
        (bin_folder / name).write_text('#!/bin/sh\necho "$0 $*" >>calls\n')
        (bin_folder / name).chmod(0o755)
    for age, (name, text) in enumerate(files.items(), 1):
        (checkout / ".venv" / name).write_text(text)
        os.utime(checkout / ".venv" / name, (2e9 + age, 2e9 + age))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    subprocess.run(["make", target], cwd=checkout, env=environment, capture_output=True, check=False)
    calls = (checkout / "calls").read_text() if (checkout / "calls").exists() else ""
    assert re.findall(r"cmake\.define\.MLXR_TIERS=(\w+) -e \.", calls) == expected


@pytest.mark.parametrize(
    "target",
    [
        *(
            "run",
            "tiers",
            "test",
            "quick",
            "lint",
            "bench",
            "bench-gate",
            "page",
            "check-page",
            "test-page",
            "docs",
            "wheel",
        ),
        *("test-gpu", "sanitize", "test-real", "test-peers", "test-wheel", "test-agents", "clean"),
    ],
)
def test_help_lists_the_target(target: str) -> None:
    assert target in list_targets()


@cache
def list_targets() -> list[str]:
    """The targets that `make help` lists."""
    listing = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listing.splitlines()]
