"""The reference of `run_layers`, for any device: it calls the operators one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlxr.kernels.activate import activate
from mlxr.kernels.arrays import cut_rows
from mlxr.kernels.attend import attend
from mlxr.kernels.collectives import all_reduce
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import (
    add,
    balance_streams,
    blend_streams,
    cut_gates,
    gate_heads,
    hadamard,
    level_streams,
    match_streams,
    mix_streams,
    scale,
    spread_streams,
)
from mlxr.kernels.embed import embed, embed_ngrams
from mlxr.kernels.latent import project_parts, rope_and_write_latent
from mlxr.kernels.layers import operators as op
from mlxr.kernels.layers.operators import Layer, Layers, NormWeight, Operator, Register, Routes, StepInput
from mlxr.kernels.linear import LinearWeight, linear
from mlxr.kernels.lora import add_lora
from mlxr.kernels.moe import Experts, mix, route
from mlxr.kernels.norms import gated_norm, layer_norm, rms_norm
from mlxr.kernels.recurrent import DeltaRule, gated_delta, mamba2, scan, short_conv
from mlxr.kernels.rope_and_write_kv import rope_and_write_kv
from mlxr.kernels.tensor import FloatArray, IntArray, PoolArray

Registers = dict[Register | Routes, Any]  # arrays, or None
Programs = tuple[tuple[Operator, ...], ...]


def prepare(_ctx: Context, layers: tuple[Layer, ...]) -> Programs:
    """Return the operators of each layer."""
    return tuple(layer.program for layer in layers)


def run_layers(
    ctx: Context, stream: FloatArray, layers: Layers, step: StepInput
) -> tuple[FloatArray, FloatArray | None]:
    """Run layer after layer, operator after operator."""
    return run_programs(ctx, stream, layers.payload, step)


def run_programs(
    ctx: Context, stream: FloatArray, programs: Programs, step: StepInput
) -> tuple[FloatArray, FloatArray | None]:
    """Run the operators of each layer, each by the device's implementation."""
    registers: Registers = {"stream": stream, "delta": None}
    for index, operators in enumerate(programs):
        run_layer(ctx, registers, operators, step, index)
    return take(registers, "stream"), registers["delta"]


See = Callable[[LinearWeight, FloatArray], None]  # a weight, and the rows (T, in_features) that it multiplies


def run_seen(
    ctx: Context, stream: FloatArray, layers: Layers, step: StepInput, see: See
) -> tuple[FloatArray, FloatArray | None]:
    """Run layer after layer, operator after operator, and call `see` with the input of each product before it."""
    registers: Registers = {"stream": stream, "delta": None}
    for index, layer in enumerate(layers.layers):
        for operator in layer.program:
            match operator:
                case op.MatMul(weight, source):
                    see(weight, take(registers, source))
                case op.MixExperts(experts, _, source):
                    _see_experts(ctx, take(registers, source), registers["chosen"], experts, see)
            run_layer(ctx, registers, (operator,), step, index)
    return take(registers, "stream"), registers["delta"]


def _see_experts(ctx: Context, x: FloatArray, chosen: IntArray, experts: Experts, see: See) -> None:
    for expert, (up, down) in enumerate(zip(experts.up, experts.down, strict=True)):
        rows = x[(chosen == expert).any(axis=1)]
        if len(rows):
            see(up, rows)
            see(down, activate(ctx, linear(ctx, rows, up), experts.activation, gated=experts.is_gated))


