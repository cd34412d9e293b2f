"""The grids of the weight types IQ1 to IQ3, out of `grids.h`, which C++ and GPU sources read too."""

from __future__ import annotations

import re
from array import array
from functools import cache
from pathlib import Path


@cache
def load_grid(name: str) -> array[int]:
    """The numbers of a grid (`iq3_s_grid`), 16 bits each: two or four bits for each of eight or four columns."""
    text = Path(__file__).with_suffix(".h").read_text(encoding="utf-8")
    found = re.search(rf"^GRID\({name.upper()}, \d+\) = \{{(.*?)\}};", text, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return array("H", (int(number, 16) for number in re.findall(r"0x\w+", found[1])))
