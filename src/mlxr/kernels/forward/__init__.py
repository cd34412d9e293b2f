"""All of a model as one operator: token ids and pages in, logits out.

The reference calls the operators one by one. An implementation of its own computes the same bits and saves what lies
between them: each return to the interpreter costs it what the weights have driven out of the caches since the last one.
"""

from __future__ import annotations

import math

from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import Choice
from mlxr.kernels.context import Context
from mlxr.kernels.forward.model import Ends, ModelWeights
from mlxr.kernels.layers import StepInput
from mlxr.kernels.tensor import FloatArray

__all__ = ["Ends", "ModelWeights", "forward", "make_model"]

CHOICE = Choice(__name__)


def make_model(model: ModelWeights) -> ModelWeights:
    """Weights that were prepared, as one model. Raises ValueError for shapes that do not fit."""
    columns = model.table.shape[1]
    check_floats("forward", "norm", model.norm.weight, 1)
    check_size("forward", "length of norm", model.norm.weight.shape[0], columns)
    check_size("forward", "in_features of output", model.output.in_features, columns)
    ends = model.ends
    if ends.softcap is not None and not 0 < ends.softcap < math.inf:
        refuse("forward", "softcap", ends.softcap, "a number above 0")
    if not (math.isfinite(ends.embedding_scale) and math.isfinite(ends.logit_scale)):
        refuse("forward", "scales", f"{ends.embedding_scale} and {ends.logit_scale}", "finite numbers")
    return model


def forward(ctx: Context, model: ModelWeights, step: StepInput) -> FloatArray:
    """Logits (R, vocabulary) of the output rows; keys and values of the batch go into the step's pools.

    Raises ValueError for shapes that do not fit, for tokens outside the vocabulary, for positions that the tables do
    not cover and for slots and pages outside the pools.
    """
    _, implementation = CHOICE.pick(ctx.device)
    logits: FloatArray = implementation.forward(ctx, model, step)
    return logits
