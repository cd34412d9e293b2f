"""Products on the matrix units: which tiles a SIMD-group makes, and the launch.

A threadgroup makes rows of outputs for up to 64 tokens; its SIMD-groups share the columns out and add up. Knows no
deferred results: whoever waits for a norm, a gate or a sum calls with what it wants done.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.expand import BLOCK_HEADERS
from mlxr.kernels.linear.extras import Extras
from mlxr.kernels.linear.parts import TYPE_NAMES

SIMD_GROUPS = 8
MAX_STAGED = 16384  # columns; 37 KiB of shared memory
SHORT_COLUMNS = 8192
MANY_OUTPUTS = 8192
SINGLE = frozenset((12, 14))  # q4_k and q6_k
LIGHT = frozenset((2, 12))  # q4_0 and q4_k, by ggml's numbers
TILE_ROWS, TILE_TOKENS = 16, 8
TILES = Kernel(
    "linear_tiles",
    Path(__file__).parent,
    "tiles.body",
    ("x", "a", "b", "bias", "norm", "residual", "numbers", "sizes"),
    ("out",),
    (*BLOCK_HEADERS, "tiles.h", "gate.h"),
    type_names=TYPE_NAMES,
    cuda_only=True,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a SIMD-group works: its tiles of rows and of tokens, and how many share the columns of the same tile.

    `resident`: threadgroups that share a multiprocessor, which bounds the registers. `ahead`: words of the next step
    are loaded before those of one are multiplied. `staged`: x, one row, goes through shared memory.
    `single`: its runs are kept apart and scaled after they are summed, for the types in SINGLE.
    """

    row_tiles: int
    token_tiles: int
    split: int
    resident: int = 1
    ahead: bool = False
    staged: bool = False
    single: bool = False

    def count_groups(self, made: int, is_gated: bool) -> int:
        """Threadgroups that it takes to make `made` outputs of one weight."""
        rows = (TILE_ROWS // 2 if is_gated else TILE_ROWS) * self.row_tiles * (SIMD_GROUPS // self.split)
        return -(-made // rows)


def choose_plan(tokens: int, columns: int, outputs: int, types: Collection[int], is_normed: bool) -> Plan:
    """What was fastest on one H200 (lab/bench/products.py); `types` are ggml's numbers of the weights' types.

    Many outputs fill the device even when fewer SIMD-groups share the columns, which saves sums. Where the words of a
    step take few registers, more threadgroups fit. Bringing a long row to every threadgroup costs more than it saves.
    """
    many, light = outputs >= MANY_OUTPUTS, LIGHT.issuperset(types)
    single = SINGLE.issuperset(types)
    if is_normed or (tokens == 1 and single and columns <= SHORT_COLUMNS):
        return Plan(1, 1, 4 if many else 8, resident=4 if light and many else 3, staged=True, single=single)
    if tokens <= 8:
        return Plan(2 if light and many else 1, 1, 4 if many else 8, resident=2)
    if tokens <= 16:
        return Plan(2, 2, 4 if many else 8, resident=2 if light else 1)
    return Plan(2, 4 if tokens <= 32 else 8, 2 if many else 8)


def can_norm(tokens: int, columns: int) -> bool:
    """Whether a norm may wait for the product."""
    return tokens == 1 and columns <= MAX_STAGED


def multiply_tiles(
    gpu: Any,
    x: Any,
    weights: list[tuple[int, int, Any]],
    extras: Extras,
    kind: Any,
    plan: Plan | None = None,
) -> Any:
    """One launch for one or two weights, each (number of its type, rows, planes): out (tokens, outputs) of type `kind`.

    x is (tokens, columns) in bf16 or f32. It is normed first only where `can_norm` says so. `plan` is chosen unless
    given.
    """
    tokens, columns = x.shape
    first, second = weights[0], weights[-1]
    rows = first[1], (second[1] if len(weights) == 2 else 0)
    made = [first[1] // 2 if extras.gate else first[1], rows[1]]
    if plan is None:
        plan = choose_plan(tokens, columns, sum(rows), {weight[0] for weight in weights}, extras.norm is not None)
    blocks = -(-tokens // (TILE_TOKENS * plan.token_tiles))
    (out,) = gpu.launcher.launch(
        TILES,
        [
            x,
            first[2],
            second[2],
            *extras.list_inputs(gpu),
            gpu.launcher.numbers(tokens),
        ],
        groups=(blocks, sum(plan.count_groups(count, extras.gate != 0) for count in made), 1),
        threads=32 * SIMD_GROUPS,
        outputs=[((tokens, sum(made)), kind)],
        constants={
            "TYPE_A": first[0],
            "TYPE_B": second[0],
            "M": plan.row_tiles,
            "N": plan.token_tiles,
            "SPLIT": plan.split,
            "RESIDENT": plan.resident,
            "AHEAD": int(plan.ahead),
            "STAGED": int(plan.staged),
            "SINGLE": int(plan.single),
            "INPUTS": columns,
            "ROWS_A": rows[0],
            "ROWS_B": rows[1],
            **extras.constants,
        },
        types={"X": x.dtype, "Y": kind},
    )
    return out
