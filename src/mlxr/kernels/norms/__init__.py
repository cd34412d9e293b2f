"""Norms: RMS norm and layer norm, fused with the addition that precedes them, and the gated norm of recurrent mixers.

Each operator has its checks, then its reference in NumPy, which defines its numbers, then the call of the native kernel
(csrc/operators/norms.inc, csrc/mixers). `gpu.py` has the launches.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

from typing import Any

import numpy as np

from mlxr.core.frozen import frozen
from mlxr.kernels.arrays import empty
from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray


@frozen
class Scales:
    """Factors of the sum of a norm: (x + residual * factor `residual`) * factor `total`."""

    residual: float = 1.0
    total: float = 1.0

    @property
    def change(self) -> bool:
        """True if a factor is not 1."""
        return self.residual != 1.0 or self.total != 1.0

    def add(self, x: Any, residual: Any | None) -> Any:
        """Return the sum of arrays of any kind, each step rounded to their type."""
        if residual is None or not self.change:
            return x if residual is None else x + residual
        return (x + self.residual * residual) * self.total


def rms_norm(
    ctx: Context,
    x: FloatArray,
    weight: FloatArray | None,
    eps: float,
    residual: FloatArray | None = None,
    *,
    residual_scale: float = 1.0,
    sum_scale: float = 1.0,
) -> tuple[FloatArray, FloatArray]:
    """Return (normed, summed): summed = x + residual, or x itself without one; normed = summed / rms(summed) * weight.

    With scales summed is (x + residual_scale * residual) * sum_scale, each step rounded.

    x and residual are (T, n), weight (n,) or None for ones; of a weight (m * n,) part i % m is for row i. rms is over
    each row: sqrt(mean(summed²) + eps). Inputs are not changed. x may be a view with any row stride (heads of a fused
    projection), which is copied first.
    """
    scales = Scales(residual_scale, sum_scale)
    x = _check_rows("rms_norm", x, residual, scales)
    if weight is not None:
        check_floats("rms_norm", "weight", weight, 1)
        rows = max(1, weight.shape[0] // max(1, x.shape[1]))
        check_size("rms_norm", "columns of x", x.shape[1] * rows, weight.shape[0])
    if not x.shape[0]:
        return x, x
    name, implementation = RMS_NORM.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("rms_norm", name, "f32" if residual is None else "f32+residual")
    return implementation(ctx, x, weight, eps, residual, scales)


def _rms_norm_reference(
    ctx: Context, x: FloatArray, weight: FloatArray | None, eps: float, residual: FloatArray | None, scales: Scales
) -> tuple[FloatArray, FloatArray]:
    summed = scales.add(x, residual)
    mean_square: FloatArray = np.square(summed).mean(axis=1, keepdims=True)
    rms: FloatArray = np.sqrt(mean_square + np.float32(eps))
    normed: FloatArray = summed / rms
    if weight is not None and len(weight) != x.shape[1]:
        weights = weight.reshape(-1, x.shape[1])
        return normed * weights[np.arange(len(x)) % len(weights)], summed
    return normed if weight is None else normed * weight, summed


def _rms_norm_native(
    ctx: Context, x: FloatArray, weight: FloatArray | None, eps: float, residual: FloatArray | None, scales: Scales
) -> tuple[FloatArray, FloatArray]:
    normed = empty(ctx, *x.shape)
    summed = None if residual is None else empty(ctx, *x.shape)
    ctx.module.rms_norm(ctx.native, x, weight, eps, residual, normed, summed, scales.residual, scales.total)
    return normed, x if summed is None else summed


RMS_NORM = Choice("rms_norm", _rms_norm_reference, _rms_norm_native, f"{__name__}.gpu")


def layer_norm(
    ctx: Context,
    x: FloatArray,
    weight: FloatArray,
    eps: float,
    residual: FloatArray | None = None,
    *,
    bias: FloatArray | None = None,
    residual_scale: float = 1.0,
    sum_scale: float = 1.0,
) -> tuple[FloatArray, FloatArray]:
    """Return (normed, summed): summed = x + residual, or x itself without one; normed = (summed - mean) / deviation *
    weight + bias.

    x and residual are (T, n), weight and bias (n,). Mean and deviation are those of each row; the deviation is the root
    of variance + eps. Of a weight (m, n), row i % m is for row i of x. Inputs are not changed; x may be a view and the
    sum scaled as in `rms_norm`.
    """
    scales = Scales(residual_scale, sum_scale)
    x = _check_rows("layer_norm", x, residual, scales)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_floats("layer_norm", name, vector, 2 if name == "weight" and vector.ndim == 2 else 1)
            check_size("layer_norm", f"length of {name}", vector.shape[-1], x.shape[1])
    if not x.shape[0]:
        return x, x
    name, implementation = LAYER_NORM.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("layer_norm", name, "f32" if residual is None else "f32+residual")
    return implementation(ctx, x, weight, bias, eps, residual, scales)


def _layer_norm_reference(
    ctx: Context,
    x: FloatArray,
    weight: FloatArray,
    bias: FloatArray | None,
    eps: float,
    residual: FloatArray | None,
    scales: Scales,
) -> tuple[FloatArray, FloatArray]:
    summed = scales.add(x, residual)
    centred = summed - summed.mean(axis=1, keepdims=True)
    variance: FloatArray = np.square(centred).mean(axis=1, keepdims=True)
    if weight.ndim == 2:
        weight = weight[np.arange(len(x)) % len(weight)]
    normed: FloatArray = centred / np.sqrt(variance + np.float32(eps)) * weight
    return normed if bias is None else normed + bias, summed


def _layer_norm_native(
    ctx: Context,
    x: FloatArray,
    weight: FloatArray,
    bias: FloatArray | None,
    eps: float,
    residual: FloatArray | None,
    scales: Scales,
) -> tuple[FloatArray, FloatArray]:
    normed = empty(ctx, *x.shape)
    summed = None if residual is None else empty(ctx, *x.shape)
    weights = weight.reshape(-1, x.shape[1])
    ctx.module.layer_norm(ctx.native, x, weights, bias, eps, residual, normed, summed, scales.residual, scales.total)
    return normed, x if summed is None else summed


LAYER_NORM = Choice("layer_norm", _layer_norm_reference, _layer_norm_native, f"{__name__}.gpu")


def _check_rows(operator: str, x: FloatArray, residual: FloatArray | None, scales: Scales) -> FloatArray:
    """Check the inputs of a norm, and return x as a C-contiguous array."""
    if isinstance(x, np.ndarray) and x.ndim == 2 and x.strides[1] == x.itemsize:
        x = np.ascontiguousarray(x)  # nothing to do, nearly always
    check_floats(operator, "x", x, 2)
    if residual is not None:
        check_floats(operator, "residual", residual, 2)
        if residual.shape != x.shape:
            refuse(operator, "residual", f"of shape {residual.shape}", f"shape {x.shape} of x")
    elif scales.change:
        refuse(operator, "residual", "None", "an array, as there are scales")
    return x


def gated_norm(
    ctx: Context,
    x: FloatArray,
    gate: FloatArray,
    weight: FloatArray | None,
    eps: float,
    *,
    width: int,
    gate_first: bool = False,
    first: int = 0,
) -> FloatArray:
    """Return norm(x) * weight * silu(gate), or with `gate_first` norm(x * silu(gate)) * weight, for x (T, n); without a
    weight x * silu(gate).

    The norm divides each `width` neighbours by the root of their mean square + eps. The gates are the columns from
    `first` on of `gate` (T, m); the weight is (width,), the same for all, or (n,).
    """
    check_floats("gated_norm", "x", x, 2)
    check_floats("gated_norm", "gate", gate, 2)
    if weight is not None:
        check_floats("gated_norm", "weight", weight, 1)
    columns = x.shape[1]
    check_size("gated_norm", "rows of gate", gate.shape[0], x.shape[0])
    if width < 1 or columns % width:
        refuse("gated_norm", "width", width, f"a divisor of the {columns} columns of x")
    if weight is not None and weight.shape[0] not in (width, columns):
        refuse("gated_norm", "length of weight", weight.shape[0], f"{width} or {columns}")
    if first < 0 or first + columns > gate.shape[1]:
        refuse("gated_norm", "first column", first, f"0 to {gate.shape[1] - columns}")
    name, implementation = GATED_NORM.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("gated_norm", name, name_variant(weight, gate_first))
    return implementation(ctx, x, gate, weight, eps, width, gate_first, first)


def name_variant(weight: FloatArray | None, gate_first: bool) -> str:
    """Return the variant under which the ledger counts a gated norm."""
    return "gate alone" if weight is None else "gate first" if gate_first else "norm first"


def _gated_norm_reference(
    ctx: Context,
    x: FloatArray,
    gate: FloatArray,
    weight: FloatArray | None,
    eps: float,
    width: int,
    gate_first: bool,
    first: int,
) -> FloatArray:
    gates = gate[:, first : first + x.shape[1]]
    with np.errstate(over="ignore"):  # exp(-gate) may be infinite, and the result 0
        silu = gates / (np.float32(1) + np.exp(-gates))
    if weight is None:
        return x * silu.astype(np.float32)
    groups: FloatArray = (x * silu.astype(np.float32) if gate_first else x).reshape(len(x), -1, width)
    root = np.sqrt(np.square(groups).mean(axis=2, keepdims=True) + np.float32(eps))
    normed: FloatArray = (groups / root * weight.reshape(-1, width)).reshape(x.shape)
    return normed if gate_first else (normed * silu).astype(np.float32)


def _gated_norm_native(
    ctx: Context,
    x: FloatArray,
    gate: FloatArray,
    weight: FloatArray | None,
    eps: float,
    width: int,
    gate_first: bool,
    first: int,
) -> FloatArray:
    out = empty(ctx, *x.shape)
    ctx.module.gated_norm(ctx.native, x, gate, first, weight, width, eps, gate_first, out)
    return out


GATED_NORM = Choice("gated_norm", _gated_norm_reference, _gated_norm_native, f"{__name__}.gpu")
