"""Native `forward`: csrc/layers/blocks.cpp, from ids to logits in one call, where the logits of all tokens are wanted.

That is so when decoding. Of a prompt one row is wanted, which is picked between the layers and the output.
"""

from __future__ import annotations

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import NO_SOFTCAP
from mlxr.kernels.forward import reference
from mlxr.kernels.forward.model import ModelWeights
from mlxr.kernels.layers import StepInput
from mlxr.kernels.layers.cpu import list_arrays
from mlxr.kernels.tensor import FloatArray


def forward(ctx: Context, model: ModelWeights, step: StepInput) -> FloatArray:
    """Run the whole model in one call."""
    batch, norm = step.batch, model.norm
    if len(batch.output_rows) != batch.tokens or not model.layers.layers:
        return reference.forward(ctx, model, step)
    logits = empty(ctx, batch.tokens, model.output.out_features)
    ctx.module.forward(
        ctx.native,
        model.layers.payload,
        model.table.type_name,
        model.table.data,
        norm.weight,
        norm.bias,
        norm.eps,
        norm.kind == "layer",
        model.output.payload,
        logits,
        *list_arrays(step),
        model.ends.embedding_scale,
        model.ends.logit_scale,
        model.ends.softcap or NO_SOFTCAP,
    )
    return logits
