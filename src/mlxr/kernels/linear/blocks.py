"""Products of few rows with weights in blocks: the choice of the kernel, its plan, and the launch.

- Without matrix units, a launch reads each block once, in f32 (`multiply_rows`); a SIMD-group makes two or four outputs
  for all rows at a time. It takes floats of 16 bits, too.
- On matrix units, a threadgroup makes tiles of outputs for up to 64 tokens (`multiply_tiles`); its SIMD-groups share
  the columns and add up their sums.
- One row times a weight in integers: the weight is streamed through the threadgroups' memory (`multiply_stream`). As
  many threadgroups as the device has multiprocessors share the rows, and each runs once. They begin to load their
  weight before the previous launch has ended.

This module knows no deferred results: callers pass the norm, gate or sum to be done as `Extras`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from mlxr.core.frozen import frozen
from mlxr.kernels.gpu.device import Gpu
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.floats import can_spread, multiply_wide
from mlxr.kernels.linear.parts import BLOCK_HEADERS, LAYOUTS, TYPE_NAMES, Extras, Weights
from mlxr.kernels.linear.unpacked import PACKINGS
from mlxr.kernels.tensor import DeviceArray, NumberType

ROWS = Kernel(
    "linear_rows",
    Path(__file__).parent,
    "rows.body",
    ("x", "a", "b", "bias", "norm", "residual", "numbers", "sizes"),
    ("out",),
    (*BLOCK_HEADERS, "rows.h", "gate.h"),
    type_names=TYPE_NAMES,
)
MANY_ROW_OUTPUTS = 4096
TOKENS = (1, 2, 4, 8)  # rows of x that a variant of the kernel takes
APPLE_TOKENS = 4  # most rows on an Apple GPU, where a threadgroup has 32 KiB and a thread 128 registers


def limit_tokens(gpu: Gpu) -> int:
    """Return the most rows of x that a launch takes at a time; it repeats for further ones."""
    return APPLE_TOKENS if gpu.is_apple else TOKENS[-1]


def choose_rows(gpu: Gpu, tokens: int, outputs: int) -> int:
    """Return the number of outputs that a SIMD-group makes at a time: even, since a gate takes two."""
    return 4 if outputs >= MANY_ROW_OUTPUTS and (tokens == 1 if gpu.is_apple else tokens >= 4) else 2


def multiply_rows(gpu: Gpu, x: DeviceArray, weights: Weights, extras: Extras, kind: NumberType) -> DeviceArray:
    """Multiply as `multiply_tiles`; any rows may be normed first. Blocks are read again for each `limit_tokens` rows.

    Few outputs in 32 bits go to `multiply_wide`.
    """
    (tokens, columns), first, second = x.shape, weights[0], weights[-1]
    if can_spread(weights, columns, extras):
        return multiply_wide(gpu, x, weights[0], extras, kind)
    rows = first[1], (second[1] if len(weights) == 2 else 0)
    width = next(width for width in TOKENS if width >= min(tokens, limit_tokens(gpu)))
    per_group = choose_rows(gpu, width, sum(rows))
    made = rows[0] // 2 if extras.gate else sum(rows)
    step = SIMD_GROUPS * (per_group // 2 if extras.gate else per_group)
    groups = -(-made // step) if extras.gate else sum(-(-count // step) for count in rows)
    (out,) = gpu.launcher.launch(
        ROWS,
        [
            x,
            first[2],
            second[2],
            *extras.list_inputs(gpu),
            gpu.launcher.numbers(columns, tokens, *rows),
        ],
        groups=(groups, -(-tokens // width), 1),
        threads=32 * SIMD_GROUPS,
        outputs=[((tokens, made), kind)],
        constants={
            "TYPE_A": first[0],
            "TYPE_B": second[0],
            "ROWS": per_group,
            "T": width,
            "ALONE": int(gpu.is_apple and width == 1),
            **extras.constants,
        },
        types={"X": x.dtype, "Y": kind},
    )
    return out


SIMD_GROUPS = 8  # SIMD-groups of a threadgroup; without matrix units each loads one of the eight quads of every run
MAX_STAGED = 16384  # most columns of a staged row, which takes 37 KiB of shared memory
SHORT_COLUMNS = 8192
MANY_OUTPUTS = 8192
SINGLE = frozenset((12, 14))  # q4_k and q6_k
LIGHT = frozenset((2, 12))  # q4_0 and q4_k, by ggml's numbers
TILE_ROWS, TILE_TOKENS = 16, 8
TILES = Kernel(
    "linear_tiles",
    Path(__file__).parent,
    "tiles.body",
    ("x", "a", "b", "bias", "norm", "residual", "numbers", "sizes"),
    ("out",),
    (*BLOCK_HEADERS, "tiles.h", "gate.h"),
    type_names=TYPE_NAMES,
    cuda_only=True,
)


@frozen
class Plan:
    """The work of a SIMD-group: its tiles of rows and of tokens; `split` SIMD-groups share the columns of a tile.

    `resident` threadgroups share a multiprocessor, which bounds the registers. With `ahead`, words of the next step are
    loaded before those of one are multiplied. With `staged`, x, a single row, goes through shared memory. With
    `single`, its runs are summed separately and scaled afterwards, for the types in SINGLE.
    """

    row_tiles: int
    token_tiles: int
    split: int
    resident: int = 1
    ahead: bool = False
    staged: bool = False
    single: bool = False

    @property
    def constants(self) -> dict[str, int]:
        """The constants for which a kernel is compiled."""
        return {
            "M": self.row_tiles,
            "N": self.token_tiles,
            "SPLIT": self.split,
            "RESIDENT": self.resident,
            "AHEAD": int(self.ahead),
            "STAGED": int(self.staged),
            "SINGLE": int(self.single),
        }

    def count_groups(self, made: int, is_gated: bool) -> int:
        """Return the number of threadgroups that make `made` outputs of one weight."""
        rows = (TILE_ROWS // 2 if is_gated else TILE_ROWS) * self.row_tiles * (SIMD_GROUPS // self.split)
        return -(-made // rows)


def choose_plan(tokens: int, columns: int, outputs: int, types: Collection[int], is_normed: bool) -> Plan:
    """Return the plan that was fastest on an H200 (lab/bench/products.py); `types` are ggml's numbers of the types.

    Many outputs fill the device even if fewer SIMD-groups share the columns, which saves sums. If the words of a step
    take few registers, more threadgroups fit. Loading a long row into every threadgroup costs more than it saves.
    """
    many, light = outputs >= MANY_OUTPUTS, LIGHT.issuperset(types)
    single = SINGLE.issuperset(types)
    if is_normed or (tokens == 1 and single and columns <= SHORT_COLUMNS):
        return Plan(1, 1, 4 if many else 8, resident=4 if light and many else 3, staged=True, single=single)
    if tokens <= 8:
        return Plan(2 if light and many else 1, 1, 4 if many else 8, resident=2)
    if tokens <= 16:
        return Plan(2, 2, 4 if many else 8, resident=2 if light else 1)
    return Plan(2, 4 if tokens <= 32 else 8, 2 if many else 8)


def can_norm(tokens: int, columns: int) -> bool:
    """Return True if the launch of the product can norm x."""
    return tokens == 1 and columns <= MAX_STAGED


def multiply_tiles(
    gpu: Gpu,
    x: DeviceArray,
    weights: Weights,
    extras: Extras,
    kind: NumberType,
    plan: Plan | None = None,
) -> DeviceArray:
    """Multiply x by one or two weights in one launch: (tokens, outputs) of type `kind`.

    A weight is (number of its type, rows, planes). x is (tokens, columns) in bf16 or f32. It can be normed first only
    if `can_norm` is True. `plan` is chosen unless given.
    """
    tokens, columns = x.shape
    first, second = weights[0], weights[-1]
    rows = first[1], (second[1] if len(weights) == 2 else 0)
    made = [first[1] // 2 if extras.gate else first[1], rows[1]]
    if plan is None:
        plan = choose_plan(tokens, columns, sum(rows), {weight[0] for weight in weights}, extras.norm is not None)
    blocks = -(-tokens // (TILE_TOKENS * plan.token_tiles))
    (out,) = gpu.launcher.launch(
        TILES,
        [
            x,
            first[2],
            second[2],
            *extras.list_inputs(gpu),
            gpu.launcher.numbers(tokens),
        ],
        groups=(blocks, sum(plan.count_groups(count, extras.gate != 0) for count in made), 1),
        threads=32 * SIMD_GROUPS,
        outputs=[((tokens, sum(made)), kind)],
        constants={
            "TYPE_A": first[0],
            "TYPE_B": second[0],
            "INPUTS": columns,
            "ROWS_A": rows[0],
            "ROWS_B": rows[1],
            **plan.constants,
            **extras.constants,
        },
        types={"X": x.dtype, "Y": kind},
    )
    return out


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
# Types with one scale for 32 columns.
_GRIDS = [LAYOUTS[name].number for name in ("iq1_s", "iq2_xxs", "iq3_xxs", "iq3_s") if name in LAYOUTS]
# Words of a unit, as in stream.h and stream_runs.h, by ggml's number of the type.
STAGE_WORDS = {2: 832, 6: 960, 8: 1152, 12: 1280, 13: 1792, 14: 1232, 20: 832, 23: 800, 39: 816}
STAGE_WORDS |= {number: PACKINGS[number].unit_words for number in _GRIDS}
DOUBLE = frozenset((12, 13))  # types whose unit is two blocks
BLOCK_COLUMNS = 256
# Rows must have a multiple of these columns, by type: those of a block, or as many as fill whole words in each plane.
WHOLE_COLUMNS = {2: 64, 6: 64, 8: 64, 12: 256, 13: 256, 14: 256, 20: 64, 23: 256, 39: 32}
WHOLE_COLUMNS |= dict.fromkeys(_GRIDS, BLOCK_COLUMNS)
STAGES = 3  # enough that only one threadgroup fits on a multiprocessor: two on some of them are slower
RING_BYTES = 136 * 1024  # small units have more stages in this memory


@frozen
class StreamPlan:
    """A plan of `groups` threadgroups of `simd_groups` for each weight; every SIMD-group loads `stages` units ahead."""

    groups: tuple[int, int]
    simd_groups: int = SIMD_GROUPS
    stages: int = STAGES


@frozen
class StreamShape:
    """One or two weights of `rows` (the second may be 0), `columns` and `types`; `gate` as in `Extras`."""

    types: tuple[int, int]
    rows: tuple[int, int]
    columns: int
    gate: int = 0

    @property
    def unit(self) -> int:
        """Blocks of a unit: the larger number of both types."""
        return 2 if DOUBLE & {*self.types} else 1

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of each weight: 16 rows, or eight of each half."""
        return self.rows[0] // TILE_ROWS, self.rows[1] // TILE_ROWS

    def count_tiles(self, plan: StreamPlan) -> int:
        """Return the most tiles of a threadgroup."""
        shares = zip(self.tiles, plan.groups, strict=True)
        return max(-(-tiles // groups) for tiles, groups in shares if tiles)

    @property
    def row_bytes(self) -> int:
        """Bytes of x in a threadgroup's memory."""
        blocks = self.unit * -(-self.columns // (self.unit * BLOCK_COLUMNS))
        return 4 * (BLOCK_COLUMNS // 2 * blocks + 64 + 4 * blocks + -(-blocks // 4) * 4)

    def count_room(self, plan: StreamPlan) -> int:
        """Return the bytes of a threadgroup's memory: x, the rings and the sums."""
        rings = plan.stages * max(STAGE_WORDS[kind] for kind in self.types)
        sums = TILE_ROWS * (-(-self.count_tiles(plan) // plan.simd_groups) + 1)
        return self.row_bytes + 4 * plan.simd_groups * (rings + sums)


def plan_stream(shape: StreamShape, processors: int, room_bytes: int) -> StreamPlan | None:
    """Return a plan to stream weights on `processors` multiprocessors, with `room_bytes` of memory for a threadgroup;
    None if the kernel cannot do it."""
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
    """Return the bytes of `columns` columns of a row, by the number of the type."""
    layout = LAYOUTS[TYPE_NAMES[kind]]
    return columns // layout.block_size * layout.block_bytes


def share_groups(shape: StreamShape, processors: int) -> tuple[int, int]:
    """Return the threadgroups of each weight, such that the slowest ends soonest."""
    first, second = shape.tiles
    if not second:
        return min(first, processors), 0
    costs = [count_bytes(kind, BLOCK_COLUMNS) for kind in shape.types]

    def slowest(groups: int) -> int:
        return max(-(-first // (processors - groups)) * costs[0], -(-second // groups) * costs[1])

    groups = min(range(1, processors), key=slowest)
    return min(first, processors - groups), min(second, groups)


def multiply_stream(
    gpu: Gpu, x: DeviceArray, weights: Weights, extras: Extras, kind: NumberType, plan: StreamPlan
) -> DeviceArray:
    """Multiply one row, as `multiply_tiles`."""
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


def describe(weights: Weights, columns: int, gate: int) -> StreamShape:
    """Return the shape of one or two weights, each (number of its type, rows, planes)."""
    first, second = weights[0], weights[-1]
    return StreamShape((first[0], second[0]), (first[1], second[1] if len(weights) == 2 else 0), columns, gate)


def make_constants(shape: StreamShape, plan: StreamPlan) -> dict[str, int]:
    """Return the constants of the body, except THREADS and those of the extras."""
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
