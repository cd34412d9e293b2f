"""Products of experts by our kernels: the layout of their weights, tiles of pairs of a token and a rank, the launches.

The weights of all experts of a layer are one array for each part, one expert after another. They were put on the GPU
expert by expert for `linear`. Each is copied to its place and freed before the next, so that only one is in memory
twice; afterwards it is a view of its place, and `linear` multiplies by it as before.

A tile is some pairs of one expert. Its largest number of pairs, and the number of tiles launched, depend only on the
batch's shape: nothing waits for the host to learn where tokens go. One token has a tile for each rank; pairs of several
tokens are sorted by expert, so that a weight is read once for a whole tile. All products open late (see `Kernel`), so
that the second one, even after an activation between the two, finds the chosen experts from its start.

Experts with many rows each go by `panels` (CUDA, sm_90a), whose matrix units read the threadgroups' memory: weights and
picked rows of x pass through one ring there. There, pairs are the columns of the product, and a tile takes as many as
it has: so an expert's weights are read once for up to a tile's width of pairs. One token's experts go by `stream`,
through the threadgroups' memory, as `linear` streams one weight: the tiles of all ranks follow one another, and as many
threadgroups as the device has multiprocessors share them. Those of the second product begin to read weights while the
first one ends. This module knows no deferred results.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxr.core.errors import DeviceError
from mlxr.core.frozen import frozen
from mlxr.kernels.gpu.device import Gpu, Upload
from mlxr.kernels.gpu.kernel import LANES, Kernel
from mlxr.kernels.gpu.launcher import MIN_ARRAY
from mlxr.kernels.gpu.mlx import Mlx
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.linear.blocks import (
    LIGHT,
    MAX_STAGED,
    SIMD_GROUPS,
    SINGLE,
    TILE_ROWS,
    TILE_TOKENS,
    TOKENS,
    Plan,
    StreamPlan,
    StreamShape,
    choose_rows,
    limit_tokens,
    plan_stream,
)
from mlxr.kernels.linear.parts import BLOCK_HEADERS, BLOCKS, FLOATS, LAYOUTS, TYPE_NAMES, Part
from mlxr.kernels.linear.squares import choose_squares
from mlxr.kernels.tensor import DeviceArray, NumberType

ALIGNMENT_BYTES = 16  # kernels read whole words

Shares = DeviceArray | None  # shares of each token's experts (tokens, used)


@frozen(eq=False)
class StackedPart:
    """One part of all experts: `array` is (experts, bytes) of blocks or (experts, rows, columns) of floats.

    `raw` are the same bytes for kernels, with `stride` bytes from one expert to the next; None without kernels.
    """

    type_name: str
    rows: int
    array: DeviceArray
    raw: DeviceArray
    stride: int


@frozen(eq=False)
class Stack:
    """The parts of one weight of all experts, each (out_features, in_features), and their `biases` (experts,
    out_features), or None."""

    in_features: int
    out_features: int
    parts: tuple[StackedPart, ...]
    biases: DeviceArray | None

    def count_made(self, gate: int) -> int:
        """Return the number of columns of the result."""
        return self.out_features // 2 if gate else self.out_features


def stack_weights(gpu: Gpu, weights: Sequence[LinearWeight]) -> Stack:
    """Return the weights of all experts as one stack. Raises DeviceError unless their types are the same."""
    kinds = {tuple((part.type_name, part.rows) for part in weight.payload[0]) for weight in weights}
    if len(kinds) > 1 or len({weight.payload[1] is None for weight in weights}) > 1:
        shown = ", ".join(sorted({weight.variant for weight in weights}))
        raise DeviceError(f"the experts of a layer have weights of different types, which no GPU kernel takes: {shown}")
    mx = gpu.mx
    parts = tuple(_stack_part(gpu, weights, index) for index in range(len(next(iter(kinds)))))
    biases = None
    if weights[0].payload[1] is not None:
        biases = mx.stack([weight.payload[1] for weight in weights])
        mx.eval(biases)
    return Stack(weights[0].in_features, weights[0].out_features, parts, biases)


def _stack_part(gpu: Gpu, weights: Sequence[LinearWeight], index: int) -> StackedPart:
    mx = gpu.mx
    lists = [weight.payload[0] for weight in weights]
    first: Part = lists[0][index]
    type_name, rows, has_raw, shape = first.type_name, first.rows, first.raw is not None, first.upload.array.shape
    is_float, length, dtype = first.type_name in FLOATS, shape[0], first.upload.array.dtype
    padded = shape if is_float else (-(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES,)
    stacked = mx.zeros((len(lists), *padded), dtype)
    mx.eval(stacked)
    del first
    for expert, parts in enumerate(lists):
        array, parts[index] = parts[index].upload.array, None
        if is_float:
            stacked[expert] = array
        else:
            stacked[expert, :length] = array
        mx.eval(stacked)
        del array
    all_bytes, stride = _view_bytes(mx, stacked), int(stacked.nbytes) // len(weights)
    used_bytes = stride if is_float else length
    for expert, parts in enumerate(lists):
        raw = all_bytes[expert * stride : expert * stride + used_bytes]  # one axis: others would be copied
        view = raw.view(dtype).reshape(shape)
        mx.eval(raw, view)
        parts[index] = Part(type_name, rows, Upload(view), raw if has_raw else None)
    return StackedPart(type_name, rows, stacked, all_bytes if gpu.launcher is not None else None, stride)


def _view_bytes(mx: Mlx, array: DeviceArray) -> DeviceArray:
    raw = array.view(mx.uint8).reshape(-1)
    mx.eval(raw)
    return raw


FOLDER = Path(__file__).parent
_INPUTS = ("x", "all_a", "all_b", "bias", "shares", "tiles", "order", "sizes")
_LINEAR_HEADERS = tuple(f"../linear/{name}" for name in (*BLOCK_HEADERS, "gate.h"))
ROWS = Kernel(
    "moe_rows",
    FOLDER,
    "rows.body",
    _INPUTS,
    ("out",),
    (*_LINEAR_HEADERS, "../linear/rows.h", "experts.h"),
    opens_late=True,
    type_names=TYPE_NAMES,
    counts_rows=True,
)
TILES = Kernel(
    "moe_tiles",
    FOLDER,
    "tiles.body",
    _INPUTS,
    ("out",),
    (*_LINEAR_HEADERS, "../linear/tiles.h", "experts.h", "picked.h"),
    opens_late=True,
    type_names=TYPE_NAMES,
    counts_rows=True,
    cuda_only=True,
)
SQUARES = Kernel(
    "moe_squares",
    FOLDER,
    "squares.body",
    _INPUTS,
    ("out",),
    (*_LINEAR_HEADERS, "../linear/rows.h", "../linear/squares.h", "experts.h"),
    type_names=TYPE_NAMES,
    counts_rows=True,
    metal_only=True,
)
SQUARE_WIDTHS = ((48, 64), (24, 32), (6, 16))  # least pairs for each expert, and pairs of a tile
ITEMS = Kernel(
    "moe_items",
    FOLDER,
    "items.body",
    ("x", "all_a", "bias", "shares", "tiles", "order", "sizes"),
    ("out",),
    (*_LINEAR_HEADERS, "../linear/tiles.h", "experts.h", "picked.h", "items.h"),
    opens_late=True,
    type_names=TYPE_NAMES,
    counts_rows=True,
    cuda_only=True,
)
SORT = Kernel("moe_sort", FOLDER, "sort.body", ("chosen", "use", "live", "sizes"), ("tiles", "order"), ("same.h",))
SORT_SECTIONS, FEW_SECTIONS = 32, 8  # sections of many pairs, and of up to FEW_PAIRS
FEW_PAIRS = 512
SORT_COUNTS = 2**12  # most counts, one for each expert and section: 16 KiB of the threadgroup's memory
MAX_SORT_THREADS = 1024
FLOAT_RUN = 32  # columns of a lane on matrix units
ONE_RESIDENT, TABLED_RESIDENT, FEW_RESIDENT = 2, 3, 2  # threadgroups of a multiprocessor: for one pair, or eight
ONE_AHEAD = False  # True to load words of one pair's next step early; not yet measured on a GPU
STEP_COLUMNS = 256  # columns of a row that a SIMD-group takes at a time
MAX_IDLE = 1.34  # most SIMD-groups for each one that has columns to multiply
TABLED = frozenset((39,))  # mxfp4, whose words take few registers
WIDTHS = ((6, 1), (12, 2), (40, 4))  # most pairs for each expert, and tiles of eight for these; for more, WIDEST
WIDEST = 8


@frozen(eq=False)
class Tiling:
    """`count` tiles of up to `width` pairs. `tiles` and `order` are as in moe/experts.h; `order` is None if each tile
    is one pair. With `panels`, they are multiplied by that plan."""

    tokens: int
    used: int
    width: int
    count: int
    tiles: DeviceArray
    order: DeviceArray | None
    panels: PanelPlan | None = None

    def shape_result(self, made: int, shares: Shares) -> tuple[int, ...]:
        """Return the shape of products with `made` columns; with shares they are ordered by rank."""
        return (self.tokens * self.used, made) if shares is None else (self.used, self.tokens, made)


def can_multiply(gpu: Gpu, stack: Stack) -> bool:
    """Return True if our kernels multiply by these weights: floats need whole blocks of columns, too."""
    if gpu.launcher is None or len(stack.parts) > 2:
        return False
    return all(
        part.type_name not in FLOATS
        or stack.in_features % (FLOAT_RUN if gpu.has_tiles else LAYOUTS[part.type_name].block_size) == 0
        for part in stack.parts
    )


def takes_squares(gpu: Gpu, *stacks: Stack) -> bool:
    """Return True if matrix units of 8 x 8 multiply by these weights."""
    return gpu.has_squares and all(part.type_name in BLOCKS for stack in stacks for part in stack.parts)


def choose_width(
    tokens: int, used: int, experts: int, has_tiles: bool, row_width: int = TOKENS[-1], has_squares: bool = False
) -> int:
    """Return the most pairs of a tile; `row_width` without matrix units."""
    if tokens == 1:
        return 1
    each = tokens * used / experts
    if not has_tiles:
        return next((width for least, width in SQUARE_WIDTHS if has_squares and each >= least), row_width)
    wanted = next((tiles for most, tiles in WIDTHS if each <= most), WIDEST)
    return TILE_TOKENS * min(wanted, -(-tokens // TILE_TOKENS))


def count_tiles(tokens: int, used: int, experts: int, width: int) -> int:
    """Return the most tiles that tokens * used pairs can form."""
    pairs = tokens * used
    return pairs if pairs <= experts else experts + (pairs - experts) // width


def sort_pairs(
    gpu: Gpu,
    chosen: DeviceArray,
    experts: int,
    has_tiles: bool,
    panels: PanelPlan | None = None,
    use: DeviceArray | None = None,
    has_squares: bool = False,
) -> Tiling:
    """Return tiles of the pairs in `chosen` (tokens, used); several tokens take a launch, which counts in `use`."""
    tokens, used = chosen.shape
    width = choose_width(tokens, used, experts, has_tiles, limit_tokens(gpu), has_squares)
    width = width if panels is None else panels.pairs
    if tokens == 1:
        return Tiling(tokens, used, width, used, chosen, None)
    count, kind = count_tiles(tokens, used, experts, width), gpu.mx.int32
    wanted = SORT_SECTIONS if has_tiles and tokens * used > FEW_PAIRS else FEW_SECTIONS
    sections = max(1, min(wanted, SORT_COUNTS // experts))
    tiles, order = gpu.launcher.launch(
        SORT,
        [
            chosen,
            gpu.launcher.numbers(0) if use is None else use,
            gpu.count_live(tokens),
            gpu.launcher.numbers(tokens * used, count, used),
        ],
        groups=(1, 1, 1),
        threads=min(MAX_SORT_THREADS, LANES * max(sections, -(-experts // LANES))),
        outputs=[((count, 4), kind), ((max(MIN_ARRAY, tokens * used),), kind)],
        constants={"EXPERTS": experts, "WIDTH": width, "SECTIONS": sections, "COUNTED": int(use is not None)},
    )
    return Tiling(tokens, used, width, count, tiles, order, panels)


def multiply_experts(
    gpu: Gpu, x: DeviceArray, stack: Stack, tiling: Tiling, gate: int, shares: Shares, kind: NumberType
) -> DeviceArray:
    """Multiply rows of x by the weights of each pair's expert, add its bias, and apply `gate` (one of GATES, or 0).

    x is (tokens, inputs), or (pairs, inputs) if `shares` (tokens, used) are given. The result is (pairs, outputs) of
    type `kind`; with `shares` it is multiplied by them and ordered by rank: (used, tokens, outputs).
    """
    if tiling.panels is not None:
        return multiply_panels(gpu, x, stack, tiling, tiling.panels, gate, shares, kind)
    if gpu.has_tiles and tiling.order is not None and tiling.width > 1 and len(stack.parts) == 1:
        return multiply_items(gpu, x, stack, tiling, gate, shares, kind)
    stream = plan_experts(gpu, stack, tiling.used, gate) if tiling.order is None else None
    if stream is not None:
        return multiply_stream(gpu, x, stack, tiling, stream, gate, shares, kind)
    numbers, parts, made = gpu.launcher.numbers, stack.parts, stack.count_made(gate)
    rows = parts[0].rows, (parts[1].rows if len(parts) == 2 else 0)
    threads = 32 * SIMD_GROUPS
    places = [tiling.used, tiling.tokens, tiling.used if shares is None else 1]
    strides = [parts[0].stride, parts[-1].stride]
    constants: dict[str, int] = {
        "TYPE_A": LAYOUTS[parts[0].type_name].number,
        "TYPE_B": LAYOUTS[parts[-1].type_name].number,
        "SORTED": int(tiling.order is not None),
        **_list_constants(stack, gate, shares),
    }
    if gpu.has_tiles:
        plan = choose_plan(stack, tiling)
        kernel, sizes = TILES, numbers(*places, *strides)
        counts = [plan.count_groups(count, gate != 0) for count in (made if gate else rows[0], rows[1])]
        groups = sum(counts), tiling.count, 1
        constants |= {"INPUTS": stack.in_features, "ROWS_A": rows[0], "ROWS_B": rows[1], **plan.constants}
    elif tiling.width > limit_tokens(gpu):
        squares = choose_squares(tiling.width)
        kernel, sizes = SQUARES, numbers(stack.in_features, *rows, *places, *strides)
        groups, threads = (tiling.count, squares.count_groups(rows, gate), 1), 32 * squares.simd_groups
        constants |= squares.constants
    else:
        each = choose_rows(gpu, tiling.width, stack.out_features)
        kernel, sizes = ROWS, numbers(stack.in_features, *rows, *places, *strides)
        step = SIMD_GROUPS * (each // 2 if gate else each)
        groups = (sum(-(-count // step) for count in (made if gate else rows[0], rows[1])), tiling.count, 1)
        constants |= {"ROWS": each, "T": tiling.width, "ALONE": int(gpu.is_apple and tiling.width == 1)}
    order = numbers(0) if tiling.order is None else tiling.order
    (out,) = gpu.launcher.launch(
        kernel,
        [x, parts[0].raw, parts[-1].raw, *_list_inputs(gpu, stack, shares), tiling.tiles, order, sizes],
        groups=groups,
        threads=threads,
        outputs=[(tiling.shape_result(made, shares), kind)],
        constants=constants,
        types={"X": x.dtype, "Y": kind},
    )
    return out


def _list_inputs(gpu: Gpu, stack: Stack, shares: Shares) -> list[DeviceArray]:
    """Return the biases of all experts, and the shares."""
    none = gpu.launcher.numbers(0.0)
    return [none if stack.biases is None else stack.biases, none if shares is None else shares]


def _list_constants(stack: Stack, gate: int, shares: Shares) -> dict[str, int]:
    return {"GATE": gate, "BIAS": int(stack.biases is not None), "SHARED_OUT": int(shares is not None)}


def choose_plan(stack: Stack, tiling: Tiling) -> Plan:
    """Return the work of a SIMD-group, which holds fewer rows of types that take many registers."""
    split = choose_split(-(-stack.in_features // STEP_COLUMNS))
    types = {LAYOUTS[part.type_name].number for part in stack.parts}
    if tiling.width == 1:
        single, staged = types <= SINGLE, stack.in_features <= MAX_STAGED
        resident = TABLED_RESIDENT if types <= TABLED else ONE_RESIDENT
        return Plan(1, 1, split, resident, ahead=ONE_AHEAD, staged=staged, single=single and staged)
    tiles = tiling.width // TILE_TOKENS
    if tiles == 1:
        return Plan(1, 1, split, resident=FEW_RESIDENT)
    return Plan(2 if types <= LIGHT else 1, tiles, min(2, split) if tiles >= 4 else split)


@frozen
class ItemsPlan:
    """The work of a SIMD-group at an item, as in `Plan`; a threadgroup has `simd_groups`."""

    row_tiles: int
    token_tiles: int
    simd_groups: int
    resident: int
    ahead: bool


def plan_items(stack: Stack, width: int) -> ItemsPlan:
    """Return the plan for tiles of `width` pairs that was fastest on an H200 (lab/bench/experts.py).

    Types that take many registers have one tile of rows, and no words ahead.
    """
    tiles, is_light = width // TILE_TOKENS, LAYOUTS[stack.parts[0].type_name].number in LIGHT | TABLED
    if tiles == 1:
        return ItemsPlan(1, tiles, simd_groups=8, resident=2, ahead=is_light)
    return ItemsPlan(2 if is_light else 1, tiles, simd_groups=4, resident=3 if tiles <= 4 else 2, ahead=False)


def multiply_items(
    gpu: Gpu, x: DeviceArray, stack: Stack, tiling: Tiling, gate: int, shares: Shares, kind: NumberType
) -> DeviceArray:
    """Multiply as `multiply_experts`, for sorted pairs and a stack of one part.

    With `shares` it is the experts' second product: the first one let it start when the pairs had been sorted.
    """
    assert tiling.order is not None  # pairs were sorted
    plan, part = plan_items(stack, tiling.width), stack.parts[0]
    is_shared, made = shares is not None, stack.count_made(gate)
    turns = -(-made // (plan.row_tiles * (TILE_ROWS // 2 if gate else TILE_ROWS))) * tiling.count
    groups = -(-turns // plan.simd_groups)
    groups = min(groups, plan.resident * gpu.processors or groups)
    sizes = (tiling.used, tiling.tokens, 1 if is_shared else tiling.used, part.stride, tiling.count, groups)
    (out,) = gpu.launcher.launch(
        ITEMS,
        [x, part.raw, *_list_inputs(gpu, stack, shares), tiling.tiles, tiling.order, gpu.launcher.numbers(*sizes)],
        groups=(groups, 1, 1),
        threads=LANES * plan.simd_groups,
        outputs=[(tiling.shape_result(made, shares), kind)],
        constants={
            "TYPE_A": LAYOUTS[part.type_name].number,
            "M": plan.row_tiles,
            "N": plan.token_tiles,
            "RESIDENT": plan.resident,
            "AHEAD": int(plan.ahead),
            "EARLY": int(is_shared),
            "INPUTS": stack.in_features,
            "ROWS": stack.out_features,
            **_list_constants(stack, gate, shares),
        },
        types={"X": x.dtype, "Y": kind},
    )
    return out


def choose_split(steps: int) -> int:
    """Return the SIMD-groups that share a row's columns, which take one `steps` steps: many, of which few are idle."""
    made = {split: -(-steps // split) * split for split in (8, 4, 2, 1)}
    fitting = [split for split, count in made.items() if count <= MAX_IDLE * steps]
    return min(fitting[:2], key=made.__getitem__)


PANELS = Kernel(
    "moe_panels",
    FOLDER,
    "panels.body",
    ("x", "all_a", "bias", "shares", "tiles", "order", "sizes"),
    ("out",),
    (*(f"../linear/{name}" for name in (*BLOCK_HEADERS, "tiles.h", "gate.h")), "experts.h", "panels.h"),
    has_rings=True,
    opens_late=True,
    type_names=TYPE_NAMES,
    counts_rows=True,
    cuda_only=True,
)
MIN_EACH = 32  # least pairs of an expert with which panels pay
SLOT_COLUMNS, PANEL_ROWS = 64, 16
FILLERS = 4  # SIMD-groups that load weights and x


@frozen
class PanelPlan:
    """A plan by which `fours` times four SIMD-groups multiply 64 rows each by up to `pairs` pairs.

    The ring has `stages` slots, of which `ahead` are being loaded. With `depth` 1, products of a slot run while the
    next one is awaited.
    """

    fours: int
    pairs: int
    stages: int
    ahead: int
    depth: int = 0

    @property
    def room_bytes(self) -> int:
        """Bytes of a threadgroup's memory."""
        return 2 * SLOT_COLUMNS * self.stages * (64 * self.fours + self.pairs)

    def count_groups(self, made: int, gated: bool) -> int:
        """Return the number of threadgroups for `made` outputs."""
        return -(-made // (self.fours * (32 if gated else 64)))


FEW, MANY = PanelPlan(4, 128, 4, 2), PanelPlan(3, 192, 4, 2)
FEW_EACH = 160  # pairs of an expert up to which tiles are narrow
# Below MIN_EACH it matters most that many weights are being loaded: with one or two pairs to an expert, steps were 4 to
# 10 % shorter on an H200 than by tiles. Fewer pairs were not measured.
SPARSE, MIN_SPARSE = PanelPlan(3, 32, 6, 4), 1.0


def plan_panels(gpu: Gpu, kind: NumberType, up: Stack, down: Stack, each: float) -> PanelPlan | None:
    """Return the plan for rows of MLX's type `kind`, about `each` to an expert; None if other kernels are faster."""
    if not gpu.has_tiles or gpu.machine is None or not gpu.machine.has_boxes or kind != gpu.operands:
        return None
    suits = all(
        len(stack.parts) == 1
        and kind == (stack.parts[0].array.dtype if stack.parts[0].type_name in FLOATS else gpu.mx.bfloat16)
        and kind.size == 2
        and stack.in_features % SLOT_COLUMNS == 0
        and stack.out_features % (2 * PANEL_ROWS) == 0
        for stack in (up, down)
    )
    if not suits or each < MIN_EACH:
        is_sparse = suits and each >= MIN_SPARSE and up.parts[0].type_name in FLOATS
        return SPARSE if is_sparse and down.parts[0].type_name in FLOATS else None
    return FEW if each <= FEW_EACH else MANY


def multiply_panels(
    gpu: Gpu, x: DeviceArray, stack: Stack, tiling: Tiling, plan: PanelPlan, gate: int, shares: Shares, kind: NumberType
) -> DeviceArray:
    """Multiply as `multiply_experts`, for pairs that were sorted for a plan.

    With `shares` it is the experts' second product: the first one let it start when the pairs had been sorted.
    """
    numbers, part, is_shared, made = gpu.launcher.numbers, stack.parts[0], shares is not None, stack.count_made(gate)
    assert tiling.order is not None  # pairs that go by panels are sorted
    items = plan.count_groups(made, gate != 0) * tiling.count
    groups = min(items, gpu.processors or items)
    sizes = numbers(tiling.used, tiling.tokens, 1 if is_shared else tiling.used, part.stride, items, groups)
    (out,) = gpu.launcher.launch(
        PANELS,
        [x, part.raw, *_list_inputs(gpu, stack, shares), tiling.tiles, tiling.order, sizes],
        groups=(groups, 1, 1),
        threads=32 * (4 * plan.fours + FILLERS),
        outputs=[(tiling.shape_result(made, shares), kind)],
        constants={
            "TYPE_A": LAYOUTS[part.type_name].number,
            "FOURS": plan.fours,
            "PAIRS": plan.pairs,
            "STAGES": plan.stages,
            "AHEAD": plan.ahead,
            "DEPTH": plan.depth,
            "EARLY": int(is_shared),
            "INPUTS": stack.in_features,
            "ROWS": stack.out_features,
            **_list_constants(stack, gate, shares),
        },
        types={"K": x.dtype, "Y": kind},
        room_bytes=plan.room_bytes,
    )
    return out


STREAM = Kernel(
    "moe_stream",
    FOLDER,
    "stream.body",
    ("x", "all_a", "bias", "shares", "chosen", "sizes"),
    ("out",),
    tuple(f"../linear/{name}" for name in (*BLOCK_HEADERS, "units.h", "stream.h", "stream_runs.h", "gate.h")),
    opens_late=True,
    type_names=TYPE_NAMES,
    counts_rows=True,
    cuda_only=True,
)


def describe(stack: Stack, used: int, gate: int) -> StreamShape:
    """Return the shape of the weights of all ranks as one."""
    number = LAYOUTS[stack.parts[0].type_name].number
    return StreamShape((number, number), (used * stack.out_features, 0), stack.in_features, gate)


def plan_experts(gpu: Gpu, stack: Stack, used: int, gate: int) -> StreamPlan | None:
    """Return a plan to stream the experts of one token; None if the kernel cannot do it."""
    if not gpu.has_tiles or len(stack.parts) > 1:
        return None
    shape, rows = describe(stack, used, gate), stack.parts[0].rows
    plan = plan_stream(shape, gpu.processors, gpu.room_bytes)
    if plan is None or rows % TILE_ROWS or shape.count_tiles(plan) > rows // TILE_ROWS:
        return None
    return plan if _count_room(shape, plan) <= gpu.room_bytes else None


def _count_room(shape: StreamShape, plan: StreamPlan) -> int:
    """Return the bytes of a threadgroup's memory; it may hold two rows of x."""
    return shape.count_room(plan) + shape.row_bytes


def multiply_stream(
    gpu: Gpu,
    x: DeviceArray,
    stack: Stack,
    tiling: Tiling,
    plan: StreamPlan,
    gate: int,
    shares: Shares,
    kind: NumberType,
) -> DeviceArray:
    """Multiply as `multiply_experts`, for one token.

    With `shares` it is the experts' second product: the first one let it start when the experts had been chosen.
    """
    used, part, is_shared = tiling.used, stack.parts[0], shares is not None
    shape = describe(stack, used, gate)
    (out,) = gpu.launcher.launch(
        STREAM,
        [x, part.raw, *_list_inputs(gpu, stack, shares), tiling.tiles, gpu.launcher.numbers(part.stride)],
        groups=(plan.groups[0], 1, 1),
        threads=32 * plan.simd_groups,
        outputs=[(tiling.shape_result(stack.count_made(gate), shares), kind)],
        constants={
            "TYPE_A": shape.types[0],
            "INPUTS": stack.in_features,
            "ROWS": part.rows,
            "USED": used,
            "GROUPS": plan.groups[0],
            "STAGES": plan.stages,
            "TILES": shape.count_tiles(plan),
            "APART": int(is_shared),
            "EARLY": int(is_shared),
            **_list_constants(stack, gate, shares),
        },
        types={"X": x.dtype, "Y": kind},
        room_bytes=_count_room(shape, plan),
    )
    return out
