"""Products of some rows with a weight in blocks, unpacked in registers on its way to the matrix units (CUDA, sm_90a).

A weight is unpacked once for up to 256 rows of x, which pass through the threadgroup's memory. This module knows no
deferred results.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from mlxr.core.frozen import frozen
from mlxr.kernels.gpu.device import Gpu
from mlxr.kernels.gpu.kernel import Box, Kernel
from mlxr.kernels.linear.parts import BLOCK_HEADERS, BLOCKS, GRIDS, LAYOUTS, TYPE_NAMES, Extras, Layout
from mlxr.kernels.tensor import DeviceArray, NumberType

UNPACKED = Kernel(
    "linear_unpacked",
    Path(__file__).parent,
    "unpacked.body",
    ("x", "a", "b", "bias", "norm", "residual", "numbers", "sizes"),
    ("out",),
    (*BLOCK_HEADERS, "units.h", "unpacked.h", "gate.h"),
    has_rings=True,
    type_names=TYPE_NAMES,
    cuda_only=True,
)
UNPACKED_BOXED = replace(UNPACKED, name="linear_unpacked_boxed", boxed=("x",))  # only recorded steps have boxes
UNIT_COLUMNS, UNIT_ROWS, SLOT_COLUMNS = 256, 16, 64
MIN_TOKENS, MAX_TOKENS = 17, 256  # with more tokens it pays to expand the weight
SPARE_BYTES = 2048  # bytes of the threadgroup's memory that are not for rings
UNIT_TIMES = {
    32: {(1, 1): 1.3, (2, 1): 1.9, (2, 2): 3.3, (4, 1): 2.9},
    64: {(1, 1): 1.6, (2, 1): 2.2, (2, 2): 3.6, (4, 1): 3.5},
    128: {(1, 1): 1.9, (2, 1): 3.8, (2, 2): 4.8},
}  # microseconds of an H200 for 256 columns, by tokens, parts and tiles of each (lab/bench/unpacked.py)
SHARES = (1, 2, 4)
RINGS = ((5, 10, 5), (4, 8, 4), (4, 7, 3), (3, 7, 3), (3, 6, 2), (2, 6, 2), (2, 5, 1))  # the largest that fit are best
REGISTERS = (232, 40)


@frozen
class Packing:
    """The words of a unit in the ring, and of its table of scales, as in unpacked.h."""

    unit_words: int
    table_words: int


_SHIFTED = frozenset(("q4_1", "q5_1", "q2_k", "q4_k", "q5_k", "affine4_32", "affine4_64", "affine8_32", "affine8_64"))
_SHARED = frozenset(("q4_k", "q5_k", "affine4_64", "affine8_64"))  # two runs have the same scales
_PADDED = {"q3_k": 2, "q6_k": 2}  # number of planes whose rows are padded to differ in banks, if it is not 1


def _pack(name: str, layout: Layout) -> Packing:
    planes = [size * UNIT_COLUMNS // layout.block_size for _, size in layout.fields] or [layout.block_bytes]
    padded = _PADDED.get(name, 2 if name in GRIDS else 1) if layout.fields else 0
    unit = sum(max(1, size // 4) for size in planes) + 4 * padded
    entries, words = 4 if name in _SHARED else 8, 4 if name in _SHIFTED else 2
    return Packing(UNIT_ROWS * unit, UNIT_ROWS * (entries + 1) * words)


PACKINGS = {layout.number: _pack(name, layout) for name, layout in LAYOUTS.items() if name in BLOCKS}
# Types of which 64 columns are whole blocks and have a whole word in each plane: rows need no whole number of units.
CUT = frozenset(
    layout.number
    for name, layout in LAYOUTS.items()
    if name in BLOCKS
    and SLOT_COLUMNS % layout.block_size == 0
    and all(size * (SLOT_COLUMNS // layout.block_size) % 4 == 0 for _, size in layout.fields)
)


@frozen
class UnpackPlan:
    """The work of a threadgroup: `parts` times four SIMD-groups make `held` tiles of 64 rows each for `width` tokens.

    The inputs are split into `shares`, each with its own threadgroups. Rings hold `stages` units of each SIMD-group and
    `x_stages` slots of 64 columns of x; `fillers` SIMD-groups load x, `ahead` slots in advance. With `depth` 1,
    products of one step run while the next one is unpacked. `registers` are those of a thread that multiplies and of
    one that loads x, if the kernel shares them out itself. With `spread` 1, threadgroups begin at different columns.
    With `boxed` 1, one lane loads x in boxes in launches that have them, and `ahead` does not count.
    """

    width: int
    parts: int
    held: int
    shares: int = 1
    stages: int = 4
    x_stages: int = 8
    fillers: int = 4
    ahead: int = 2
    depth: int = 0
    registers: tuple[int, int] = (0, 0)
    spread: int = 0  # 1 to 2 % slower on an H200
    boxed: int = 1  # 5 to 8 % faster there

    def count_made(self, is_gated: bool) -> int:
        """Return the number of outputs of a threadgroup."""
        return 4 * self.parts * self.held * (UNIT_ROWS // 2 if is_gated else UNIT_ROWS)

    def count_groups(self, shape: UnpackShape, tokens: int) -> tuple[int, int, int]:
        """Return the numbers of threadgroups by tokens, by rows and by shares."""
        each = self.count_made(shape.gate != 0)
        return -(-tokens // self.width), sum(-(-made // each) for made in shape.made), self.shares

    def count_room(self, types: tuple[int, int], is_gated: bool) -> int:
        """Return the bytes of a threadgroup's memory: the rings, or the results if these are larger."""
        own = max(self.held * (self.stages * PACKINGS[kind].unit_words + PACKINGS[kind].table_words) for kind in types)
        rings = self.x_stages * self.width * SLOT_COLUMNS // 2 + 4 * self.parts * own
        return 4 * max(rings, self.width * (self.count_made(is_gated) + 4))


