"""Native `activate`: csrc/activate.inc."""

from __future__ import annotations

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray


def activate(ctx: Context, gate_up: FloatArray, kind: str) -> FloatArray:
    """act(first half) * second half."""
    out = np.empty((gate_up.shape[0], gate_up.shape[1] // 2), np.float32)
    ctx.module.activate(ctx.native, gate_up, kind, out)
    return out
