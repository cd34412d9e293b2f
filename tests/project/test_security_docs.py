"""The bounds in docs/security.md are those in the source."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from mlxr.core.settings import BY_NAME

TEXT = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
ROWS = re.findall(r"^\|([^|\n]*)\|([^|\n]*)\|([^|\n]*)\|$", TEXT.split("## Bounds")[1], re.MULTILINE)[2:]
UNITS = {"MiB": 2**20, "s": 1}


@pytest.mark.parametrize(("what", "bound", "places"), ROWS, ids=[row[0].strip() for row in ROWS])
def test_bounds_are_those_of_the_source(what: str, bound: str, places: str) -> None:
    numbers = [int(number) * UNITS.get(unit, 1) for number, unit in re.findall(r"(\d+)(?: (MiB|s)\b)?", bound)]
    names = re.findall(r"`([^`]+)`", places)
    assert names
    for name in names:
        if "." not in name:
            default = BY_NAME[name].default
            assert not numbers or default is None or default in numbers or "%" in bound or "half" in bound
            continue
        module, _, constant = name.rpartition(".")
        assert getattr(importlib.import_module(module), constant) in numbers
