"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464), token by token."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlxr.kernels.arrays import empty
from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, FunctionChoice
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.recurrent import check_states, list_states, place_states, read_heads, write_heads
from mlxr.kernels.tensor import FloatArray, PoolArray

EPS = 1e-6  # of the lengths of queries and keys


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRule:
    """The shapes and numbers of a layer: heads of `key_dim` and `value_dim`, and how they forget.

    `rates` and `bias` are (value_heads,), or (value_heads * key_dim,) where each key channel forgets by itself; rates
    are -exp(A_log). With `is_tiled` value head h reads key head h % key_heads, else h // (value_heads / key_heads).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    rates: FloatArray
    bias: FloatArray
    is_tiled: bool = False

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
        """Whether each key channel forgets by itself."""
        return len(self.rates) != self.value_heads

    def check(self, operator: str) -> None:
        """Raise ValueError for numbers that do not fit."""
        if self.key_heads < 1 or self.value_heads < 1 or self.value_heads % self.key_heads:
            refuse(operator, "value_heads", self.value_heads, f"a multiple of the {self.key_heads} key heads")
        for name, vector in (("rates", self.rates), ("bias", self.bias)):
            check_floats(operator, name, vector, 1)
            each = self.key_dim if self.decays_channels else 1
            check_size(operator, f"length of {name}", vector.shape[0], self.value_heads * each)


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

    The state is that of the sequence in its slot of `pool` from `at` on, as in `short_conv`. Where each head has one
    decay, its numbers are to be multiplied by its scale, where 0 says 1: so the CPU keeps the product of the decays
    beside the numbers and need not multiply these for each token. A GPU leaves the scales as they are.
    """
    check_floats("gated_delta", "qkv", qkv, 2)
    check_floats("gated_delta", "x", x, 2)
    check_size("gated_delta", "columns of qkv", qkv.shape[1], rule.columns)
    for name, array in (("qkv", qkv), ("x", x)):
        check_size("gated_delta", f"rows of {name}", array.shape[0], batch.tokens)
    if first < 0 or first + rule.gates > x.shape[1]:
        refuse("gated_delta", "first column", first, f"0 to {x.shape[1] - rule.gates}")
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
    """Sequence after sequence, token after token."""
    keys, heads = rule.key_heads * rule.key_dim, rule.value_heads
    q = _spread(rule, normalise(qkv[:, :keys], rule.key_dim) * np.float32(rule.key_dim**-0.5))
    k = _spread(rule, normalise(qkv[:, keys : 2 * keys], rule.key_dim))
    v = qkv[:, 2 * keys :].reshape(-1, heads, rule.value_dim)
    with np.errstate(over="ignore"):
        beta = np.float32(1) / (np.float32(1) + np.exp(-x[:, first : first + heads]))
    steps = x[:, first + heads : first + heads + len(rule.rates)]
    decay = np.exp(rule.rates * softplus(steps + rule.bias)).reshape(len(x), heads, -1, 1)
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
    """Each group of `width` columns divided by its length: (rows, groups, width)."""
    groups = x.reshape(len(x), -1, width)
    result: FloatArray = groups / np.sqrt(np.square(groups).sum(axis=2, keepdims=True) + np.float32(EPS))
    return result


def softplus(x: FloatArray) -> FloatArray:
    """Return log(1 + exp(x))."""
    return np.logaddexp(x, np.float32(0))


def _spread(rule: DeltaRule, heads: FloatArray) -> FloatArray:
    """For each value head the key head that it reads."""
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
        out,
        *place_states(batch, pool, at),
    )
    return out


GATED_DELTA = FunctionChoice("gated_delta", run_gated_delta, _gated_delta_native, "mlxr.kernels.recurrent.gpu")
