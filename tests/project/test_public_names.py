"""`from mlxr import ...` offers exactly what `__all__` says, and every public name explains itself."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path

import mlxr

PACKAGE = Path(mlxr.__file__).parent


@cache
def read_modules() -> dict[str, ast.Module]:
    """All modules of the package, parsed."""
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def test_all_names_exist_and_are_documented() -> None:
    assert mlxr.__all__ == sorted(mlxr.__all__, key=lambda name: (name.startswith("_"), name.lower()))
    for name in mlxr.__all__:
        value = getattr(mlxr, name)
        assert name.startswith("__") or inspect.getdoc(value), f"mlxr.{name} has no docstring"


def test_nothing_else_is_public() -> None:
    known = set(mlxr.__all__) | {path.stem for path in PACKAGE.iterdir()} | {"annotations", "TYPE_CHECKING"}
    public = {name for name in dir(mlxr) if not name.startswith("_")}
    assert public <= known, f"mlxr shows {public - known} without naming it in __all__"


def test_every_module_says_what_it_is_for() -> None:
    silent = [name for name, module in read_modules().items() if not ast.get_docstring(module)]
    assert silent == []


def test_docstrings_are_sentences() -> None:
    short = [
        f"{name}: {text}"
        for name, module in read_modules().items()
        for node in ast.walk(module)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node)) is not None
        and len(text.split()) < 4
    ]
    assert short == []


def test_no_vague_module_names() -> None:
    vague = {"utils", "util", "helpers", "helper", "manager", "misc", "common"}
    assert [str(path) for path in PACKAGE.rglob("*.py") if path.stem in vague] == []
