"""Root-mean-square norm, fused with the addition that precedes it (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import numpy as np

from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.rms_norm.scales import Scales
from mlxr.kernels.tensor import FloatArray

__all__ = ["check_rows", "rms_norm"]

CHOICE = Choice(__name__)


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

    x and residual are (T, n), weight (n,) or None for ones; rms is over each row: sqrt(mean(summed²) + eps). Inputs are
    left as they are. x may be a view with a free row stride (heads out of a fused projection), which is copied first.
    """
    scales = Scales(residual_scale, sum_scale)
    x = check_rows("rms_norm", x, residual, scales)
    if weight is not None:
        check_floats("rms_norm", "weight", weight, 1)
        check_size("rms_norm", "columns of x", x.shape[1], weight.shape[0])
    if not x.shape[0]:
        return x, x
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("rms_norm", name, "f32" if residual is None else "f32+residual")
    result: tuple[FloatArray, FloatArray] = implementation.rms_norm(ctx, x, weight, eps, residual, scales)
    return result


def check_rows(operator: str, x: FloatArray, residual: FloatArray | None, scales: Scales) -> FloatArray:
    """Check what norms take, and return x with its rows one after another."""
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
