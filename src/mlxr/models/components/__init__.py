"""The components that layers are made of: for each its sizes, its tensors, and its operators.

A component is frozen numbers that a family's file fills in. `tensors` lists the names and shapes of its weights, and
`operators` reads these and lists, in order, the operations with them. Everything else follows from the two: the tensors
that a file must have, the contents of the cache, the shares of several GPUs, and the cost of a step.
"""

from mlxr.models.components.attention import NO_ROPE, Attention, LatentAttention, Rope
from mlxr.models.components.encoder import Dense, Embeddings
from mlxr.models.components.feed_forward import DenseAndExperts, Experts, FeedForward
from mlxr.models.components.layer import (
    AltUp,
    BalancedStreams,
    Layer,
    LayerInputs,
    NgramInputs,
    ParallelMixers,
    Streams,
)
from mlxr.models.components.recurrent import ChannelDelta, GatedDelta, Mamba, Mamba2, Recurrence, ShortConv
from mlxr.models.components.weights import Norms, Weights

__all__ = [
    "NO_ROPE",
    "AltUp",
    "Attention",
    "BalancedStreams",
    "ChannelDelta",
    "Dense",
    "DenseAndExperts",
    "Embeddings",
    "Experts",
    "FeedForward",
    "GatedDelta",
    "LatentAttention",
    "Layer",
    "LayerInputs",
    "Mamba",
    "Mamba2",
    "NgramInputs",
    "Norms",
    "ParallelMixers",
    "Recurrence",
    "Rope",
    "ShortConv",
    "Streams",
    "Weights",
]
