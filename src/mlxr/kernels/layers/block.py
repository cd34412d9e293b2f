"""The weights of layers, ready to run: those of the two blocks of a layer, and layers that run as one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxr.kernels.activate import Activation
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.tensor import FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBlock:
    """Weights of one layer's self-attention: `norm` (hidden,), `qkv` three weights in one, `output`; `q_norm` and
    `k_norm` (head_dim,) norm each head, or are None; `group` says which slots and page table of a batch are its own."""

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
    group: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all weights together."""
        norms = [norm for norm in (self.norm, self.q_norm, self.k_norm) if norm is not None]
        return self.qkv.nbytes + self.output.nbytes + sum(norm.nbytes for norm in norms)

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True, eq=False)
class FeedForwardBlock:
    """Weights of one layer's feed-forward block: `norm` (hidden,), `gate_up` two weights in one, `down`."""

    norm: FloatArray
    eps: float
    gate_up: LinearWeight
    down: LinearWeight
    activation: Activation

    @property
    def nbytes(self) -> int:
        """Bytes of all weights together."""
        return self.norm.nbytes + self.gate_up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The two blocks of one layer."""

    attention: AttentionBlock
    feed_forward: FeedForwardBlock

    @property
    def nbytes(self) -> int:
        """Bytes of all weights together."""
        return self.attention.nbytes + self.feed_forward.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Layers that run one after another. What `payload` is only the implementation knows that made it."""

    layers: tuple[Layer, ...]
    payload: Any

    @property
    def nbytes(self) -> int:
        """Bytes of weights: what one forward step reads."""
        return sum(layer.nbytes for layer in self.layers)
