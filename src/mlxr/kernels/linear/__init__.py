"""Matrix product with weights of any type, one or several at once: y = x Wᵀ + b.

Weights that share their input (query, key and value; gate and up) are prepared together and multiply as one, so that
the input is quantised once. `prepare` hands the raw blocks to the implementation, which lays them out for its kernels;
models see only `LinearWeight`.

On the CPU the bits of a row of the result do not depend on other rows, threads and instruction set.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlxr.core.errors import DeviceError, ModelError
from mlxr.core.frozen import frozen
from mlxr.core.tables import WEIGHT_TYPES
from mlxr.kernels.arrays import empty, fetch_rows, place_rows
from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import Hadamard
from mlxr.kernels.tensor import FloatArray, TensorSource

PROBES = 4  # rows by which products are compared
_TYPES = tuple(row.name for row in WEIGHT_TYPES)  # types with native kernels


@frozen(eq=False)
class LinearWeight:
    """A weight, or several that share their input, ready to multiply with."""

    in_features: int
    splits: tuple[int, ...]  # output features of each, one after another
    nbytes: int  # bytes in memory
    variant: str  # the weight types: "q4_k", "q4_k+q6_k"
    implementation: str  # the implementation that made the payload
    payload: Any  # an object that only the implementation knows
    names: tuple[str, ...] = ()  # the model's names of the tensors, if adapters may update them
    rotation: Hadamard | None = None  # rotation of its rows, which the input needs, too
    is_share: bool = False  # True if other ranks have the other inputs, so that the product is part of a sum

    @property
    def out_features(self) -> int:
        """The number of output features of all parts together."""
        return sum(self.splits)


def prepare(
    ctx: Context,
    tensors: Sequence[TensorSource],
    biases: Sequence[FloatArray | None] | None = None,
    names: tuple[str, ...] = (),
) -> LinearWeight:
    """Make one weight of `tensors`, each (out_features, in_features) with the same in_features.

    `biases` has for each tensor a float32 vector (out_features,), or None. `names` are the model's names of the
    tensors. The sources are released after reading. Raises ValueError for shapes that do not fit, DeviceError for a
    type the implementation lacks.
    """
    _check(tensors, biases)
    name, implementation = PREPARE.pick(ctx.device)
    payload, nbytes = implementation(ctx, tensors, biases)
    return _describe(name, tensors, payload, nbytes, names)


def leave(
    ctx: Context,
    tensors: Sequence[TensorSource],
    biases: Sequence[FloatArray | None] | None = None,
    names: tuple[str, ...] = (),
) -> LinearWeight:
    """Make a weight as `prepare` does, but leave the blocks in their mapped files, where `linear` reads them each time.

    It is for weights that `moe` loads and unloads; `nbytes` are the bytes while it is loaded. Raises ModelError for a
    tensor that is not mapped, DeviceError for a device that reads no weights from files.
    """
    _check(tensors, biases)
    if ctx.device != "cpu":
        raise DeviceError(f"device {ctx.device!r} keeps all weights in memory; only 'cpu' reads some of the file")
    payload, nbytes = _leave_native(ctx, tensors, biases)
    return _describe("cpu", tensors, payload, nbytes, names)


def _check(tensors: Sequence[TensorSource], biases: Sequence[FloatArray | None] | None) -> None:
    if not tensors:
        refuse("linear.prepare", "tensors", "empty", "at least one tensor")
    for tensor in tensors:
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            refuse("linear.prepare", f"tensor {tensor.name}", f"of shape {tensor.shape}", "(out_features, in_features)")
        check_size("linear.prepare", f"in_features of {tensor.name}", tensor.shape[1], tensors[0].shape[1])
    if biases is not None:
        check_size("linear.prepare", "number of biases", len(biases), len(tensors))
        for tensor, bias in zip(tensors, biases, strict=True):
            if bias is not None:
                check_floats("linear.prepare", f"bias of {tensor.name}", bias, 1)
                check_size("linear.prepare", f"length of bias of {tensor.name}", bias.shape[0], tensor.shape[0])


def _describe(
    name: str, tensors: Sequence[TensorSource], payload: object, nbytes: int, names: tuple[str, ...]
) -> LinearWeight:
    return LinearWeight(
        in_features=tensors[0].shape[1],
        splits=tuple(tensor.shape[0] for tensor in tensors),
        nbytes=nbytes,
        variant="+".join(dict.fromkeys(tensor.type_name for tensor in tensors)),
        implementation=name,
        payload=payload,
        names=names,
    )


def linear(ctx: Context, x: FloatArray, weight: LinearWeight) -> FloatArray:
    """Return x (T, in_features) times `weight`: (T, out_features), the outputs of its parts side by side."""
    check_floats("linear", "x", x, 2)
    check_size("linear", "columns of x", x.shape[1], weight.in_features)
    name, implementation = LINEAR.pick(ctx.device)
    if weight.implementation != name:
        refuse("linear", "weight", f"prepared for {weight.implementation}", name)
    if not x.shape[0] and ctx.gpu is None:
        return np.empty((0, weight.out_features), np.float32)
    if name == REFERENCE:
        ctx.ledger.count("linear", name, weight.variant)
    return implementation(ctx, x, weight)


def compare_products(ctx: Context, weight: LinearWeight, reference_ctx: Context, reference: LinearWeight) -> float:
    """Return the largest error of an output of `weight`, relative to the outputs' rms, for inputs of 1 and -1.

    Such inputs are exact in every format to which activations are rounded. `reference` is the same weight, prepared for
    the reference device.
    """
    signs = np.random.default_rng(1).choice(np.array([-1, 1], np.float32), (PROBES, weight.in_features))
    outputs = fetch_rows(ctx, linear(ctx, place_rows(ctx, signs), weight))
    wanted = linear(reference_ctx, signs, reference)
    return float(np.abs(outputs - wanted).max() / np.sqrt((wanted**2).mean()))


def move_weight(weight: LinearWeight, size: float) -> None:
    """Change every number of a weight of the reference by a random fraction, of standard deviation `size`."""
    chance = np.random.default_rng(0)
    for row in weight.payload[0]:
        row *= 1 + size * chance.standard_normal(len(row), dtype=np.float32)


def _prepare_reference(
    ctx: Context, tensors: Sequence[TensorSource], biases: Sequence[FloatArray | None] | None
) -> tuple[Any, int]:
    """Return the matrices as one in float32, the biases as one, and the bytes of both."""
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


def _linear_reference(ctx: Context, x: FloatArray, weight: LinearWeight) -> FloatArray:
    """Multiply by NumPy; a row's last bits may depend on the number of rows."""
    matrix, bias = weight.payload
    result: FloatArray = x @ matrix.T
    if bias is not None:
        result += bias
    return result


