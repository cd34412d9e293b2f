"""One row times a weight in integers, streamed through the threadgroups' memory: which threadgroups, and the launch.

As many threadgroups as the device has multiprocessors share the rows out, and each runs once. What they first read of a
weight is under way before the launch in front has ended. Knows no deferred results.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.expand import BLOCK_HEADERS
from mlxr.kernels.linear.extras import Extras
from mlxr.kernels.linear.parts import LAYOUTS, TYPE_NAMES

STREAM = Kernel(
    "linear_stream",
    Path(__file__).parent,
    "stream.body",
    ("x", "a", "b", "bias", "norm", "residual", "numbers"),
    ("out",),
    (*BLOCK_HEADERS, "units.h", "stream.h", "stream_runs.h", "gate.h"),
    type_names=TYPE_NAMES,
    cuda_only=True,
)
# Of a unit, as stream.h and stream_runs.h have it, by ggml's number of the type.
STAGE_WORDS = {2: 832, 6: 960, 8: 1152, 12: 1280, 13: 1792, 14: 1232, 20: 832, 23: 800, 39: 816}
DOUBLE = frozenset((12, 13))  # types of which a unit is two blocks
TILE_ROWS = 16
BLOCK_COLUMNS = 256
# Of which a row has a whole number, by type: those of a block, or as many as have a whole word in each plane.
WHOLE_COLUMNS = {2: 64, 6: 64, 8: 64, 12: 256, 13: 256, 14: 256, 20: 64, 23: 256, 39: 32}
SIMD_GROUPS = 8
STAGES = 3  # so many that threadgroups have a multiprocessor each: two on some of them cost more than they bring
RING_BYTES = 136 * 1024  # small units have more stages in as much


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """`groups` threadgroups of `simd_groups` for each weight; `stages` units of every SIMD-group are under way."""

    groups: tuple[int, int]
    simd_groups: int = SIMD_GROUPS
    stages: int = STAGES


@dataclass(frozen=True, slots=True)
class StreamShape:
    """One or two weights of `rows` (the second may be 0) and `columns`, of `types`; `gate` as in `multiply_stream`."""

    types: tuple[int, int]
    rows: tuple[int, int]
    columns: int
    gate: int = 0

    @property
    def unit(self) -> int:
        """Blocks of a unit, the most of both types."""
        return 2 if DOUBLE & {*self.types} else 1

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of each weight: 16 rows, or eight of each half."""
        return self.rows[0] // TILE_ROWS, self.rows[1] // TILE_ROWS

    def count_tiles(self, plan: StreamPlan) -> int:
        """Most tiles of a threadgroup."""
        shares = zip(self.tiles, plan.groups, strict=True)
        return max(-(-tiles // groups) for tiles, groups in shares if tiles)

    @property
    def row_bytes(self) -> int:
        """Bytes of x in a threadgroup's memory."""
        blocks = self.unit * -(-self.columns // (self.unit * BLOCK_COLUMNS))
        return 4 * (BLOCK_COLUMNS // 2 * blocks + 64 + 4 * blocks + -(-blocks // 4) * 4)

    def count_room(self, plan: StreamPlan) -> int:
        """Bytes of a threadgroup's memory: x, the rings and the sums."""
        rings = plan.stages * max(STAGE_WORDS[kind] for kind in self.types)
        sums = TILE_ROWS * (-(-self.count_tiles(plan) // plan.simd_groups) + 1)
        return self.row_bytes + 4 * plan.simd_groups * (rings + sums)


def plan_stream(shape: StreamShape, processors: int, room_bytes: int) -> StreamPlan | None:
    """How to stream it on so many multiprocessors with so much memory for a threadgroup; None where it does not go."""
    fits = all(kind in STAGE_WORDS and not shape.columns % WHOLE_COLUMNS[kind] for kind in shape.types)
    unit = shape.unit * BLOCK_COLUMNS
    if shape.columns % unit and len({kind in DOUBLE for kind in shape.types}) > 1:
        fits = False  # the last unit of both would begin elsewhere
    if not fits or shape.columns < unit or not processors or any(rows % TILE_ROWS for rows in shape.rows):
        return None
    words = max(STAGE_WORDS[kind] for kind in shape.types)
    plan = StreamPlan(share_groups(shape, processors), stages=max(STAGES, RING_BYTES // (4 * SIMD_GROUPS * words)))
    return plan if shape.count_room(plan) <= room_bytes else None


def count_bytes(kind: int, columns: int) -> int:
    """Bytes of so many columns of a row, by the number of the type."""
    layout = LAYOUTS[TYPE_NAMES[kind]]
    return columns // layout.block_size * layout.block_bytes


def share_groups(shape: StreamShape, processors: int) -> tuple[int, int]:
    """Threadgroups of each weight, such that the slowest is done soonest."""
    first, second = shape.tiles
    if not second:
        return min(first, processors), 0
    costs = [count_bytes(kind, BLOCK_COLUMNS) for kind in shape.types]

    def slowest(groups: int) -> int:
        return max(-(-first // (processors - groups)) * costs[0], -(-second // groups) * costs[1])

    groups = min(range(1, processors), key=slowest)
    return min(first, processors - groups), min(second, groups)


def multiply_stream(
    gpu: Any, x: Any, weights: list[tuple[int, int, Any]], extras: Extras, kind: Any, plan: StreamPlan
) -> Any:
    """As `multiply_tiles`, for one row."""
    shape = describe(weights, x.shape[1], extras.gate)
    made = shape.rows[0] // 2 if extras.gate else sum(shape.rows)
    (out,) = gpu.launcher.launch(
        STREAM,
        [
            x,
            weights[0][2],
            weights[-1][2],
            *extras.list_inputs(gpu),
        ],
        groups=(sum(plan.groups), 1, 1),
        threads=32 * plan.simd_groups,
        outputs=[((1, made), kind)],
        constants=make_constants(shape, plan) | extras.constants,
        types={"X": x.dtype, "Y": kind},
        room_bytes=shape.count_room(plan),
    )
    return out


def describe(weights: list[tuple[int, int, Any]], columns: int, gate: int) -> StreamShape:
    """The shape of one or two weights, each (number of its type, rows, planes)."""
    first, second = weights[0], weights[-1]
    return StreamShape((first[0], second[0]), (first[1], second[1] if len(weights) == 2 else 0), columns, gate)


def make_constants(shape: StreamShape, plan: StreamPlan) -> dict[str, int]:
    """The constants of the body but THREADS and the extras'."""
    return {
        "TYPE_A": shape.types[0],
        "TYPE_B": shape.types[1],
        "INPUTS": shape.columns,
        "ROWS_A": shape.rows[0],
        "ROWS_B": shape.rows[1],
        "GROUPS_A": plan.groups[0],
        "GROUPS_B": plan.groups[1],
        "STAGES": plan.stages,
        "TILES": shape.count_tiles(plan),
    }
