"""`linear` on the CPU: raw blocks are repacked natively into rows interleaved for the vector units, once, at load.

Knows neither layout nor kernels; the native module does. The payload of a weight is its `LinearWeight` object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxr.core.errors import DeviceError, ModelError
from mlxr.core.tables import WEIGHT_TYPES
from mlxr.kernels.arrays import empty
from mlxr.kernels.context import Context
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.tensor import FloatArray, TensorSource

TYPES = tuple(row.name for row in WEIGHT_TYPES)


def prepare(
    ctx: Context, tensors: Sequence[TensorSource], biases: Sequence[FloatArray | None] | None
) -> tuple[Any, int]:
    """The repacked weight and its bytes. Each source is released as soon as it is repacked.

    Raises DeviceError for a type without a kernel, ValueError for columns the type does not allow.
    """
    _check_types(tensors)
    weight = ctx.module.LinearWeight(tensors[0].shape[1])
    for index, tensor in enumerate(tensors):
        bias = biases[index] if biases is not None else None
        weight.append(ctx.native, tensor.type_name, tensor.shape[0], tensor.data, bias)
        tensor.release()
    return weight, weight.nbytes


def leave(ctx: Context, tensors: Sequence[TensorSource], biases: Sequence[FloatArray | None] | None) -> tuple[Any, int]:
    """The weight with its blocks where they are, and its bytes when they are repacked.

    Raises as `prepare` does, and ModelError for a tensor that is no view of a mapped file.
    """
    _check_types(tensors)
    weight = ctx.module.LinearWeight(tensors[0].shape[1])
    for index, tensor in enumerate(tensors):
        if not tensor.is_mapped:
            raise ModelError(
                f"tensor {tensor.name} is laid out anew when it is read, so it cannot stay in its file, and there is "
                "no memory for all experts; convert the model to GGUF with `mlxr convert`, or raise expert_bytes"
            )
        bias = biases[index] if biases is not None else None
        weight.leave(tensor.type_name, tensor.shape[0], tensor.data, bias)
    return weight, weight.nbytes


def _check_types(tensors: Sequence[TensorSource]) -> None:
    for tensor in tensors:
        if tensor.type_name not in TYPES:
            known = ", ".join(TYPES)
            raise DeviceError(
                f"tensor {tensor.name} has type {tensor.type_name}, which has no CPU kernel; known are {known}"
            )


def linear(ctx: Context, x: FloatArray, weight: LinearWeight) -> FloatArray:
    """x Wᵀ + b; the same bits for a row of x whatever the other rows, the threads and the instruction set."""
    out = empty(ctx, x.shape[0], weight.out_features)
    ctx.module.linear(ctx.native, x, weight.payload, out)
    return out
