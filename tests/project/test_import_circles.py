"""No module needs itself: imports that run, those inside functions included, form no circle.

Imports for types alone (below `if TYPE_CHECKING`) do not run, and may name what stands above.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path.read_text() for path in sorted((SOURCES / "mlxr").rglob("*.py"))}


def imports_that_run(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports below a node but those for types alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from imports_that_run(child)


def find_needed(module: str, files: Mapping[str, str]) -> set[str]:
    """The modules among `files` that a module imports."""
    named: set[str] = set()
    for node in imports_that_run(ast.parse(files[module])):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        else:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            named |= {name if name in files else str(node.module) for name in names}
    return (named & files.keys()) - {module}


def find_circle(files: Mapping[str, str]) -> list[str]:
    """Return the modules of a circle in the order in which they import each other; empty if there is none."""
    try:
        TopologicalSorter({module: find_needed(module, files) for module in files}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_import_forms_a_circle() -> None:
    assert len(FILES) > 200
    assert find_circle(FILES) == []


@pytest.mark.parametrize(
    ("source", "is_circle"),
    [
        ("from mlxr import one", True),
        ("def f():\n    from mlxr.one import x", True),
        ("if TYPE_CHECKING:\n    from mlxr.one import x", False),
        ("import numpy", False),
    ],
)
def test_the_test_catches_circles(source: str, is_circle: bool) -> None:
    circle = find_circle({"mlxr.one": "import mlxr.two", "mlxr.two": source})
    assert (len(circle) > 0) is is_circle
