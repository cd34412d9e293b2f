"""Norms on a GPU: the stream stays f32; normed rows have the type that `linear` wants.

If the residual of `rms_norm` is a deferred product, that product's launch adds the stream. The norm itself is deferred
to the product that follows, whose launch may do it. Otherwise sum and norm are one launch, with any number of summands.
`layer_norm` is the same launch, which subtracts the mean first. `gated_norm` is one launch, or part of the launch of
the recurrence before it.
"""

from __future__ import annotations

from pathlib import Path

from mlxr.kernels.collectives.gpu import find_own_part, sum_and_norm
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import (
    Deferred,
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
from mlxr.kernels.gpu.mlx import Mlx
from mlxr.kernels.linear.gpu import MAX_ROWS, Normed, join_product
from mlxr.kernels.norms import Scales, name_variant
from mlxr.kernels.recurrent.gpu import OutputNorm, Recurred
from mlxr.kernels.tensor import DeviceArray, FloatArray

MAX_THREADS = 512
NORM = Kernel(
    "rms_norm",
    Path(__file__).parent,
    "norm.body",
    ("x", "residual", "other", "input", "gate", "weight", "bias", "numbers", "sizes"),
    ("normed", "summed"),
    ("../elementwise/summands.h", "../gpu/threads.h"),
    operator="rms_norm",
)
GATED_THREADS = 128
MOST_PIECES = 4  # most pieces of a lane if one SIMD-group norms a group
WIDTHS = (8, 4, 1)  # neighbours that a thread takes at a time
GATED = Kernel(
    "gated_norm",
    Path(__file__).parent,
    "gated.body",
    ("x", "gate", "weight", "numbers", "sizes"),
    ("out",),
    ("silu.h", "../gpu/threads.h"),
    operator="gated_norm",
)
KERNELS = (NORM, GATED)


def rms_norm(
    ctx: Context, x: Value, weight: FloatArray | None, eps: float, residual: Value | None, scales: Scales
) -> tuple[Value, Value]:
    """Return summed / sqrt(mean(summed²) + eps) * weight, and summed."""
    gpu, gain, x = ctx.gpu, None if weight is None else ctx.gpu.hold(weight), settle(x)
    if gpu.launcher is None:
        summed = scales.add(x, settle(residual))
        variant = "f32" if residual is None else "f32+residual"
        return gpu.watch.run_mlx("rms_norm", variant, lambda: gpu.mx.fast.rms_norm(summed, gain, eps), summed), summed
    if not scales.change:
        own = find_own_part(residual)
        if gain is not None and own is not None:
            return sum_and_norm(ctx, x, own, gain, eps)
    x, summands = join_residual(ctx, x, residual, scales)
    if summands is None and gain is not None and x.shape[0] <= MAX_ROWS:
        parts = Normed(x, gain, eps)
        return Deferred(x.shape, gpu.operands, parts, lambda: launch_norm(ctx, x, gain, None, eps, None)[0]), x
    return launch_norm(ctx, x, gain, None, eps, summands, scales.total)


def layer_norm(
    ctx: Context,
    x: Value,
    weight: FloatArray,
    bias: FloatArray | None,
    eps: float,
    residual: Value | None,
    scales: Scales,
) -> tuple[Value, Value]:
    """Return (summed - mean) / sqrt(variance + eps) * weight + bias, and summed."""
    gpu, gain, x = ctx.gpu, ctx.gpu.hold(weight), settle(x)
    shift = None if bias is None else gpu.hold(bias)
    if gpu.launcher is None:
        summed = scales.add(x, settle(residual))
        variant = "f32" if residual is None else "f32+residual"
        return gpu.watch.run_mlx(
            "layer_norm", variant, lambda: _compose_layer_norm(gpu.mx, summed, gain, shift, eps), summed
        ), summed
    x, summands = join_residual(ctx, x, residual, scales)
    return launch_norm(ctx, x, gain, shift, eps, summands, scales.total, is_centred=True)


def join_residual(
    ctx: Context, x: DeviceArray, residual: Value | None, scales: Scales
) -> tuple[DeviceArray, Summands | None]:
    """Return the sum of x and a deferred product, and None; or else x, and what is still to be added."""
    if scales.change:
        assert residual is not None  # `_check_rows` refuses scales without it
        return x, Summands(settle(residual), factor=scales.residual)
    return join_product(ctx, x, residual)


def launch_norm(
    ctx: Context,
    x: DeviceArray,
    gain: DeviceArray | None,
    shift: DeviceArray | None,
    eps: float,
    summands: Summands | None,
    total: float = 1.0,
    *,
    is_centred: bool = False,
) -> tuple[DeviceArray, DeviceArray]:
    """Return the norm of (x + summands) * total, and that sum; if `is_centred`, its mean is subtracted first.

    `gain` and `shift` are the weight, which may have several rows, and the bias on the device.
    """
    gpu, (rows, columns) = ctx.gpu, x.shape
    width, numbers = 8 if columns % 8 == 0 else 1, gpu.launcher.numbers
    shares, factor = (0, 1.0) if summands is None else (count_shares(summands.array), summands.factor)
    joined = list_constants(summands)
    sizes = numbers(columns, rows if max(shares, joined["OTHERS"]) > 1 else 0)
    gains = 0 if gain is None else 1 if gain.ndim == 1 else gain.shape[0]
    flags = {"WEIGHT": gains, "BIAS": int(shift is not None), "SCALED": int(factor != 1.0 or total != 1.0)}
    none = numbers(0.0)
    normed, summed = gpu.launcher.launch(
        NORM,
        [
            x,
            *list_inputs(summands, none),
            none if gain is None else gain,
            none if shift is None else shift,
            numbers(eps, factor, total),
            sizes,
        ],
        groups=(rows, 1, 1),
        threads=min(MAX_THREADS, -(-columns // (LANES * width)) * LANES),
        outputs=[((rows, columns), gpu.operands), ((1, 1) if summands is None else (rows, columns), gpu.mx.float32)],
        constants={"RESIDUAL": shares, **joined, "N": width, "CENTRED": int(is_centred), **flags},
        types={"Y": gpu.operands, "S": gpu.mx.float32},
    )
    return normed, x if summands is None else summed


def _compose_layer_norm(mx: Mlx, x: DeviceArray, gain: DeviceArray, shift: DeviceArray, eps: float) -> DeviceArray:
    if gain.ndim == 1:
        return mx.fast.layer_norm(x, gain, shift, eps)
    normed = mx.fast.layer_norm(x, None, None, eps) * gain[mx.arange(x.shape[0]) % gain.shape[0]]
    return normed if shift is None else normed + shift


def gated_norm(
    ctx: Context, x: Value, gate: Value, weight: FloatArray | None, eps: float, width: int, gate_first: bool, first: int
) -> Value:
    """Norm each group and apply the gate, in the launch of the recurrence before if that is deferred."""
    gpu, recurred, gate = ctx.gpu, find_parts(x, Recurred), settle(gate)
    gain = None if weight is None else gpu.hold(weight)
    if recurred is not None and gain is not None and not gate_first and width == recurred.columns:
        normed: DeviceArray = recurred.launch(OutputNorm(gate, gain, float(eps), first))
        return normed
    x = settle(x)
    rows, columns = x.shape
    if gpu.launcher is None:
        return gpu.watch.run_mlx(
            "gated_norm",
            name_variant(weight, gate_first),
            lambda: _compose_gated_norm(gpu, x, gate, gain, eps, width, gate_first, first),
            x,
            gate,
        )
    numbers = gpu.launcher.numbers
    each = next(count for count in WIDTHS if all(one % count == 0 for one in (width, gate.shape[1], first)))
    sharing = choose_threads(width, each)
    threads = max(GATED_THREADS, sharing)
    (out,) = gpu.launcher.launch(
        GATED,
        [x, gate, x if gain is None else gain, numbers(float(eps)), numbers(columns, gate.shape[1], first)],
        groups=(-(-(columns // width) // (threads // sharing)), rows, 1),
        threads=threads,
        outputs=[((rows, columns), gpu.operands)],
        constants={
            "WIDTH": width,
            "EACH": sharing,
            "N": each,
            "GATE_FIRST": int(gate_first),
            "SHARED_WEIGHT": int(weight is not None and len(weight) == width),
            "NORMED": int(weight is not None),
        },
        types={"Y": gpu.operands},
    )
    return out


def choose_threads(width: int, each: int) -> int:
    """Return the number of threads that norm a group, a power of two; each takes `each` neighbours at a time."""
    pieces = -(-width // each)
    if pieces <= LANES * MOST_PIECES:
        return min(LANES, 1 << (pieces - 1).bit_length())
    return min(MAX_THREADS, max(GATED_THREADS, 1 << (-(-pieces // MOST_PIECES) - 1).bit_length()))


def _compose_gated_norm(
    gpu: Gpu, x: DeviceArray, gate: DeviceArray, gain: DeviceArray, eps: float, width: int, gate_first: bool, first: int
) -> DeviceArray:
    mx, (rows, columns) = gpu.mx, x.shape
    gates = gate[:, first : first + columns]
    silu = gates * mx.sigmoid(gates)
    if gain is None:
        return (x * silu).astype(gpu.operands)
    groups = mx.fast.rms_norm((x * silu if gate_first else x).reshape(rows, -1, width), None, eps)
    normed = (groups * gain.reshape(-1, width)).reshape(rows, columns)
    return (normed if gate_first else normed * silu).astype(gpu.operands)
