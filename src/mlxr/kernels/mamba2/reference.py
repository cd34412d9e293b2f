"""NumPy reference of `mamba2`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.mamba2 import StateSpace
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.states import list_states, read_heads, write_heads
from mlxr.kernels.tensor import FloatArray


def mamba2(
    ctx: Context,
    xbc: FloatArray,
    x: FloatArray,
    space: StateSpace,
    batch: RaggedBatch,
    pool: FloatArray,
    first: int,
    at: int,
) -> FloatArray:
    """Sequence after sequence, token after token."""
    heads, groups = space.heads, space.groups * space.state_dim
    u = xbc[:, : space.results].reshape(-1, heads, space.head_dim)
    b, c = (
        part.reshape(len(xbc), space.groups, space.state_dim).repeat(heads // space.groups, axis=1)
        for part in (xbc[:, space.results : space.results + groups], xbc[:, space.results + groups :])
    )
    steps = np.logaddexp(x[:, first : first + heads] + space.bias, np.float32(0))
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
