"""Writes the tables of `csrc/tables` as Python into `src/mlxr/kernels/tables.py`: weight types and activations.

C++ includes the tables themselves; a wheel has no `csrc`. `make format` runs this program, and
`tests/project/test_tables.py` says when it was forgotten.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "csrc" / "tables"
TARGET = ROOT / "src" / "mlxr" / "kernels" / "tables.py"
HEAD = '''"""Weight types and activations as kernels know them. Written by tools/write_tables.py: change csrc/tables."""

from typing import Literal, NamedTuple


class WeightType(NamedTuple):
    """A weight type that the CPU multiplies and a GPU takes."""

    name: str
    code: int  # in GPU sources: ggml's number, or our own
    block_size: int  # values that share a block
    block_bytes: int


WEIGHT_TYPES = (
'''


def read_rows(table: str) -> list[list[str]]:
    """Return the arguments of each row of a table, split at commas."""
    text = (TABLES / f"{table}.def").read_text(encoding="utf-8")
    return [[part.strip() for part in row.split(",")] for row in re.findall(r"^[A-Z]+\((.*)\)$", text, re.MULTILINE)]


def render() -> str:
    """Return the source of the module."""
    types = "".join(f'    WeightType("{row[0]}", {", ".join(row[1:4])}),\n' for row in read_rows("types"))
    names = ", ".join(f'"{row[0]}"' for row in read_rows("activations"))
    counts = ", ".join(f'"{row[0]}": {row[1]}' for row in read_rows("activations") if row[1] != "0")
    numbers = (
        f"# How many numbers a layer states of an activation.\nPARAMETER_COUNTS: dict[Activation, int] = {{{counts}}}\n"
    )
    return f"{HEAD}{types})\n\nActivation = Literal[{names}]\n{numbers}"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
