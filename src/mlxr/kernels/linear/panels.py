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
)
MIN_TOKENS, MAX_TOKENS = 33, 128
PANEL_TOKENS = 64
WIDTHS = (112, 128, 96, 64, 48)  # columns of a product on the matrix units, as cuda.h has them
SHARES = (1, 2, 4)
BLOCK_COLUMNS = 64
READERS = 8  # SIMD-groups that multiply
SPARE_BYTES = 3072  # of the threadgroup's memory, for what is not a ring
MOST_X_STAGES = 8
FULL = 0.9  # of the multiprocessors' time; with less the library is as fast


@dataclass(frozen=True, slots=True)
class PanelPlan:
    """`groups` threadgroups of `parts` times `width` columns for each of `shares` of the inputs.

    `stages` slots of the ring hold `blocks` blocks of 64 columns of a part, `x_stages` one block of x.
    """

    width: int
    parts: int
    shares: int
    groups: int
    blocks: int
    stages: int
    x_stages: int

    def count_room(self, tokens: int) -> int:
        """Bytes of a threadgroup's memory."""
        rows = self.stages * self.blocks * self.width + self.x_stages * _pad(tokens)
        return 2 * BLOCK_COLUMNS * rows


def plan_panels(
    tokens: int, rows: int, columns: int, gate: int, *, is_split: bool, processors: int, room_bytes: int
) -> PanelPlan | None:
    """How to multiply by a weight (rows, columns); None where the library is better. `is_split`: shares are welcome."""
    if not MIN_TOKENS <= tokens <= MAX_TOKENS or tokens % 8 or rows % 16 or not processors:
        return None
    made, best = (rows // 2 if gate else rows), None
    for shares in SHARES if is_split else (1,):
        for width in WIDTHS:
            groups = -(-made // (width if gate else 2 * width))
            filled = made / (2 * width if not gate else width) * shares / processors
            if columns % (2 * BLOCK_COLUMNS * shares) == 0:
                found = filled / -(-groups * shares // processors), -shares, width, groups
                best = found if best is None else max(best, found)
    if best is None or best[0] < FULL:
        return None
    return fit_rings(tokens, best[2], -best[1], best[3], room_bytes)


def fit_rings(tokens: int, width: int, shares: int, groups: int, room_bytes: int, blocks: int = 2) -> PanelPlan | None:
    """The plan whose rings fill the memory, a third of it for x, which the cache has; None where that is too little."""
    room = room_bytes - SPARE_BYTES
    x_bytes, slot_bytes = 2 * BLOCK_COLUMNS * _pad(tokens), 2 * BLOCK_COLUMNS * blocks * width
    x_stages = min(MOST_X_STAGES, room // (3 * x_bytes) + 1)
    stages = (room - x_stages * x_bytes) // slot_bytes
    if (
        _pad(tokens) == PANEL_TOKENS and stages % 2
    ):  # four SIMD-groups to a half: a slot is always theirs or the others'
        stages += 1
        x_stages = (room - stages * slot_bytes) // x_bytes
    if stages < 3 or x_stages <= blocks:
        return None
    return PanelPlan(width, 2, shares, groups, blocks, stages, x_stages)


def multiply_panels(gpu: Any, x: Any, weight: Any, gate: int, kind: Any, plan: PanelPlan) -> Any:
    """x (tokens, columns) times weight (rows, columns), of one 16-bit type: (tokens, outputs) of type `kind`.

    With several shares (shares, tokens, outputs). `gate` 1 silu, 2 gelu: the rows' upper half gates the lower one.
    """
    (tokens, columns), rows = x.shape, weight.shape[0]
    outputs = rows // 2 if gate else rows
    shape = (tokens, outputs) if plan.shares == 1 else (plan.shares, tokens, outputs)
    (out,) = gpu.launcher.launch(
        PANELS,
        [x, weight, gpu.launcher.numbers(tokens)],
        groups=(plan.groups, plan.shares, 1),
        threads=32 * (READERS + 2),
        outputs=[(shape, kind)],
        constants={
            "TOKENS": _pad(tokens),
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
            Box(tokens, columns, _pad(tokens), 1),
            Box(rows, columns, plan.width // 2 if gate else plan.width, plan.blocks),
        ),
    )
    return out


def _pad(tokens: int) -> int:
    return -(-tokens // PANEL_TOKENS) * PANEL_TOKENS
