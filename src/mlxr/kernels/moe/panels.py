"""Products of experts with many rows each, by kernels whose matrix units read the threadgroups' memory (CUDA, sm_90a).

Weights and picked rows of x pass through one ring there. The rows of a weight are the rows of what is multiplied, and
pairs its columns, of which a tile takes as many as it has: so an expert's weights are read once for up to a tile's
width of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.expand import BLOCK_HEADERS
from mlxr.kernels.linear.parts import FLOATS, LAYOUTS, TYPE_NAMES
from mlxr.kernels.moe.stacked import Stack

PANELS = Kernel(
    "moe_panels",
    Path(__file__).parent,
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
MIN_EACH = 32  # pairs of an expert from which on it pays
SLOT_COLUMNS, TILE_ROWS = 64, 16
FILLERS = 4  # SIMD-groups that bring weights and x


@dataclass(frozen=True, slots=True)
class PanelPlan:
    """`fours` times four SIMD-groups multiply 64 rows each by up to `pairs` pairs.

    `ahead` of the `stages` slots of the ring are being brought. `depth` 1: products of a slot are under way while the
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
        """Threadgroups for so many outputs."""
        return -(-made // (self.fours * (32 if gated else 64)))


FEW, MANY = PanelPlan(4, 128, 4, 2), PanelPlan(3, 192, 4, 2)
FEW_EACH = 160  # pairs of an expert up to which tiles are narrow
# Below MIN_EACH what counts is that much of the weights is under way: with one or two pairs to an expert steps were 4
# to 10 % shorter on an H200 than by tiles. Fewer were not measured.
SPARSE, MIN_SPARSE = PanelPlan(3, 32, 6, 4), 1.0


def plan_panels(gpu: Any, kind: Any, up: Stack, down: Stack, each: float) -> PanelPlan | None:
    """How to multiply rows of MLX's type `kind`, about `each` to an expert; None where others are faster."""
    if not gpu.has_tiles or gpu.machine is None or not gpu.machine.has_boxes or kind != gpu.operands:
        return None
    suits = all(
        len(stack.parts) == 1
        and kind == (stack.parts[0].array.dtype if stack.parts[0].type_name in FLOATS else gpu.mx.bfloat16)
        and kind.size == 2
        and stack.in_features % SLOT_COLUMNS == 0
        and stack.out_features % (2 * TILE_ROWS) == 0
        for stack in (up, down)
    )
    if not suits or each < MIN_EACH:
        is_sparse = suits and each >= MIN_SPARSE and up.parts[0].type_name in FLOATS
        return SPARSE if is_sparse and down.parts[0].type_name in FLOATS else None
    return FEW if each <= FEW_EACH else MANY


def multiply_panels(gpu: Any, x: Any, stack: Stack, tiling: Any, gate: int, shares: Any, kind: Any) -> Any:
    """As `products.multiply_experts` does it, of pairs that a plan sorted.

    With `shares` it comes after the experts' first product, which let it in when the pairs had been sorted.
    """
    numbers, part, plan = gpu.launcher.numbers, stack.parts[0], tiling.panels
    made, pairs = (stack.out_features // 2 if gate else stack.out_features), tiling.tokens * tiling.used
    is_shared, items = shares is not None, plan.count_groups(made, gate != 0) * tiling.count
    groups = min(items, gpu.processors or items)
    (out,) = gpu.launcher.launch(
        PANELS,
        [
            x,
            part.raw,
            numbers(0.0) if stack.biases is None else stack.biases,
            numbers(0.0) if shares is None else shares,
            tiling.tiles,
            tiling.order,
            numbers(tiling.used, tiling.tokens, 1 if is_shared else tiling.used, part.stride, items, groups),
        ],
        groups=(groups, 1, 1),
        threads=32 * (4 * plan.fours + FILLERS),
        outputs=[((tiling.used, tiling.tokens, made) if is_shared else (pairs, made), kind)],
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
            "GATE": gate,
            "BIAS": int(stack.biases is not None),
            "SHARED_OUT": int(is_shared),
        },
        types={"K": x.dtype, "Y": kind},
        room_bytes=plan.room_bytes,
    )
    return out
