"""The weights of a model, ready to run."""

from __future__ import annotations

from dataclasses import dataclass

from mlxr.kernels.layers import Layers
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.tensor import FloatArray, TensorSource


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """The embedding `table` (vocabulary, hidden), the layers, the final norm (hidden,) and the output weight."""

    table: TensorSource
    layers: Layers
    norm: FloatArray
    eps: float
    output: LinearWeight

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a forward step reads, the few rows of the embedding table aside."""
        return self.layers.nbytes + self.norm.nbytes + self.output.nbytes
