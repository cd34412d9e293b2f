"""Weight types, activations and operators are said once, in csrc/tables."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np

from mlxr.core import tables
from mlxr.formats.ggml_types import by_name
from mlxr.kernels.activate import ACTIVATIONS, PARAMETER_COUNTS, activate
from mlxr.kernels.context import Context
from mlxr.kernels.linear.parts import LAYOUTS

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "write_tables.py"))


def test_the_tables_of_python_are_those_of_the_kernels() -> None:
    assert Path(tables.__file__).read_text(encoding="utf-8") == TOOL["render"](), "run `make format`"


def test_every_row_is_found() -> None:
    for table in ("types", "activations", "operators", "kernels"):
        text = (TOOL["TABLES"] / f"{table}.def").read_text(encoding="utf-8")
        rows = [line for line in text.splitlines() if not line.startswith(("//", "#"))]
        assert len(TOOL["read_rows"](table)) == len(rows) > 4


def test_blocks_of_files_are_those_of_the_kernels() -> None:
    for row in tables.WEIGHT_TYPES:
        known = by_name(row.name)
        assert (known.block_size, known.type_size) == (row.block_size, row.block_bytes)
        assert known.id in (row.code, None)


def test_fields_on_a_gpu_lie_within_the_block() -> None:
    assert list(LAYOUTS) == [row.name for row in tables.WEIGHT_TYPES]
    for layout in LAYOUTS.values():
        assert all(offset + size <= layout.block_bytes for offset, size in layout.fields)


def test_the_ledger_names_activations_as_the_table_does() -> None:
    ctx = Context("cpu", threads=1)
    for kind in ACTIVATIONS:
        numbers = (0.5,) * PARAMETER_COUNTS.get(kind, 0)  # type: ignore[call-overload]
        activate(ctx, np.zeros((1, 4), np.float32), kind, parameters=numbers)  # type: ignore[arg-type]
    assert {count.variant for count in ctx.ledger.snapshot().dispatches} == set(ACTIVATIONS)