def run_layer(ctx: Context, registers: Registers, operators: tuple[Operator, ...], step: StepInput, index: int) -> None:
    """Run one layer, whose pools are number `index`."""
    k_pool, v_pool, batch = step.k_pools[index], step.v_pools[index], step.batch
    for operator in operators:
        match operator:
            case op.Norm(weight, source, target, parts) if parts > 1:
                registers[target] = norm_parts(ctx, take(registers, source), weight, parts)
            case op.Norm(weight, source, target):
                added = registers["delta"] if source == "stream" else None
                normed, summed = norm(ctx, take(registers, source), weight, added)
                if source == "stream":
                    registers["stream"], registers["delta"] = summed, None
                registers[target] = normed
            case op.MatMul(weight, source, target):
                x = take(registers, source)
                registers[target] = linear(ctx, x, weight)
                if step.adapters:
                    registers[target] = add_lora(ctx, x, registers[target], weight, step.adapters)
            case op.Turn(rotation, source, target):
                registers[target] = hadamard(ctx, take(registers, source), rotation)
            case op.AllReduce(target):
                registers[target] = all_reduce(ctx, take(registers, target))
            case op.RopeAndWriteKV(heads):
                registers["x"] = rope_and_write_kv(
                    ctx,
                    take(registers, "x"),
                    heads.heads,
                    batch.of_group(heads.group),
                    step.ropes[heads.rope],
                    k_pool,
                    v_pool,
                    heads.norms,
                    projected=heads.projected,
                )
            case op.RopeAndWriteLatent(heads, weight):
                registers["x"] = rope_and_write_latent(
                    ctx,
                    take(registers, "x"),
                    take(registers, "kept"),
                    batch.of_group(heads.group),
                    step.ropes[heads.rope],
                    k_pool,
                    weight.weight,
                    weight.eps,
                )
            case op.ProjectParts(parts, passed, source, target):
                registers[target] = project_parts(ctx, take(registers, source), parts, passed)
            case op.Attend(heads):
                registers["x"] = attend(
                    ctx,
                    take(registers, "x"),
                    k_pool,
                    v_pool,
                    batch.of_group(heads.group),
                    scale=heads.scale,
                    sliding_window=heads.window,
                    softcap=heads.softcap,
                    sinks=heads.sinks,
                    symmetric=heads.symmetric,
                    whole_pictures=heads.whole_pictures,
                    value_dim=heads.value_dim,
                    biases=heads.biases,
                    chunked=heads.chunked,
                )
            case op.Activate(kind, _, is_gated, None, parameters):
                registers["x"] = activate(ctx, take(registers, "x"), kind, gated=is_gated, parameters=parameters)
            case op.Activate(kind, first=int(first)):
                inputs = take(registers, "inputs")
                registers["x"] = activate(ctx, take(registers, "x"), kind, gated=False, up=inputs, first=first)
            case op.AddResidual(factor):
                if registers["delta"] is not None:
                    registers["stream"] = add(ctx, take(registers, "stream"), registers["delta"], factor)
                registers["delta"] = None
            case op.Scale(factor, target, softcap):
                registers[target] = scale(ctx, take(registers, target), factor, softcap=softcap)
            case op.TakeShares(source, target):
                registers[target] = take(registers, source) * registers["shares"]
                registers["shares"] = np.ones_like(registers["shares"])
            case op.Add(target, factor, source):
                registers[target] = add(ctx, take(registers, target), take(registers, source), factor)
            case op.MixStreams(count, target):
                registers[target] = mix_streams(ctx, take(registers, "kept"), take(registers, "x"), count)
            case op.SpreadStreams(count, source, target, factor, gate_scale, has_gains, adds):
                registers[target] = spread_streams(
                    ctx,
                    take(registers, source),
                    count,
                    take(registers, "gains") if has_gains else None,
                    take(registers, target) if adds else None,
                    factor=factor,
                    gate_scale=gate_scale,
                )
                if source == "delta":
                    registers["delta"] = None
            case op.MatchStreams(count, factor):
                registers["gains"] = match_streams(
                    ctx, take(registers, "x"), take(registers, "kept"), count, scale=factor
                )
            case op.BalanceStreams(count, factors, base, turns, eps):
                registers["gains"] = balance_streams(
                    ctx, take(registers, "x"), factors, base, count, turns=turns, eps=eps
                )
            case op.BlendStreams(count, target, has_gains, adds, source):
                gains = take(registers, "gains") if has_gains else None
                added = take(registers, source) if adds else None
                registers[target] = blend_streams(ctx, take(registers, "streams"), count, gains, added)
                if adds and source == "delta":
                    registers["delta"] = None
            case op.LevelStreams(count):
                registers["streams"] = level_streams(ctx, take(registers, "x"), take(registers, "stream"), count)
            case op.CutGates(features, factor):
                registers["x"] = cut_gates(ctx, take(registers, "x"), features, factor)
            case op.GetNgrams(table, ngrams, at, target):
                registers[target] = embed_ngrams(ctx, table, ngrams, batch, _states(step, index), at=at)
            case op.GetRows(table, target):
                registers[target] = embed(ctx, batch.token_ids, table)
            case op.Route(router, experts):
                registers["chosen"], registers["shares"] = route(ctx, take(registers, "x"), router, experts)
            case op.MixExperts(experts, _, source, target):
                routes = registers["chosen"], registers["shares"]
                registers[target] = mix(ctx, take(registers, source), *routes, experts, step.adapters)
            case op.GateRows(target):
                registers[target] = gate_heads(ctx, take(registers, target), take(registers, "x"))
            case op.GateHeads(softplus):
                registers["x"] = gate_heads(ctx, take(registers, "x"), take(registers, "kept"), softplus=softplus)
            case op.Convolve(conv, first, at):
                kept = take(registers, "kept")
                registers["x"] = short_conv(ctx, kept, conv, batch, _states(step, index), first=first, at=at)
            case op.Recur(rule, first, at):
                x, kept, states = take(registers, "x"), take(registers, "kept"), _states(step, index)
                if isinstance(rule, DeltaRule):
                    registers["x"] = gated_delta(ctx, x, kept, rule, batch, states, first=first, at=at)
                else:
                    registers["x"] = mamba2(ctx, x, kept, rule, batch, states, first=first, at=at)
            case op.Scan(rule, at):
                arrays = take(registers, "x"), take(registers, "steps"), take(registers, "other")
                registers["x"] = scan(ctx, *arrays, rule, batch, _states(step, index), at=at)
            case op.GatedNorm(weight, first):
                registers["x"] = gated_norm(
                    ctx,
                    take(registers, "x"),
                    take(registers, "kept"),
                    weight.weight,
                    weight.eps,
                    width=weight.width,
                    gate_first=weight.gate_first,
                    first=first,
                )


def _states(step: StepInput, index: int) -> PoolArray:
    """Return the pool of states of layer `index`, which must have one."""
    states = step.states[index]
    assert states is not None, f"layer {index} has no pool of states"
    return states


def norm(
    ctx: Context, x: FloatArray, weight: NormWeight, residual: FloatArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """Return the norm of x + residual, and that sum."""
    if weight.kind == "layer":
        return layer_norm(ctx, x, weight.weight, weight.eps, residual, bias=weight.bias)
    return rms_norm(ctx, x, weight.weight, weight.eps, residual)


def norm_parts(ctx: Context, x: FloatArray, weight: NormWeight, parts: int) -> FloatArray:
    """Return the norm of each of `parts` equal parts of every row of x."""
    rows, columns = x.shape
    normed, _ = norm(ctx, cut_rows(x, rows * parts, columns // parts), weight)
    return cut_rows(normed, rows, columns)


def take(registers: Registers, name: Register) -> FloatArray:
    """Return the array in a register, which must have been written."""
    array: FloatArray | None = registers[name]
    assert array is not None, f"register {name} is read before it is written"
    return array
