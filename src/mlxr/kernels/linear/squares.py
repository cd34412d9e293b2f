"""Products with blocks on an Apple GPU's matrix units of 8 x 8 numbers (`simdgroup_matrix`): from five rows on.

A threadgroup unpacks a run of its rows of the weight once for all of its rows of x. With more rows of x it unpacks less
often, and uses each number read from its memory more often; with few, it saves registers. `gpu.py` decides when to use
these products.
"""

from __future__ import annotations

from pathlib import Path

from mlxr.core.frozen import frozen
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


@frozen
class SquarePlan:
    """The shape of a threadgroup: a SIMD-group makes `row_squares` squares of the weight's rows times `token_squares`
    of x's; the `simd_groups` are split by rows of the weight into `row_simds`."""

    row_squares: int
    token_squares: int
    row_simds: int
    simd_groups: int = 4

    @property
    def rows(self) -> int:
        """Rows of the weight of a threadgroup; with a gate, half of them are gates."""
        return SIDE * self.row_squares * self.row_simds

    @property
    def tokens(self) -> int:
        """Rows of x of a threadgroup."""
        return SIDE * self.token_squares * (self.simd_groups // self.row_simds)

    @property
    def shared_bytes(self) -> int:
        """Bytes of a threadgroup's memory: scales and offsets, a run of each row in f16, and one of x in f32, which is
        used for sums at the end."""
        turned = SIDE * SIDE * self.row_squares * self.simd_groups
        return 512 * self.simd_groups + 64 * self.rows + 4 * max(32 * self.tokens, turned)

    @property
    def constants(self) -> dict[str, int]:
        """The constants for which a kernel is compiled."""
        return {"ROW_SQUARES": self.row_squares, "TOKEN_SQUARES": self.token_squares, "ROW_SIMDS": self.row_simds}

    def count_groups(self, rows: tuple[int, int], gate: int) -> int:
        """Return the number of threadgroups for the rows of one or two weights."""
        if gate:
            return -(-rows[0] // self.rows)
        return sum(-(-count // self.rows) for count in rows)


PLANS = tuple(SquarePlan(*row) for row in ((2, 1, 4, 4), (2, 2, 4, 4), (4, 2, 2, 4), (4, 4, 2, 4), (4, 4, 2, 8)))


def choose_squares(tokens: int) -> SquarePlan:
    """Return the smallest plan that takes all `tokens` rows of x at once, or the largest plan."""
    return next((plan for plan in PLANS if plan.tokens >= tokens), PLANS[-1])


def multiply_squares(
    gpu: Gpu, x: DeviceArray, weights: Weights, extras: Extras, kind: NumberType, plan: SquarePlan | None = None
) -> DeviceArray:
    """Multiply x by one or two weights in one launch: (tokens, outputs) of type `kind`.

    A weight is (number of its type, rows, planes). x is (tokens, columns) of any type of floats, and is not normed.
    `plan` is chosen unless given.
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
