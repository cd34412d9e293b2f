"""All of a model as one operator: token ids and pages in, logits out.

The reference calls the operators one by one. An implementation of its own computes the same bits and saves what lies
between them: each return to the interpreter costs it what the weights have driven out of the caches since the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import Choice
from mlxr.kernels.context import Context
from mlxr.kernels.forward.model import PLAIN_ENDS, Ends, ModelWeights
from mlxr.kernels.layers import Layers
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.tensor import FloatArray, PoolArray, TensorSource

__all__ = ["Ends", "ModelWeights", "forward", "make_model"]

CHOICE = Choice(__name__)


def make_model(
    table: TensorSource,
    layers: Layers,
    norm: FloatArray,
    eps: float,
    output: LinearWeight,
    ends: Ends = PLAIN_ENDS,
) -> ModelWeights:
    """Weights that were prepared, as one model. Raises ValueError for shapes that do not fit."""
    check_floats("forward", "norm", norm, 1)
    check_size("forward", "length of norm", norm.shape[0], table.shape[1])
    check_size("forward", "in_features of output", output.in_features, table.shape[1])
    if ends.softcap is not None and not 0 < ends.softcap < math.inf:
        refuse("forward", "softcap", ends.softcap, "a number above 0")
    if not (math.isfinite(ends.embedding_scale) and math.isfinite(ends.logit_scale)):
        refuse("forward", "scales", f"{ends.embedding_scale} and {ends.logit_scale}", "finite numbers")
    return ModelWeights(table, layers, norm, eps, output, ends)


def forward(
    ctx: Context,
    model: ModelWeights,
    batch: RaggedBatch,
    rope: RopeTable,
    k_pools: Sequence[PoolArray],
    v_pools: Sequence[PoolArray],
) -> FloatArray:
    """Logits (R, vocabulary) of the output rows; keys and values of the batch go into the pools, two per layer.

    Raises ValueError for shapes that do not fit, for tokens outside the vocabulary, for positions that the table does
    not cover and for slots and pages outside the pools.
    """
    _, implementation = CHOICE.pick(ctx.device)
    logits: FloatArray = implementation.forward(ctx, model, batch, rope, k_pools, v_pools)
    return logits
