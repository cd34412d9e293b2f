"""One row times a weight in integers, streamed through the threadgroups' memory: which threadgroups, and the launch.

As many threadgroups as the device has multiprocessors share the rows out and run once. What they read of the weight is
under way before the launch in front has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.expand import BLOCK_HEADERS

STREAM = Kernel(
    "linear_stream",
    Path(__file__).parent,
    "stream.body",
    ("x", "a", "b", "bias", "norm", "residual", "numbers"),
    ("out",),
    (*BLOCK_HEADERS, "stream.h", "gate.h"),
)
UNIT_COLUMNS = {12: 512, 14: 512}
STAGE_WORDS = {12: 1280, 14: 1232}
TILE_ROWS = 16
MAX_ROOM_BYTES = 226 * 1024


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """`groups` threadgroups of `simds` SIMD-groups for each weight, and units under way for each of these."""

    groups: tuple[int, int]
    simds: int
    stages: int


def count_room(plan: StreamPlan, columns: int, rows: tuple[int, int], types: tuple[int, int], gate: int) -> tuple[int, int]:
    """Most tiles of a threadgroup, and bytes of its memory."""
    made = 8 if gate else 16
    tiles = 1
    for count, groups in zip((rows[0] // 2 if gate else rows[0], rows[1]), plan.groups, strict=True):
        if count:
            tiles = max(tiles, -(-(count // made) // groups))
    blocks = columns // 256
    row = columns // 2 + 64 + 4 * blocks + -(-blocks // 4) * 4
    kept = -(-tiles // plan.simds) + 1
    stage = max(STAGE_WORDS[kind] for kind in types)
    return tiles, 4 * (row + plan.simds * plan.stages * stage + plan.simds * kept * 16)


def make_constants(plan: StreamPlan, columns: int, rows: tuple[int, int], types: tuple[int, int], gate: int, norm: bool,
                   bias: bool, residual: bool) -> dict[str, int]:
    tiles, _ = count_room(plan, columns, rows, types, gate)
    return {
        "THREADS": 32 * plan.simds,
        "TYPE_A": types[0],
        "TYPE_B": types[1],
        "INPUTS": columns,
        "ROWS_A": rows[0],
        "ROWS_B": rows[1],
        "GROUPS_A": plan.groups[0],
        "GROUPS_B": plan.groups[1],
        "STAGES": plan.stages,
        "TILES": tiles,
        "NORM": int(norm),
        "BIAS": int(bias),
        "GATE": gate,
        "RESIDUAL": int(residual),
    }
