"""Everyday runs leave out combinations and long tests, never a value of a parameter; changes bring them all back."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import everyday
import pytest
from hypothesis import given
from hypothesis import strategies as st


def make_case(place: str, markers: tuple[str, ...] = (), **values: int) -> Any:
    path, _, name = place.partition("::")
    suffix = f"[{values}]" if values else ""
    return SimpleNamespace(
        path=everyday.ROOT / path,
        nodeid=f"{path}::{name}{suffix}",
        callspec=SimpleNamespace(indices=values),
        get_closest_marker=lambda wanted: SimpleNamespace(args=(3,)) if wanted in markers else None,
    )


def choose(cases: list[Any], *changed: str, is_quick: bool = False) -> list[Any]:
    return everyday.choose(cases, is_quick=is_quick, changed=changed)


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=64, unique=True))
def test_each_value_of_each_parameter_is_in_a_case(rows: list[tuple[int, int, int]]) -> None:
    cases = [make_case("tests/engine/test_x.py::test_y", a=a, b=b, c=c) for a, b, c in rows]
    kept = choose(cases, "src/mlxr/engine/runner.py")
    values = [
        {(name, value) for case in some for name, value in case.callspec.indices.items()} for some in (cases, kept)
    ]
    assert values[0] == values[1]
    assert [case for case in cases if case in kept] == kept
    assert len(kept) <= len(values[0])


def test_a_full_cross_takes_as_many_cases_as_its_longest_parameter() -> None:
    cases = [make_case("tests/engine/test_x.py::test_y", a=a, b=b) for a in range(7) for b in range(5)]
    assert len(choose(cases, "src/mlxr/engine/runner.py")) == 7


@pytest.mark.parametrize("folder", ["engine", "project"])
def test_one_list_of_cases_stays_whole_where_it_matters(folder: str) -> None:
    cases = [make_case(f"tests/{folder}/test_x.py::test_y", a=at, b=at) for at in range(30)]
    assert choose(cases, f"tests/{folder}/test_x.py") == cases
    assert choose(cases) == (cases if folder == "project" else [everyday.stand_in(cases)])


def test_of_a_sampled_test_every_third_case_runs() -> None:
    cases = [make_case("tests/engine/test_x.py::test_y", ("sampled",), a=at) for at in range(8)]
    assert choose(cases, "src/mlxr/engine/runner.py") == cases[::3]


def test_one_case_stands_for_many_and_not_always_the_first() -> None:
    tests = [[make_case(f"tests/engine/test_x.py::test_{name}[{at}]", a=at) for at in range(3)] for name in range(40)]
    kept = choose([case for cases in tests for case in cases])
    assert kept == [everyday.stand_in(cases) for cases in tests] == choose(kept)
    assert {cases.index(case) for cases, case in zip(tests, kept, strict=True)} == {0, 1, 2}


@pytest.mark.parametrize("folder", ["server", "cli", "service"])
def test_of_what_starts_servers_every_second_test_runs_unless_it_is_changed(folder: str) -> None:
    cases = [make_case(f"tests/{folder}/test_x.py::test_{number}") for number in range(60)]
    kept = choose(cases)
    assert 20 < len(kept) < 40
    assert kept == choose(kept)
    assert choose(cases, f"tests/{folder}/test_x.py") == cases


@pytest.mark.parametrize("is_quick", [False, True])
def test_slow_tests_are_left_out(is_quick: bool) -> None:
    slow, other = make_case("tests/cache/test_x.py::test_a", ("slow",)), make_case("tests/cache/test_x.py::test_b")
    assert choose([slow, other], is_quick=is_quick) == [other]


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        *[("gpu", name) for name in ("attend/decode.body", "linear/k_blocks.h", "moe/gpu.py", "gpu/device.py")],
        ("page", "web/src/App.tsx"),
    ],
)
def test_smoke_stands_for_the_rest_until_a_source_is_changed(folder: str, source: str) -> None:
    whole = source if folder == "page" else f"src/mlxr/kernels/{source}"
    cases = [make_case(f"tests/{folder}/test_x.py::test_a", ("smoke",), a=at) for at in range(3)]
    cases += [make_case(f"tests/{folder}/test_x.py::test_b", a=at) for at in range(3)]
    assert choose(cases, "README.md", "src/mlxr/kernels/attend/__init__.py") == cases[:1]
    assert choose(cases, "README.md", whole) == cases


def test_quick_runs_take_what_is_changed_and_a_little_of_the_rest() -> None:
    engine, cache, page = (
        [make_case(f"tests/{folder}/test_x.py::test_a", ("smoke",), a=at) for at in range(3)]
        for folder in ("engine", "cache", "page")
    )
    cases = [*engine, *cache, *page]
    assert choose(cases, is_quick=True) == cache[:1]
    assert choose(cases, "src/mlxr/engine/runner.py", is_quick=True) == [*engine[:1], *cache[:1]]
    assert choose(cases, "tests/engine/test_x.py", is_quick=True) == [*engine, *cache[:1]]


def test_every_package_has_tests() -> None:
    packages = [path for path in (everyday.ROOT / "src" / "mlxr").iterdir() if path.suffix == ".py" or path.is_dir()]
    names = [f"src/mlxr/{path.name}" for path in packages if not path.name.startswith("__") and path.name != "assets"]
    for name in [*names, "csrc/linear/rows.h"]:
        folders = everyday.find_touched([name])
        assert folders, name
        for folder in folders:
            assert (everyday.ROOT / "tests" / folder).is_dir(), f"{name}: there is no tests/{folder}"


def test_changes_are_those_since_the_branch_began(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        own = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        subprocess.run(["git", *own, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "one").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    assert everyday.list_changed(tmp_path) == []
    git("checkout", "-b", "work", "--track", "main")
    (tmp_path / "one").write_text("2")
    git("commit", "-am", "second")
    (tmp_path / "two").write_text("new")
    assert everyday.list_changed(tmp_path) == ["one", "two"]


def test_outside_a_checkout_nothing_is_changed(tmp_path: Path) -> None:
    assert everyday.list_changed(tmp_path) == []
