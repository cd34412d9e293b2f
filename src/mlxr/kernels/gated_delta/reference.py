"""NumPy reference of `gated_delta`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.gated_delta import EPS, DeltaRule
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.states import list_states, read_heads, write_heads
from mlxr.kernels.tensor import FloatArray


def gated_delta(
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
