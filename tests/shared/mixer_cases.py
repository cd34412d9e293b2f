"""Recurrent mixers with made-up numbers, and the same in plain double precision, written token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.recurrent import (
    Convolution,
    ConvolutionKind,
    DeltaRule,
    SelectiveScan,
    StateSpace,
    gated_delta,
    mamba2,
    scan,
    short_conv,
)
from mlxr.kernels.tensor import PoolArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
AHEAD, BEHIND = 3, 5  # floats of a slot before and after the operator's own, which it leaves alone
SLOTS = 9


@dataclass(frozen=True)
class Mixer:
    """A recurrent mixer: `widths` are the columns of its inputs, `floats` the size of its state, `scales` the last of
    these.

    `run(ctx, inputs, batch, pool, at)` is the operator. `compute(inputs, state)` gives the right result for one
    sequence, whose state `read` returns.
    """

    widths: tuple[int, ...]
    floats: int
    run: Callable[[Context, Sequence[Any], RaggedBatch, PoolArray, int], Any]
    compute: Callable[[Sequence[Doubles], Doubles], tuple[Doubles, Doubles]]
    scales: int = 0

    def inputs(self, tokens: int, seed: int = 1) -> list[Floats]:
        rng = np.random.default_rng(seed)
        return [rng.standard_normal((tokens, width)).astype(np.float32) for width in self.widths]

    def pool(self, seed: int = 7, *, at: int = AHEAD, scaled: bool = True) -> Floats:
        """Random states, in slots from `at` on; a GPU takes none with scales."""
        numbers = np.random.default_rng(seed).standard_normal((SLOTS, at + self.floats + BEHIND))
        if self.scales:
            first = at + self.floats - self.scales
            numbers[:, first : first + (1 if scaled else self.scales)] = 0
        return numbers.astype(np.float32)

    def read(self, state: Floats) -> Doubles:
        """The numbers of a state, multiplied by their scales."""
        numbers, scales = np.split(state.astype(np.float64), [self.floats - self.scales])
        if not self.scales:
            return numbers
        return (numbers.reshape(self.scales, -1) * np.where(scales == 0, 1, scales)[:, None]).reshape(-1)

    def play(self, ctx: Context, inputs: Sequence[Floats], batch: RaggedBatch, pool: Floats) -> Floats:
        """The result on the host; the pool is written."""
        return np.asarray(self.run(ctx, inputs, batch, pool, AHEAD))


def make_batch(counts: Sequence[int], reads: Sequence[int], writes: Sequence[int]) -> RaggedBatch:
    """Sequences of so many tokens each, with slots for their states."""

    def ints(values: object) -> NDArray[np.int32]:
        return np.array(values, np.int32)

    tokens = sum(counts)
    batch = RaggedBatch(
        token_ids=ints([0] * tokens),
        positions=ints([i for count in counts for i in range(count)]),
        slots=ints([-1] * tokens),
        query_starts=ints(np.concatenate([[0], np.cumsum(counts)])),
        context_lengths=ints(counts),
        page_table=np.empty((len(counts), 0), np.int32),
        output_rows=ints([]),
    )
    return batch.with_states(ints(reads), ints(writes))


def sigmoid(x: Doubles) -> Doubles:
    return 1 / (1 + np.exp(-x))


def make_convolution(
    taps: int, channels: int, kind: ConvolutionKind, *, bias: bool, first: int = 0, behind: int = 2
) -> Mixer:
    rng = np.random.default_rng(taps)
    weight = rng.standard_normal((taps, channels)).astype(np.float32)
    conv = Convolution(weight, rng.standard_normal(channels).astype(np.float32) if bias else None, kind)

    def run(ctx: Context, inputs: Sequence[Any], batch: RaggedBatch, pool: PoolArray, at: int) -> Any:
        return short_conv(ctx, inputs[0], conv, batch, pool, first=first, at=at)

    def compute(inputs: Sequence[Doubles], state: Doubles) -> tuple[Doubles, Doubles]:
        rows = inputs[0][:, first : first + conv.inputs]
        last, out = list(state.reshape(taps - 1, channels)), []
        for row in rows:
            b, c, u = np.split(row, 3) if kind == "gated" else (1.0, 1.0, row)
            last.append(b * u)
            made = sum((weight[i] * last[i] for i in range(taps)), 0.0 if conv.bias is None else conv.bias)
            out.append(c * (made * sigmoid(made) if kind == "silu" else made))
            last = last[1:]
        return np.array(out), np.array(last).reshape(-1)

    return Mixer((first + conv.inputs + behind,), conv.state_floats, run, compute)


def make_delta(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    tiled: bool = False,
    channels: bool = False,
    bound: float = 0.0,
) -> Mixer:
    rng = np.random.default_rng([key_heads, value_heads, key_dim, value_dim])
    decays, first = value_heads * (key_dim if channels else 1), 2
    rates, bias = -rng.uniform(0.1, 2, decays).astype(np.float32), rng.standard_normal(decays).astype(np.float32)
    rule = DeltaRule(key_heads, value_heads, key_dim, value_dim, rates, bias, tiled, bound)

    def run(ctx: Context, inputs: Sequence[Any], batch: RaggedBatch, pool: PoolArray, at: int) -> Any:
        return gated_delta(ctx, inputs[0], inputs[1], rule, batch, pool, first=first, at=at)

    def compute(inputs: Sequence[Doubles], state: Doubles) -> tuple[Doubles, Doubles]:
        held, out = state.reshape(value_heads, key_dim, value_dim).copy(), []
        for qkv, gates in zip(*inputs, strict=True):
            q, k = qkv[: 2 * key_heads * key_dim].reshape(2, key_heads, key_dim)
            v = qkv[2 * key_heads * key_dim :].reshape(value_heads, value_dim)
            betas, steps = sigmoid(gates[first : first + value_heads]), gates[first + value_heads :][:decays]
            forgets = bound * sigmoid(-rates * (steps + bias)) if bound else rates * np.log1p(np.exp(steps + bias))
            decay = np.exp(forgets).reshape(value_heads, -1)
            row = []
            for h in range(value_heads):
                own = h % key_heads if tiled else h // (value_heads // key_heads)
                key, query = (x[own] / np.sqrt((x[own] ** 2).sum() + 1e-6) for x in (k, q))
                held[h] *= decay[h][:, None]
                held[h] += np.outer(key, betas[h] * (v[h] - held[h].T @ key))
                row.append(held[h].T @ query / np.sqrt(key_dim))
            out.append(np.concatenate(row))
        return np.array(out), held.reshape(-1)

    scales = 0 if channels else value_heads
    return Mixer((rule.columns, first + value_heads + decays + 1), rule.state_floats, run, compute, scales)


def make_space(heads: int, head_dim: int, groups: int, state_dim: int) -> Mixer:
    rng = np.random.default_rng([heads, head_dim, groups, state_dim])
    rates, bias, skip = (rng.uniform(0.1, 2, heads).astype(np.float32) for _ in range(3))
    space, first = StateSpace(heads, head_dim, groups, state_dim, -rates, bias, skip), 1

    def run(ctx: Context, inputs: Sequence[Any], batch: RaggedBatch, pool: PoolArray, at: int) -> Any:
        return mamba2(ctx, inputs[0], inputs[1], space, batch, pool, first=first, at=at)

    def compute(inputs: Sequence[Doubles], state: Doubles) -> tuple[Doubles, Doubles]:
        held, out = state.reshape(heads, state_dim, head_dim).copy(), []
        for xbc, steps in zip(*inputs, strict=True):
            u = xbc[: space.results].reshape(heads, head_dim)
            b, c = xbc[space.results :].reshape(2, groups, state_dim)
            size = np.log1p(np.exp(steps[first : first + heads] + bias))
            row = []
            for h in range(heads):
                own = h // (heads // groups)
                held[h] = held[h] * np.exp(-rates[h] * size[h]) + np.outer(b[own], size[h] * u[h])
                row.append(held[h].T @ c[own] + skip[h] * u[h])
            out.append(np.concatenate(row))
        return np.array(out), held.reshape(-1)

    return Mixer((space.columns, first + heads + 1), space.state_floats, run, compute, heads)


def make_scan(channels: int, state_dim: int) -> Mixer:
    rng = np.random.default_rng([channels, state_dim])
    rates, skip = rng.uniform(0.1, 2, (state_dim, channels)).astype(np.float32), rng.uniform(0.1, 2, channels)
    rule = SelectiveScan(-rates, skip.astype(np.float32))

    def run(ctx: Context, inputs: Sequence[Any], batch: RaggedBatch, pool: PoolArray, at: int) -> Any:
        return scan(ctx, *inputs, rule, batch, pool, at=at)

    def compute(inputs: Sequence[Doubles], state: Doubles) -> tuple[Doubles, Doubles]:
        held, out = state.reshape(state_dim, channels).copy(), []
        for u, steps, bc in zip(*inputs, strict=True):
            size = np.log1p(np.exp(steps))
            for channel in range(channels):
                held[:, channel] *= np.exp(-rates[:, channel] * size[channel])
                held[:, channel] += bc[:state_dim] * size[channel] * u[channel]
            out.append(bc[state_dim:] @ held + rule.skip * u)
        return np.array(out), held.reshape(-1)

    return Mixer((channels, channels, 2 * state_dim), rule.state_floats, run, compute)


MIXERS = {
    "gated convolution": make_convolution(3, 40, "gated", bias=False, first=1),
    "gated convolution with a bias": make_convolution(3, 17, "gated", bias=True),
    "convolution with silu": make_convolution(4, 100, "silu", bias=True, first=5),
    "convolution with silu, no bias": make_convolution(4, 33, "silu", bias=False),
    "plain convolution of one channel": make_convolution(2, 1, "plain", bias=False),
    "convolution of seven taps": make_convolution(7, 16, "plain", bias=True),
    "convolution without a state": make_convolution(1, 20, "plain", bias=False),
    "delta rule": make_delta(2, 4, 16, 40),
    "delta rule, tiled heads": make_delta(2, 4, 32, 32, tiled=True),
    "delta rule, odd sizes": make_delta(1, 3, 7, 5),
    "delta rule, a decay of each channel": make_delta(2, 2, 21, 48, channels=True),
    "delta rule, large heads": make_delta(1, 2, 128, 128),
    "mamba": make_space(4, 16, 2, 24),
    "mamba, odd sizes": make_space(3, 5, 1, 7),
    "mamba, large heads": make_space(2, 64, 1, 128),
}
ON_PROCESSORS = {  # which no GPU runs
    "scan": make_scan(64, 16),
    "scan, odd sizes": make_scan(21, 5),
    "scan, many channels": make_scan(200, 16),
    "delta rule, a bounded decay of each channel": make_delta(2, 2, 21, 48, channels=True, bound=-2.5),
    "delta rule, a bounded decay": make_delta(1, 2, 16, 40, bound=-0.7),
}
