"""`add`, `scale` and `gate_heads` on a GPU, which need a launch only if no other launch can do them; then the others.

A sum is made by the product that makes one side of it, or by the norm that follows. Sums of experts' results are
deferred to their reader, together with the shared expert, its gate and a factor. Rows whose gate is a product with one
output are deferred, with that product, to the sum that takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import Hadamard
from mlxr.kernels.gpu.deferred import (
    Deferred,
    Gated,
    Summands,
    Value,
    count_shares,
    find_parts,
    list_constants,
    list_inputs,
    settle,
)
from mlxr.kernels.gpu.device import Gpu
from mlxr.kernels.gpu.kernel import LANES, Kernel
from mlxr.kernels.gpu.launcher import MIN_ARRAY
from mlxr.kernels.gpu.mlx import Mlx
from mlxr.kernels.linear.gpu import Product, find_dot, join_product, list_summands
from mlxr.kernels.tensor import DeviceArray

MAX_THREADS = 512  # most threads of a threadgroup of `add`
THREADS = 256
MAX_SUMMED = 8192  # most columns of a deferred sum; wider arrays are logits, to which nothing is added
ADD = Kernel(
    "add",
    Path(__file__).parent,
    "add.body",
    ("x", "array", "other", "input", "gate", "numbers", "sizes"),
    ("out",),
    ("summands.h", "../gpu/threads.h"),
    operator="add",
)
SCALE = Kernel("scale", Path(__file__).parent, "scale.body", ("x", "numbers", "sizes"), ("out",), operator="scale")
GATE = Kernel(
    "gate_heads", Path(__file__).parent, "gate.body", ("x", "gates", "sizes"), ("out",), operator="gate_heads"
)
HADAMARD = Kernel(
    "hadamard",
    Path(__file__).parent,
    "hadamard.body",
    ("x", "signs", "order", "numbers", "sizes"),
    ("out",),
    operator="scale",
)
ROWS = Kernel("sum_rows", Path(__file__).parent, "rows.body", ("x", "starts", "sizes"), ("out",), operator="sum_rows")
KERNELS = (ADD, SCALE, GATE, HADAMARD, ROWS)


def add(ctx: Context, x: Value, other: Value, factor: float) -> Value:
    """Return (x + other) * factor, deferred if x is a deferred sum."""
    gpu = ctx.gpu
    if gpu.launcher is None:
        variant = "f32" if factor == 1.0 else "f32+scale"
        return gpu.watch.run_mlx(
            "add", variant, lambda: _compose_sum(gpu.mx, settle(x), settle(other), factor), settle(x)
        )
    waiting = find_parts(x, Summands)
    if waiting is not None and waiting.is_plain:
        gated = find_parts(other, Gated)
        array, dot = (other, None) if gated is None else (gated.y, gated.dot)
        return defer_sum(ctx, replace(waiting, other=list_summands(ctx, array), dot=dot, factor=factor))
    joined, summands = join_product(ctx, settle(x), other)
    made: DeviceArray = joined
    return made if summands is None and factor == 1.0 else _launch_add(ctx, made, summands, factor)


def _compose_sum(mx: Mlx, x: DeviceArray, other: DeviceArray, factor: float) -> DeviceArray:
    return (x.astype(mx.float32) + other) * factor


def defer_sum(ctx: Context, summands: Summands) -> Deferred:
    """Return the sum, (rows, columns) in f32, deferred until it is needed."""
    rows, columns = summands.array.shape[-2:]
    return Deferred(
        (rows, columns), ctx.gpu.mx.float32, summands, lambda: _launch_add(ctx, None, summands), summands.arrays
    )


def _launch_add(ctx: Context, x: DeviceArray | None, summands: Summands | None, total: float = 1.0) -> DeviceArray:
    """Return (x + summands) * total; x or the summands may be None."""
    gpu, numbers = ctx.gpu, ctx.gpu.launcher.numbers
    rows, columns = summands.array.shape[-2:] if summands is not None else () if x is None else x.shape
    width, shares = 8 if columns % 8 == 0 else 1, 0 if summands is None else count_shares(summands.array)
    threads = min(MAX_THREADS, -(-columns // (LANES * width)) * LANES)
    parts = 1 if summands is not None and summands.dot is not None else -(-columns // (threads * width))
    none = numbers(0.0)
    (out,) = gpu.launcher.launch(
        ADD,
        [
            none if x is None else x,
            *list_inputs(summands, none),
            numbers(1.0 if summands is None else summands.factor, float(total)),
            numbers(columns, rows, parts * threads * width),
        ],
        groups=(rows, parts, 1),
        threads=threads,
        outputs=[((rows, columns), gpu.mx.float32)],
        constants={"HAS_X": int(x is not None), "SUMMANDS": shares, **list_constants(summands), "N": width},
        types={"Y": gpu.mx.float32},
    )
    return out


def scale(ctx: Context, x: Value, factor: float, softcap: float | None) -> Value:
    """Return x * factor, perhaps capped."""
    summands = _find_summands(ctx, x) if softcap is None else None
    if summands is not None:
        return defer_sum(ctx, replace(summands, factor=summands.factor * factor))
    gpu, array = ctx.gpu, settle(x)
    (rows, columns), kind = array.shape, array.dtype
    if gpu.launcher is None:
        variant = "f32" if softcap is None else "f32+softcap"
        return gpu.watch.run_mlx("scale", variant, lambda: _compose_scale(gpu.mx, array, factor, softcap), array)
    width = 8 if columns % 8 == 0 else 1
    (out,) = gpu.launcher.launch(
        SCALE,
        [
            array,
            gpu.launcher.numbers(float(factor)) if softcap is None else gpu.launcher.numbers(factor / softcap, softcap),
            gpu.launcher.numbers(columns),
        ],
        groups=(-(-columns // (THREADS * width)), rows, 1),
        threads=THREADS,
        outputs=[((rows, columns), kind)],
        constants={"CAPPED": int(softcap is not None), "N": width},
        types={"Y": kind},
    )
    return out


def _find_summands(ctx: Context, x: Value) -> Summands | None:
    """Return the summands of x if it is deferred: experts' results, or a product no wider than the stream."""
    if find_parts(x, Product) is not None and x.shape[1] <= MAX_SUMMED:
        return Summands(list_summands(ctx, x))
    return find_parts(x, Summands)


