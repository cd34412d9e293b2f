"""Recurrent mixers: the gated delta rule (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464), Mamba-2 (Dao and Gu
2024, arXiv:2405.21060), Mamba (Gu and Dao 2023, arXiv:2312.00752), all token by token, the short convolution before
them, which LFM2 (arXiv:2511.23404) has by itself, and the states that they keep.

A layer has a pool of states, and each of its operators a part of every slot. A batch names for each sequence the slot
with the state before its first token, and the slot for the state after its last one; no slot is both read and written
in one step.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from mlxr.core.frozen import frozen
from mlxr.kernels.arrays import empty
from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import NO_STATE, RaggedBatch
from mlxr.kernels.tensor import FLOAT32, FloatArray, IntArray, PoolArray


def check_states(operator: str, pool: PoolArray, at: int, floats: int, batch: RaggedBatch) -> None:
    """Check that the batch has slots of `pool` (slots, floats of a slot), each with the operator's `floats` at `at`."""
    slots, held = pool.shape
    if isinstance(pool, np.ndarray) and (pool.dtype != FLOAT32 or not pool.flags.c_contiguous):
        refuse(operator, "pool", f"{pool.dtype} with strides {pool.strides}", "float32, C-contiguous")
    if at < 0 or at + floats > held:
        refuse(operator, "floats of a slot", held, f"at least {at + floats}")
    if not batch.has_states:
        refuse(operator, "the batch", "without states", "slots for those of its sequences")
    highest = int(max(batch.state_reads.max(), batch.state_writes.max()))
    spares = 0 if isinstance(pool, np.ndarray) else 1  # a pool on a GPU has one more, for what is padded
    if highest >= slots + spares:
        refuse(operator, "slot", highest, f"below {slots}")


def place_states(batch: RaggedBatch, pool: PoolArray, at: int) -> tuple[PoolArray, int, IntArray, IntArray, IntArray]:
    """Return the arguments for states that native operators take."""
    return pool, at, batch.state_reads, batch.state_writes, batch.query_starts


def list_states(
    pool: FloatArray, at: int, floats: int, batch: RaggedBatch
) -> Iterator[tuple[slice, FloatArray, FloatArray]]:
    """Yield for each sequence its tokens, the state before them, and the place for that after them, both (floats,)."""
    for index in range(batch.sequences):
        tokens = slice(int(batch.query_starts[index]), int(batch.query_starts[index + 1]))
        read, write = int(batch.state_reads[index]), int(batch.state_writes[index])
        before = np.zeros(floats, np.float32) if read == NO_STATE else pool[read, at : at + floats].copy()
        yield tokens, before, pool[write, at : at + floats]


def read_heads(state: FloatArray, heads: int, rows: int, columns: int) -> FloatArray:
    """Return the numbers (heads, rows, columns) of a recurrence's state, each head multiplied by its scale.

    The scales (heads,), if there are any, come after the numbers; 0 means 1.
    """
    numbers, scales = np.split(state, [heads * rows * columns])
    if scales.size:
        numbers = numbers.reshape(heads, -1) * np.where(scales == 0, np.float32(1), scales)[:, None]
    return numbers.reshape(heads, rows, columns)


def write_heads(state: FloatArray, numbers: FloatArray) -> None:
    """Overwrite a recurrence's state with `numbers` (heads, rows, columns), and set its scales to 0."""
    state[: numbers.size] = numbers.reshape(-1)
    state[numbers.size :] = 0


ConvolutionKind = Literal["plain", "silu", "gated"]


@frozen(eq=False)
class Convolution:
    """A short causal convolution of each channel, whose state is its last inputs.

    It has the `weight` (taps, channels), the oldest input's first, and a `bias` (channels,) or None. The kind "silu"
    applies silu to the result. With "gated", rows are B | C | x, the input is B x, and the result is multiplied by C.
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
        """Columns of each row that are read."""
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


def make_convolution(
    weight: FloatArray | Sequence[FloatArray], bias: FloatArray | None, kind: ConvolutionKind, apart: int = 1
) -> Convolution:
    """Return a convolution from a file's weight (channels, taps), or from several that have some channels each.

    Its taps are `apart` tokens apart, with zeros between them.
    """
    whole = weight if isinstance(weight, np.ndarray) else np.concatenate(weight)
    taps: FloatArray = np.zeros(((whole.shape[1] - 1) * apart + 1, len(whole)), np.float32)
    taps[::apart] = whole.T
    return Convolution(taps, bias, kind)


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
    """Convolve sequence after sequence, all its tokens at once, one tap after another."""
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
    """Return x / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # exp(-x) may be infinite, and the result 0
        return (x / (np.float32(1) + np.exp(-x))).astype(np.float32)


