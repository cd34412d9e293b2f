"""The encoders: equal to the `gguf` package where it has one, no worse than ggml's own, safe at the edges."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from mlxr.core.errors import ModelError
from mlxr.formats.ggml_types import GGML_TYPES, GGMLType, by_name, decode_blocks, encode_tensor

WRITTEN = [row for row in GGML_TYPES if row.encode is not None]
QUANTIZED = [row for row in WRITTEN if row.is_quantized]

# Relative error (root mean square over root mean square) of ggml's own quantizer on `weights()`: plain, and weighted
# by the magnitude of each value. Measured once with ggml_quantize_chunk of ggml 0.25 (llama-cpp-python 0.3.36).
GGML_ERRORS = {
    "q2_k": (0.332407, 0.176373),
    "q3_k": (0.175516, 0.101806),
    "q4_k": (0.082859, 0.046806),
    "q5_k": (0.041911, 0.024345),
    "q6_k": (0.021320, 0.011617),
    "iq3_s": (0.189181, 0.094650),
    "iq4_nl": (0.088429, 0.056048),
    "iq4_xs": (0.089316, 0.057347),
}


def weights() -> NDArray[np.float32]:
    """Weights with the heavier tails of trained ones."""
    return (np.random.default_rng(7).standard_t(5, (256, 512)) * 0.02).astype(np.float32)


def round_trip(row: GGMLType, values: NDArray[np.float32]) -> NDArray[np.float32]:
    return decode_blocks(row, encode_tensor(row.name, values)).reshape(values.shape)


def relative_errors(values: NDArray[np.float32], decoded: NDArray[np.float32]) -> tuple[float, float]:
    exact, difference = values.astype(np.float64), values.astype(np.float64) - decoded
    weight = np.abs(exact)
    plain = np.sqrt((difference**2).sum() / (exact**2).sum())
    weighted = np.sqrt((difference**2 * weight).sum() / (exact**2 * weight).sum())
    return float(plain), float(weighted)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4"])
def test_encoder_equals_gguf(name: str) -> None:
    values = np.concatenate([weights(), np.zeros((1, 512), np.float32), weights()[:8] * 1e4])
    wanted = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(encode_tensor(name, values), wanted.view(np.uint8).reshape(-1))


@pytest.mark.parametrize("name", GGML_ERRORS)
def test_encoder_is_no_worse_than_ggml(name: str) -> None:
    got = relative_errors(weights(), round_trip(by_name(name), weights()))
    for ours, theirs in zip(got, GGML_ERRORS[name], strict=True):
        assert ours <= theirs * 1.002


@pytest.mark.parametrize(("name", "bound"), [("f32", 0), ("f16", 2**-11), ("bf16", 2**-8)])
def test_plain_types_round_to_nearest(name: str, bound: float) -> None:
    decoded = round_trip(by_name(name), weights())
    assert (np.abs(decoded - weights()) <= bound * np.abs(weights()) + 2**-25).all()


@pytest.mark.parametrize(("name", "steps"), [("q4_0", 8), ("q4_1", 7.5), ("q5_0", 16), ("q5_1", 15.5), ("q8_0", 127)])
def test_small_types_are_within_one_step(name: str, steps: float) -> None:
    """No value is further off than its block's largest magnitude (or half range) over the number of steps."""
    row = by_name(name)
    blocks = weights().reshape(-1, row.block_size)
    reach = np.abs(blocks).max(axis=1) if name.endswith("_0") else np.ptp(blocks, axis=1) / 2
    difference = np.abs(blocks - round_trip(row, blocks)).max(axis=1)
    assert (difference <= reach / steps * 1.01 + 1e-6).all()


@pytest.mark.parametrize("row", QUANTIZED, ids=lambda row: row.name)
def test_values_on_the_grid_stay(row: GGMLType) -> None:
    """Decoded values, encoded again, decode to nearly the same: encoding is close to idempotent."""
    once = round_trip(row, weights())
    plain, _ = relative_errors(once, round_trip(row, once))
    first, _ = relative_errors(weights(), once)
    assert plain < 0.5 * first


@pytest.mark.parametrize("row", QUANTIZED, ids=lambda row: row.name)
@pytest.mark.parametrize("constant", [0.0, 0.5, -0.5, 1e-3, 300.0])
def test_constant_blocks(row: GGMLType, constant: float) -> None:
    values = np.full((2, 256), constant, np.float32)
    assert np.allclose(round_trip(row, values), values, rtol=0.34 if row.name in ("mxfp4", "iq3_s") else 0.1, atol=1e-7)


@pytest.mark.parametrize("row", QUANTIZED, ids=lambda row: row.name)
def test_extreme_blocks_stay_finite(row: GGMLType) -> None:
    """Subnormal values, one large value among tiny ones, the largest the type takes: finite, and the large one kept."""
    values = np.full((4, 256), 1e-42, np.float32)
    values[0, ::2] = 0
    values[1, 17] = 60000.0
    values[2] = np.where(np.arange(256) % 2, 65504.0, -65504.0)
    values[3] = np.float32(1e-7) * np.arange(-128, 128)
    with np.errstate(all="raise", under="ignore"):
        decoded = round_trip(row, values)
    assert np.isfinite(decoded).all()
    assert abs(decoded[1, 17] - 60000.0) < 0.2 * 60000.0
    assert (np.sign(decoded[2]) == np.sign(values[2])).all()


@pytest.mark.parametrize("row", QUANTIZED, ids=lambda row: row.name)
def test_blocks_are_independent(row: GGMLType) -> None:
    whole = encode_tensor(row.name, weights())
    per_row = np.concatenate([encode_tensor(row.name, line[None]) for line in weights()[:9]])
    assert np.array_equal(whole[: per_row.size], per_row)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    values = weights()
    values[3, 5] = bad
    for name in ("q4_k", "q8_0", "mxfp4"):
        with pytest.raises(ModelError, match=f"(nan|inf), which cannot be written as {name}"):
            encode_tensor(name, values)
    assert np.array_equal(round_trip(by_name("bf16"), values)[3, 5:6], [bad], equal_nan=True)


def test_weights_too_large_are_refused() -> None:
    values = weights()
    values[0, 0] = -70000
    for name in ("f16", "q4_0", "q6_k", "iq4_xs"):
        with pytest.raises(ModelError, match=f"70000, {name} goes to 65504; use bf16 or f32"):
            encode_tensor(name, values)
    assert round_trip(by_name("bf16"), values)[0, 0] == pytest.approx(-70000, rel=0.01)


def test_shapes_and_types_are_checked() -> None:
    with pytest.raises(ModelError, match="multiple of 32 values, not 40"):
        encode_tensor("q8_0", np.zeros((4, 40), np.float32))
    with pytest.raises(ModelError, match="cannot write type q8_k; it is read only"):
        encode_tensor("q8_k", np.zeros((1, 256), np.float32))
    assert encode_tensor("q8_0", np.ones(64, np.float32)).shape == (68,)
    assert encode_tensor("q8_0", np.ones((3, 2, 32), np.float32)).shape == (204,)