def _compose_scale(mx: Mlx, x: DeviceArray, factor: float, softcap: float | None) -> DeviceArray:
    scaled = x * factor if softcap is None else softcap * mx.tanh(x * (factor / softcap))
    return scaled.astype(x.dtype)


def gate_heads(ctx: Context, x: Value, gates: Value, softplus: bool) -> Value:
    """Return x times the sigmoid of its gate."""
    assert not softplus, "prepare_layers refuses it"
    dot = find_dot(gates)
    if dot is not None and dot.x.shape == x.shape:
        return Deferred(x.shape, ctx.gpu.operands, Gated(x, dot), lambda: _gate(ctx, settle(x), settle(gates)))
    return _gate(ctx, settle(x), settle(gates))


def _gate(ctx: Context, x: DeviceArray, gates: DeviceArray) -> DeviceArray:
    gpu = ctx.gpu
    (rows, columns), count = x.shape, gates.shape[1]
    if gpu.launcher is None:
        variant = "elements" if count == columns else "heads"
        return gpu.watch.run_mlx("gate_heads", variant, lambda: _compose_gate(gpu, x, gates), x, gates)
    (out,) = gpu.launcher.launch(
        GATE,
        [x, gates, gpu.launcher.numbers(columns, count)],
        groups=(-(-columns // THREADS), rows, 1),
        threads=THREADS,
        outputs=[((rows, columns), gpu.operands)],
        types={"Y": gpu.operands},
    )
    return out


def _compose_gate(gpu: Gpu, x: DeviceArray, gates: DeviceArray) -> DeviceArray:
    (rows, columns), count = x.shape, gates.shape[1]
    heads = x.reshape(rows, count, columns // count) * gpu.mx.sigmoid(gates)[:, :, None]
    return heads.reshape(rows, columns).astype(gpu.operands)


def hadamard(ctx: Context, x: Value, rotation: Hadamard) -> DeviceArray:
    """Return the rotated rows of x; a threadgroup computes each block."""
    gpu, array, block = ctx.gpu, settle(x), rotation.block
    rows, columns = array.shape
    signs = None if rotation.signs is None else gpu.hold(rotation.signs)
    order = None if rotation.order is None else gpu.hold(rotation.order)
    if gpu.launcher is None:
        return gpu.watch.run_mlx(
            "scale", rotation.variant, lambda: _compose_hadamard(gpu, array, rotation, signs, order), array
        )
    numbers = gpu.launcher.numbers
    (out,) = gpu.launcher.launch(
        HADAMARD,
        [
            array,
            numbers(1.0) if signs is None else signs,
            numbers(0) if order is None else order,
            numbers(rotation.scale),
            numbers(columns),
        ],
        groups=(columns // block, rows, 1),
        threads=max(LANES, min(THREADS, block // 2)),
        outputs=[((rows, columns), gpu.operands)],
        constants={
            "BLOCK": block,
            "SIGNS": int(signs is not None),
            "ORDER": int(order is not None),
            "INVERSE": int(rotation.inverse),
        },
        types={"Y": gpu.operands},
    )
    return out


def _compose_hadamard(
    gpu: Gpu, x: DeviceArray, rotation: Hadamard, signs: DeviceArray | None, order: DeviceArray | None
) -> DeviceArray:
    mx, (rows, columns) = gpu.mx, x.shape
    values = (x if order is None else x[:, order]).astype(mx.float32)
    if signs is not None and not rotation.inverse:
        values = values * signs
    blocks = values.reshape(rows, columns // rotation.block, rotation.block)
    step = 1
    while step < rotation.block:
        pairs = blocks.reshape(rows, -1, 2, step)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        blocks = mx.stack([first + second, first - second], axis=2)
        step *= 2
    values = blocks.reshape(rows, columns) * rotation.scale
    return (values * signs if signs is not None and rotation.inverse else values).astype(gpu.operands)


def sum_rows(ctx: Context, x: Value, counts: Sequence[int]) -> DeviceArray:
    """Return the sums of each `counts[i]` neighbouring rows, (parts, columns)."""
    gpu, array, starts = ctx.gpu, settle(x), [0, *accumulate(counts)]
    if gpu.launcher is None:
        return gpu.watch.run_mlx("sum_rows", "f32", lambda: _compose_row_sums(gpu.mx, array, starts), array)
    columns, filling = array.shape[1], [starts[-1]] * max(0, MIN_ARRAY - len(starts))
    (out,) = gpu.launcher.launch(
        ROWS,
        [array, gpu.mx.array([*starts, *filling], gpu.mx.int32), gpu.launcher.numbers(columns)],
        groups=(len(counts), -(-columns // THREADS), 1),
        threads=THREADS,
        outputs=[((len(counts), columns), gpu.mx.float32)],
    )
    return out


def _compose_row_sums(mx: Mlx, x: DeviceArray, starts: Sequence[int]) -> DeviceArray:
    return mx.stack([x[first:last].astype(mx.float32).sum(axis=0) for first, last in pairwise(starts)])
