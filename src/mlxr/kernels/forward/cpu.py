"""Native `forward`: csrc/blocks.cpp, from token ids to logits in one call, where the logits of all tokens are wanted.

That is so when decoding. Of a prompt one row is wanted, which is picked between the layers and the output.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.forward import reference
from mlxr.kernels.forward.model import Ends, ModelWeights
from mlxr.kernels.layers import StepInput
from mlxr.kernels.layers.cpu import Counted, list_arrays, name_ropes
from mlxr.kernels.ledger import Part
from mlxr.kernels.scale.cpu import NO_SOFTCAP
from mlxr.kernels.tensor import FloatArray, pool_type

_NAME = "cpu"


def forward(ctx: Context, model: ModelWeights, step: StepInput) -> FloatArray:
    """One call; the ledger counts the operators in it."""
    batch, norm = step.batch, model.norm
    if len(batch.output_rows) != batch.tokens or not model.layers.layers:
        return reference.forward(ctx, model, step)
    logits = empty(ctx, batch.tokens, model.output.out_features)
    ctx.module.forward(
        ctx.native,
        model.layers.payload.native,
        batch.token_ids,
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
    counted, kinds = model.layers.payload.counted, (model.table.type_name, norm.kind, model.output.variant)
    ctx.ledger.count_parts(_list_parts, counted, model.ends, *kinds, name_ropes(step), pool_type(step.k_pools[0]))
    return logits


def _list_parts(
    counted: Counted, ends: Ends, table: str, norm: str, output: str, ropes: tuple[str, ...], kv_type: str
) -> Iterator[Part]:
    """All operators of one run."""
    yield ("embed", _NAME, table)
    if ends.embedding_scale != 1.0:
        yield ("scale", _NAME, "f32")
    yield from counted.list_parts(ropes, kv_type)
    yield from ((f"{norm}_norm", _NAME, "f32+residual"), ("linear", _NAME, output))
    if ends.logit_scale != 1.0 or ends.softcap is not None:
        yield ("scale", _NAME, "f32" if ends.softcap is None else "f32+softcap")
