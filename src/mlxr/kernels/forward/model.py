"""The weights of a model, ready to run."""

from __future__ import annotations

from dataclasses import dataclass

from mlxr.kernels.layers import Layers, NormWeight
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.tensor import TensorSource


@dataclass(frozen=True, slots=True)
class Ends:
    """By what a model multiplies its embeddings and its logits, and the cap of these: c tanh(logit / c), or None."""

    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None


PLAIN_ENDS = Ends()


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """The embedding `table` (vocabulary, hidden), the layers, the final norm and the output weight.

    `output_columns` are how many logits each of several ranks makes, none where one makes all.
    """

    table: TensorSource
    layers: Layers
    norm: NormWeight
    output: LinearWeight
    ends: Ends = PLAIN_ENDS
    output_columns: tuple[int, ...] = ()
