"""A short causal convolution of each channel, whose state is its last inputs (LFM2, arXiv:2511.23404; the one before
the gated delta rule and before Mamba-2)."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlxr.kernels.arrays import empty
from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, FunctionChoice
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.recurrent import check_states, list_states, place_states
from mlxr.kernels.tensor import FloatArray, PoolArray

ConvolutionKind = Literal["plain", "silu", "gated"]


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """The `weight` (taps, channels), the oldest input's first, a `bias` (channels,) or None, and what surrounds it.

    `silu` is that of its result. `gated`: of rows B | C | x the input is B x, and the result is multiplied by C.
    """

    weight: FloatArray
    bias: FloatArray | None = None
    kind: ConvolutionKind = "plain"

    @property
    def channels(self) -> int:
        """Columns of the result."""
        return int(self.weight.shape[1])

    @property
    def inputs(self) -> int:
        """Columns that are read of each row."""
        return self.channels * (3 if self.kind == "gated" else 1)

    @property
    def state_floats(self) -> int:
        """Numbers of a state: the inputs (taps - 1, channels) before the next one."""
        return int(self.weight.shape[0] - 1) * self.channels

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and the bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def check(self, operator: str) -> None:
        """Raise ValueError for arrays that do not fit."""
        check_floats(operator, "weight", self.weight, 2)
        if not self.weight.shape[0]:
            refuse(operator, "taps", 0, "at least 1")
        if self.bias is not None:
            check_floats(operator, "bias", self.bias, 1)
            check_size(operator, "length of bias", self.bias.shape[0], self.channels)


def make_convolution(weight: FloatArray, bias: FloatArray | None, kind: ConvolutionKind) -> Convolution:
    """A convolution out of a weight as files have it, (channels, taps)."""
    return Convolution(np.ascontiguousarray(weight.T), bias, kind)


def short_conv(
    ctx: Context, x: FloatArray, conv: Convolution, batch: RaggedBatch, pool: PoolArray, *, first: int = 0, at: int = 0
) -> FloatArray:
    """Convolve the columns of x (T, n) from `first` on: (T, channels).

    y[t] = b + w[0] u[t - taps + 1] + … + w[taps - 1] u[t], added in this order, where u before the batch's tokens are
    in the state of their sequence: in its slot of `pool` (slots, floats) from `at` on.
    """
    check_floats("short_conv", "x", x, 2)
    check_size("short_conv", "rows of x", x.shape[0], batch.tokens)
    if first < 0 or first + conv.inputs > x.shape[1]:
        refuse("short_conv", "first column", first, f"0 to {x.shape[1] - conv.inputs}")
    check_states("short_conv", pool, at, conv.state_floats, batch)
    name, implementation = SHORT_CONV.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("short_conv", name, conv.kind)
    return implementation(ctx, x, conv, batch, pool, first, at)


def run_short_conv(
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


def _short_conv_native(
    ctx: Context, x: FloatArray, conv: Convolution, batch: RaggedBatch, pool: FloatArray, first: int, at: int
) -> FloatArray:
    out = empty(ctx, x.shape[0], conv.channels)
    places = place_states(batch, pool, at)
    ctx.module.short_conv(ctx.native, x, first, conv.weight, conv.bias, conv.kind, out, *places)
    return out


SHORT_CONV = FunctionChoice("short_conv", run_short_conv, _short_conv_native, "mlxr.kernels.recurrent.gpu")
