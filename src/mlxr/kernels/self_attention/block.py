"""The weights of one layer's self-attention, ready to be called: what `prepare_attention` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.tensor import FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBlock:
    """Weights of one layer's self-attention: `norm` (hidden,), `qkv` three weights in one, `output`; `q_norm` and
    `k_norm` (head_dim,) norm each head, or are None. What `payload` is only the implementation knows that made it."""

    norm: FloatArray
    eps: float
    qkv: LinearWeight
    q_norm: FloatArray | None
    k_norm: FloatArray | None
    output: LinearWeight
    heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int | None
    payload: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        norms = [norm for norm in (self.norm, self.q_norm, self.k_norm) if norm is not None]
        return self.qkv.nbytes + self.output.nbytes + sum(norm.nbytes for norm in norms)

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return float(self.head_dim**-0.5)
