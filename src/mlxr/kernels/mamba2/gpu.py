"""`mamba2` on a GPU: the launch of the gated delta rule, without what makes it a delta rule."""

from __future__ import annotations

from typing import Any

from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.gated_delta.launch import MOST_ROWS, Heads, launch_recurrence, make_recurrence
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.gpu.states import compose_on_host
from mlxr.kernels.mamba2 import StateSpace, run_mamba2
from mlxr.kernels.ragged import RaggedBatch

RECUR = make_recurrence("mamba2")
KERNELS = (RECUR.any, RECUR.step)
_CONSTANTS = {"DELTA": 0, "NORMED": 0, "BETAS": 0, "TILED": 0, "DECAYS": 0}


def mamba2(
    ctx: Context, xbc: Any, x: Any, space: StateSpace, batch: RaggedBatch, pool: Pool, first: int, at: int
) -> Any:
    """What the columns of the batch's tokens give."""
    xbc, x = settle(xbc), settle(x)
    if ctx.gpu.launcher is None:
        return compose_on_host(
            ctx,
            "mamba2",
            "decay of each head",
            (xbc, x),
            pool,
            lambda own, gates, states: run_mamba2(ctx, own, gates, space, batch, states, first, at),
        )
    if space.state_dim > MOST_ROWS:
        refuse("mamba2", "state_dim", space.state_dim, f"at most {MOST_ROWS} on a GPU")
    b = space.results
    heads = Heads(
        space.groups, space.heads, space.state_dim, space.head_dim, (b + space.groups * space.state_dim, b, 0)
    )
    arrays = space.rates, space.bias, space.skip
    return launch_recurrence(ctx, RECUR, xbc, x, heads, arrays, batch, pool, (first, at), _CONSTANTS)
