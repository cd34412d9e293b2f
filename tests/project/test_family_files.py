"""A family is named by its row among the models, and by tokenizers: all else follows from its layers."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from mlxr.models.architectures import ARCHITECTURES
from mlxr.models.folders.registry import FOLDERS

SOURCES = Path(__file__).parents[2] / "src" / "mlxr"
WHERE = ("models/rows/", "tokenizers/")
NAMES = {name for row in ARCHITECTURES for name in (row.name, row.gguf_name)}
NAMES |= {name for family in FOLDERS for name in (family.model_type, family.hf_class)}


def find_named(source: str) -> set[str]:
    """Names of families among the words that a source has in quotes, but for its docstrings."""
    return {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES
    }


@cache
def list_files() -> dict[str, set[str]]:
    """The families that each source file names, if it names some."""
    found = {path.relative_to(SOURCES).as_posix(): find_named(path.read_text()) for path in SOURCES.rglob("*.py")}
    return {name: named for name, named in sorted(found.items()) if named}


def test_no_other_file_knows_families() -> None:
    assert {name: named for name, named in list_files().items() if not name.startswith(WHERE)} == {}


def test_the_test_finds_families() -> None:
    rows = [named for name, named in list_files().items() if name.startswith(WHERE[0])]
    assert {row.name for row in ARCHITECTURES} <= set().union(*rows)