def _short_conv_native(
    ctx: Context, x: FloatArray, conv: Convolution, batch: RaggedBatch, pool: FloatArray, first: int, at: int
) -> FloatArray:
    out = empty(ctx, x.shape[0], conv.channels)
    places = place_states(batch, pool, at)
    ctx.module.short_conv(ctx.native, x, first, conv.weight, conv.bias, conv.kind, out, *places)
    return out


SHORT_CONV = Choice("short_conv", run_short_conv, _short_conv_native, f"{__name__}.gpu")


EPS = 1e-6  # added to the squared lengths of queries and keys


@frozen(eq=False)
class DeltaRule:
    """A layer's gated delta rule: heads of `key_dim` and `value_dim`, and the numbers by which they forget.

    `rates` and `bias` are (value_heads,), or (value_heads * key_dim,) if each key channel forgets by itself; rates are
    -exp(A_log). With `is_tiled`, value head h reads key head h % key_heads, else h // (value_heads / key_heads). With a
    `bound` below 0, a step keeps at least e**bound of a state.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    rates: FloatArray
    bias: FloatArray
    is_tiled: bool = False
    bound: float = 0.0

    @property
    def columns(self) -> int:
        """Columns of queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def results(self) -> int:
        """Columns of the result."""
        return self.value_heads * self.value_dim

    @property
    def gates(self) -> int:
        """Columns of betas and steps together."""
        return self.value_heads + len(self.rates)

    @property
    def state_floats(self) -> int:
        """Numbers of a state: (value_heads, key_dim, value_dim), then with one decay of each head its scale."""
        return self.results * self.key_dim + (0 if self.decays_channels else self.value_heads)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.rates.nbytes + self.bias.nbytes

    @property
    def decays_channels(self) -> bool:
        """True if each key channel forgets by itself."""
        return len(self.rates) != self.value_heads

    def check(self, operator: str) -> None:
        """Raise ValueError for numbers that do not fit."""
        if self.key_heads < 1 or self.value_heads < 1 or self.value_heads % self.key_heads:
            refuse(operator, "value_heads", self.value_heads, f"a multiple of the {self.key_heads} key heads")
        for name, vector in (("rates", self.rates), ("bias", self.bias)):
            check_floats(operator, name, vector, 1)
            each = self.key_dim if self.decays_channels else 1
            check_size(operator, f"length of {name}", vector.shape[0], self.value_heads * each)
        if not -1e30 <= self.bound <= 0:
            refuse(operator, "bound", self.bound, "below 0, or 0 for none")


def _check_inputs(
    operator: str, arrays: Mapping[str, FloatArray], columns: int, first: int, gates: int, batch: RaggedBatch
) -> None:
    """Raise ValueError unless the first array is (T, columns) and the other has T rows with `gates` from `first` on."""
    (mixed, given), (_, x) = arrays.items()
    for name, array in arrays.items():
        check_floats(operator, name, array, 2)
    check_size(operator, f"columns of {mixed}", given.shape[1], columns)
    for name, array in arrays.items():
        check_size(operator, f"rows of {name}", array.shape[0], batch.tokens)
    if first < 0 or first + gates > x.shape[1]:
        refuse(operator, "first column", first, f"0 to {x.shape[1] - gates}")


