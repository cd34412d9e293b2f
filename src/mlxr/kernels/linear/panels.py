"""Many rows times a weight of 16-bit numbers on the matrix units that read the threadgroups' memory (CUDA, sm_90a).

Boxes of the weight and of x pass through rings there; the weight is asked for before the launch in front has ended. One
threadgroup to a multiprocessor, so sums of few outputs come in shares of the inputs, which a norm adds up. Only in
recorded steps, whose addresses are known. Knows no deferred results.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxr.kernels.gpu.kernel import Box, Kernel

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
MIN_TOKENS, MAX_TOKENS, MAX_SUM_TOKENS = 17, 128, 64  # where it was faster than the library
PANEL_TOKENS, TILE_ROWS = 64, 8
WIDTHS = (112, 128, 96, 64, 48)  # columns of a product on the matrix units, as cuda/rings.h has them
SHARES = (1, 2, 4)
BLOCK_COLUMNS = 64
PARTS, BLOCKS = 2, 2  # see PanelPlan: 256 bytes of a row are asked for together
FOUR = 4  # SIMD-groups that multiply together
SPARE_BYTES = 3072  # of the threadgroup's memory, for what is not a ring
MOST_X_STAGES = 8
FULL = 0.9  # of the multiprocessors' time; with less the library is as fast


@dataclass(frozen=True, slots=True)
class PanelPlan:
    """`groups` threadgroups of `parts` (1 or 2) parts of `width` columns for each of `shares` of the inputs.

    `stages` slots of the ring hold `blocks` blocks of 64 columns of a part, `x_stages` one block of x.
    """

    width: int
    shares: int
    groups: int
    blocks: int
    stages: int
    x_stages: int
    parts: int = PARTS

    def count_readers(self, tokens: int) -> int:
        """SIMD-groups that multiply: four for each part, or for 64 tokens."""
        return FOUR * max(self.parts, pad_tokens(tokens) // PANEL_TOKENS)

    def count_room(self, tokens: int) -> int:
        """Bytes of a threadgroup's memory."""
        rows = self.stages * self.blocks * self.width + self.x_stages * pad_tokens(tokens)
        return 2 * BLOCK_COLUMNS * rows


def plan_panels(tokens: int, rows: int, columns: int, gate: int, processors: int, room_bytes: int) -> PanelPlan | None:
    """How to multiply by a weight (rows, columns), without a gate in shares; None where the library is better."""
    most = MAX_TOKENS if gate else MAX_SUM_TOKENS
    if not MIN_TOKENS <= tokens <= most or tokens % TILE_ROWS or rows % (2 * TILE_ROWS):
        return None
    for parts in (PARTS, 1) if gate else (PARTS,):  # one where two leave too much idle, as with a share of the features
        found = [
            _try(shares, width, parts, rows, gate, processors)
            for shares in ((1,) if gate else SHARES)
            for width in WIDTHS
            if columns % (BLOCKS * BLOCK_COLUMNS * shares) == 0
        ]
        filled, shares, width, groups = max(found, default=(0.0, 0, 0, 0))
        if filled >= FULL:
            return fit_rings(tokens, width, -shares, groups, room_bytes, parts)
    return None


def _try(shares: int, width: int, parts: int, rows: int, gate: int, processors: int) -> tuple[float, int, int, int]:
    """How much of the multiprocessors' time is used; the shares, negative; the width and threadgroups of a share."""
    made, each = (rows // 2, parts * width // 2) if gate else (rows, parts * width)
    groups = -(-made // each)
    waves = -(-groups * shares // processors) if processors else 0
    return made / each * shares / processors / waves if waves else 0.0, -shares, width, groups


def fit_rings(
    tokens: int, width: int, shares: int, groups: int, room_bytes: int, parts: int = PARTS
) -> PanelPlan | None:
    """The plan whose rings fill the memory, a third of it for x, which the cache has; None where that is too little."""
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
    """Rows of x that are multiplied."""
    return -(-tokens // PANEL_TOKENS) * PANEL_TOKENS


def multiply_panels(gpu: Any, x: Any, weight: Any, gate: int, kind: Any, plan: PanelPlan) -> Any:
    """x (tokens, columns) times weight (rows, columns), of one 16-bit type: (tokens, outputs) of type `kind`.

    With several shares (shares, tokens, outputs). `gate`, one of GATES: the rows' upper half gates the lower one.
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
