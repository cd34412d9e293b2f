"""A few rows times a weight of 16-bit floats, streamed through the threadgroups' memory: the plan, and the launch.

As many threadgroups as the device has multiprocessors share the rows out, and each runs once. What they first read of a
weight is under way before the launch in front has ended. What a SIMD-group needs of x stays in registers; where that is
too much, threadgroups share the columns of the same rows, and whoever reads the result adds the shares up. Knows no
deferred results.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.extras import Extras

FLOAT_STREAM = Kernel(
    "linear_floats",
    Path(__file__).parent,
    "floats.body",
    ("x", "weights", "bias", "norm", "residual", "numbers", "sizes"),
    ("out",),
    ("gate.h", "floats.h"),
    cuda_only=True,
)
PIECE_ROWS, PIECE_COLUMNS, PIECE_BYTES = 16, 64, 2048
TILE_TOKENS = 8
MAX_TOKENS = 16
SIMD_GROUPS = 8
STAGES = 10  # pieces of a SIMD-group under way: attention finds a place beside them
MAX_UNITS = (64, 12, 8)  # pieces of a tile that a SIMD-group holds x for: of one row, of eight, of 16
SHARES = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class FloatsPlan:
    """`groups` threadgroups for the rows, times `shares` for the columns; `tiles` of eight tokens, 0 for one token."""

    groups: int
    shares: int
    tiles: int
    simd_groups: int = SIMD_GROUPS
    stages: int = STAGES

    @property
    def room_bytes(self) -> int:
        """Bytes of a threadgroup's memory: rings, and two sets of sums."""
        sums = 2 * 4 * PIECE_ROWS * (TILE_TOKENS * self.tiles or 1)
        return self.simd_groups * (self.stages * PIECE_BYTES + sums)


def plan_floats(
    tokens: int, outputs: int, inputs: int, processors: int, room_bytes: int, *, shared: bool
) -> FloatsPlan | None:
    """How to stream it on so many multiprocessors with so much memory for a threadgroup; None where it does not go.

    `outputs` are those that are made, `shared` says whether shares of the columns may be left to add up.
    """
    if tokens > MAX_TOKENS or not processors or outputs * processors >= 2**31:
        return None
    tiles = 0 if tokens == 1 else -(-tokens // TILE_TOKENS)
    for shares in SHARES if shared else SHARES[:1]:
        units, rest = divmod(inputs, shares * PIECE_COLUMNS * SIMD_GROUPS)
        if not rest and 0 < units <= MAX_UNITS[tiles]:
            plan = FloatsPlan(min(max(1, processors // shares), outputs), shares, tiles)
            return plan if plan.room_bytes <= room_bytes else None
    return None


def make_constants(plan: FloatsPlan, rows: int, inputs: int) -> dict[str, int]:
    """The constants of the body but THREADS and the extras'."""
    return {
        "ROWS": rows,
        "INPUTS": inputs,
        "GROUPS": plan.groups,
        "SHARES": plan.shares,
        "STAGES": plan.stages,
        "N": max(1, plan.tiles),
        "SINGLE": int(not plan.tiles),
    }


def multiply_floats(gpu: Any, x: Any, weight: Any, extras: Extras, kind: Any, plan: FloatsPlan) -> Any:
    """x (tokens, inputs) times `weight` (outputs, inputs): (tokens, outputs) of type `kind`, or shares of it in front.

    A norm is for one row.
    """
    (tokens, inputs), rows = x.shape, weight.shape[0]
    made = rows // 2 if extras.gate else rows
    (out,) = gpu.launcher.launch(
        FLOAT_STREAM,
        [
            x,
            weight,
            *extras.list_inputs(gpu),
            gpu.launcher.numbers(tokens),
        ],
        groups=(plan.groups * plan.shares, 1, 1),
        threads=32 * plan.simd_groups,
        outputs=[((plan.shares, tokens, made) if plan.shares > 1 else (tokens, made), kind)],
        constants=make_constants(plan, rows, inputs) | extras.constants,
        types={"X": x.dtype, "K": weight.dtype, "Y": kind},
        room_bytes=plan.room_bytes,
    )
    return out
