"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in place, from a table of cos and sin.

A table may say besides by what queries are multiplied at each position, and one that rotates nothing leaves x as it is.
"""

from __future__ import annotations

from mlxr.kernels.checks import check_heads, check_ints, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.rope.scaling import (
    SCALING_KINDS,
    QueryTemperature,
    RopeScaling,
    ScalingKind,
    longrope_attention_factor,
    stretch_base,
    yarn_attention_factor,
)
from mlxr.kernels.rope.table import RopeTable, build_table, inverse_frequencies, llama3_factors
from mlxr.kernels.tensor import FloatArray, IntArray

__all__ = [
    "SCALING_KINDS",
    "QueryTemperature",
    "RopeScaling",
    "RopeTable",
    "ScalingKind",
    "build_table",
    "inverse_frequencies",
    "llama3_factors",
    "longrope_attention_factor",
    "rope",
    "stretch_base",
    "yarn_attention_factor",
]

CHOICE = Choice(__name__)


def rope(ctx: Context, x: FloatArray, positions: IntArray, table: RopeTable, *, queries: bool = False) -> None:
    """Rotate x (T, heads, head_dim) in place by `positions` (T,): (a, b) becomes (a cos - b sin, b cos + a sin).

    `queries` are then multiplied by the table's factor of their position, if it has factors. x may be a view with a
    free token stride (part of a fused projection). Raises ValueError for a position that the table does not cover,
    before anything is rotated.
    """
    check_heads("rope", "x", x)
    check_ints("rope", "positions", positions)
    check_size("rope", "length of positions", positions.shape[0], x.shape[0])
    if table.rot_dim > x.shape[2]:
        refuse("rope", "rot_dim of table", table.rot_dim, f"at most the head_dim {x.shape[2]} of x")
    factors = table.query_factors if queries else None
    if not table.rot_dim and factors is None:
        return
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("rope", name, "interleaved" if table.interleaved else "halves")
    implementation.rope(ctx, x, positions, table, factors)
