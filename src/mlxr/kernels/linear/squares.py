"""Products with blocks on an Apple GPU's matrix units of 8 x 8 numbers (`simdgroup_matrix`): from five rows on.

A threadgroup unpacks a run of its rows of the weight once for all of its rows of x. With more of these it unpacks less
often, and each number that it reads of its memory is used more often; with few, registers are saved. Knows nothing of
when it pays.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlxr.kernels.gpu.device import Gpu
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.parts import BLOCK_HEADERS, TYPE_NAMES, Extras, Weights
from mlxr.kernels.tensor import DeviceArray, NumberType

SQUARES = Kernel(
    "linear_squares",
    Path(__file__).parent,
    "squares.body",
    ("x", "a", "b", "bias", "residual", "sizes"),
    ("out",),
    (*BLOCK_HEADERS, "rows.h", "squares.h", "gate.h"),
    type_names=TYPE_NAMES,
    metal_only=True,
)
SIDE = 8


@dataclass(frozen=True, slots=True)
class SquarePlan:
    """Squares of a SIMD-group, of the weight's rows times those of x, and how many SIMD-groups there are, of which
    `row_simds` have rows of the weight of their own."""

    row_squares: int
    token_squares: int
    row_simds: int
    simd_groups: int = 4

    @property
    def rows(self) -> int:
        """Rows of the weight of a threadgroup, of which half are gates where there is one."""
        return SIDE * self.row_squares * self.row_simds

    @property
    def tokens(self) -> int:
        """Rows of x of a threadgroup."""
        return SIDE * self.token_squares * (self.simd_groups // self.row_simds)

    @property
    def shared_bytes(self) -> int:
        """Bytes of a threadgroup's memory: scales and offsets, a run of each row in f16, and one of x in f32, where
        sums go at the end."""
        turned = SIDE * SIDE * self.row_squares * self.simd_groups
        return 512 * self.simd_groups + 64 * self.rows + 4 * max(32 * self.tokens, turned)

    @property
    def constants(self) -> dict[str, int]:
        """Which of it a kernel is compiled for."""
        return {"ROW_SQUARES": self.row_squares, "TOKEN_SQUARES": self.token_squares, "ROW_SIMDS": self.row_simds}

    def count_groups(self, rows: tuple[int, int], gate: int) -> int:
        """Threadgroups that it takes for the rows of one or two weights."""
        if gate:
            return -(-rows[0] // self.rows)
        return sum(-(-count // self.rows) for count in rows)


PLANS = tuple(SquarePlan(*row) for row in ((2, 1, 4, 4), (2, 2, 4, 4), (4, 2, 2, 4), (4, 4, 2, 4), (4, 4, 2, 8)))


def choose_squares(tokens: int) -> SquarePlan:
    """The plan for so many rows of x, which takes all of them at once as far as there is one."""
    return next((plan for plan in PLANS if plan.tokens >= tokens), PLANS[-1])


def multiply_squares(
    gpu: Gpu, x: DeviceArray, weights: Weights, extras: Extras, kind: NumberType, plan: SquarePlan | None = None
) -> DeviceArray:
    """One launch for one or two weights, each (number of its type, rows, planes): out (tokens, outputs) of type `kind`.

    x is (tokens, columns) of any type of floats, and is not normed. `plan` is chosen unless given.
    """
    (tokens, columns), first, second = x.shape, weights[0], weights[-1]
    rows = first[1], (second[1] if len(weights) == 2 else 0)
    plan = plan or choose_squares(tokens)
    bias, _, residual, _ = extras.list_inputs(gpu)
    (out,) = gpu.launcher.launch(
        SQUARES,
        [x, first[2], second[2], bias, residual, gpu.launcher.numbers(columns, tokens, *rows)],
        groups=(-(-tokens // plan.tokens), plan.count_groups(rows, extras.gate), 1),
        threads=32 * plan.simd_groups,
        outputs=[((tokens, rows[0] // 2 if extras.gate else sum(rows)), kind)],
        constants={"TYPE_A": first[0], "TYPE_B": second[0], **plan.constants, **extras.constants},
        types={"X": x.dtype, "Y": kind},
    )
    return out
