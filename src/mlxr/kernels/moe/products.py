"""Products of experts by our kernels: how pairs of a token and a rank form tiles, and the launches.

A tile is some pairs of one expert. How many it takes at most follows from the batch's shape alone, and so does the
number of tiles that are launched: nothing waits for the host to see where tokens go. One token has a tile for each
rank; the pairs of more are sorted by expert, so that a weight is read once for all of a tile. All products open late:
so the second one, even behind an activation between the two, finds from its start what was chosen. Knows no deferred
results.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxr.kernels.gpu.kernel import LANES, Kernel
from mlxr.kernels.gpu.launcher import MIN_ARRAY
from mlxr.kernels.linear.expand import BLOCK_HEADERS
from mlxr.kernels.linear.parts import FLOATS, LAYOUTS, TYPE_NAMES
from mlxr.kernels.linear.rows import TOKENS, choose_rows, limit_tokens
from mlxr.kernels.linear.tiles import LIGHT, MAX_STAGED, SIMD_GROUPS, SINGLE, TILE_TOKENS, Plan
from mlxr.kernels.moe.panels import PanelPlan, multiply_panels
from mlxr.kernels.moe.stacked import Stack
from mlxr.kernels.moe.stream import multiply_stream, plan_experts

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
SORT = Kernel("moe_sort", FOLDER, "sort.body", ("chosen", "use", "live", "sizes"), ("tiles", "order"), ("same.h",))
SORT_SECTIONS, FEW_SECTIONS = 32, 8  # of many pairs, and up to FEW_PAIRS
FEW_PAIRS = 512
SORT_COUNTS = 2**12  # of an expert in a section, at most: 16 KiB of the threadgroup's memory
MAX_SORT_THREADS = 1024
FLOAT_RUN = 32  # columns of a lane on matrix units
ONE_RESIDENT, TABLED_RESIDENT, FEW_RESIDENT = 2, 3, 2  # threadgroups of a multiprocessor: for one pair, or eight
ONE_AHEAD = False  # whether words of one pair's next step are asked for early; not yet measured on a GPU
STEP_COLUMNS = 256  # that a SIMD-group takes of a row at a time
MAX_IDLE = 1.34  # SIMD-groups that there are for each one that has columns to multiply
TABLED = frozenset((39,))  # mxfp4, whose words take few registers
WIDTHS = ((6, 1), (12, 2), (40, 4))  # up to so many pairs for each expert: tiles of eight; more take WIDEST of them
WIDEST = 8


@dataclass(frozen=True, slots=True, eq=False)
class Tiling:
    """`count` tiles of up to `width` pairs. `tiles` and `order` are as moe/experts.h says; `order` is None where each
    tile is one pair. With `panels` they are multiplied as that says."""

    tokens: int
    used: int
    width: int
    count: int
    tiles: Any
    order: Any
    panels: PanelPlan | None = None


def can_multiply(gpu: Any, stack: Stack) -> bool:
    """Whether our kernels multiply by these weights: floats need whole blocks of columns, too."""
    if gpu.launcher is None or len(stack.parts) > 2:
        return False
    return all(
        part.type_name not in FLOATS
        or stack.in_features % (FLOAT_RUN if gpu.has_tiles else LAYOUTS[part.type_name].block_size) == 0
        for part in stack.parts
    )


def choose_width(tokens: int, used: int, experts: int, has_tiles: bool, row_width: int = TOKENS[-1]) -> int:
    """How many pairs a tile takes at most; `row_width` without matrix units."""
    if tokens == 1:
        return 1
    if not has_tiles:
        return row_width
    each = tokens * used / experts
    wanted = next((tiles for most, tiles in WIDTHS if each <= most), WIDEST)
    return TILE_TOKENS * min(wanted, -(-tokens // TILE_TOKENS))


def count_tiles(tokens: int, used: int, experts: int, width: int) -> int:
    """The most tiles that so many pairs may form."""
    pairs = tokens * used
    return pairs if pairs <= experts else experts + (pairs - experts) // width


def sort_pairs(
    gpu: Any, chosen: Any, experts: int, has_tiles: bool, panels: PanelPlan | None = None, use: Any = None
) -> Tiling:
    """Tiles of the pairs in `chosen` (tokens, used); one launch if there are several tokens, which `use` counts."""
    tokens, used = chosen.shape
    width = choose_width(tokens, used, experts, has_tiles, limit_tokens(gpu)) if panels is None else panels.pairs
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


def multiply_experts(gpu: Any, x: Any, stack: Stack, tiling: Tiling, gate: int, shares: Any, kind: Any) -> Any:
    """Rows of x times the weights of the expert of each pair, plus its bias, gated by `gate` (one of GATES, or 0).

    x is (tokens, inputs), or (pairs, inputs) if `shares` (tokens, used) are given. The result is (pairs, outputs) of
    type `kind`; with `shares` it is multiplied by them and ordered by rank: (used, tokens, outputs).
    """
    if tiling.panels is not None:
        return multiply_panels(gpu, x, stack, tiling, gate, shares, kind)
    stream = plan_experts(gpu, stack, tiling.used, gate) if tiling.order is None else None
    if stream is not None:
        return multiply_stream(gpu, x, stack, tiling.tiles, gate, shares, kind, stream)
    launcher, parts = gpu.launcher, stack.parts
    rows = parts[0].rows, (parts[1].rows if len(parts) == 2 else 0)
    made, pairs = (stack.out_features // 2 if gate else stack.out_features), tiling.tokens * tiling.used
    is_shared, none = shares is not None, launcher.numbers(0)
    constants: dict[str, int] = {
        "TYPE_A": LAYOUTS[parts[0].type_name].number,
        "TYPE_B": LAYOUTS[parts[-1].type_name].number,
        "SORTED": int(tiling.order is not None),
        "GATE": gate,
        "BIAS": int(stack.biases is not None),
        "SHARED_OUT": int(is_shared),
    }
    places = [tiling.used, tiling.tokens, 1 if is_shared else tiling.used]
    strides = [parts[0].stride, parts[-1].stride]
    inputs = [
        x,
        parts[0].raw,
        parts[-1].raw,
        launcher.numbers(0.0) if stack.biases is None else stack.biases,
        launcher.numbers(0.0) if shares is None else shares,
        tiling.tiles,
        none if tiling.order is None else tiling.order,
    ]
    if gpu.has_tiles:
        plan = choose_plan(stack, tiling)
        kernel, sizes = TILES, launcher.numbers(*places, *strides)
        counts = (plan.count_groups(count, gate != 0) for count in (made if gate else rows[0], rows[1]))
        constants |= {
            "M": plan.row_tiles,
            "N": plan.token_tiles,
            "SPLIT": plan.split,
            "RESIDENT": plan.resident,
            "AHEAD": int(plan.ahead),
            "STAGED": int(plan.staged),
            "SINGLE": int(plan.single),
            "INPUTS": stack.in_features,
            "ROWS_A": rows[0],
            "ROWS_B": rows[1],
        }
    else:
        each = choose_rows(gpu, tiling.width, stack.out_features)
        kernel, sizes = ROWS, launcher.numbers(stack.in_features, *rows, *places, *strides)
        step = SIMD_GROUPS * (each // 2 if gate else each)
        counts = (-(-count // step) for count in (made if gate else rows[0], rows[1]))
        constants |= {"ROWS": each, "T": tiling.width}
    (out,) = launcher.launch(
        kernel,
        [*inputs, sizes],
        groups=(sum(counts), tiling.count, 1),
        threads=32 * SIMD_GROUPS,
        outputs=[((tiling.used, tiling.tokens, made) if is_shared else (pairs, made), kind)],
        constants=constants,
        types={"X": x.dtype, "Y": kind},
    )
    return out


def choose_plan(stack: Stack, tiling: Tiling) -> Plan:
    """How a SIMD-group works. It holds fewer rows of types that take many registers."""
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


def choose_split(steps: int) -> int:
    """How many SIMD-groups share the columns of a row, which are so many steps of one: many, of which few are idle."""
    made = {split: -(-steps // split) * split for split in (8, 4, 2, 1)}
    fitting = [split for split, count in made.items() if count <= MAX_IDLE * steps]
    return min(fitting[:2], key=made.__getitem__)
