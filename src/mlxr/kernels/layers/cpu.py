"""Native `run_layers`: csrc/layers/blocks.cpp runs all operators of all layers at once. Its payload is native."""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.kernels.arrays import empty
from mlxr.kernels.context import Context
from mlxr.kernels.layers import operators as op
from mlxr.kernels.layers.operators import Heads, Layer, Layers, Operator, StepInput
from mlxr.kernels.lora import list_native
from mlxr.kernels.moe import make_native_router
from mlxr.kernels.native import NativeLayers, NativeUpdates, Rotation
from mlxr.kernels.recurrent import EPS, DeltaRule, StateSpace
from mlxr.kernels.tensor import FloatArray, IntArray, PoolArray

_NONE = 0  # no window, no softcap, or a separate pool of values
Pools = Sequence[PoolArray | None]
StepArrays = tuple[
    IntArray,  # token ids
    Pools,  # keys
    Pools,  # values
    IntArray,  # rows of the rotation tables
    Sequence[Rotation],
    Sequence[IntArray],  # slots of each group
    IntArray,  # where the queries of each sequence start
    IntArray,  # lengths of contexts
    Sequence[IntArray],  # page tables of each group
    Pools,  # states
    IntArray,  # slots of states that are read
    IntArray,  # and written
    NativeUpdates,
    IntArray,  # the end of what each token sees, or empty
]


def prepare(ctx: Context, layers: tuple[Layer, ...]) -> NativeLayers:
    """Return the native form of `layers`, which keeps their weights alive."""
    native = ctx.module.Layers()
    for layer in layers:
        native.append_layer(layer.columns)
        for operator in layer.program:
            if isinstance(operator, op.RopeAndWriteKV | op.RopeAndWriteLatent):
                native.append_heads(*_describe(operator.heads))
            _append(ctx, native, operator)
    return native


def _describe(
    heads: Heads,
) -> tuple[int, int, int, float, int, bool, float, FloatArray | None, int, int, int, bool, FloatArray | None, bool]:
    return (
        heads.heads,
        heads.kv_heads,
        heads.head_dim,
        heads.scale,
        heads.window or _NONE,
        heads.symmetric,
        heads.softcap or _NONE,
        heads.sinks,
        heads.rope,
        heads.group,
        heads.value_dim or _NONE,
        heads.whole_pictures,
        None if heads.biases is None else heads.biases.reshape(-1),
        heads.chunked,
    )


