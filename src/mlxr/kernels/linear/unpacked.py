"""Some rows times a weight in blocks, unpacked in registers on its way to the matrix units (CUDA, sm_90a).

A weight is unpacked once for up to 256 rows of x, which pass through the threadgroup's memory. Knows no deferred
results.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.expand import BLOCK_HEADERS
from mlxr.kernels.linear.extras import Extras
from mlxr.kernels.linear.parts import LAYOUTS, TYPE_NAMES

UNPACKED = Kernel(
    "linear_unpacked",
    Path(__file__).parent,
    "unpacked.body",
    ("x", "a", "b", "bias", "norm", "residual", "numbers", "sizes"),
    ("out",),
    (*BLOCK_HEADERS, "unpacked.h", "gate.h"),
    has_rings=True,
    type_names=TYPE_NAMES,
)
UNIT_COLUMNS, UNIT_ROWS, SLOT_COLUMNS = 256, 16, 64
WIDTHS = (16, 32, 64, 96, 128, 192, 256)  # tokens of a product on the matrix units, as cuda/rings.h has them


@dataclass(frozen=True, slots=True)
class Packing:
    """As unpacked.h has it: words of a unit in the ring, and of its table of scales."""

    unit_words: int
    table_words: int


def _pack(planes: tuple[int, ...], padded: int, entries: int, words: int) -> Packing:
    unit = sum(max(1, size // 4) for size in planes) + 4 * padded
    return Packing(UNIT_ROWS * unit, UNIT_ROWS * (entries + 1) * words)


PACKINGS = {
    2: _pack((128, 16), 1, 8, 2),
    3: _pack((128, 32), 1, 8, 4),
    6: _pack((128, 32, 16), 1, 8, 2),
    7: _pack((128, 32, 32), 1, 8, 4),
    8: _pack((256, 16), 1, 8, 2),
    10: _pack((64, 16, 4), 1, 8, 4),
    11: _pack((64, 32, 12, 2), 2, 8, 2),
    12: _pack((144,), 0, 4, 4),
    13: _pack((176,), 0, 4, 4),
    14: _pack((128, 64, 16, 2), 2, 8, 2),
    15: _pack((256, 4), 1, 8, 2),
    20: _pack((128, 16), 1, 8, 2),
    23: _pack((128, 4, 4), 1, 8, 2),
    39: _pack((128, 8), 1, 8, 2),
    432: _pack((128, 64), 1, 8, 4),
    464: _pack((128, 32), 1, 4, 4),
    832: _pack((256, 64), 1, 8, 4),
    864: _pack((256, 32), 1, 4, 4),
}  # by the number of the type
assert set(PACKINGS) == {layout.number for name, layout in LAYOUTS.items() if name not in ("f32", "f16", "bf16")}


@dataclass(frozen=True, slots=True)
class UnpackPlan:
    """How a threadgroup works: `parts` times four SIMD-groups make `held` tiles of 64 rows each for `width` tokens.

    `shares` of the inputs go to threadgroups of their own. `stages` units of each SIMD-group and `x_stages` slots of 64
    columns of x are in rings; `fillers` SIMD-groups bring x, and `ahead` slots of it are under way.
    """

    width: int
    parts: int
    held: int
    shares: int = 1
    stages: int = 4
    x_stages: int = 8
    fillers: int = 2
    ahead: int = 2
    depth: int = 0
    registers: tuple[int, int] = (0, 0)

    def count_made(self, is_gated: bool) -> int:
        """Outputs of a threadgroup."""
        return 4 * self.parts * self.held * (UNIT_ROWS // 2 if is_gated else UNIT_ROWS)

    def count_room(self, types: tuple[int, int], is_gated: bool) -> int:
        """Bytes of a threadgroup's memory: the rings, or the results."""
        own = max(
            self.held * (self.stages * PACKINGS[kind].unit_words + PACKINGS[kind].table_words) for kind in types
        )
        rings = self.x_stages * self.width * SLOT_COLUMNS // 2 + 4 * self.parts * own
        return 4 * max(rings, self.width * (self.count_made(is_gated) + 4))


def multiply_unpacked(
    gpu: Any, x: Any, weights: list[tuple[int, int, Any]], extras: Extras, kind: Any, plan: UnpackPlan
) -> Any:
    """As `multiply_tiles`, of x in bf16; with several shares (shares, tokens, outputs), to be added up."""
    (tokens, columns), first, second = x.shape, weights[0], weights[-1]
    rows = first[1], (second[1] if len(weights) == 2 else 0)
    made = [first[1] // 2 if extras.gate else first[1], rows[1]]
    each, room = plan.count_made(extras.gate != 0), plan.count_room((first[0], second[0]), extras.gate != 0)
    shape = (tokens, sum(made)) if plan.shares == 1 else (plan.shares, tokens, sum(made))
    (out,) = gpu.launcher.launch(
        UNPACKED,
        [x, first[2], second[2], *extras.list_inputs(gpu), gpu.launcher.numbers(tokens)],
        groups=(-(-tokens // plan.width), sum(-(-count // each) for count in made), plan.shares),
        threads=32 * (4 * plan.parts + plan.fillers),
        outputs=[(shape, kind)],
        constants=make_constants((first[0], second[0]), rows, columns, plan, extras.gate != 0) | extras.constants,
        types={"X": x.dtype, "Y": kind},
        room_bytes=room,
    )
    return out


def make_constants(
    types: tuple[int, int], rows: tuple[int, int], columns: int, plan: UnpackPlan, is_gated: bool
) -> dict[str, int]:
    """The constants of the body but THREADS and the extras'."""
    return {
        "TYPE_A": types[0],
        "TYPE_B": types[1],
        "INPUTS": columns,
        "ROWS_A": rows[0],
        "ROWS_B": rows[1],
        "N": plan.width,
        "PARTS": plan.parts,
        "HELD": plan.held,
        "SHARES": plan.shares,
        "STAGES": plan.stages,
        "X_STAGES": plan.x_stages,
        "AHEAD": plan.ahead,
        "DEPTH": plan.depth,
        "REGISTERS": plan.registers[0],
        "FILLER_REGISTERS": plan.registers[1],
        "ROOM_WORDS": plan.count_room(types, is_gated) // 4,
    }