def _prepare_native(
    ctx: Context, tensors: Sequence[TensorSource], biases: Sequence[FloatArray | None] | None
) -> tuple[Any, int]:
    """Return the weight, repacked into rows interleaved for the vector units, and its bytes.

    Each source is released as soon as it is repacked. Raises DeviceError for a type without a kernel, ValueError for
    columns that the type does not allow.
    """
    _check_types(tensors)
    weight = ctx.module.LinearWeight(tensors[0].shape[1])
    for index, tensor in enumerate(tensors):
        bias = biases[index] if biases is not None else None
        weight.append(ctx.native, tensor.type_name, tensor.shape[0], tensor.data, bias)
        tensor.release()
    return weight, weight.nbytes


def _leave_native(
    ctx: Context, tensors: Sequence[TensorSource], biases: Sequence[FloatArray | None] | None
) -> tuple[Any, int]:
    """Return the weight, whose blocks stay in their files, and its bytes when it is repacked.

    Raises the errors of `prepare`, and ModelError for a tensor that is not a view of a mapped file.
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
        if tensor.type_name not in _TYPES:
            known = ", ".join(_TYPES)
            raise DeviceError(
                f"tensor {tensor.name} has type {tensor.type_name}, which has no CPU kernel; known are {known}"
            )


def _linear_native(ctx: Context, x: FloatArray, weight: LinearWeight) -> FloatArray:
    """Return x Wᵀ + b; the bits of a row do not depend on other rows, threads and instruction set."""
    out = empty(ctx, x.shape[0], weight.out_features)
    ctx.module.linear(ctx.native, x, weight.payload, out)
    return out


PREPARE = Choice("linear", _prepare_reference, _prepare_native, f"{__name__}.gpu", "prepare")
LINEAR = Choice("linear", _linear_reference, _linear_native, f"{__name__}.gpu")
