"""Operators that take numbers one by one: `add`, `scale` and `gate_heads`.

Each has its checks, then its reference in NumPy, which defines its numbers, then the call of the native kernel
(csrc/operators/scale.inc). `gpu.py` has the launches.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import math

import numpy as np

from mlxr.kernels.arrays import empty
from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray

NO_SOFTCAP = 0.0  # what native kernels take where nothing is capped


def add(ctx: Context, x: FloatArray, other: FloatArray, factor: float = 1.0) -> FloatArray:
    """(x + other) * factor, each step rounded; x and other (T, n), which are left as they are.

    Raises ValueError for shapes that differ.
    """
    check_floats("add", "x", x, 2)
    check_floats("add", "other", other, 2)
    if other.shape != x.shape:
        refuse("add", "other", f"of shape {other.shape}", f"shape {x.shape} of x")
    if not x.shape[0]:
        return x
    name, implementation = ADD.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("add", name, "f32" if factor == 1.0 else "f32+scale")
    return implementation(ctx, x, other, factor)


def _add_reference(ctx: Context, x: FloatArray, other: FloatArray, factor: float) -> FloatArray:
    return (x + other) * np.float32(factor)


def _add_native(ctx: Context, x: FloatArray, other: FloatArray, factor: float) -> FloatArray:
    out = empty(ctx, *x.shape)
    ctx.module.add(ctx.native, x, other, factor, out)
    return out


ADD = Choice("add", _add_reference, _add_native, f"{__name__}.gpu")


def scale(ctx: Context, x: FloatArray, factor: float = 1.0, *, softcap: float | None = None) -> FloatArray:
    """x * factor of x (T, n); with a softcap c, c * tanh(x * factor / c). x itself where neither changes anything."""
    check_floats("scale", "x", x, 2)
    if not math.isfinite(factor):
        refuse("scale", "factor", factor, "a finite number")
    if softcap is not None and not 0 < softcap < math.inf:
        refuse("scale", "softcap", softcap, "a number above 0")
    if (factor == 1.0 and softcap is None) or not x.shape[0]:
        return x
    name, implementation = SCALE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("scale", name, "f32" if softcap is None else "f32+softcap")
    return implementation(ctx, x, factor, softcap)


def _scale_reference(ctx: Context, x: FloatArray, factor: float, softcap: float | None) -> FloatArray:
    if softcap is None:
        return x * np.float32(factor)
    result: FloatArray = np.float32(softcap) * np.tanh(x * np.float32(factor / softcap))
    return result


def _scale_native(ctx: Context, x: FloatArray, factor: float, softcap: float | None) -> FloatArray:
    out = empty(ctx, *x.shape)
    ctx.module.scale(ctx.native, x, factor, softcap or NO_SOFTCAP, out)
    return out


SCALE = Choice("scale", _scale_reference, _scale_native, f"{__name__}.gpu")


def gate_heads(ctx: Context, x: FloatArray, gates: FloatArray) -> FloatArray:
    """x / (1 + exp(-gate)): x (T, n), gates (T, m), each of which is that of n / m neighbours: m is n, or the heads."""
    check_floats("gate_heads", "x", x, 2)
    check_floats("gate_heads", "gates", gates, 2)
    check_size("gate_heads", "rows of gates", gates.shape[0], x.shape[0])
    if not gates.shape[1] or x.shape[1] % gates.shape[1]:
        refuse("gate_heads", "columns of gates", gates.shape[1], f"a divisor of the {x.shape[1]} columns of x")
    name, implementation = GATE_HEADS.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("gate_heads", name, "elements" if gates.shape[1] == x.shape[1] else "heads")
    return implementation(ctx, x, gates)


def _gate_heads_reference(ctx: Context, x: FloatArray, gates: FloatArray) -> FloatArray:
    with np.errstate(over="ignore"):  # exp(-gate) may be infinite, and the sigmoid 0
        share = np.float32(1) / (np.float32(1) + np.exp(-gates))
    heads: FloatArray = x.reshape(*gates.shape, x.shape[1] // gates.shape[1]) * share[:, :, None]
    return heads.reshape(x.shape)


def _gate_heads_native(ctx: Context, x: FloatArray, gates: FloatArray) -> FloatArray:
    out = empty(ctx, *x.shape)
    ctx.module.gate_heads(ctx.native, x, gates, out)
    return out


GATE_HEADS = Choice("gate_heads", _gate_heads_reference, _gate_heads_native, f"{__name__}.gpu")