@frozen
class UnpackShape:
    """One or two weights of `rows` (the second may be 0), `columns` and `types`; `gate` as in `Extras`."""

    types: tuple[int, int]
    rows: tuple[int, int]
    columns: int
    gate: int = 0

    @property
    def made(self) -> tuple[int, int]:
        """The number of outputs of each weight."""
        return (self.rows[0] // 2 if self.gate else self.rows[0]), self.rows[1]


def plan_unpacked(
    shape: UnpackShape, tokens: int, processors: int, room_bytes: int, *, shared: bool = False
) -> UnpackPlan | None:
    """Return the plan that should be fastest, with several shares only if `shared`; None if the kernel cannot do it."""
    if not MIN_TOKENS <= tokens <= MAX_TOKENS or not processors or shape.columns < UNIT_COLUMNS:
        return None
    if shape.columns % (SLOT_COLUMNS if set(shape.types) <= CUT else UNIT_COLUMNS):
        return None
    if any(rows % (2 * UNIT_ROWS) for rows in shape.rows) or not PACKINGS.keys() >= set(shape.types):
        return None
    width = next((width for width in UNIT_TIMES if width >= tokens), max(UNIT_TIMES))
    found: list[tuple[float, int, UnpackPlan]] = []
    for (parts, held), shares in itertools.product(UNIT_TIMES[width], SHARES if shared else (1,)):
        plan = _fit_rings(shape, width, parts, held, shares, room_bytes - SPARE_BYTES)
        if plan is not None and (shares == 1 or shape.columns >= 4 * UNIT_COLUMNS * shares):
            found.append((_guess_time(shape, plan, tokens, processors), len(found), plan))
    return min(found)[2] if found else None


def _fit_rings(
    shape: UnpackShape, width: int, parts: int, held: int, shares: int, room_bytes: int
) -> UnpackPlan | None:
    wide = held * width >= 256
    registers = REGISTERS if parts == 2 and (wide or width == 128) else (0, 0)
    for stages, x_stages, ahead in RINGS:
        plan = UnpackPlan(width, parts, held, shares, stages, x_stages, 4, ahead, int(not wide), registers)
        if plan.count_room(shape.types, shape.gate != 0) <= room_bytes:
            return plan
    return None


def _guess_time(shape: UnpackShape, plan: UnpackPlan, tokens: int, processors: int) -> float:
    """Return the microseconds that a plan should take, from measured times of units; starting takes as long as two."""
    blocks, rows, shares = plan.count_groups(shape, tokens)
    units = -(-shape.columns // UNIT_COLUMNS) / shares + 2
    return -(-blocks * rows * shares // processors) * units * UNIT_TIMES[plan.width][plan.parts, plan.held]


def multiply_unpacked(
    gpu: Gpu,
    x: DeviceArray,
    weights: list[tuple[int, int, DeviceArray]],
    extras: Extras,
    kind: NumberType,
    plan: UnpackPlan,
) -> DeviceArray:
    """Multiply x in bf16, as `multiply_tiles`; with several shares, (shares, tokens, outputs) to be added up."""
    tokens, shape = x.shape[0], describe(weights, x.shape[1], extras.gate)
    made, columns = sum(shape.made), x.shape[1]
    boxed = plan.boxed and (gpu.is_recording or gpu.emulates)
    (out,) = gpu.launcher.launch(
        UNPACKED_BOXED if boxed else UNPACKED,
        [x, weights[0][2], weights[-1][2], *extras.list_inputs(gpu), gpu.launcher.numbers(tokens)],
        groups=plan.count_groups(shape, tokens),
        threads=32 * (4 * plan.parts + plan.fillers),
        outputs=[((tokens, made) if plan.shares == 1 else (plan.shares, tokens, made), kind)],
        constants=make_constants(shape, plan) | {"BOXED": int(boxed)} | extras.constants,
        types={"X": x.dtype, "Y": kind},
        room_bytes=plan.count_room(shape.types, extras.gate != 0),
        boxes=(Box(tokens, columns, plan.width, 1),) if boxed else (),
    )
    return out


def describe(weights: list[tuple[int, int, DeviceArray]], columns: int, gate: int) -> UnpackShape:
    """Return the shape of one or two weights, each (number of its type, rows, planes)."""
    first, second = weights[0], weights[-1]
    return UnpackShape((first[0], second[0]), (first[1], second[1] if len(weights) == 2 else 0), columns, gate)


def make_constants(shape: UnpackShape, plan: UnpackPlan) -> dict[str, int]:
    """Return the constants of the body, except THREADS and those of the extras."""
    return {
        "TYPE_A": shape.types[0],
        "TYPE_B": shape.types[1],
        "INPUTS": shape.columns,
        "ROWS_A": shape.rows[0],
        "ROWS_B": shape.rows[1],
        "N": plan.width,
        "PARTS": plan.parts,
        "HELD": plan.held,
        "SHARES": plan.shares,
        "STAGES": plan.stages,
        "X_STAGES": plan.x_stages,
        "AHEAD": plan.ahead,
        "DEPTH": plan.depth,
        "SPREAD": plan.spread,
        "BOXED": plan.boxed,
        "REGISTERS": plan.registers[0],
        "FILLER_REGISTERS": plan.registers[1],
        "ROOM_WORDS": plan.count_room(shape.types, shape.gate != 0) // 4,
    }
