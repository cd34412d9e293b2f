"""Native `route` and `mix`: csrc/moe chooses experts, sorts tokens by them, and multiplies all as one stream.

The payload of experts is the native object that holds their weights.
"""

# ruff: noqa: ARG001 -- every implementation takes the context and the experts
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxr.kernels.activate import Activation
from mlxr.kernels.arrays import empty
from mlxr.kernels.context import Context
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.lora import AdapterRows, list_native
from mlxr.kernels.moe import Experts, ExpertsUse, Router
from mlxr.kernels.native import NativeExperts, NativeRouter
from mlxr.kernels.tensor import FloatArray, IntArray


def prepare_experts(
    ctx: Context, up: tuple[LinearWeight, ...], down: tuple[LinearWeight, ...], activation: Activation
) -> NativeExperts:
    """The native twin of the experts, which keeps their weights alive."""
    native = ctx.module.Experts(activation)
    for one, other in zip(up, down, strict=True):
        native.append(one.payload, other.payload)
    return native


def limit_experts(ctx: Context, payload: NativeExperts, slots: int) -> None:
    """Keep the weights of so many of them in memory at a time."""
    payload.limit(ctx.native, slots)


def read_use(ctx: Context, payload: NativeExperts) -> ExpertsUse:
    """What was sent to them, as native code counts it."""
    return ExpertsUse(*payload.list_use())


def make_native(ctx: Context, router: Router) -> NativeRouter:
    """The native twin of a router."""
    rule = router.rule
    return ctx.module.Router(
        router.experts,
        rule.used,
        rule.scoring,
        rule.renormalises,
        rule.floor,
        rule.scale,
        rule.groups,
        rule.groups_used,
        rule.gap,
        router.choice_bias,
        router.expert_scales,
    )


def route(
    ctx: Context, logits: FloatArray, router: Router, experts: Experts | None = None
) -> tuple[IntArray, FloatArray]:
    """Numbers and shares of each token's experts; the same bits whatever the other tokens and the instruction set."""
    shape = len(logits), router.rule.used
    chosen, shares = np.empty(shape, np.int32), np.empty(shape, np.float32)
    ctx.module.route(ctx.native, logits, make_native(ctx, router), chosen, shares)
    return chosen, shares


def mix(
    ctx: Context,
    x: FloatArray,
    chosen: IntArray,
    shares: FloatArray,
    experts: Experts,
    adapters: Sequence[AdapterRows] = (),
) -> FloatArray:
    """The experts' sum; the bits of a token are those that `linear`, `add_lora` and `activate` give for it alone."""
    out = empty(ctx, *x.shape)
    ctx.module.mix(ctx.native, x, chosen, shares, experts.payload, list_native(adapters), out)
    return out