def _append(ctx: Context, native: NativeLayers, operator: Operator) -> None:
    match operator:
        case op.Norm(weight, source, target, parts):
            native.append_norm(weight.weight, weight.bias, weight.eps, weight.kind == "layer", source, target, parts)
        case op.MatMul(weight, source, target):
            native.append_product(weight.payload, source, target)
        case op.Turn(rotation, source, target):
            native.append_hadamard(rotation.signs, rotation.order, rotation.block, source, target)
        case op.RopeAndWriteKV(heads):
            norms = heads.norms
            q_norm, k_norm, eps, values, kind = None, None, 0.0, False, "each"
            if norms is not None:
                q_norm, k_norm, eps, values, kind = norms.q, norms.k, norms.eps, norms.values, norms.kind
            native.append_rope_and_write_kv(q_norm, k_norm, eps, values, heads.projected, kind)
        case op.RopeAndWriteLatent(_, weight):
            native.append_rope_and_write_latent(weight.weight, weight.eps)
        case op.ProjectParts(parts, passed, source, target):
            native.append_project_parts(parts.payload, passed, source, target)
        case op.Attend():
            native.append_attend()
        case op.Activate(kind, features, first=first, parameters=parameters):  # gated when `x` has more columns
            native.append_activate(kind, features, first, parameters)
        case op.AddResidual(factor):
            native.append_sum(factor)
        case op.Scale(factor, target, softcap):
            native.append_scale(factor, softcap or _NONE, target)
        case op.TakeShares(source, target):
            native.append_take_shares(source, target)
        case op.Add(target, factor, source):
            native.append_join(factor, target, source)
        case op.MixStreams(count, target):
            native.append_mix_streams(count, target)
        case op.SpreadStreams(count, source, target, factor, gate_scale, has_gains, adds):
            native.append_spread_streams(count, factor, gate_scale, has_gains, adds, source, target)
        case op.MatchStreams(count, factor):
            native.append_match_streams(count, factor)
        case op.BalanceStreams(count, scale, base, turns, eps):
            native.append_balance_streams(count, scale, base, turns, eps)
        case op.BlendStreams(count, target, has_gains, adds, source):
            native.append_blend_streams(count, has_gains, adds, target, source)
        case op.LevelStreams(count):
            native.append_level_streams(count)
        case op.CutGates(features, factor):
            native.append_cut_gates(features, factor)
        case op.GetNgrams(table, ngrams, at, target):
            hashes = ngrams.multipliers, ngrams.sizes, ngrams.offsets
            native.append_ngrams(table.type_name, table.data, table.shape[1], ngrams.end, *hashes, at, target)
        case op.GetRows(table, target):
            native.append_rows(table.type_name, table.data, table.shape[1], target)
        case op.GateHeads(softplus):
            native.append_gate_heads(softplus)
        case op.Convolve(conv, first, at):
            native.append_short_conv(conv.weight, conv.bias, conv.kind, first, at)
        case op.Recur(rule, first, at):
            _append_recurrence(native, rule, first, at)
        case op.Scan(rule, at):
            native.append_scan(rule.rates, rule.skip, at)
        case op.GatedNorm(norm, first):
            native.append_gated_norm(norm.weight, norm.width, norm.eps, norm.gate_first, first)
        case op.Route(router):
            native.append_route(make_native_router(ctx, router))
        case op.MixExperts(experts, _, source, target):
            native.append_mix(experts.payload, source, target)
        case op.GateRows(target):
            native.append_gate_rows(target)


def _append_recurrence(native: NativeLayers, rule: DeltaRule | StateSpace, first: int, at: int) -> None:
    if isinstance(rule, DeltaRule):
        heads = rule.key_heads, rule.value_heads, rule.key_dim, rule.value_dim, rule.is_tiled
        native.append_gated_delta(rule.rates, rule.bias, *heads, EPS, rule.key_dim**-0.5, rule.bound, first, at)
    else:
        sizes = rule.groups, rule.state_dim, rule.head_dim
        native.append_mamba2(rule.rates, rule.bias, rule.skip, *sizes, first, at)


def run_layers(
    ctx: Context, stream: FloatArray, layers: Layers, step: StepInput
) -> tuple[FloatArray, FloatArray | None]:
    """Run all layers in one call, in place."""
    if not layers.layers:
        return stream, None
    delta = empty(ctx, *stream.shape)
    ctx.module.run_layers(ctx.native, layers.payload, stream, delta, *list_arrays(step))
    last = layers.layers[-1].operators[-1]
    is_added = isinstance(last, op.AddResidual)
    is_added = is_added or (isinstance(last, op.Norm | op.MixStreams | op.BlendStreams) and last.target == "stream")
    return stream, None if is_added else delta


def list_arrays(step: StepInput) -> StepArrays:
    """Return a step's arrays in the order in which native calls take them."""
    batch = step.batch
    return (
        batch.token_ids,
        step.k_pools,
        step.v_pools,
        batch.rope_rows,
        [(table.cos, table.sin, table.interleaved, table.query_factors) for table in step.ropes],
        [part.slots for part in batch.groups],
        batch.query_starts,
        batch.context_lengths,
        [part.page_table for part in batch.groups],
        step.states or (None,) * len(step.k_pools),
        batch.state_reads,
        batch.state_writes,
        list_native(step.adapters, batch.token_ids),
        batch.ends,
    )
