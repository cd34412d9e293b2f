"""A few rows times few outputs in 32 bits, as a router has them: a threadgroup for some outputs, all columns at once.

Such a weight is small, so what counts is that many threadgroups ask for all of it at the same time, and before the
launch in front has ended. Knows no deferred results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.extras import Extras
from mlxr.kernels.linear.parts import LAYOUTS, TYPE_NAMES

WIDE = Kernel(
    "linear_wide",
    Path(__file__).parent,
    "wide.body",
    ("x", "a", "bias", "norm", "residual", "numbers", "sizes"),
    ("out",),
    type_names=TYPE_NAMES,
)
THREADS, QUAD = 128, 4
MAX_OUTPUTS, MAX_COLUMNS = 1024, 8192
SHAPES = ((1, 1, 1), (4, 2, 4), (8, 4, 8))  # up to so many tokens: outputs and tokens of a threadgroup
LARGEST = (4, 16)


def can_spread(weights: list[tuple[int, int, Any]], columns: int, extras: Extras) -> bool:
    """Whether `multiply_wide` multiplies by these weights, each (number of its type, rows, bytes)."""
    (kind, rows, _), *others = weights
    is_wide = not others and kind == LAYOUTS["f32"].number and not extras.gate
    return is_wide and rows <= MAX_OUTPUTS and columns <= MAX_COLUMNS and columns % QUAD == 0


def multiply_wide(gpu: Any, x: Any, weight: tuple[int, int, Any], extras: Extras, kind: Any) -> Any:
    """As `rows.multiply_rows` does it."""
    (tokens, columns), (number, rows, raw) = x.shape, weight
    outputs, width = next(((r, t) for most, r, t in SHAPES if tokens <= most), LARGEST)
    if columns > MAX_COLUMNS // 2:
        outputs = min(outputs, 2)
    (out,) = gpu.launcher.launch(
        WIDE,
        [x, raw, *extras.list_inputs(gpu), gpu.launcher.numbers(tokens, rows)],
        groups=(-(-rows // outputs), -(-tokens // width), 1),
        threads=THREADS,
        outputs=[((tokens, rows), kind)],
        constants={"TYPE_A": number, "ROWS": outputs, "T": width, "INPUTS": columns, **extras.constants},
        types={"X": x.dtype, "Y": kind},
    )
    return out
