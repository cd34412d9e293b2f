"""Transformer layers as one operator: self-attention and feed-forward blocks around the residual stream.

`operators` says which operators a layer is. The reference calls them one by one. An implementation of its own computes
the same bits and saves what lies between them: on the CPU the way to Python and back some 200 times a token, after each
of which nothing of the interpreter is left in the caches, and the waiting of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlxr.kernels.activate import ACTIVATIONS, ALWAYS_GATED, Activation
from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import Choice
from mlxr.kernels.context import Context
from mlxr.kernels.gated_delta import DeltaRule
from mlxr.kernels.layers.block import (
    AttentionBlock,
    BesideBlock,
    BothBlock,
    FeedForwardBlock,
    InputBlock,
    InputsBlock,
    Layer,
    Layers,
    MixerBlock,
    MixerNorm,
    MixtureBlock,
    NormWeight,
    RecurrentBlock,
)
from mlxr.kernels.layers.operators import list_operators
from mlxr.kernels.layers.step import StepInput
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.mamba2 import StateSpace
from mlxr.kernels.moe import Experts, Router
from mlxr.kernels.short_conv import Convolution
from mlxr.kernels.split_heads import HeadNorms, Projected
from mlxr.kernels.tensor import FloatArray, TensorSource

__all__ = [
    "AttentionBlock",
    "BesideBlock",
    "BothBlock",
    "FeedForwardBlock",
    "InputBlock",
    "InputsBlock",
    "Layer",
    "Layers",
    "MixerBlock",
    "MixerNorm",
    "MixtureBlock",
    "NormWeight",
    "RecurrentBlock",
    "StepInput",
    "list_operators",
    "make_attention",
    "make_beside",
    "make_both",
    "make_feed_forward",
    "make_input",
    "make_inputs",
    "make_mixture",
    "make_recurrent",
    "prepare_layers",
    "run_layers",
]

CHOICE = Choice(__name__)


def make_attention(
    norm: NormWeight | None,
    qkv: LinearWeight,
    output: LinearWeight,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float | None = None,
    head_norms: HeadNorms | None = None,
    post_norm: NormWeight | None = None,
    projected: Projected = "qkv",
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: FloatArray | None = None,
    rope: int = 0,
    group: int = 0,
    gate: LinearWeight | None = None,
) -> AttentionBlock:
    """Weights that were prepared for `linear`, as one block; the scale is by default 1 / sqrt(head_dim).

    Raises ValueError for shapes that do not fit.
    """
    hidden, columns = qkv.in_features, (heads + (len(projected) - 1) * kv_heads) * head_dim
    check_size("self_attention", "columns of qkv", qkv.out_features, columns)
    check_size("self_attention", "in_features of output", output.in_features, heads * head_dim)
    check_size("self_attention", "columns of output", output.out_features, hidden)
    _check_norms("self_attention", hidden, norm, post_norm)
    if head_norms is not None:
        head_norms.check(heads, kv_heads, head_dim)
    if kv_heads < 1 or heads % kv_heads:
        refuse("self_attention", "heads", heads, f"a multiple of the {kv_heads} key heads")
    if sliding_window is not None and sliding_window < 1:
        refuse("self_attention", "sliding_window", sliding_window, "at least 1")
    if gate is not None:
        check_size("self_attention", "in_features of gate", gate.in_features, hidden)
        if gate.out_features not in (heads, heads * head_dim):
            refuse("self_attention", "columns of gate", gate.out_features, f"{heads} or {heads * head_dim}")
    if sinks is not None:
        check_floats("self_attention", "sinks", sinks, 1)
        check_size("self_attention", "length of sinks", sinks.shape[0], heads)
    return AttentionBlock(
        norm,
        qkv,
        output,
        heads,
        kv_heads,
        head_dim,
        scale=float(head_dim**-0.5) if scale is None else scale,
        head_norms=head_norms,
        post_norm=post_norm,
        projected=projected,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        rope=rope,
        group=group,
        gate=gate,
    )


def make_recurrent(
    norm: NormWeight | None,
    input: LinearWeight,  # noqa: A002 -- as in the block
    output: LinearWeight,
    conv: Convolution,
    rule: DeltaRule | StateSpace | None = None,
    gated_norm: MixerNorm | None = None,
    post_norm: NormWeight | None = None,
) -> RecurrentBlock:
    """Weights that were prepared for `linear`, as one block. Raises ValueError for shapes that do not fit."""
    conv.check("recurrent")
    columns, made = conv.inputs, conv.channels
    if rule is not None:
        rule.check("recurrent")
        check_size("recurrent", "channels of the convolution", conv.channels, rule.columns)
        columns, made = columns + rule.gates, rule.results
    if gated_norm is not None:
        if gated_norm.weight is not None:
            check_floats("recurrent", "weight of the gated norm", gated_norm.weight, 1)
        check_size("recurrent", "columns of the gated norm", gated_norm.columns, made)
        columns += gated_norm.columns
    check_size("recurrent", "columns of input", input.out_features, columns)
    check_size("recurrent", "in_features of output", output.in_features, made)
    check_size("recurrent", "columns of output", output.out_features, input.in_features)
    _check_norms("recurrent", input.in_features, norm, post_norm)
    return RecurrentBlock(norm, input, output, conv, rule, gated_norm, post_norm)


def make_beside(attention: AttentionBlock, recurrent: RecurrentBlock) -> BesideBlock:
    """Attention and a recurrent mixer beside it. Raises ValueError for other sizes and for norms of their own."""
    check_size("beside", "columns of the recurrent mixer", recurrent.output.out_features, attention.qkv.in_features)
    if recurrent.norm is not None or recurrent.post_norm is not None or attention.post_norm is not None:
        refuse("beside", "norms", "of their own", "one before both")
    return BesideBlock(attention, recurrent)


def make_feed_forward(
    norm: NormWeight | None,
    up: LinearWeight,
    down: LinearWeight,
    activation: Activation,
    post_norm: NormWeight | None = None,
) -> FeedForwardBlock:
    """Weights that were prepared for `linear`, as one block, with a gate if `up` makes twice what `down` reads.

    Raises ValueError for shapes that do not fit.
    """
    if up.out_features != down.in_features:
        check_size("feed_forward", "columns of gate and up", up.out_features, 2 * down.in_features)
    check_size("feed_forward", "columns of down", down.out_features, up.in_features)
    _check_norms("feed_forward", up.in_features, norm, post_norm)
    if activation not in ACTIVATIONS:
        refuse("feed_forward", "activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}")
    block = FeedForwardBlock(norm, up, down, activation, post_norm)
    if activation == ALWAYS_GATED and not block.is_gated:
        refuse("feed_forward", "activation", repr(activation), "a kind without a gate")
    return block


def make_both(
    dense: FeedForwardBlock,
    mixture: MixtureBlock,
    router_norm: NormWeight,
    mixture_post_norm: NormWeight,
    post_norm: NormWeight,
) -> BothBlock:
    """A block and a mixture beside it. Raises ValueError for shapes that do not fit and for blocks without norms."""
    hidden = dense.up.in_features
    check_size("both", "in_features of the router", mixture.router_weight.in_features, hidden)
    _check_norms("both", hidden, router_norm, mixture_post_norm, post_norm)
    if dense.norm is None or dense.post_norm is None or mixture.norm is None:
        refuse("both", "norms", None, "one before and after each block")
    if mixture.shared is not None:
        refuse("both", "shared", "a block", "none, as all tokens go through the block beside the experts")
    return BothBlock(dense, replace(mixture, router_norm=router_norm, post_norm=mixture_post_norm), post_norm)


def make_mixture(
    norm: NormWeight | None,
    router_weight: LinearWeight,
    router: Router,
    experts: Experts,
    shared: FeedForwardBlock | None = None,
    shared_gate: LinearWeight | None = None,
) -> MixtureBlock:
    """A mixture out of its parts. Raises ValueError for shapes that do not fit."""
    hidden = experts.up[0].in_features
    check_size("mixture", "number of experts", len(experts.up), router.experts)
    check_size("mixture", "columns of the router", router_weight.out_features, router.experts)
    check_size("mixture", "in_features of the router", router_weight.in_features, hidden)
    _check_norms("mixture", hidden, norm)
    if shared is not None:
        check_size("mixture", "in_features of the shared expert", shared.up.in_features, hidden)
        if shared.norm is not None or shared.post_norm is not None:
            refuse("mixture", "shared", "with norms", "a block without norms of its own")
    if shared_gate is not None:
        check_size("mixture", "in_features of the shared gate", shared_gate.in_features, hidden)
        check_size("mixture", "columns of the shared gate", shared_gate.out_features, 1)
    return MixtureBlock(norm, router_weight, router, experts, shared, shared_gate)


def make_inputs(
    table: TensorSource, projection: LinearWeight, norm: NormWeight, *, table_scale: float, scale: float
) -> InputsBlock:
    """What makes the inputs of all layers, for each as many as the norm is long.

    Raises ValueError for shapes that do not fit.
    """
    columns, features = projection.out_features, norm.weight.shape[0]
    check_size("layer_inputs", f"columns of table {table.name}", table.shape[1], columns)
    if not features or columns % features:
        refuse("layer_inputs", "length of norm", features, f"a divisor of the {columns} columns")
    _check_norms("layer_inputs", features, norm)
    return InputsBlock(table, projection, norm, columns // features, table_scale, scale)


def make_input(
    gate: LinearWeight,
    projection: LinearWeight,
    activation: Activation,
    first: int,
    post_norm: NormWeight | None = None,
) -> InputBlock:
    """How a layer takes its input, the columns of all inputs from `first` on. Raises ValueError as above."""
    check_size("layer_input", "columns of gate", gate.out_features, projection.in_features)
    check_size("layer_input", "columns of projection", projection.out_features, gate.in_features)
    _check_norms("layer_input", projection.out_features, post_norm)
    if activation not in ACTIVATIONS:
        refuse("layer_input", "activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}")
    return InputBlock(gate, projection, activation, first, post_norm)


def _check_norms(block: str, columns: int, *norms: NormWeight | None) -> None:
    for norm in norms:
        for vector in () if norm is None else (norm.weight, norm.bias):
            if vector is not None:
                check_floats(block, "norm", vector, 1)
                check_size(block, "length of norm", vector.shape[0], columns)


def prepare_layers(ctx: Context, layers: Sequence[Layer]) -> Layers:
    """Layers whose weights were prepared for `linear`, to be run as one."""
    _, implementation = CHOICE.pick(ctx.device)
    return Layers(tuple(layers), implementation.prepare(ctx, tuple(layers)))


def run_layers(
    ctx: Context, stream: FloatArray, layers: Layers, step: StepInput
) -> tuple[FloatArray, FloatArray | None]:
    """All layers over the residual stream (T, hidden); keys and values of the batch go into the step's pools.

    Returns the stream and what the last layer adds to it, which is left to the norm that follows (None when there is no
    layer, or when it scales its output). `stream` is taken over: its memory may be written. Raises ValueError for
    shapes that do not fit, and before anything is computed for positions that the tables do not cover and for slots and
    pages outside the pools.
    """
    check_size("run_layers", "number of k_pools", len(step.k_pools), len(layers.layers))
    check_size("run_layers", "number of v_pools", len(step.v_pools), len(layers.layers))
    _, implementation = CHOICE.pick(ctx.device)
    result: tuple[FloatArray, FloatArray | None] = implementation.run_layers(ctx, stream, layers, step)
    return result
