"""Writes the tables of `csrc/tables` as Python into `src/mlxr/core/tables.py`: weight types and activations.

C++ includes the tables themselves; a wheel has no `csrc`. `make format` runs this program, and
`tests/project/test_tables.py` fails if it was forgotten.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "csrc" / "tables"
TARGET = ROOT / "src" / "mlxr" / "core" / "tables.py"
HEAD = '''"""Weight types and activations as kernels know them. Written by tools/write_tables.py: change csrc/tables."""

from typing import Literal, NamedTuple

OWN_CODES = 256  # from here on codes are our own, of types that no GGUF file has


class WeightType(NamedTuple):
    """A weight type that the CPU multiplies and a GPU takes."""

    name: str
    code: int  # in files and GPU sources: ggml's number, or our own
    block_size: int  # values that share a block
    block_bytes: int
    fields: tuple[tuple[str, int, int], ...] = ()  # of the kernels' layout: kind, offset in the block, how many


WEIGHT_TYPES = (
'''


def read_rows(table: str) -> list[list[str]]:
    """Return the arguments of each row of a table, split at commas outside braces."""
    text = (TABLES / f"{table}.def").read_text(encoding="utf-8")
    rows = re.findall(r"^[A-Z]+\((.*)\)$", text, re.MULTILINE)
    return [re.findall(r"\{[^}]*\}|[^,{\s][^,{]*", row) for row in rows]


def _render_type(row: list[str]) -> str:
    fields = [re.findall(r"\w+", field) for field in row[4:]]
    text = "".join(f'("{kind}", {offset}, {count}), ' for kind, offset, count in fields)
    return f'    WeightType("{row[0]}", {", ".join(row[1:4])}, ({text.rstrip() if len(fields) == 1 else text[:-2]})),\n'


def render() -> str:
    """Return the source of the module."""
    types = "".join(map(_render_type, read_rows("types")))
    names = ", ".join(f'"{row[0]}"' for row in read_rows("activations"))
    counts = ", ".join(f'"{row[0]}": {row[1]}' for row in read_rows("activations") if row[1] != "0")
    numbers = (
        f"# How many numbers a layer states of an activation.\nPARAMETER_COUNTS: dict[Activation, int] = {{{counts}}}\n"
    )
    return f"{HEAD}{types})\n\nActivation = Literal[\n    {names}\n]\n{numbers}"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
