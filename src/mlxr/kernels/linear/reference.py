"""Reference of `linear`: decode everything to float32, then one matrix product.

Takes four bytes per weight. A row's last bits may depend on the number of rows, as NumPy's product does.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.tensor import FloatArray, TensorSource

Payload = tuple[FloatArray, FloatArray | None]


def prepare(
    ctx: Context, tensors: Sequence[TensorSource], biases: Sequence[FloatArray | None] | None
) -> tuple[Payload, int]:
    """The decoded matrices on top of each other, the biases one after another, and their bytes."""
    rows = sum(tensor.shape[0] for tensor in tensors)
    matrix = np.empty((rows, tensors[0].shape[1]), np.float32)
    bias = np.zeros(rows, np.float32) if biases is not None and any(b is not None for b in biases) else None
    start = 0
    for index, tensor in enumerate(tensors):
        stop = start + tensor.shape[0]
        matrix[start:stop] = tensor.to_float32()
        tensor.release()
        part = biases[index] if biases is not None else None
        if bias is not None and part is not None:
            bias[start:stop] = part
        start = stop
    return (matrix, bias), matrix.nbytes + (0 if bias is None else bias.nbytes)


def linear(ctx: Context, x: FloatArray, weight: LinearWeight) -> FloatArray:
    """Return x Wᵀ + b in float32."""
    matrix, bias = weight.payload
    result: FloatArray = x @ matrix.T
    if bias is not None:
        result += bias
    return result
