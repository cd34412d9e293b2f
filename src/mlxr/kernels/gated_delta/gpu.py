"""`gated_delta` on a GPU: one launch, which norms queries and keys as well."""

from __future__ import annotations

from typing import Any

from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.gated_delta import EPS, DeltaRule, run_gated_delta
from mlxr.kernels.gated_delta.launch import MOST_ROWS, Heads, launch_recurrence, make_recurrence
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.gpu.states import compose_on_host
from mlxr.kernels.ragged import RaggedBatch

RECUR = make_recurrence("gated_delta")
KERNELS = (RECUR.any, RECUR.step)


def gated_delta(
    ctx: Context, qkv: Any, x: Any, rule: DeltaRule, batch: RaggedBatch, pool: Pool, first: int, at: int
) -> Any:
    """Run the rule on the GPU over the tokens of the batch."""
    qkv, x = settle(qkv), settle(x)
    if ctx.gpu.launcher is None:
        return compose_on_host(
            ctx,
            "gated_delta",
            "decay of each " + ("channel" if rule.decays_channels else "head"),
            (qkv, x),
            pool,
            lambda own, gates, states: run_gated_delta(ctx, own, gates, rule, batch, states, first, at),
        )
    if rule.key_dim > MOST_ROWS:
        refuse("gated_delta", "key_dim", rule.key_dim, f"at most {MOST_ROWS} on a GPU")
    keys = rule.key_heads * rule.key_dim
    heads = Heads(rule.key_heads, rule.value_heads, rule.key_dim, rule.value_dim, (0, keys, 2 * keys))
    constants = {
        "DELTA": 1, "NORMED": 1, "BETAS": 1, "TILED": int(rule.is_tiled), "DECAYS": int(rule.decays_channels),
    }  # fmt: skip
    arrays = rule.rates, rule.bias, None
    return launch_recurrence(ctx, RECUR, qkv, x, heads, arrays, batch, pool, (first, at), constants, EPS)
