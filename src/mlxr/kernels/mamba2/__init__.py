"""The recurrence of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), token by token."""

from __future__ import annotations

from dataclasses import dataclass

from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.states import check_states
from mlxr.kernels.tensor import FloatArray, PoolArray

__all__ = ["StateSpace", "mamba2"]

CHOICE = Choice(__name__)


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
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("mamba2", name, "decay of each head")
    result: FloatArray = implementation.mamba2(ctx, xbc, x, space, batch, pool, first, at)
    return result
