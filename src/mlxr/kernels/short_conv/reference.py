"""NumPy reference of `short_conv`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.short_conv import Convolution
from mlxr.kernels.states import list_states
from mlxr.kernels.tensor import FloatArray


def short_conv(
    ctx: Context, x: FloatArray, conv: Convolution, batch: RaggedBatch, pool: FloatArray, first: int, at: int
) -> FloatArray:
    """Sequence after sequence, all its tokens at once, one tap after another."""
    taps, channels = conv.weight.shape
    rows = x[:, first : first + conv.inputs]
    gates = rows[:, channels : 2 * channels] if conv.kind == "gated" else None
    inputs = rows if gates is None else rows[:, :channels] * rows[:, 2 * channels :]
    out = np.empty((len(x), channels), np.float32)
    for tokens, before, after in list_states(pool, at, conv.state_floats, batch):
        known = np.concatenate([before.reshape(taps - 1, channels), inputs[tokens]])
        count = tokens.stop - tokens.start
        total: FloatArray = np.zeros((count, channels), np.float32)
        if conv.bias is not None:
            total += conv.bias
        for tap in range(taps):
            total += conv.weight[tap] * known[tap : tap + count]
        out[tokens] = total
        after[:] = known[count:].reshape(-1)
    if gates is not None:
        return out * gates
    return silu(out) if conv.kind == "silu" else out


def silu(x: FloatArray) -> FloatArray:
    """x / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # exp(-x) may be infinite, and the result 0
        return (x / (np.float32(1) + np.exp(-x))).astype(np.float32)
