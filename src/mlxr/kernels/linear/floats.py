"""Products with weights of plain numbers by our own kernels: the plans, and the launches.

- A few rows times 16-bit floats: the weight is streamed through the threadgroups' memory (`multiply_floats`). As many
  threadgroups as the device has multiprocessors share the rows, and each runs once. They begin to load their weight
  before the previous launch has ended. A SIMD-group keeps its columns of x in registers; if these are too many,
  threadgroups share the columns of the same rows, and the reader of the result adds the shares up.
- Many rows: on the matrix units that read the threadgroups' memory (CUDA, sm_90a), by `multiply_panels`. Boxes of the
  weight and of x pass through rings there; the weight is loaded before the previous launch has ended. There is one
  threadgroup to a multiprocessor, so products with few outputs come in shares of the inputs, which a norm adds up. Only
  recorded steps use it, as they know the addresses.
- Few outputs in 32 bits, as of a router: a threadgroup for some rows and outputs, all columns at once
  (`multiply_wide`). Such a weight is small, so it matters most that many threadgroups load it at the same time, before
  the previous launch has ended.

This module knows no deferred results.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mlxr.core.frozen import frozen
from mlxr.kernels.gpu.device import Gpu
from mlxr.kernels.gpu.kernel import LANES, Box, Kernel
from mlxr.kernels.linear.parts import LAYOUTS, TYPE_NAMES, Extras, Weights
from mlxr.kernels.tensor import DeviceArray, NumberType

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
MAX_STREAMED = 16
SIMD_GROUPS = 8
STAGES = 10  # pieces of a SIMD-group being loaded; this leaves memory for attention beside them
MAX_UNITS = (64, 12, 8)  # most pieces for which a SIMD-group holds x: of one row, of eight, of 16
STREAM_SHARES = (1, 2, 4)


@frozen
class FloatsPlan:
    """A plan of `groups` threadgroups for rows times `shares` for columns; `tiles` of eight tokens, 0 for one token."""

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
    """Return a plan to stream a weight on `processors` multiprocessors; None if the kernel cannot do it.

    `room_bytes` is the memory of a threadgroup, `outputs` the number of results (after a gate); `shared` is True if the
    result may be shares, to be added up.
    """
    if tokens > MAX_STREAMED or not processors or outputs * processors >= 2**31:
        return None
    tiles = 0 if tokens == 1 else -(-tokens // TILE_TOKENS)
    for shares in STREAM_SHARES if shared else STREAM_SHARES[:1]:
        units, rest = divmod(inputs, shares * PIECE_COLUMNS * SIMD_GROUPS)
        if not rest and 0 < units <= MAX_UNITS[tiles]:
            plan = FloatsPlan(min(max(1, processors // shares), outputs), shares, tiles)
            return plan if plan.room_bytes <= room_bytes else None
    return None


def make_constants(plan: FloatsPlan, rows: int, inputs: int) -> dict[str, int]:
    """Return the constants of the body, except THREADS and those of the extras."""
    return {
        "ROWS": rows,
        "INPUTS": inputs,
        "GROUPS": plan.groups,
        "SHARES": plan.shares,
        "STAGES": plan.stages,
        "N": max(1, plan.tiles),
        "SINGLE": int(not plan.tiles),
    }


def multiply_floats(
    gpu: Gpu, x: DeviceArray, weight: DeviceArray, extras: Extras, kind: NumberType, plan: FloatsPlan
) -> DeviceArray:
    """Multiply x (tokens, inputs) by `weight` (outputs, inputs): (tokens, outputs) of type `kind`.

    With several shares, these are an additional first axis. Only a single row can be normed.
    """
    (tokens, inputs), rows = x.shape, weight.shape[0]
    made = rows // 2 if extras.gate else rows
    (out,) = gpu.launcher.launch(
        FLOAT_STREAM,
        [x, weight, *extras.list_inputs(gpu), gpu.launcher.numbers(tokens)],
        groups=(plan.groups * plan.shares, 1, 1),
        threads=32 * plan.simd_groups,
        outputs=[((plan.shares, tokens, made) if plan.shares > 1 else (tokens, made), kind)],
        constants=make_constants(plan, rows, inputs) | extras.constants,
        types={"X": x.dtype, "K": weight.dtype, "Y": kind},
        room_bytes=plan.room_bytes,
    )
    return out


PANELS = Kernel(
    "linear_panels",
    Path(__file__).parent,
    "panels.body",
    ("x", "weights", "sizes"),
    ("out",),
    ("gate.h",),
    boxed=("x", "weights"),
    cuda_only=True,
)
MIN_PANEL_TOKENS, MAX_PANEL_TOKENS, MAX_SUM_TOKENS = 17, 128, 64  # between these it was faster than the library
PANEL_TOKENS, TILE_ROWS = 64, 8
WIDTHS = (112, 128, 96, 64, 48)  # columns of a product on the matrix units, as in cuda/rings.h
PANEL_SHARES = (1, 2, 4)
BLOCK_COLUMNS = 64
PARTS, BLOCKS = 2, 2  # see PanelPlan: 256 bytes of a row are loaded together
FOUR = 4  # SIMD-groups that multiply together
SPARE_BYTES = 3072  # bytes of the threadgroup's memory that are not for rings
MOST_X_STAGES = 8
FULL = 0.9  # share of the multiprocessors' time that must be used; with less, the library is as fast


@frozen
class PanelPlan:
    """A plan of `groups` threadgroups for each of `shares` of the inputs; each has `parts` (1 or 2) of `width` columns.

    Each of the ring's `stages` slots holds `blocks` blocks of 64 columns of a part, each of `x_stages` one block of x.
    """

    width: int
    shares: int
    groups: int
    blocks: int
    stages: int
    x_stages: int
    parts: int = PARTS

    def count_readers(self, tokens: int) -> int:
        """Return the number of SIMD-groups that multiply: four for each part, or for 64 tokens if that is more."""
        return FOUR * max(self.parts, pad_tokens(tokens) // PANEL_TOKENS)

    def count_room(self, tokens: int) -> int:
        """Return the bytes of a threadgroup's memory."""
        rows = self.stages * self.blocks * self.width + self.x_stages * pad_tokens(tokens)
        return 2 * BLOCK_COLUMNS * rows


