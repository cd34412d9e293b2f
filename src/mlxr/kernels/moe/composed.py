"""`route` and `mix` as operations of MLX, where our kernels cannot run or do not take a weight."""

from __future__ import annotations

from typing import Any

from mlxr.kernels.activate import activate
from mlxr.kernels.context import Context
from mlxr.kernels.ledger import EXPERT_ROWS, MLX
from mlxr.kernels.moe import Experts, Router
from mlxr.kernels.moe.stacked import Stack


def route_composed(ctx: Context, logits: Any, router: Router, bias: Any, scales: Any) -> tuple[Any, Any]:
    """As `route` of the reference."""
    mx, rule = ctx.gpu.mx, router.rule
    logits = logits.astype(mx.float32)
    scores = logits
    if rule.scoring == "softmax":
        scores = mx.softmax(logits, axis=1, precise=True)
    elif rule.scoring == "sigmoid":
        scores = mx.sigmoid(logits)
    worth = scores if bias is None else scores + bias
    if rule.groups_used < rule.groups:
        grouped = worth.reshape(worth.shape[0], rule.groups, -1)
        best = mx.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
        kept = _find_ranks(mx, best) < rule.groups_used
        worth = mx.where(kept[:, :, None], grouped, float("-inf")).reshape(worth.shape)
    chosen = _sort_falling(mx, worth)[:, : rule.used]
    shares = mx.take_along_axis(scores, chosen, axis=1)
    if rule.scoring == "softmax_chosen":
        shares = mx.softmax(shares, axis=1, precise=True)
    elif rule.scoring == "sparsemixer":
        shares = _share_near(mx, logits, chosen, rule.gap)
    if rule.renormalises:
        shares = shares / (shares.sum(axis=1, keepdims=True) + rule.floor)
    shares = shares * rule.scale
    if scales is not None:
        shares = shares * mx.take(scales, chosen)
    return chosen.astype(mx.int32), shares


def mix_composed(ctx: Context, x: Any, chosen: Any, shares: Any, experts: Experts, payload: Any) -> Any:
    """Every pair of a token and a rank by itself, with the weights that MLX gathers."""
    mx, (tokens, used) = ctx.gpu.mx, chosen.shape
    rows = mx.repeat(x.astype(mx.float32), used, axis=0)
    numbers = chosen.reshape(-1)
    inner = activate(ctx, _multiply(ctx, rows, payload.up, numbers), experts.activation, gated=experts.is_gated)
    made = _multiply(ctx, inner.astype(mx.float32), payload.down, numbers).reshape(tokens, used, -1)
    return (made * shares[:, :, None]).sum(axis=1)


def _multiply(ctx: Context, x: Any, stack: Stack, numbers: Any) -> Any:
    mx = ctx.gpu.mx

    def gather() -> Any:
        made = [
            mx.gather_mm(x[:, None, :], part.array.astype(mx.float32).swapaxes(1, 2), rhs_indices=numbers)[:, 0]
            for part in stack.parts
        ]
        joined = made[0] if len(made) == 1 else mx.concatenate(made, axis=1)
        return joined if stack.biases is None else joined + mx.take(stack.biases, numbers, axis=0)

    variant = "+".join(dict.fromkeys(part.type_name for part in stack.parts))
    ctx.ledger.count(EXPERT_ROWS, MLX, variant, numbers.shape[0])
    return ctx.gpu.watch.run_mlx("moe", variant, gather, x)


def _share_near(mx: Any, logits: Any, chosen: Any, gap: float) -> Any:
    shares, places = [], mx.arange(logits.shape[1])[None]
    for rank in range(chosen.shape[1]):
        number = chosen[:, rank : rank + 1]
        own = mx.take_along_axis(logits, number, axis=1)
        is_far = (own - logits) / mx.maximum(mx.abs(logits), own) > gap
        powers = mx.where(is_far & (logits != own), 0.0, mx.exp(logits - own))
        shares.append(1 / powers.sum(axis=1, keepdims=True))
        logits = mx.where(places == number, float("-inf"), logits)
    return mx.concatenate(shares, axis=1)


def _sort_falling(mx: Any, values: Any) -> Any:
    """The places of the values, the largest first; of equal ones the first one first."""
    return mx.argsort(_find_ranks(mx, values), axis=1)


def _find_ranks(mx: Any, values: Any) -> Any:
    """How many values of a row come before each: larger ones, and equal ones to its left."""
    places = mx.arange(values.shape[1])
    above, equal = values[:, None, :] > values[:, :, None], values[:, None, :] == values[:, :, None]
    return (above | (equal & (places[None, :] < places[:, None])[None])).astype(mx.int32).sum(axis=2)
