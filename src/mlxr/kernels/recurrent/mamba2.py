"""The recurrence of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), token by token."""

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


@dataclass(frozen=True, slots=True, eq=False)
class StateSpace:
    """The shapes and numbers of a layer: `heads` of `head_dim` columns, `groups` of B and C of `state_dim`.

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
        """Columns of the steps that it takes in."""
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
    """What the columns give: (T, results).

    xbc (T, columns) holds the columns u, B and C; x holds from column `first` on a step for each head. For each token
    and head, with d = softplus(step + bias):

        S = S * exp(rate * d) + B (u * d)ᵀ;  out = SᵀC + skip * u

    The state is that of the sequence in its slot of `pool` from `at` on, as in `short_conv`.
    """
    check_floats("mamba2", "xbc", xbc, 2)
    check_floats("mamba2", "x", x, 2)
    check_size("mamba2", "columns of xbc", xbc.shape[1], space.columns)
    for name, array in (("xbc", xbc), ("x", x)):
        check_size("mamba2", f"rows of {name}", array.shape[0], batch.tokens)
    if first < 0 or first + space.heads > x.shape[1]:
        refuse("mamba2", "first column", first, f"0 to {x.shape[1] - space.heads}")
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


MAMBA2 = FunctionChoice("mamba2", run_mamba2, _mamba2_native, "mlxr.kernels.recurrent.gpu")
