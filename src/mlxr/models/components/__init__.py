"""The components that layers are made of: of each its sizes, its tensors, and its operators.

A component is frozen numbers that a family's file fills in. `tensors` says the names and shapes of its weights, and
`operators` reads these and says, in order, what is computed with them. All else follows from the two: what a file must
have, what the cache keeps, what several GPUs share, and what a step costs.
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
