"""The reference operators against their definitions written out once more, and the checks at the boundary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mlxr.core.errors import ModelError
from mlxr.formats import TensorSource, encode_tensor
from mlxr.kernels.activate import activate
from mlxr.kernels.attend import allocate_pools, attend
from mlxr.kernels.context import Context
from mlxr.kernels.embed import embed
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.norms import rms_norm
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import (
    RopeScaling,
    RopeTable,
    build_table,
    inverse_frequencies,
    llama3_factors,
    rope,
    stretch_base,
    yarn_attention_factor,
)
from mlxr.kernels.rope_and_write_kv import write_pages
from mlxr.kernels.tensor import read_vector

Floats = NDArray[np.float32]


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def tensor(values: Floats, type_name: str = "f32") -> TensorSource:
    return TensorSource("weight", type_name, values.shape, encode_tensor(type_name, values))


# linear and embed


def test_linear_multiplies_a_group_and_adds_biases(reference: Context) -> None:
    x, first, second, bias = normal(0, 3, 64), normal(1, 5, 64), normal(2, 2, 64), normal(3, 2)
    weight = prepare(reference, [tensor(first), tensor(second)], [None, bias])
    assert (weight.in_features, weight.out_features, weight.splits) == (64, 7, (5, 2))
    assert weight.nbytes == 4 * (7 * 64 + 7)
    expected = np.concatenate([x @ first.T, x @ second.T + bias], axis=1)
    np.testing.assert_allclose(linear(reference, x, weight), expected, rtol=1e-5, atol=1e-5)


def test_linear_decodes_quantised_weights_and_says_so(reference: Context) -> None:
    sources = [tensor(normal(1, 4, 64), "q8_0"), tensor(normal(2, 4, 64), "q4_0"), tensor(normal(3, 4, 64), "q8_0")]
    weight = prepare(reference, sources)
    assert weight.variant == "q8_0+q4_0"
    x = normal(0, 2, 64)
    expected = x @ np.concatenate([source.to_float32() for source in sources]).T
    np.testing.assert_allclose(linear(reference, x, weight), expected, rtol=1e-5, atol=1e-5)
    (dispatch,) = reference.ledger.snapshot().dispatches
    assert (dispatch.operator, dispatch.implementation, dispatch.variant) == ("linear", "reference", "q8_0+q4_0")


def test_linear_of_no_rows_is_empty(reference: Context) -> None:
    weight = prepare(reference, [tensor(normal(1, 4, 8))])
    assert linear(reference, np.empty((0, 8), np.float32), weight).shape == (0, 4)


def test_embed_picks_rows(reference: Context) -> None:
    table = tensor(normal(1, 9, 32), "q8_0")
    rows = embed(reference, ints(3, 0, 3, 8), table)
    np.testing.assert_array_equal(rows, table.to_float32()[[3, 0, 3, 8]])


def test_read_vector_owns_its_values() -> None:
    source = tensor(normal(1, 8), "f32")
    vector = read_vector(source)
    np.testing.assert_array_equal(vector, source.to_float32())
    assert vector.flags.owndata
    assert vector.flags.writeable


# rms_norm and activate


def test_rms_norm_adds_first(reference: Context) -> None:
    x, residual, weight = normal(0, 3, 16), normal(1, 3, 16), normal(2, 16)
    normed, summed = rms_norm(reference, x, weight, 1e-3, residual)
    np.testing.assert_array_equal(summed, x + residual)
    for row, total in zip(normed, (x + residual).astype(np.float64), strict=True):
        rms = math.sqrt(sum(value * value for value in total) / 16 + 1e-3)
        np.testing.assert_allclose(row, total / rms * weight, rtol=1e-5)


def test_rms_norm_without_residual_returns_its_input(reference: Context) -> None:
    x = normal(0, 3, 16)
    before = x.copy()
    normed, summed = rms_norm(reference, x, np.ones(16, np.float32), 1e-6)
    assert summed is x
    np.testing.assert_array_equal(x, before)
    np.testing.assert_allclose(np.square(normed).mean(axis=1), 1.0, rtol=1e-4)


def test_rms_norm_takes_rows_out_of_a_wider_array(reference: Context) -> None:
    wide, weight = normal(0, 4, 24), normal(1, 8)
    normed, _ = rms_norm(reference, wide[:, 8:16], weight, 1e-6)
    expected, _ = rms_norm(reference, np.ascontiguousarray(wide[:, 8:16]), weight, 1e-6)
    np.testing.assert_array_equal(normed, expected)


@pytest.mark.parametrize(
    ("kind", "definition"),
    [
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    ],
)
def test_activate_is_its_definition(reference: Context, kind: Any, definition: Callable[[float], float]) -> None:
    gate_up = normal(0, 3, 10) * 3
    expected = [[definition(float(row[i])) * float(row[5 + i]) for i in range(5)] for row in gate_up]
    np.testing.assert_allclose(activate(reference, gate_up, kind), expected, rtol=2e-5, atol=1e-6)


def test_activate_survives_large_gates(reference: Context) -> None:
    gate_up = np.array([[-1e4, 1e4, 1.0, 1.0]], np.float32)
    np.testing.assert_array_equal(activate(reference, gate_up), [[0.0, 1e4]])


# rope


def rotate(x: Floats, positions: list[int], theta: float, *, interleaved: bool, rot_dim: int) -> NDArray[np.float64]:
    """Rotate pair by pair, as complex numbers."""
    result = x.astype(np.float64)
    for t, position in enumerate(positions):
        for i in range(rot_dim // 2):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rot_dim // 2)
            turned = (x[t, :, a] + 1j * x[t, :, b]) * np.exp(1j * position * theta ** (-2 * i / rot_dim))
            result[t, :, a], result[t, :, b] = turned.real, turned.imag
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rot_dim", [16, 10])
def test_rope_turns_pairs(reference: Context, interleaved: bool, rot_dim: int) -> None:
    x = normal(0, 3, 2, 16)
    expected = rotate(x, [0, 7, 99], 1000.0, interleaved=interleaved, rot_dim=rot_dim)
    rope(reference, x, ints(0, 7, 99), build_table(100, rot_dim, 1000.0, interleaved=interleaved))
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-5)


def test_rope_works_in_place_on_a_part_of_a_projection(reference: Context) -> None:
    qkv = normal(0, 3, 48)
    before, table = qkv.copy(), build_table(8, 16, 1000.0, interleaved=False)
    rope(reference, qkv[:, 16:48].reshape(3, 2, 16), ints(1, 2, 3), table)
    np.testing.assert_array_equal(qkv[:, :16], before[:, :16])
    expected = rotate(before[:, 16:].reshape(3, 2, 16), [1, 2, 3], 1000.0, interleaved=False, rot_dim=16)
    np.testing.assert_allclose(qkv[:, 16:], expected.reshape(3, 32), rtol=1e-5, atol=1e-5)


def test_rope_refuses_positions_beyond_the_table_and_rotates_nothing(reference: Context) -> None:
    x = normal(0, 2, 1, 8)
    before = x.copy()
    for positions in (ints(0, 4), ints(-1, 0)):
        with pytest.raises(ValueError, match="positions from 0 to 3"):
            rope(reference, x, positions, build_table(4, 8, 100.0, interleaved=True))
    np.testing.assert_array_equal(x, before)


def test_table_rows_do_not_depend_on_its_length() -> None:
    short, long = (build_table(n, 64, 10000.0, interleaved=False) for n in (10, 1000))
    np.testing.assert_array_equal(short.cos, long.cos[:10])
    np.testing.assert_array_equal(short.sin, long.sin[:10])
    assert (short.positions, long.positions) == (10, 1000)


def test_linear_scaling_stretches_positions() -> None:
    plain = build_table(10, 16, 1e4, interleaved=False)
    stretched = build_table(40, 16, 1e4, interleaved=False, scaling=RopeScaling("linear", 4.0))
    np.testing.assert_allclose(stretched.cos[::4], plain.cos, atol=1e-6)


def test_ntk_scaling_keeps_the_fastest_and_divides_the_slowest() -> None:
    plain = inverse_frequencies(64, 1e4)
    scaled = inverse_frequencies(64, stretch_base(1e4, 4.0, 64))
    assert scaled[0] == plain[0] == 1.0
    assert scaled[-1] == pytest.approx(plain[-1] / 4.0)


def test_llama3_scaling_keeps_fast_divides_slow() -> None:
    plain = inverse_frequencies(128, 500000.0)
    factors = llama3_factors(plain, 8.0, 8192, low=1.0, high=4.0)
    wavelengths = 2 * math.pi / plain
    np.testing.assert_array_equal(factors[wavelengths < 8192 / 4], 1.0)
    np.testing.assert_allclose(factors[wavelengths > 8192], 8.0)
    assert np.all(np.diff(factors) >= 0)
    divided = inverse_frequencies(128, 500000.0, frequency_factors=factors.tolist())
    np.testing.assert_allclose(divided, plain / factors)


def test_yarn_keeps_fast_divides_slow_and_sharpens() -> None:
    scaling = RopeScaling("yarn", 4.0, original_context=4096, attention_factor=yarn_attention_factor(4.0))
    plain, scaled = inverse_frequencies(128, 1e4), inverse_frequencies(128, 1e4, scaling)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 4)
    table = build_table(2, 128, 1e4, interleaved=False, scaling=scaling)
    np.testing.assert_allclose(table.cos[0], 0.1 * math.log(4) + 1, rtol=1e-6)
    assert yarn_attention_factor(1.0) == 1.0
    assert yarn_attention_factor(40.0, 1.0, 1.0) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "dynamic", "factor": 2.0}, "'dynamic' is not known; known are linear, yarn, longrope"),
        ({"kind": "linear", "factor": 0.0}, "factor is 0.0"),
        ({"kind": "linear", "factor": float("nan")}, "factor is nan"),
        ({"kind": "yarn", "factor": 2.0}, "original_context is None"),
        ({"kind": "yarn", "factor": 2.0, "original_context": 8, "beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast 1.0"),
    ],
)
def test_senseless_scaling_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        RopeScaling(**arguments)


# pages and attention


def test_write_pages_fills_slots(reference: Context) -> None:
    pools = allocate_pools(reference, 3, 2, 4, 8)
    k, v = normal(0, 3, 2, 8), normal(1, 3, 2, 8)
    write_pages(reference, k, v, *pools, ints(11, 0, 6))
    for pool, values in zip(pools, (k, v), strict=True):
        for t, (page, offset) in enumerate([(2, 3), (0, 0), (1, 2)]):
            np.testing.assert_array_equal(pool[page, :, offset], values[t])
        assert np.count_nonzero(pool) == values.size


def test_write_pages_rounds_to_f16(reference: Context) -> None:
    k_pool, v_pool = allocate_pools(reference, 1, 1, 4, 8, "f16")
    k = normal(0, 1, 1, 8)
    write_pages(reference, k, -k, k_pool, v_pool, ints(2))
    np.testing.assert_array_equal(k_pool[0, 0, 2], k[0, 0].astype(np.float16))
    assert reference.ledger.snapshot().dispatches[0].variant == "f16"


@pytest.mark.parametrize("slot", [-1, 12])
def test_write_pages_refuses_slots_outside_and_writes_nothing(reference: Context, slot: int) -> None:
    k_pool, v_pool = allocate_pools(reference, 3, 1, 4, 8)
    with pytest.raises(ValueError, match="slots from 0 to 11"):
        write_pages(reference, normal(0, 2, 1, 8), normal(1, 2, 1, 8), k_pool, v_pool, ints(0, slot))
    assert not k_pool.any()


def make_batch(lengths: list[int], queries: list[int], page_table: list[list[int]]) -> RaggedBatch:
    positions = np.concatenate([np.arange(n - q, n) for n, q in zip(lengths, queries, strict=True)]).astype(np.int32)
    return RaggedBatch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        slots=np.zeros(len(positions), np.int32),
        query_starts=np.cumsum([0, *queries]).astype(np.int32),
        context_lengths=np.array(lengths, np.int32),
        page_table=np.array(page_table, np.int32),
        output_rows=ints(0),
    )


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_attend_is_its_definition(reference: Context, heads: int, kv_heads: int, window: int | None) -> None:
    page_size, head_dim, lengths, queries = 4, 6, [10, 3, 5], [4, 3, 1]
    pages = [[5, 0, 3], [1, -1, -1], [2, 6, -1]]
    shape = (7, kv_heads, page_size, head_dim)
    k_pool, v_pool = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    contexts = []
    for s, length in enumerate(lengths):
        k, v = normal(2 * s, length, kv_heads, head_dim), normal(2 * s + 1, length, kv_heads, head_dim)
        contexts.append((k, v))
        slots = np.array([pages[s][p // page_size] * page_size + p % page_size for p in range(length)], np.int32)
        write_pages(reference, k, v, k_pool, v_pool, slots)
    if window == 1:
        pages[0][0] = pages[2][0] = -1  # no query sees anything of these pages, and their sequences gave them back
    batch, q = make_batch(lengths, queries, pages), normal(9, 8, heads, head_dim)
    result = attend(reference, q, k_pool, v_pool, batch, scale=0.7, sliding_window=window)
    assert result.shape == (8, heads * head_dim)
    owners = np.repeat([0, 1, 2], queries)
    for t, (owner, position) in enumerate(zip(owners, batch.positions, strict=True)):
        seen = range(max(0, position + 1 - (window or 1000)), position + 1)
        for head in range(heads):
            k, v = (values[:, head // (heads // kv_heads)].astype(np.float64) for values in contexts[owner])
            weights = [math.exp(0.7 * float(q[t, head] @ k[p])) for p in seen]
            expected = sum(w * v[p] for w, p in zip(weights, seen, strict=True)) / sum(weights)
            np.testing.assert_allclose(result[t, head * head_dim : (head + 1) * head_dim], expected, atol=1e-5)
    firsts = [max(0, length - count + 1 - (window or 1000)) for length, count in zip(lengths, queries, strict=True)]
    copied = sum(length - first // page_size * page_size for length, first in zip(lengths, firsts, strict=True))
    assert reference.ledger.snapshot().copied_bytes == 2 * 4 * copied * kv_heads * head_dim


@pytest.mark.parametrize("page", [-1, 3])
def test_attend_refuses_pages_outside_the_pool(reference: Context, page: int) -> None:
    pools = allocate_pools(reference, 3, 1, 4, 8)
    with pytest.raises(ValueError, match="pages from 0 to 2"):
        attend(reference, normal(0, 1, 1, 8), *pools, make_batch([5], [1], [[0, page]]), scale=1.0)


def test_default_pools_of_the_reference_are_f32(reference: Context) -> None:
    k_pool, v_pool = allocate_pools(reference, 2, 3, 4, 8)
    assert k_pool.shape == v_pool.shape == (2, 3, 4, 8)
    assert k_pool.dtype == v_pool.dtype == np.float32


# the boundary: what does not fit is refused with the argument and both values

WEIGHT = normal(0, 4, 8)
CTX = Context("reference")
POOLS = allocate_pools(CTX, 2, 2, 4, 8)
TABLE = build_table(4, 8, 100.0, interleaved=False)
BATCH = make_batch([3], [3], [[0]])


REFUSALS: list[tuple[Callable[[], object], str]] = [
    (lambda: linear(CTX, normal(0, 2, 9), prepare(CTX, [tensor(WEIGHT)])), "columns of x is 9, expected 8"),
    (lambda: linear(CTX, normal(0, 8), prepare(CTX, [tensor(WEIGHT)])), r"x is of shape \(8,\), expected 2 dimensions"),
    (lambda: linear(CTX, np.ones((2, 8)), prepare(CTX, [tensor(WEIGHT)])), "x is float64, expected float32"),  # type: ignore[arg-type]
    (lambda: linear(CTX, normal(0, 8, 2).T, prepare(CTX, [tensor(WEIGHT)])), "x is an array with strides"),
    (lambda: linear(CTX, [[1.0]], prepare(CTX, [tensor(WEIGHT)])), "x is a list, expected an array"),  # type: ignore[arg-type]
    (lambda: prepare(CTX, []), "tensors is empty"),
    (lambda: prepare(CTX, [tensor(normal(0, 8))]), r"tensor weight is of shape \(8,\)"),
    (lambda: prepare(CTX, [tensor(WEIGHT), tensor(normal(0, 4, 9))]), "in_features of weight is 9, expected 8"),
    (lambda: prepare(CTX, [tensor(WEIGHT)], []), "number of biases is 0, expected 1"),
    (lambda: prepare(CTX, [tensor(WEIGHT)], [normal(0, 3)]), "length of bias of weight is 3, expected 4"),
    (lambda: embed(CTX, ints(0, 4), tensor(WEIGHT)), r"token_ids is \[0, 4\], expected ids from 0 to 3"),
    (lambda: embed(CTX, ints(-1), tensor(WEIGHT)), "ids from 0 to 3"),
    (lambda: embed(CTX, ints(1), tensor(normal(0, 8))), "table weight is of shape"),
    (lambda: embed(CTX, np.array([1]), tensor(WEIGHT)), "token_ids is int64, expected int32"),  # type: ignore[arg-type]
    (lambda: rms_norm(CTX, WEIGHT, normal(0, 9), 1e-5), "columns of x is 8, expected 9"),
    (lambda: rms_norm(CTX, WEIGHT, WEIGHT[0], 1e-5, normal(0, 4, 9)), r"residual is of shape \(4, 9\)"),
    (lambda: rms_norm(CTX, WEIGHT.T, normal(0, 4), 1e-5), "x is an array with strides"),
    (lambda: activate(CTX, normal(0, 2, 7)), "columns of gate_up is 7, expected an even number"),
    (lambda: activate(CTX, WEIGHT, "selu"), "kind is 'selu', expected one of silu, gelu_tanh, gelu_erf"),  # type: ignore[arg-type]
    (
        lambda: rope(CTX, normal(0, 2, 1, 6), ints(0, 1), TABLE),
        "rot_dim of table is 8, expected at most the head_dim 6",
    ),
    (lambda: rope(CTX, normal(0, 2, 1, 8), ints(0), TABLE), "length of positions is 1, expected 2"),
    (lambda: rope(CTX, normal(0, 2, 8, 4).transpose(0, 2, 1), ints(0, 1), TABLE), "heads and head_dim contiguous"),
    (lambda: RopeTable(TABLE.cos, TABLE.sin, False, 10), r"expected \(positions, 10 / 2\)"),
    (lambda: build_table(4, 7, 100.0, interleaved=False), "rot_dim is 7, expected an even number"),
    (lambda: inverse_frequencies(8, 100.0, None, [1.0]), "length of frequency_factors is 1, expected 4"),
    (lambda: write_pages(CTX, normal(0, 1, 1, 8), normal(0, 1, 1, 8), *POOLS, ints(0)), r"expected \(1, 2, 8\)"),
    (lambda: write_pages(CTX, normal(0, 1, 2, 8), normal(0, 1, 2, 8), *POOLS, ints(0, 1)), r"expected \(2, 2, 8\)"),
    (lambda: attend(CTX, normal(0, 3, 2, 6), *POOLS, BATCH, scale=1.0), "3 tokens of head_dim 8"),
    (
        lambda: attend(CTX, normal(0, 3, 3, 8), *POOLS, BATCH, scale=1.0),
        "heads of q is 3, expected a multiple of the 2",
    ),
    (lambda: attend(CTX, normal(0, 3, 2, 8), *POOLS, BATCH, scale=1.0, sliding_window=0), "sliding_window is 0"),
    (
        lambda: attend(CTX, normal(0, 1, 2, 8), *POOLS, make_batch([5], [1], [[0]]), scale=1.0),
        "page_table is 1 pages wide, expected pages of 4 for a context of 5",
    ),
    (
        lambda: attend(CTX, normal(0, 3, 2, 8), POOLS[0], POOLS[1].astype(np.float16), BATCH, scale=1.0),
        "v_pool is float16",
    ),
    (lambda: attend(CTX, normal(0, 3, 2, 8), POOLS[0], POOLS[1].astype(int), BATCH, scale=1.0), "v_pool is int64"),
    (lambda: allocate_pools(CTX, 0, 1, 4, 8), "pages is 0, expected at least 1"),
    (lambda: allocate_pools(CTX, 1, 1, 0, 8), "page_size is 0, expected from 1"),
    (lambda: allocate_pools(CTX, 1, 1, 4, 8, "q8_0"), "kv_type is 'q8_0', expected one of bf16, f16, f32"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_boundary_refuses(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
