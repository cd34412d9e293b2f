"""Layer norm, fused with the addition that precedes it (Ba, Kiros and Hinton 2016, arXiv:1607.06450)."""

from __future__ import annotations

from mlxr.kernels.checks import check_floats, check_size
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.rms_norm import check_rows
from mlxr.kernels.rms_norm.scales import Scales
from mlxr.kernels.tensor import FloatArray

__all__ = ["layer_norm"]

CHOICE = Choice(__name__)


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

    x and residual are (T, n), weight and bias (n,). The mean is that of each row, and the deviation the root of the
    mean square of the differences from it plus eps. Of a weight (m, n), row i % m is for row i of x. Inputs are left as
    they are; x may be a view and the sum scaled as in `rms_norm`.
    """
    scales = Scales(residual_scale, sum_scale)
    x = check_rows("layer_norm", x, residual, scales)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_floats("layer_norm", name, vector, 2 if name == "weight" and vector.ndim == 2 else 1)
            check_size("layer_norm", f"length of {name}", vector.shape[-1], x.shape[1])
    if not x.shape[0]:
        return x, x
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("layer_norm", name, "f32" if residual is None else "f32+residual")
    result: tuple[FloatArray, FloatArray] = implementation.layer_norm(ctx, x, weight, bias, eps, residual, scales)
    return result
