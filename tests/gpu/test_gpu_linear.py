"""Quantised products on the GPU straight from the blocks of a file, against decoding everything in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_cases import QUANTISED, REFERENCE, make_tensor, random_floats, relative_error

from mlxr.core.errors import DeviceError
from mlxr.formats import TensorSource
from mlxr.kernels.context import Context
from mlxr.kernels.embed import embed
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.linear.gpu import MAX_ROWS, MAX_TILED, MIN_SQUARED
from mlxr.kernels.linear.parts import cut_rows

EXACT = 2e-6  # f32 sums in another order
HALVED = 6e-4  # weights rounded to f16
NARROW = 8e-3  # weights, input and result rounded to bf16 on the way


def run(ctx: Context, tensors: list[TensorSource], tokens: int, biased: bool = False) -> float:
    x = random_floats(tokens, tokens, tensors[0].shape[1])
    biases = [random_floats(9, tensor.shape[0]) for tensor in tensors] if biased else None
    expected = linear(REFERENCE, x, prepare(REFERENCE, tensors, biases))
    return relative_error(settle(linear(ctx, ctx.gpu.mx.array(x), prepare(ctx, tensors, biases))), expected)


def allow(ctx: Context, tokens: int) -> float:
    """Return the allowed error: 16 bits with matrix units, 16-bit weights on an Apple GPU, otherwise f32."""
    has_halves = ctx.gpu.has_squares and tokens >= MIN_SQUARED
    return NARROW if ctx.gpu.has_tiles or (ctx.gpu.narrow and tokens > MAX_ROWS) else HALVED if has_halves else EXACT


@pytest.mark.smoke
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("type_name", QUANTISED)
def test_few_rows(gpu: Context, type_name: str, tokens: int) -> None:
    assert run(gpu, [make_tensor(type_name, 37, 768)], tokens) < allow(gpu, tokens)


@pytest.mark.parametrize("tokens", [2, 3, 5, 8])
def test_every_number_of_rows(gpu: Context, tokens: int) -> None:
    assert run(gpu, [make_tensor("q4_k", 21, 512)], tokens) < allow(gpu, tokens)


@pytest.mark.smoke
@pytest.mark.parametrize("type_name", QUANTISED)
def test_many_rows(gpu: Context, type_name: str) -> None:
    tokens = (MAX_TILED if gpu.gpu.has_tiles else MAX_ROWS) + 3
    assert run(gpu, [make_tensor(type_name, 37, 768)], tokens) < allow(gpu, tokens)


def test_rows_are_cut_into_pieces_that_have_room() -> None:
    assert cut_rows([5, 2], 8) == [[(0, 0, 5), (1, 0, 2)]]
    assert cut_rows([5, 2], 3) == [[(0, 0, 3)], [(0, 3, 5), (1, 0, 1)], [(1, 1, 2)]]


@pytest.mark.parametrize("most", [768 * 4 * 30, 768 * 4 * 1000])
def test_pieces_of_several_weights(gpu: Context, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxr.kernels.linear.parts.SCRATCH_BYTES", most)
    tensors = [make_tensor("q4_k", 37, 768), make_tensor("q6_k", 21, 768), make_tensor("q8_0", 40, 768)]
    tokens = (MAX_TILED if gpu.gpu.has_tiles else MAX_ROWS) + 3
    assert run(gpu, tensors, tokens, biased=True) < allow(gpu, tokens)


@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_floats(gpu: Context, type_name: str, tokens: int) -> None:
    allowed = NARROW if gpu.gpu.narrow else EXACT
    assert run(gpu, [make_tensor(type_name, 64, 96)], tokens) < allowed


@pytest.mark.parametrize(
    "types", [("q4_k", "q4_k", "q6_k"), ("q4_k", "q6_k", "q5_k"), ("q8_0", "bf16")], ids=lambda types: "+".join(types)
)
@pytest.mark.parametrize("tokens", [1, 12])
def test_parts_of_several_types_with_biases(gpu: Context, types: tuple[str, ...], tokens: int) -> None:
    tensors = [make_tensor(type_name, 18 + index, 512, index) for index, type_name in enumerate(types)]
    assert run(gpu, tensors, tokens, biased=True) < (NARROW if gpu.gpu.narrow else allow(gpu, tokens))


def test_many_outputs_take_two_rows_at_a_time(gpu: Context) -> None:
    assert run(gpu, [make_tensor("q4_0", 16385, 32)], 1) < allow(gpu, 1)


@pytest.mark.smoke
@pytest.mark.parametrize("type_name", [*QUANTISED, "f16", "bf16"])
def test_embedding_rows(gpu: Context, type_name: str) -> None:
    table = make_tensor(type_name, 11, 512)
    ids = np.array([3, 0, 10, 3], np.int32)
    assert relative_error(embed(gpu, ids, table), embed(REFERENCE, ids, table)) < EXACT


@pytest.mark.smoke
def test_type_without_kernel_is_refused(gpu: Context) -> None:
    tensor = TensorSource("w", "i8", (2, 32), np.zeros(64, np.uint8))
    with pytest.raises(DeviceError, match="type i8, which has no GPU kernel"):
        prepare(gpu, [tensor])
