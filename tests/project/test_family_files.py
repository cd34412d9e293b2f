"""Only a family's file, and tokenizers, name the family: all other code follows from its layers and its folders."""

from __future__ import annotations

import ast
import runpy
from functools import cache
from pathlib import Path

from mlxr.models.families import FAMILIES, FOLDERS

SOURCES = Path(__file__).parents[2] / "src" / "mlxr"
WHERE = ("models/families/", "tokenizers/")
NAMES = {name for _, folder in FOLDERS for name in (folder.model_type, folder.hf_class, folder.older_class)}
NAMES |= {family.name for family in FAMILIES}
SHARED = {"bert": 2, "mamba": 3}  # the `model_type` of JinaBERT's folders, too; layers of Granite and Nemotron-H
RECURRENCES = {"mamba2"}  # which a family is called after


def find_named(source: str) -> set[str]:
    """Find the names of families among the quoted words of a source."""
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
    others = {name: named - RECURRENCES for name, named in list_files().items() if not name.startswith(WHERE)}
    assert {name: named for name, named in others.items() if named} == {}


def test_each_family_is_named_in_one_file() -> None:
    files = {name: named for name, named in list_files().items() if name.startswith(WHERE[0])}
    assert {family.name for family in FAMILIES} <= set().union(*files.values())
    for family in FAMILIES:
        assert len([name for name, named in files.items() if family.name in named]) == SHARED.get(family.name, 1), (
            family.name
        )


def test_the_table_of_families_follows_from_the_tests() -> None:
    tool = runpy.run_path(str(SOURCES.parents[1] / "tools" / "write_families.py"))
    assert tool["TARGET"].read_text(encoding="utf-8") == tool["render"](tool["TARGET"].read_text(encoding="utf-8")), (
        "run `make format`"
    )
