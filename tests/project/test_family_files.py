"""A family is named in one file of the models, and by tokenizers: all else follows from its layers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from mlxr.models.architectures import ARCHITECTURES

SOURCES = Path(__file__).parents[2] / "src" / "mlxr"
WHERE = ("models/architectures.py", "tokenizers/")
NAMES = {name for row in ARCHITECTURES for name in (row.name, row.gguf_name, row.hf_class)}


def find_named(source: str) -> set[str]:
    """Names of families among the words that a source has in quotes, but for its docstrings."""
    return {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES
    }


def list_files() -> Iterator[tuple[str, set[str]]]:
    for path in sorted(SOURCES.rglob("*.py")):
        named = find_named(path.read_text())
        if named:
            yield path.relative_to(SOURCES).as_posix(), named


def test_no_other_file_knows_families() -> None:
    assert {name: named for name, named in list_files() if not name.startswith(WHERE)} == {}


def test_the_test_finds_families() -> None:
    assert {row.name for row in ARCHITECTURES} <= dict(list_files())[WHERE[0]]
