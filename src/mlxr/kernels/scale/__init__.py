"""Numbers times a factor, and kept below a cap: embeddings, logits (Gemma 2, arXiv:2408.00118) and layers' results."""

from __future__ import annotations

import math

from mlxr.kernels.checks import check_floats, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray

__all__ = ["scale"]

CHOICE = Choice(__name__)


def scale(ctx: Context, x: FloatArray, factor: float = 1.0, *, softcap: float | None = None) -> FloatArray:
    """x * factor of x (T, n); with a softcap c, c * tanh(x * factor / c). x itself where neither changes anything."""
    check_floats("scale", "x", x, 2)
    if not math.isfinite(factor):
        refuse("scale", "factor", factor, "a finite number")
    if softcap is not None and not 0 < softcap < math.inf:
        refuse("scale", "softcap", softcap, "a number above 0")
    if (factor == 1.0 and softcap is None) or not x.shape[0]:
        return x
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("scale", name, "f32" if softcap is None else "f32+softcap")
    result: FloatArray = implementation.scale(ctx, x, factor, softcap)
    return result