def plan_panels(tokens: int, rows: int, columns: int, gate: int, processors: int, room_bytes: int) -> PanelPlan | None:
    """Return a plan to multiply by a weight (rows, columns), in shares if there is no gate; None if the library is
    better."""
    most = MAX_PANEL_TOKENS if gate else MAX_SUM_TOKENS
    if not MIN_PANEL_TOKENS <= tokens <= most or tokens % TILE_ROWS or rows % (2 * TILE_ROWS):
        return None
    for parts in (PARTS, 1) if gate else (PARTS,):  # one if two leave too much idle, as with a share of the features
        found = [
            _try_panels(shares, width, parts, rows, gate, processors)
            for shares in ((1,) if gate else PANEL_SHARES)
            for width in WIDTHS
            if columns % (BLOCKS * BLOCK_COLUMNS * shares) == 0
        ]
        filled, shares, width, groups = max(found, default=(0.0, 0, 0, 0))
        if filled >= FULL:
            return fit_panel_rings(tokens, width, -shares, groups, room_bytes, parts)
    return None


def _try_panels(
    shares: int, width: int, parts: int, rows: int, gate: int, processors: int
) -> tuple[float, int, int, int]:
    """Return the used part of the multiprocessors' time, the negated shares, the width, and a share's threadgroups."""
    made, each = (rows // 2, parts * width // 2) if gate else (rows, parts * width)
    groups = -(-made // each)
    waves = -(-groups * shares // processors) if processors else 0
    return made / each * shares / processors / waves if waves else 0.0, -shares, width, groups


def fit_panel_rings(
    tokens: int, width: int, shares: int, groups: int, room_bytes: int, parts: int = PARTS
) -> PanelPlan | None:
    """Return the plan whose rings fill the memory, a third of it for x; None if that is too little.

    x has less, as it is in the cache.
    """
    room, height = room_bytes - SPARE_BYTES, pad_tokens(tokens)
    x_bytes, slot_bytes = 2 * BLOCK_COLUMNS * height, 2 * BLOCK_COLUMNS * BLOCKS * width
    x_stages = min(MOST_X_STAGES, room // (3 * x_bytes) + 1)
    stages = (room - x_stages * x_bytes) // slot_bytes
    if height == PANEL_TOKENS and stages % parts:  # each half of the readers has its slots
        stages += 1
        x_stages = (room - stages * slot_bytes) // x_bytes
    if stages <= PARTS or x_stages <= BLOCKS:
        return None
    return PanelPlan(width, shares, groups, BLOCKS, stages, x_stages, parts)


def pad_tokens(tokens: int) -> int:
    """Return the number of rows of x that are multiplied."""
    return -(-tokens // PANEL_TOKENS) * PANEL_TOKENS


def multiply_panels(
    gpu: Gpu, x: DeviceArray, weight: DeviceArray, gate: int, kind: NumberType, plan: PanelPlan
) -> DeviceArray:
    """Multiply x (tokens, columns) by weight (rows, columns), of one 16-bit type: (tokens, outputs) of type `kind`.

    With several shares, the result is (shares, tokens, outputs). With `gate`, one of GATES, the upper half of the rows
    gates the lower one.
    """
    (tokens, columns), rows = x.shape, weight.shape[0]
    outputs = rows // 2 if gate else rows
    shape = (tokens, outputs) if plan.shares == 1 else (plan.shares, tokens, outputs)
    (out,) = gpu.launcher.launch(
        PANELS,
        [x, weight, gpu.launcher.numbers(tokens)],
        groups=(plan.groups, plan.shares, 1),
        threads=32 * (plan.count_readers(tokens) + 2),
        outputs=[(shape, kind)],
        constants={
            "TOKENS": pad_tokens(tokens),
            "INPUTS": columns,
            "ROWS": rows,
            "SHARES": plan.shares,
            "GATE": gate,
            "N": plan.width,
            "PARTS": plan.parts,
            "BLOCKS": plan.blocks,
            "STAGES": plan.stages,
            "X_STAGES": plan.x_stages,
        },
        types={"K": x.dtype, "Y": kind},
        room_bytes=plan.count_room(tokens),
        boxes=(
            Box(tokens, columns, pad_tokens(tokens), 1),
            Box(rows, columns, plan.width // 2 if gate else plan.width, plan.blocks),
        ),
    )
    return out


WIDE = Kernel(
    "linear_wide",
    Path(__file__).parent,
    "wide.body",
    ("x", "a", "bias", "norm", "residual", "numbers", "sizes"),
    ("out",),
    ("wide.h",),
    type_names=TYPE_NAMES,
)
QUAD = 4  # columns that a lane takes at a time
MAX_OUTPUTS, MAX_COLUMNS = 1024, 8192
MAX_HELD = 64  # most weights that a lane holds
MIN_SLICES, MAX_SIMD_GROUPS = 4, 16


@frozen
class WidePlan:
    """A plan in which a SIMD-group makes `outputs` of `tokens` (powers of two, at most 32 results), and a threadgroup
    has `sets` of tokens side by side. `resident` threadgroups fit on a multiprocessor."""

    outputs: int
    tokens: int
    sets: int = 1
    resident: int = 1

    def count_groups(self, tokens: int, rows: int) -> int:
        """Return the number of threadgroups that make `rows` outputs of `tokens` tokens."""
        return -(-rows // self.outputs) * -(-tokens // (self.tokens * self.sets))

    def count_slices(self, columns: int) -> int:
        """Return the number of SIMD-groups that share the columns: the fewest that need not hold too many weights."""
        slices = MIN_SLICES
        while slices < MAX_SIMD_GROUPS and self.outputs * QUAD * -(-columns // (QUAD * LANES * slices)) > MAX_HELD:
            slices *= 2
        return slices


# (most tokens, usual tokens, plan). Plans depend only on these, so that a rehearsal compiles all of them.
PLANS = (
    (1, 1, WidePlan(1, 1)),
    (8, 4, WidePlan(2, 4)),
    (64, 32, WidePlan(4, 4, 2, 2)),
    (256, 128, WidePlan(4, 8, 2, 2)),
)
MIN_GROUPS = 96  # threadgroups that leave few multiprocessors idle


def can_spread(weights: Weights, columns: int, extras: Extras) -> bool:
    """Return True if `multiply_wide` can multiply by these weights, each (number of its type, rows, bytes)."""
    (kind, rows, _), *others = weights
    is_wide = not others and kind == LAYOUTS["f32"].number and not extras.gate
    return is_wide and rows <= MAX_OUTPUTS and columns <= MAX_COLUMNS and columns % QUAD == 0


def choose_wide_plan(tokens: int, rows: int) -> WidePlan:
    """Return the plan for `tokens` rows of x and `rows` outputs; with few outputs, threadgroups make fewer each."""
    _, usual, plan = next((each for each in PLANS if tokens <= each[0]), PLANS[-1])
    while plan.count_groups(usual, rows) < MIN_GROUPS and (plan.sets > 1 or plan.outputs > 1):
        plan = replace(plan, sets=1) if plan.sets > 1 else replace(plan, outputs=plan.outputs // 2)
    return plan


def multiply_wide(
    gpu: Gpu, x: DeviceArray, weight: tuple[int, int, DeviceArray], extras: Extras, kind: NumberType
) -> DeviceArray:
    """Multiply by a small weight in 32 bits, as `multiply_rows`."""
    (tokens, columns), (number, rows, raw) = x.shape, weight
    plan = choose_wide_plan(tokens, rows)
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
