"""Rows times few outputs in 32 bits, as a router has them: a threadgroup for some of both, all columns at once.

Such a weight is small, so what counts is that many threadgroups ask for all of it at the same time, and before the
launch in front has ended. Knows no deferred results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxr.kernels.gpu.kernel import LANES, Kernel
from mlxr.kernels.linear.extras import Extras
from mlxr.kernels.linear.parts import LAYOUTS, TYPE_NAMES

WIDE = Kernel(
    "linear_wide",
    Path(__file__).parent,
    "wide.body",
    ("x", "a", "bias", "norm", "residual", "numbers", "sizes"),
    ("out",),
    ("wide.h",),
    type_names=TYPE_NAMES,
)
QUAD = 4  # columns of a lane at a time
MAX_OUTPUTS, MAX_COLUMNS = 1024, 8192
MAX_HELD = 64  # weights of a lane
MIN_SLICES, MAX_SIMD_GROUPS = 4, 16


@dataclass(frozen=True, slots=True)
class WidePlan:
    """A SIMD-group makes `outputs` of `tokens` (powers of two, at most 32 results), and a threadgroup has `sets` of
    tokens side by side. `resident` threadgroups fit on a multiprocessor."""

    outputs: int
    tokens: int
    sets: int = 1
    resident: int = 1

    def count_groups(self, tokens: int, rows: int) -> int:
        """How many threadgroups make `rows` outputs of so many tokens."""
        return -(-rows // self.outputs) * -(-tokens // (self.tokens * self.sets))

    def count_slices(self, columns: int) -> int:
        """How many SIMD-groups share the columns: few, but so many that none holds too many weights."""
        slices = MIN_SLICES
        while slices < MAX_SIMD_GROUPS and self.outputs * QUAD * -(-columns // (QUAD * LANES * slices)) > MAX_HELD:
            slices *= 2
        return slices


# Up to so many tokens, usually so many. Plans go by these alone, so that a rehearsal meets all of them.
PLANS = (
    (1, 1, WidePlan(1, 1)),
    (8, 4, WidePlan(2, 4)),
    (64, 32, WidePlan(4, 4, 2, 2)),
    (256, 128, WidePlan(4, 8, 2, 2)),
)
MIN_GROUPS = 96  # threadgroups, with which few multiprocessors are idle


def can_spread(weights: list[tuple[int, int, Any]], columns: int, extras: Extras) -> bool:
    """Whether `multiply_wide` multiplies by these weights, each (number of its type, rows, bytes)."""
    (kind, rows, _), *others = weights
    is_wide = not others and kind == LAYOUTS["f32"].number and not extras.gate
    return is_wide and rows <= MAX_OUTPUTS and columns <= MAX_COLUMNS and columns % QUAD == 0


def choose_plan(tokens: int, rows: int) -> WidePlan:
    """The plan for so many rows of x and outputs: where these are few, smaller parts keep as many threadgroups busy."""
    _, usual, plan = next((each for each in PLANS if tokens <= each[0]), PLANS[-1])
    while plan.count_groups(usual, rows) < MIN_GROUPS and (plan.sets > 1 or plan.outputs > 1):
        plan = replace(plan, sets=1) if plan.sets > 1 else replace(plan, outputs=plan.outputs // 2)
    return plan


def multiply_wide(gpu: Any, x: Any, weight: tuple[int, int, Any], extras: Extras, kind: Any) -> Any:
    """As `rows.multiply_rows` does it."""
    (tokens, columns), (number, rows, raw) = x.shape, weight
    plan = choose_plan(tokens, rows)
    slices = plan.count_slices(columns)
    sets = min(plan.sets, MAX_SIMD_GROUPS // slices)
    (out,) = gpu.launcher.launch(
        WIDE,
        [x, raw, *extras.list_inputs(gpu), gpu.launcher.numbers(tokens, rows)],
        groups=(-(-rows // plan.outputs), -(-tokens // (plan.tokens * sets)), 1),
        threads=LANES * slices * sets,
        outputs=[((tokens, rows), kind)],
        constants={
            "TYPE_A": number,
            "ROWS": plan.outputs,
            "T": plan.tokens,
            "SLICES": slices,
            "INPUTS": columns,
            "RESIDENT": plan.resident,
            **extras.constants,
        },
        types={"X": x.dtype, "Y": kind},
    )
    return out
