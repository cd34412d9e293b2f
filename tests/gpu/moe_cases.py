"""Mixtures of experts of random weights, on a GPU and by the reference."""

from __future__ import annotations

from gpu_cases import REFERENCE, make_tensor, random_floats, relative_error

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.linear import prepare
from mlxr.kernels.moe import Experts, RoutingRule, make_experts, make_router, mix, route


def make(
    ctx: Context,
    type_name: str,
    count: int,
    shape: tuple[int, int],
    *,
    gated: bool = True,
    biased: bool = False,
    down_type: str = "",
    up_type: str = "",
    activation: str = "silu",
) -> Experts:
    """Experts (hidden, ffn) of random blocks, the same ones on every device."""
    hidden, ffn = shape
    up, down = [], []
    for expert in range(count):
        seeds = (2 * expert, 2 * expert + 1) if gated else (2 * expert,)
        tensors = [
            make_tensor(kind, ffn, hidden, seed)
            for kind, seed in zip((type_name, up_type or type_name), seeds, strict=False)
        ]
        biases = [random_floats(seed, ffn) for seed in seeds] if biased else None
        up.append(prepare(ctx, tensors, biases))
        bias = [random_floats(expert, hidden)] if biased else None
        down.append(prepare(ctx, [make_tensor(down_type or type_name, hidden, ffn, 77 + expert)], bias))
    return make_experts(ctx, up, down, activation)  # type: ignore[arg-type]


def compare(ctx: Context, tokens: int, used: int, count: int, *arguments: object, **named: object) -> float:
    """Relative error of a mixture of `count` experts."""
    expected = make(REFERENCE, arguments[0], count, arguments[1], **named)  # type: ignore[arg-type]
    experts = make(ctx, arguments[0], count, arguments[1], **named)  # type: ignore[arg-type]
    x, logits = random_floats(1, tokens, expected.up[0].in_features), random_floats(2, tokens, count)
    logits[:, 0] += 1  # one that most go to
    chosen, shares = route(REFERENCE, logits, make_router(count, RoutingRule(used)))
    wanted = mix(REFERENCE, x, chosen, shares, expected)
    array = ctx.gpu.mx.array
    return relative_error(settle(mix(ctx, array(x), array(chosen), array(shares), experts)), wanted)