def gated_delta(
    ctx: Context,
    qkv: FloatArray,
    x: FloatArray,
    rule: DeltaRule,
    batch: RaggedBatch,
    pool: PoolArray,
    *,
    first: int = 0,
    at: int = 0,
) -> FloatArray:
    """Apply the rule to each token's values: (T, value_heads * value_dim).

    qkv (T, columns) holds the heads of queries, keys and values; x holds from column `first` on a beta for each value
    head, and then the steps, as many as rates. For each token and value head, with q and k divided by their lengths
    and q by the root of key_dim:

        S = S * exp(rates * softplus(step + bias));  S = S + k (v - Sᵀk)ᵀ * sigmoid(beta);  out = Sᵀq

    With a bound S decays by exp(bound * sigmoid(-rates * (step + bias))) instead; a GPU has no such rule (DeviceError).

    The state is that of the sequence in its slot of `pool` from `at` on, as in `short_conv`. If each head has one
    decay, the head's numbers must be multiplied by its scale (0 means 1): the CPU keeps the product of the decays
    there, and need not multiply the numbers for each token. A GPU does not change the scales.
    """
    _check_inputs("gated_delta", {"qkv": qkv, "x": x}, rule.columns, first, rule.gates, batch)
    check_states("gated_delta", pool, at, rule.state_floats, batch)
    name, implementation = GATED_DELTA.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("gated_delta", name, "decay of each " + ("channel" if rule.decays_channels else "head"))
    return implementation(ctx, qkv, x, rule, batch, pool, first, at)


def run_gated_delta(
    ctx: Context,
    qkv: FloatArray,
    x: FloatArray,
    rule: DeltaRule,
    batch: RaggedBatch,
    pool: FloatArray,
    first: int,
    at: int,
) -> FloatArray:
    """Run the recurrence sequence after sequence, token after token."""
    keys, heads = rule.key_heads * rule.key_dim, rule.value_heads
    q = _spread(rule, normalise(qkv[:, :keys], rule.key_dim) * np.float32(rule.key_dim**-0.5))
    k = _spread(rule, normalise(qkv[:, keys : 2 * keys], rule.key_dim))
    v = qkv[:, 2 * keys :].reshape(-1, heads, rule.value_dim)
    with np.errstate(over="ignore"):
        beta = np.float32(1) / (np.float32(1) + np.exp(-x[:, first : first + heads]))
    steps = x[:, first + heads : first + heads + len(rule.rates)]
    if rule.bound:
        with np.errstate(over="ignore"):
            forgets = np.float32(rule.bound) / (np.float32(1) + np.exp(rule.rates * (steps + rule.bias)))
    else:
        forgets = rule.rates * softplus(steps + rule.bias)
    decay = np.exp(forgets).reshape(len(x), heads, -1, 1)
    out = np.empty((len(x), heads, rule.value_dim), np.float32)
    for tokens, before, after in list_states(pool, at, rule.state_floats, batch):
        state = read_heads(before, heads, rule.key_dim, rule.value_dim)
        for t in range(tokens.start, tokens.stop):
            state = state * decay[t]
            seen = (state * k[t, :, :, None]).sum(axis=1)
            state = state + k[t, :, :, None] * ((v[t] - seen) * beta[t, :, None])[:, None, :]
            out[t] = (state * q[t, :, :, None]).sum(axis=1)
        write_heads(after, state)
    return out.reshape(len(x), -1)


def normalise(x: FloatArray, width: int) -> FloatArray:
    """Return each group of `width` columns divided by its length: (rows, groups, width)."""
    groups = x.reshape(len(x), -1, width)
    result: FloatArray = groups / np.sqrt(np.square(groups).sum(axis=2, keepdims=True) + np.float32(EPS))
    return result


def softplus(x: FloatArray) -> FloatArray:
    """Return log(1 + exp(x))."""
    return np.logaddexp(x, np.float32(0))


