"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464), token by token."""

from __future__ import annotations

from dataclasses import dataclass

from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.states import check_states
from mlxr.kernels.tensor import FloatArray, PoolArray

__all__ = ["DeltaRule", "gated_delta"]

CHOICE = Choice(__name__)
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
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("gated_delta", name, "decay of each " + ("channel" if rule.decays_channels else "head"))
    result: FloatArray = implementation.gated_delta(ctx, qkv, x, rule, batch, pool, first, at)
    return result
