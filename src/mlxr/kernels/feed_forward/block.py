"""The weights of one layer's feed-forward block, ready to be called: what `prepare_feed_forward` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxr.kernels.activate import Activation
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.tensor import FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class FeedForwardBlock:
    """Weights of one layer's feed-forward block: `norm` (hidden,), `gate_up` two weights in one, `down`. What `payload`
    is only the implementation knows that made it."""

    norm: FloatArray
    eps: float
    gate_up: LinearWeight
    down: LinearWeight
    activation: Activation
    payload: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return self.norm.nbytes + self.gate_up.nbytes + self.down.nbytes