def _spread(rule: DeltaRule, heads: FloatArray) -> FloatArray:
    """Return for each value head the key head that it reads."""
    own = np.arange(rule.value_heads)
    return heads[:, own % rule.key_heads if rule.is_tiled else own // (rule.value_heads // rule.key_heads)]


def _gated_delta_native(
    ctx: Context,
    qkv: FloatArray,
    x: FloatArray,
    rule: DeltaRule,
    batch: RaggedBatch,
    pool: FloatArray,
    first: int,
    at: int,
) -> FloatArray:
    out = empty(ctx, x.shape[0], rule.results)
    ctx.module.gated_delta(
        ctx.native,
        qkv,
        x,
        first,
        rule.rates,
        rule.bias,
        rule.key_heads,
        rule.value_heads,
        rule.key_dim,
        rule.is_tiled,
        EPS,
        rule.key_dim**-0.5,
        rule.bound,
        out,
        *place_states(batch, pool, at),
    )
    return out


GATED_DELTA = Choice("gated_delta", run_gated_delta, _gated_delta_native, f"{__name__}.gpu")


@frozen(eq=False)
class StateSpace:
    """A layer of Mamba-2: `heads` of `head_dim` columns, and `groups` of B and C of `state_dim`.

    `rates` (-exp(A_log)), `bias` of the steps and `skip` (D) are (heads,). Head h reads group h // (heads / groups).
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    rates: FloatArray
    bias: FloatArray
    skip: FloatArray

    @property
    def results(self) -> int:
        """Columns of the result."""
        return self.heads * self.head_dim

    @property
    def columns(self) -> int:
        """Columns of x, B and C together."""
        return self.results + 2 * self.groups * self.state_dim

    @property
    def gates(self) -> int:
        """Columns of the steps."""
        return self.heads

    @property
    def state_floats(self) -> int:
        """Numbers of a state: (heads, state_dim, head_dim), then a scale of each head, as in `gated_delta`."""
        return self.results * self.state_dim + self.heads

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.rates.nbytes + self.bias.nbytes + self.skip.nbytes

    def check(self, operator: str) -> None:
        """Raise ValueError for numbers that do not fit."""
        if self.groups < 1 or self.heads < 1 or self.heads % self.groups:
            refuse(operator, "heads", self.heads, f"a multiple of the {self.groups} groups")
        for name, vector in (("rates", self.rates), ("bias", self.bias), ("skip", self.skip)):
            check_floats(operator, name, vector, 1)
            check_size(operator, f"length of {name}", vector.shape[0], self.heads)


def mamba2(
    ctx: Context,
    xbc: FloatArray,
    x: FloatArray,
    space: StateSpace,
    batch: RaggedBatch,
    pool: PoolArray,
    *,
    first: int = 0,
    at: int = 0,
) -> FloatArray:
    """Run the state space over the tokens of the batch: (T, results).

    xbc (T, columns) has the columns u, B and C; x has a step for each head from column `first` on. For each token and
    head, with d = softplus(step + bias):

        S = S * exp(rate * d) + B (u * d)ᵀ;  out = SᵀC + skip * u

    The state is that of the sequence in its slot of `pool` from `at` on, as in `short_conv`.
    """
    _check_inputs("mamba2", {"xbc": xbc, "x": x}, space.columns, first, space.heads, batch)
    check_states("mamba2", pool, at, space.state_floats, batch)
    name, implementation = MAMBA2.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("mamba2", name, "decay of each head")
    return implementation(ctx, xbc, x, space, batch, pool, first, at)


def run_mamba2(
    ctx: Context,
    xbc: FloatArray,
    x: FloatArray,
    space: StateSpace,
    batch: RaggedBatch,
    pool: FloatArray,
    first: int,
    at: int,
) -> FloatArray:
    """Run the recurrence sequence after sequence, token after token."""
    heads, groups = space.heads, space.groups * space.state_dim
    u = xbc[:, : space.results].reshape(-1, heads, space.head_dim)
    b, c = (
        part.reshape(len(xbc), space.groups, space.state_dim).repeat(heads // space.groups, axis=1)
        for part in (xbc[:, space.results : space.results + groups], xbc[:, space.results + groups :])
    )
    steps = softplus(x[:, first : first + heads] + space.bias)
    decay = np.exp(space.rates * steps)[:, :, None, None]
    scaled = u * steps[:, :, None]
    out = np.empty_like(u)
    for tokens, before, after in list_states(pool, at, space.state_floats, batch):
        state = read_heads(before, heads, space.state_dim, space.head_dim)
        for t in range(tokens.start, tokens.stop):
            state = state * decay[t] + b[t, :, :, None] * scaled[t, :, None, :]
            out[t] = (state * c[t, :, :, None]).sum(axis=1) + space.skip[:, None] * u[t]
        write_heads(after, state)
    return out.reshape(len(x), -1)


def _mamba2_native(
    ctx: Context,
    xbc: FloatArray,
    x: FloatArray,
    space: StateSpace,
    batch: RaggedBatch,
    pool: FloatArray,
    first: int,
    at: int,
) -> FloatArray:
    out = empty(ctx, x.shape[0], space.results)
    numbers = space.rates, space.bias, space.skip, space.groups, space.state_dim
    ctx.module.mamba2(ctx.native, xbc, x, first, *numbers, out, *place_states(batch, pool, at))
    return out


MAMBA2 = Choice("mamba2", run_mamba2, _mamba2_native, f"{__name__}.gpu")


@frozen(eq=False)
class SelectiveScan:
    """A layer of Mamba: `rates` (state_dim, channels), which are -exp(A_log), and `skip` (channels,), which is D."""

    rates: FloatArray
    skip: FloatArray

    @property
    def channels(self) -> int:
        """Columns of the result."""
        return int(self.rates.shape[1])

    @property
    def state_dim(self) -> int:
        """Numbers of a channel's state."""
        return int(self.rates.shape[0])

    @property
    def state_floats(self) -> int:
        """Numbers of a state: (state_dim, channels)."""
        return self.rates.size

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.rates.nbytes + self.skip.nbytes

    def check(self, operator: str) -> None:
        """Raise ValueError for numbers that do not fit."""
        check_floats(operator, "rates", self.rates, 2)
        check_floats(operator, "skip", self.skip, 1)
        check_size(operator, "length of skip", self.skip.shape[0], self.channels)


def make_scan(rates: FloatArray, skip: FloatArray) -> SelectiveScan:
    """Return a scan from a file's rates (channels, state_dim)."""
    return SelectiveScan(np.ascontiguousarray(rates.T), skip)


def scan(
    ctx: Context,
    u: FloatArray,
    steps: FloatArray,
    bc: FloatArray,
    rule: SelectiveScan,
    batch: RaggedBatch,
    pool: PoolArray,
    *,
    at: int = 0,
) -> FloatArray:
    """Scan u (T, channels) with a state of each channel; return (T, channels).

    `steps` are (T, channels) and bc (T, 2 * state_dim) holds B and C of all channels. For each token and channel, with
    d = softplus(step):

        S = S * exp(rates * d) + B (u * d);  out = S C + skip * u

    The state is that of the sequence in its slot of `pool` from `at` on, as in `short_conv`. A GPU has no such operator
    (DeviceError).
    """
    for name, array, columns in (
        ("u", u, rule.channels),
        ("steps", steps, rule.channels),
        ("bc", bc, 2 * rule.state_dim),
    ):
        check_floats("scan", name, array, 2)
        check_size("scan", f"columns of {name}", array.shape[1], columns)
        check_size("scan", f"rows of {name}", array.shape[0], batch.tokens)
    check_states("scan", pool, at, rule.state_floats, batch)
    name, implementation = SCAN.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("scan", name, "decay of each number")
    return implementation(ctx, u, steps, bc, rule, batch, pool, at)


def run_scan(
    ctx: Context,
    u: FloatArray,
    steps: FloatArray,
    bc: FloatArray,
    rule: SelectiveScan,
    batch: RaggedBatch,
    pool: FloatArray,
    at: int,
) -> FloatArray:
    """Run the recurrence sequence after sequence, token after token."""
    b, c = bc[:, : rule.state_dim, None], bc[:, rule.state_dim :, None]
    sizes, out = softplus(steps), np.empty_like(u)
    for tokens, before, after in list_states(pool, at, rule.state_floats, batch):
        state = before.reshape(rule.rates.shape)
        for t in range(tokens.start, tokens.stop):
            state = state * np.exp(rule.rates * sizes[t]) + b[t] * (u[t] * sizes[t])
            out[t] = (state * c[t]).sum(axis=0) + rule.skip * u[t]
        after[:] = state.reshape(-1)
    return out


def _scan_native(
    ctx: Context,
    u: FloatArray,
    steps: FloatArray,
    bc: FloatArray,
    rule: SelectiveScan,
    batch: RaggedBatch,
    pool: FloatArray,
    at: int,
) -> FloatArray:
    out = empty(ctx, *u.shape)
    ctx.module.scan(ctx.native, u, steps, bc, rule.rates, rule.skip, out, *place_states(batch, pool, at))
    return out


SCAN = Choice("scan", run_scan, _scan_native)
