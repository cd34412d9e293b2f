"""The native `linear` for every weight type, instruction set and shape.

What it should be is computed here in float64, from the weights as the `gguf` package decodes them (f16 then as the
16-bit integers that the kernels make of them) and from activations quantised by the definition in NumPy. Equality
between batches, chunks, threads and instruction sets is demanded bit for bit. The native module is called as
`kernels/linear/__init__.py` calls it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import amounts
import gguf
import numpy as np
import numpy.typing as npt
import pytest

from mlxr.core.errors import DeviceError
from mlxr.core.tables import WEIGHT_TYPES
from mlxr.formats.ggml_types import by_name, decode_blocks, find_halves, put_iq1_m_scales
from mlxr.kernels.context import Context
from mlxr.kernels.linear import linear, prepare

native = pytest.importorskip("mlxr._native", reason="the native module is not built")

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

DENSE, FLOAT8 = ("f32", "f16", "bf16"), "f8_e4m3_128"
# Block elements, block bytes, and where in a block half-precision scales lie.
BLOCKS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    row.name: (row.block_size, row.block_bytes, find_halves(row)) for row in WEIGHT_TYPES if row.name not in DENSE
}
QUANTISED = tuple(BLOCKS)
TYPES = DENSE + QUANTISED
ISAS = native.available_isas()


def make_raw(type_name: str, rows: int, columns: int, seed: int = 0) -> Bytes:
    """Random blocks that use every bit of every field, with scales of sensible size and both signs."""
    rng = np.random.default_rng([seed, rows, columns, *type_name.encode()])
    if type_name in DENSE:
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        if type_name == "f32":
            return values.reshape(-1).view(np.uint8)
        if type_name == "f16":
            return values.astype(np.float16).reshape(-1).view(np.uint8)
        return (values.view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint8)
    elements, size, halves = BLOCKS[type_name]
    blocks = rng.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    for offset in halves:
        scales = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    if type_name == "iq1_m":
        put_iq1_m_scales(blocks, (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16))
    if type_name == "mxfp4":
        blocks[:, 0] = rng.integers(110, 130, len(blocks))
    if type_name.startswith("affine"):
        blocks[:, :8] = (rng.standard_normal((len(blocks), 2)) * 0.01).astype(np.float32).view(np.uint8)
    if type_name.startswith("nvfp4"):
        blocks[:, -36:-32] = rng.integers(0, 40, (len(blocks), 4))
    if type_name == FLOAT8:
        blocks[blocks & 127 == 127] = 0
        blocks[::3, 4:] &= 0x8F  # some of nothing but small numbers
    if type_name in ("q8_k", FLOAT8, "nvfp4_scaled"):
        scales = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float32)
        blocks[:, 0:4] = scales.view(np.uint8).reshape(-1, 4)
    return blocks.reshape(-1)


def decode(type_name: str, raw: Bytes, rows: int, columns: int) -> Floats:
    """Return the weights as the `gguf` package decodes them; by their definition if they are ours or q8_k, which it
    lacks.
    """
    if type_name.startswith("affine"):
        return decode_affine(type_name, raw, rows, columns)
    if type_name == "q8_k":
        blocks = raw.reshape(-1, 292)
        scales = blocks[:, :4].copy().view(np.float32)
        return (scales * blocks[:, 4:260].view(np.int8).astype(np.float32)).reshape(rows, columns)
    if type_name in ("q1_0", "q2_0", "pq2_0", "ptq1_0", FLOAT8, "nvfp4_scaled"):  # see test_ggml_decoders, test_packed
        return decode_blocks(by_name(type_name), raw).reshape(rows, columns)
    kind = gguf.GGMLQuantizationType[type_name.upper()]
    decoded: Floats = gguf.quants.dequantize(raw.reshape(rows, -1), kind).astype(np.float32)
    return decoded.reshape(rows, columns)


def decode_affine(type_name: str, raw: Bytes, rows: int, columns: int) -> Floats:
    """scale * q + bias; 4 bits lie as in q4_0."""
    blocks = raw.reshape(-1, BLOCKS[type_name][1])
    scale, bias = blocks[:, :8].copy().view(np.float32).T
    q = blocks[:, 8:]
    if type_name.startswith("affine4"):
        halves = q.reshape(len(q), -1, 1, 16)
        q = np.concatenate([halves & 15, halves >> 4], axis=2).reshape(len(q), -1)
    values: Floats = scale[:, None] * q.astype(np.float32) + bias[:, None]
    return values.reshape(rows, columns)


def in_groups(x: npt.NDArray[Any], size: int = 32) -> npt.NDArray[Any]:
    """(rows, groups of `size` columns, size), the last group filled up with zeros."""
    filled = np.pad(x, ((0, 0), (0, -x.shape[1] % size)))
    return filled.reshape(len(x), -1, size)


def quantise(x: Floats, most: int = 127, size: int = 32) -> npt.NDArray[np.float64]:
    """Activations after quantisation to integers up to `most` per `size` columns, as float64: scale * value."""
    groups = in_groups(x, size)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(most) / largest, np.float32(0)).astype(np.float32)
    scales = largest / np.float32(most)
    values = np.rint(groups * inverse)
    if size == 256:  # magnitudes of 16 neighbours sum up to 1023 at most
        sums = np.abs(values).reshape(*values.shape[:2], 16, 16).sum(axis=-1).max(axis=-1, keepdims=True)
        wider = np.where(sums > 1023, (sums + 8) / np.float32(1014), np.float32(1)).astype(np.float32)
        scales, values = scales * wider, np.rint(groups * (inverse / wider))
        assert np.abs(values).reshape(-1, 16).sum(axis=-1).max() <= 1023
    assert np.abs(values).max() <= most
    activations: npt.NDArray[np.float64] = values.astype(np.float64) * scales.astype(np.float64)
    return activations.reshape(len(x), -1)[:, : x.shape[1]]


def fix_point(weights: Floats) -> npt.NDArray[np.float64]:
    """f16 weights as the kernels hold them: multiples of a 2**-13th of the power of two in the largest of 128."""
    groups = in_groups(weights, 128).astype(np.float64)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    unit = np.exp2(np.maximum(np.floor(np.log2(np.maximum(largest, 2.0**-24))) - 13, -24))
    fixed: npt.NDArray[np.float64] = np.rint(groups / unit) * unit
    assert (np.abs(fixed) < unit * 2**14).all()
    return fixed.reshape(len(weights), -1)[:, : weights.shape[1]]


def fix_bytes(raw: Bytes, rows: int) -> npt.NDArray[np.float64]:
    """Round E4M3 weights in the same way, halves up."""
    blocks = raw.reshape(-1, 132)
    values = by_name("f8_e4m3").decode(blocks[:, 4:]).astype(np.float64)
    unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(values).max(axis=1, keepdims=True), 2.0**-9))) - 13)
    fixed = np.floor(values / unit + 0.5) * unit * blocks[:, :4].copy().view("<f4").astype(np.float64)
    return fixed.reshape(rows, -1)


def round_to_bf16(x: Floats) -> Floats:
    """Round to the nearest bf16, to the even one of two that are as near."""
    raw = x.view(np.uint32)
    return ((raw + 0x7FFF + (raw >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def make_weight(runtime: Any, parts: list[tuple[str, int, Bytes, Floats | None]], columns: int) -> Any:
    weight = native.LinearWeight(columns)
    for type_name, rows, raw, bias in parts:
        weight.append(runtime, type_name, rows, raw, bias)
    return weight


def multiply(runtime: Any, weight: Any, x: Floats) -> Floats:
    out = np.full((len(x), weight.out_features), np.nan, np.float32)
    native.linear(runtime, x, weight, out)
    return out


def make_input(tokens: int, columns: int, seed: int = 1) -> Floats:
    """Values of very different sizes per group, as activations have, with a group of zeros."""
    rng = np.random.default_rng([seed, tokens, columns])
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    x *= np.exp(rng.standard_normal((tokens, columns))).astype(np.float32)
    x[tokens // 2, : min(32, columns)] = 0
    return x


def expected(type_name: str, raw: Bytes, rows: int, x: Floats) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The product in float64, and for each element the sum of magnitudes that bounds its rounding."""
    weights = decode(type_name, raw, rows, x.shape[1]).astype(np.float64)
    inputs: npt.NDArray[Any]
    if type_name == "f16":
        weights, inputs = fix_point(weights.astype(np.float32)), quantise(x, 4095)
    elif type_name == FLOAT8:
        weights, inputs = fix_bytes(raw, rows), quantise(x, 4095)
    elif type_name in DENSE:
        inputs = (x if type_name == "f32" else round_to_bf16(x)).astype(np.float64)
    else:
        inputs = quantise(x, size=256 if BLOCKS[type_name][0] == 256 else 32)
    return inputs @ weights.T, np.abs(inputs) @ np.abs(weights).T


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", TYPES)
def test_equals_float64_product(type_name: str, isa: str) -> None:
    runtime = native.Runtime(2, isa)
    step = 1 if type_name in DENSE else BLOCKS[type_name][0]
    widths = (1, 7, 33, 160) if step == 1 else (256, 512, 1024) if step == 256 else (step, 3 * step, 7 * step)
    for columns in widths:
        for rows, tokens in ((1, 1), (15, 3), (16, 8), (17, 33), (33, 71), (49, 9), (67, 17), (130, 5)):
            raw, x = make_raw(type_name, rows, columns), make_input(tokens, columns)
            result = multiply(runtime, make_weight(runtime, [(type_name, rows, raw, None)], columns), x)
            product, magnitude = expected(type_name, raw, rows, x)
            # min terms of shifted types are as large as their products and cancel: allow for their magnitude
            slack = 4e-6 * magnitude.max() + 1e-30
            np.testing.assert_allclose(result, product, rtol=0, atol=slack, err_msg=f"{rows} x {columns}, {tokens}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("type_name", TYPES)
def test_same_bits_for_any_batch_threads_and_isa(type_name: str) -> None:
    columns, rows, tokens = 1024, 75, 130
    raw, x = make_raw(type_name, rows, columns), make_input(tokens, columns)
    bias = make_input(1, rows)[0]
    results = {}
    for isa in ISAS:
        for threads in (1, 2, 3, 7) if amounts.is_exhaustive else (1, 3):
            runtime = native.Runtime(threads, isa)
            weight = make_weight(runtime, [(type_name, rows, raw, bias)], columns)
            for chunk in (1, 2, 7, 9, 13, 16, 23, 40, 63, 64, 130):
                pieces = [multiply(runtime, weight, x[at : at + chunk]) for at in range(0, tokens, chunk)]
                results[isa, threads, chunk] = np.concatenate(pieces)
    first = results[ISAS[0], 1, 1]
    assert np.isfinite(first).all()
    for key, result in results.items():
        assert result.tobytes() == first.tobytes(), key


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", ["q4_k", "q6_k", "q8_0", "f16"])
def test_long_rows_in_chunks_keep_their_bits(type_name: str, isa: str) -> None:
    """Rows longer than a panel are summed in several passes, each of which goes on from the last sums."""
    runtime, columns, rows, tokens = native.Runtime(2, isa), 256 * 37, 40, 110  # amx takes 96 tokens at a time
    raw, x = make_raw(type_name, rows, columns), make_input(tokens, columns)
    weight = make_weight(runtime, [(type_name, rows, raw, None)], columns)
    together = multiply(runtime, weight, x)
    apart = np.concatenate([multiply(runtime, weight, x[t : t + 5]) for t in range(0, tokens, 5)])
    assert together.tobytes() == apart.tobytes()
    product, magnitude = expected(type_name, raw, rows, x)
    np.testing.assert_allclose(together, product, rtol=0, atol=4e-6 * magnitude.max())


@pytest.mark.parametrize("isa", ISAS)
def test_groups_of_weights_of_several_types(isa: str) -> None:
    """Outputs stand side by side, with the bits each weight has alone, whatever its neighbours' types."""
    runtime, columns = native.Runtime(2, isa), 512
    parts: list[tuple[str, int, Bytes, Floats | None]] = []
    for index, (type_name, rows) in enumerate((("q4_k", 48), ("q6_k", 17), ("f16", 33), ("q8_0", 5), ("iq2_s", 16))):
        bias = make_input(1, rows, seed=index)[0] if index % 2 else None
        parts.append((type_name, rows, make_raw(type_name, rows, columns), bias))
    group = make_weight(runtime, parts, columns)
    assert group.out_features == 48 + 17 + 33 + 5 + 16
    for tokens in (1, 5, 40, 70):
        x = make_input(tokens, columns)
        alone = [multiply(runtime, make_weight(runtime, [part], columns), x) for part in parts]
        assert multiply(runtime, group, x).tobytes() == np.concatenate(alone, axis=1).tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_largest_and_smallest_weights_are_exact(isa: str) -> None:
    """All bits set, with activations at +-127, of blocks of 256 half of them: sums reach their extremes."""
    runtime = native.Runtime(1, isa)
    for type_name, (elements, size, halves) in BLOCKS.items():
        if type_name == FLOAT8:  # whose activations have 13 bits
            continue
        for fill in (0x00, 0x80, 0x88, 0x7F, 0xFF):
            block = np.full(size, fill, np.uint8)
            for offset in halves:
                block[offset : offset + 2] = np.array([1.0], np.float16).view(np.uint8)
            if type_name in ("q8_k", "nvfp4_scaled"):
                block[:4] = np.array([1.0], np.float32).view(np.uint8)
            if type_name == "iq1_m":
                put_iq1_m_scales(block[None], np.ones(1, np.float16))
            if type_name == "mxfp4":
                block[0] = 128
            if type_name.startswith("affine"):
                block[:8] = np.array([1.0, -3.0], np.float32).view(np.uint8)
            raw = np.tile(block, 2)
            for sign in (1, -1):
                x = np.full((1, elements), 127 * sign, np.float32)
                if elements == 256:
                    x[:, ::2] = 0
                weight = make_weight(runtime, [(type_name, 2, raw, None)], elements)
                exact = decode(type_name, raw, 2, elements).astype(np.float64) @ x[0]
                many = multiply(runtime, weight, np.repeat(x, 70, axis=0))
                assert multiply(runtime, weight, x)[0].tolist() == exact.tolist(), (type_name, fill, sign)
                assert (many == exact).all(), (type_name, fill, sign)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", [name for name in QUANTISED if BLOCKS[name][0] == 256])
def test_sums_of_16_columns_stay_within_bounds(type_name: str, isa: str) -> None:
    """Activations that are all large, in some of 16 columns or in all, with the greatest and other weights."""
    runtime, rows, columns = native.Runtime(2, isa), 20, 1024
    rng = np.random.default_rng(5)
    raw = make_raw(type_name, rows, columns)
    if type_name == "q6_k":  # some rows of nothing but -32 times -128
        greatest = raw.reshape(rows, -1, 210)[4:8]
        greatest[:], greatest[:, :, 192:208] = 0, 0x80
        greatest[:, :, 208:] = np.array([0.01], np.float16).view(np.uint8)
    x = rng.uniform(0.3, 1, (90, columns)).astype(np.float32)
    x[30:60] *= rng.choice(np.array([-1, 1], np.float32), (30, columns))
    x[60:] = np.where(rng.random((30, columns // 16)) < 0.1, 1, 0.01).repeat(16, axis=1)
    x[70:74] = 0  # sums of 1,023, which is allowed, and of 1,024, of either sign
    x[70:74, :8], x[70:74, 8] = 1, np.array([7, 8, 7, 8], np.float32) / 127
    x[72:74] *= -1
    weight = make_weight(runtime, [(type_name, rows, raw, None)], columns)
    result = multiply(runtime, weight, x)
    product, magnitude = expected(type_name, raw, rows, x)
    np.testing.assert_allclose(result, product, rtol=0, atol=4e-6 * magnitude.max())
    for chunk in (1, 2, 8, 12, 20, 40):
        pieces = [multiply(runtime, weight, x[at : at + chunk]) for at in range(0, len(x), chunk)]
        assert np.concatenate(pieces).tobytes() == result.tobytes(), chunk
    if isa == ISAS[0]:
        other = native.Runtime(1, ISAS[-1])
        again = multiply(other, make_weight(other, [(type_name, rows, raw, None)], columns), x)
        assert again.tobytes() == result.tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_every_half_is_widened_exactly(isa: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    runtime, x = native.Runtime(1, isa), np.full((1, 1), 4095, np.float32)
    weight = make_weight(runtime, [("f16", len(halves), halves.view(np.uint8), None)], 1)
    assert (multiply(runtime, weight, x)[0] == halves.astype(np.float32) * 4095).all()
    blocks = np.zeros((len(halves), 34), np.uint8)  # as the scale of a block
    blocks[:, :2] = halves.view(np.uint8).reshape(-1, 2)
    blocks[:, 2] = 1
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 127
    weight = make_weight(runtime, [("q8_0", len(halves), blocks.reshape(-1), None)], 32)
    assert (multiply(runtime, weight, x)[0] == halves.astype(np.float32) * 127).all()


@pytest.mark.parametrize("isa", ISAS)
def test_halves_beside_larger_ones_are_rounded(isa: str) -> None:
    """Every pair of magnitudes: exact down to an eighth of the larger one's power of two, then within half a unit."""
    runtime, rng = native.Runtime(2, isa), np.random.default_rng(3)
    bits = rng.integers(0, 0x7C00, (4000, 2), dtype=np.uint16)
    bits[0], bits[1], bits[2] = (0x7BFF, 0x7BFF), (0x0001, 0x0000), (0x03FF, 0x8001)
    halves = np.zeros((len(bits), 136), np.float16)  # of two blocks, one of them cut short
    halves[:, 7], halves[:, 125], halves[:, 135] = bits[:, 0].view(np.float16), bits[:, 1].view(np.float16), 1
    weight = make_weight(runtime, [("f16", len(bits), halves.reshape(-1).view(np.uint8), None)], 136)
    x = np.zeros((2, 136), np.float32)
    x[0, 7] = x[1, 125] = 4095
    result = multiply(runtime, weight, x).T.astype(np.float64) / 4095
    exact = halves[:, (7, 125)].astype(np.float64)
    power = np.exp2(np.floor(np.log2(np.abs(exact).max(axis=1, keepdims=True))))
    error = np.abs(result - exact)
    assert (error[np.broadcast_to(power / 8, exact.shape) <= np.abs(exact)] == 0).all()
    assert (error <= power * 2.0**-14).all()
    assert error.max() > 0


@pytest.mark.parametrize("isa", ISAS)
def test_largest_shorts_do_not_overflow(isa: str) -> None:
    """32 products of the greatest integers of both sides are just below 2**31."""
    runtime = native.Runtime(1, isa)
    half = np.array([2 - 2**-10], np.float16)
    for sign in (1, -1):
        raw = np.tile(half * sign, 2 * 160).astype(np.float16).view(np.uint8)
        weight = make_weight(runtime, [("f16", 2, raw, None)], 160)
        for tokens in (1, 70):
            result = multiply(runtime, weight, np.full((tokens, 160), 4095, np.float32))
            assert (result == sign * 160 * 4095 * float(half[0])).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_halves_show(isa: str, value: float) -> None:
    """In every output of their row, and in no other, whatever the activations are."""
    runtime = native.Runtime(1, isa)
    halves = make_raw("f16", 20, 160).view(np.float16).reshape(20, 160).copy()
    halves[3, 150] = value
    weight = make_weight(runtime, [("f16", 20, halves.reshape(-1).view(np.uint8), None)], 160)
    for tokens in (2, 70):
        x = make_input(tokens, 160)
        x[0] = 0
        finite = np.isfinite(multiply(runtime, weight, x))
        assert not finite[:, 3].any()
        assert finite[:, np.arange(20) != 3].all()


@pytest.mark.parametrize("isa", ISAS)
def test_every_mxfp4_exponent_is_exact(isa: str) -> None:
    blocks = np.zeros((255, 17), np.uint8)  # the last exponent overflows
    blocks[:, 0] = np.arange(255)
    blocks[:, 1] = 2  # the first weight of a block is 2 halves
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 127 / 1024
    runtime = native.Runtime(1, isa)
    weight = make_weight(runtime, [("mxfp4", 255, blocks.reshape(-1), None)], 32)
    exact = np.exp2(np.arange(255) - 128.0) * 2 * 127 / 1024
    assert (multiply(runtime, weight, x)[0] == exact.astype(np.float32)).all()


def test_fused_steps_round_once_in_every_isa() -> None:
    """Operands of very different sizes, so that sums are rounded in every way there is."""
    rng = np.random.default_rng(7)
    rows, columns, tokens = 96, 40, 64
    w, x = (
        np.ldexp(rng.standard_normal((n, columns)), rng.integers(-40, 40, (n, columns))).astype(np.float32)
        for n in (rows, tokens)
    )
    x[:8] *= np.float32(1e-30)  # results below the normal numbers
    w[:8] *= np.float32(1e-8)
    results = []
    for isa in ISAS:
        runtime = native.Runtime(1, isa)
        weight = make_weight(runtime, [("f32", rows, w.reshape(-1).view(np.uint8), None)], columns)
        results.append(multiply(runtime, weight, x))
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    # Two steps against the exact value, rounded twice as the definition says.
    for i in range(16):
        product = [int_ratio(x[i, k]) * int_ratio(w[i, k]) for k in range(2)]
        first = np.float32(float_of(product[0]))
        runtime = native.Runtime(1, "portable")
        pair = make_weight(runtime, [("f32", 1, w[i, :2].copy().view(np.uint8), None)], 2)
        assert multiply(runtime, pair, x[i : i + 1, :2].copy())[0, 0] == float_of(int_ratio(first) + product[1])


@pytest.mark.parametrize("isa", ISAS)
def test_fused_steps_do_not_round_twice(isa: str) -> None:
    """c + p lies 2^-70 beside the middle of two f32: a sum rounded to f64 first would fall on the middle, and then
    to the even, wrong side."""
    runtime = native.Runtime(1, isa)
    ulp, nearly = np.float32(2**-23), (np.float32(1) + np.float32(2**-23), np.float32(1) - np.float32(2**-23))
    for size in (1.0, 2.0**40, 2.0**-40):
        for sign in (1, -1):
            for c, side, right in ((1 + ulp, 1, 1 + ulp), (1 + ulp, -1, 1 + ulp), (1 + 3 * ulp, 1, 1 + 3 * ulp)):
                w = np.array([[c * size, nearly[0] * size]], np.float32) * np.float32(sign)
                x = np.array([[1, side * nearly[1] * np.float32(2**-24)]], np.float32)
                weight = make_weight(runtime, [("f32", 1, w.reshape(-1).view(np.uint8), None)], 2)
                assert multiply(runtime, weight, x)[0, 0] == np.float32(sign * right * size), (size, sign, c, side)


def int_ratio(value: np.float32) -> Fraction:
    return Fraction(*float(value).as_integer_ratio())


def float_of(value: Fraction) -> np.float32:
    """The f32 nearest to an exact value: of the f32 near its f64, the one at the smallest distance, ties to even."""
    near = np.float32(float(value))
    around = (near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf)))
    return min(around, key=lambda f: (abs(int_ratio(f) - value), int(f.view(np.int32)) & 1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_activations_show(isa: str, value: float) -> None:
    runtime = native.Runtime(1, isa)
    for type_name in ("q4_k", "q8_0", "f16", "f32"):
        raw, x = make_raw(type_name, 16, 256), make_input(2, 256)
        x[1, 100] = value
        result = multiply(runtime, make_weight(runtime, [(type_name, 16, raw, None)], 256), x)
        assert np.isfinite(result[0]).all()
        assert not np.isfinite(result[1]).any()


@pytest.mark.parametrize("isa", ISAS)
def test_tiny_activations_count_as_zero(isa: str) -> None:
    runtime = native.Runtime(1, isa)
    x = np.full((1, 32), 1e-38, np.float32)
    for type_name in ("q4_0", "f16"):
        weight = make_weight(runtime, [(type_name, 16, make_raw(type_name, 16, 32), None)], 32)
        assert (multiply(runtime, weight, x) == 0).all()


def test_odd_rows_have_the_same_bits_in_any_company() -> None:
    """Tokens are quantised several at a time: infinities, not-a-number and tiny values stay with their own."""
    tokens, columns = 70, 96
    x = make_input(tokens, columns)
    x[3, 5] = x[16, 40] = x[66, 95] = np.nan
    x[4, 64] = x[20, 31] = np.inf
    x[17, 0] = -np.inf
    x[5] = 1e-31
    x[18, 32:64] = -1e-38
    x[19] = -0.0
    x[40] *= 1e30
    parts = [(name, 32, make_raw(name, 32, columns), None) for name in ("q8_0", "q4_1", "q5_0", "f16")]
    runtime = native.Runtime(1, "portable")
    weight = make_weight(runtime, parts, columns)
    alone = np.concatenate([multiply(runtime, weight, x[i : i + 1]) for i in range(tokens)])
    for isa in ISAS:
        runtime = native.Runtime(2, isa)
        for count in (4, 11, 12, 13, 29, 64, 70):
            result = multiply(runtime, make_weight(runtime, parts, columns), x[tokens - count :])
            np.testing.assert_array_equal(result.view(np.uint32), alone[tokens - count :].view(np.uint32))


def test_bf16_products_of_every_size_have_the_same_bits() -> None:
    """Activations and weights of all exponents, subnormal ones and infinities too; subnormal numbers count as zero."""
    rng = np.random.default_rng(5)
    columns, rows, tokens = 67, 40, 66
    x = rng.integers(0, 2**32, (tokens, columns), dtype=np.uint32).view(np.float32)
    x[0], x[1] = 1e-40, np.float32(1.1754942e-38)
    weights = rng.integers(0, 2**16, rows * columns, dtype=np.uint16).view(np.uint8)
    results = []
    for isa in ISAS:
        runtime = native.Runtime(2, isa)
        weight = make_weight(runtime, [("bf16", rows, weights, None)], columns)
        results.append(multiply(runtime, weight, x))
        results.append(np.concatenate([multiply(runtime, weight, x[i : i + 1]) for i in range(tokens)]))
    numbers = ~np.isnan(results[0])
    assert numbers.any()
    assert (results[0][:2][numbers[:2]] == 0).all()
    for result in results:
        np.testing.assert_array_equal(np.isnan(result), ~numbers)
        np.testing.assert_array_equal(result.view(np.uint32)[numbers], results[0].view(np.uint32)[numbers])


def test_memory_is_that_of_the_file() -> None:
    runtime = native.Runtime(2, ISAS[-1])
    # Sums of 16 are not kept; signs that follow from others are written down.
    kept = {"q8_k": 260, "iq2_xxs": 70, "iq2_xs": 78, "iq3_xxs": 102}
    for type_name, (elements, size, _) in BLOCKS.items():
        weight = make_weight(runtime, [(type_name, 64, make_raw(type_name, 64, 1024), None)], 1024)
        assert weight.nbytes == 64 * 1024 // elements * kept.get(type_name, size)
    weight = make_weight(runtime, [("f16", 64, make_raw("f16", 64, 1024), None)], 1024)
    assert weight.nbytes == 64 * 1024 * 2 * 257 // 256  # an exponent for 128


def test_weights_come_and_go_beside_each_other() -> None:
    """Weights share memory: one that goes, or comes later, leaves the others as they are, also beyond one region."""
    runtime = native.Runtime(2, native.best_isa())
    x = make_input(1, 4096)
    raws = [make_raw("f32", 1504, 4096, seed) for seed in range(4)]  # 25 MB: two of them in a region
    weights: list[Any] = [make_weight(runtime, [("f32", 1504, raw, None)], 4096) for raw in raws]
    before = [multiply(runtime, weight, x) for weight in weights]
    weights[0] = weights[2] = None
    later = make_weight(runtime, [("f32", 1504, raws[0], None)], 4096)
    assert np.array_equal(multiply(runtime, weights[1], x), before[1])
    assert np.array_equal(multiply(runtime, weights[3], x), before[3])
    assert np.array_equal(multiply(runtime, later, x), before[0])


def test_threads_are_bounded_by_the_machine() -> None:
    assert 1 <= native.default_threads() <= 4096
    is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else False
    is_slow = is_intel and ISAS[-1] == "avx512bf16"  # Intel's take two cycles for a product of pairs
    assert native.best_isa() == ISAS[-2 if is_slow else -1]
    assert ISAS[0] == "portable"


def test_calls_from_many_python_threads_agree() -> None:
    """One runtime serves one call at a time; other calls wait."""
    runtime = native.Runtime(2, ISAS[-1])
    raw, x = make_raw("q4_k", 64, 512), make_input(20, 512)
    weight = make_weight(runtime, [("q4_k", 64, raw, None)], 512)
    first = multiply(runtime, weight, x)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: multiply(runtime, weight, x), range(40)))
    assert all(result.tobytes() == first.tobytes() for result in results)


def refused(error: type[Exception], text: str, call: Any) -> None:
    with pytest.raises(error, match=text):
        call()


def test_bad_weights_are_refused() -> None:
    runtime = native.Runtime(1, "portable")
    raw = make_raw("q4_k", 4, 256)
    refused(ValueError, "in_features is 0", lambda: native.LinearWeight(0))
    refused(ValueError, "in_features is -32", lambda: native.LinearWeight(-32))
    weight = native.LinearWeight(256)
    refused(ValueError, "no kernel for tensor type 'f64'", lambda: weight.append(runtime, "f64", 4, raw, None))
    refused(ValueError, "out_features is 0", lambda: weight.append(runtime, "q4_k", 0, raw, None))
    refused(ValueError, "out_features is -4", lambda: weight.append(runtime, "q4_k", -4, raw, None))
    refused(ValueError, "out_features is 4611", lambda: weight.append(runtime, "q4_k", 2**62, raw, None))
    refused(ValueError, "data has 576 bytes", lambda: weight.append(runtime, "q4_k", 5, raw, None))
    refused(ValueError, "data has 575 bytes", lambda: weight.append(runtime, "q4_k", 4, raw[:-1], None))
    refused(ValueError, "multiple of 256", lambda: native.LinearWeight(288).append(runtime, "q4_k", 4, raw, None))
    refused(TypeError, "incompatible", lambda: weight.append(runtime, "q4_k", 4, raw.view(np.int8), None))
    refused(TypeError, "incompatible", lambda: weight.append(runtime, "q4_k", 4, raw[::2], None))
    refused(ValueError, "length of bias is 3", lambda: weight.append(runtime, "q4_k", 4, raw, np.zeros(3, np.float32)))
    refused(TypeError, "incompatible", lambda: weight.append(runtime, "q4_k", 4, raw, np.zeros(4, np.float64)))
    refused(TypeError, "incompatible", lambda: weight.append(None, "q4_k", 4, raw, None))
    assert weight.out_features == 0


def test_bad_calls_are_refused() -> None:
    runtime = native.Runtime(1, "portable")
    weight = make_weight(runtime, [("q4_k", 4, make_raw("q4_k", 4, 256), None)], 256)
    x, out = np.zeros((2, 256), np.float32), np.zeros((2, 4), np.float32)
    refused(
        ValueError, "columns of x is 255", lambda: native.linear(runtime, np.zeros((2, 255), np.float32), weight, out)
    )
    refused(ValueError, "rows of out is 1", lambda: native.linear(runtime, x, weight, out[:1]))
    refused(ValueError, "columns of out is 5", lambda: native.linear(runtime, x, weight, np.zeros((2, 5), np.float32)))
    refused(TypeError, "incompatible", lambda: native.linear(runtime, x.astype(np.float64), weight, out))
    refused(TypeError, "incompatible", lambda: native.linear(runtime, x[0], weight, out))
    refused(TypeError, "incompatible", lambda: native.linear(runtime, np.zeros((256, 2), np.float32).T, weight, out))
    refused(TypeError, "incompatible", lambda: native.linear(runtime, x, weight, out.astype(np.float16)))
    frozen = out.copy()
    frozen.flags.writeable = False
    refused(TypeError, "incompatible", lambda: native.linear(runtime, x, weight, frozen))
    refused(TypeError, "incompatible", lambda: native.linear(runtime, None, weight, out))
    native.linear(runtime, x, weight, out)
    refused(
        ValueError,
        "after the weight was used",
        lambda: weight.append(runtime, "q4_k", 4, make_raw("q4_k", 4, 256), None),
    )


def test_no_tokens_and_no_weights_do_nothing() -> None:
    runtime = native.Runtime(2, ISAS[-1])
    weight = make_weight(runtime, [("q4_k", 4, make_raw("q4_k", 4, 256), None)], 256)
    assert multiply(runtime, weight, np.zeros((0, 256), np.float32)).shape == (0, 4)
    assert multiply(runtime, native.LinearWeight(256), np.zeros((3, 256), np.float32)).shape == (3, 0)


@pytest.mark.parametrize(("threads", "isa"), [(0, "portable"), (-1, "portable"), (4097, "portable"), (1, "sse9")])
def test_bad_runtimes_are_refused(threads: int, isa: str) -> None:
    with pytest.raises(ValueError, match=r"threads must be|unknown instruction set"):
        native.Runtime(threads, isa)


class Tensor:
    """A weight tensor that remembers whether it was released, with read-only data as in a mapped file."""

    def __init__(self, name: str, type_name: str, rows: int, columns: int) -> None:
        self.name, self.type_name, self.shape = name, type_name, (rows, columns)
        raw = make_raw(type_name if type_name in TYPES else "f32", rows, columns)
        self.data = np.concatenate([np.zeros(1, np.uint8), raw])[1:]  # at an odd address
        self.data.flags.writeable = False
        self.nbytes = self.data.size
        self.released = 0

    def to_float32(self, start: int | None = None, stop: int | None = None) -> Floats:
        return decode(self.type_name, self.data, *self.shape)[start:stop]

    def release(self) -> None:
        self.released += 1


def test_operator_agrees_with_the_reference(cpu: Context) -> None:
    reference, columns = Context("reference"), 512
    tensors = [Tensor("wq", "q4_k", 64, columns), Tensor("wk", "q4_k", 32, columns), Tensor("wv", "f16", 33, columns)]
    biases = [None, make_input(1, 32)[0], None]
    x = make_input(9, columns)
    weight, plain = prepare(cpu, tensors, biases), prepare(reference, tensors, biases)
    assert [tensor.released for tensor in tensors] == [2, 2, 2]  # once by each
    assert weight.out_features == 129
    assert weight.variant == "q4_k+f16"
    result, truth = linear(cpu, x, weight), linear(reference, x, plain)
    assert result.shape == (9, 129)
    assert result.dtype == np.float32
    blocks = np.concatenate([tensor.to_float32() for tensor in tensors[:2]]).astype(np.float64)
    exact = quantise(x, size=256) @ blocks.T + np.concatenate([np.zeros(64), make_input(1, 32)[0]])
    assert np.linalg.norm(result[:, :96] - exact) < 1e-6 * np.linalg.norm(exact)  # rounded activations, nothing else
    steps = np.abs(in_groups(x, 256)).max(axis=-1).repeat(256, axis=-1) / 127
    error, expected_error = result[:, :96] - truth[:, :96], np.sqrt((steps**2 / 12) @ (blocks**2).T)
    # rounding to a step has a mean square error of a twelfth of its square; errors of a token are in all of its outputs
    assert 0.8 < np.linalg.norm(error) / np.linalg.norm(expected_error) < 1.18
    error = np.linalg.norm(result[:, 96:] - truth[:, 96:]) / np.linalg.norm(truth[:, 96:])
    assert 1e-6 < error < 1e-3  # f16 has them in 13 bits: up to half of a 4095th of the largest of 32
    assert cpu.ledger.snapshot().dispatches[0].implementation == "cpu"


def test_operator_refuses_what_it_has_no_kernel_for(cpu: Context) -> None:
    with pytest.raises(DeviceError, match=r"tensor odd has type f64, which has no CPU kernel; known are f32, "):
        prepare(cpu, [Tensor("fine", "q4_k", 4, 256), Tensor("odd", "f64", 4, 256)])
    narrow = Tensor("narrow", "f32", 4, 32)
    narrow.type_name = "q4_k"
    with pytest.raises(ValueError, match="multiple of 256"):
        prepare(cpu, [narrow])
