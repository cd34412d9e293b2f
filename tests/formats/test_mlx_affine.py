"""Weights quantised by MLX: the packing of every number of bits, blocks without loss, and parts that do not fit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from mlx_words import make_source, pack_words, quantize

from mlxr.core.errors import ModelError
from mlxr.formats import AffineTensor, TensorSource
from mlxr.formats.mlx_affine import BITS, GROUP_SIZES, join_affine, join_factors, unpack_codes

CONFIG = {"quantization": {"bits": 4, "group_size": 64}}


def random_floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def join_one(parts: dict[str, TensorSource], bits: int, group_size: int) -> AffineTensor:
    (joined,) = join_affine(parts, {"quantization": {"bits": bits, "group_size": group_size}}).values()
    assert isinstance(joined, AffineTensor)
    return joined


@pytest.mark.parametrize("bits", BITS)
def test_words_hold_numbers_from_the_lowest_bit_up(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (5, 64), dtype=np.uint8)
    words = pack_words(codes, bits)
    assert words.shape == (5, 2 * bits)
    assert np.array_equal(unpack_codes(words.view(np.uint8), bits).reshape(5, 64), codes)
    value = sum(int(word) << 32 * place for place, word in enumerate(words[2]))
    assert [value >> bits * place & (1 << bits) - 1 for place in range(64)] == codes[2].tolist()


@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_blocks_mean_what_the_checkpoint_says(bits: int, group_size: int, type_name: str) -> None:
    parts, meaning = quantize("x", random_floats(7, 384), bits, group_size, type_name)
    tensor = join_one(parts, bits, group_size)
    assert tensor.shape == (7, 384)
    assert tensor.type_name == f"affine{4 if bits <= 4 else 8}_{min(64, group_size)}"
    assert np.array_equal(tensor.to_float32(), meaning)
    assert np.array_equal(tensor.to_float32(2, -1), meaning[2:-1])
    assert tensor.to_float32(5, 2).shape == (0, 384)
    assert np.array_equal(tensor.take_rows(2, 5).to_float32(), meaning[2:5])
    assert tensor.nbytes == tensor.data.size
    blocks = TensorSource("blocks", tensor.type_name, tensor.shape, tensor.data)
    assert np.array_equal(blocks.to_float32(), meaning)


def test_blocks_are_kept_until_they_are_released() -> None:
    tensor = join_one(quantize("x", random_floats(4, 64), 4, 64)[0], 4, 64)
    data = tensor.data
    assert tensor.data is data
    tensor.release()
    assert tensor.data is not data
    assert np.array_equal(tensor.data, data)


def test_pieces_make_a_whole() -> None:
    values = random_floats(600, 1024)  # more than two pieces
    parts, meaning = quantize("x", values, 4, 128)
    tensor = join_one(parts, 4, 128)
    assert np.array_equal(tensor.to_float32(), meaning)
    assert np.array_equal(TensorSource("b", tensor.type_name, tensor.shape, tensor.data).to_float32(), meaning)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_mlx_says_the_same(bits: int, group_size: int, kind: str) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    with mx.stream(mx.cpu):
        values = mx.array(random_floats(6, 256)).astype(getattr(mx, kind))
        words, scales, biases = mx.quantize(values, group_size=group_size, bits=bits)
        wide = [part.astype(mx.float32) for part in (scales, biases)]
        meaning = np.asarray(mx.dequantize(words, *wide, group_size=group_size, bits=bits))
        type_name = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[kind]
        parts = {"x.weight": make_source("x.weight", np.asarray(words), "u32")}
        for name, part in zip(("x.scales", "x.biases"), wide, strict=True):
            parts[name] = make_source(name, np.asarray(part), type_name)
    assert np.array_equal(join_one(parts, bits, group_size).to_float32(), meaning)


@pytest.mark.parametrize(("mode", "bits", "group_size"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_mlx_says_the_same_of_modes_of_floats(mode: str, bits: int, group_size: int) -> None:
    """A matrix and a stack; no number is rounded."""
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    for shape in ((6, 256), (3, 5, 64)):
        with mx.stream(mx.cpu):
            words, scales = mx.quantize(mx.array(random_floats(*shape)), group_size=group_size, bits=bits, mode=mode)
            meaning = np.asarray(
                mx.dequantize(words, scales, group_size=group_size, bits=bits, mode=mode).astype(mx.float32)
            )
            parts = {"x.weight": make_source("x.weight", np.asarray(words), "u32")}
            raw = np.asarray(scales)
            parts["x.scales"] = TensorSource("x.scales", "u8", raw.shape, raw.reshape(-1))
        stated = {"quantization": {"bits": bits, "group_size": group_size, "mode": mode}}
        (joined,) = join_affine(parts, stated).values()
        assert joined.type_name == ("bf16" if mode == "mxfp8" else mode)
        for tensor, wanted in ((joined, meaning), (joined.take_rows(1, 3), meaning[1:3])):
            assert np.array_equal(tensor.to_float32(), wanted)
            assert tensor.nbytes == tensor.data.size
            blocks = TensorSource("blocks", tensor.type_name, tensor.shape, tensor.data)
            assert np.array_equal(blocks.to_float32(), wanted)
        assert np.array_equal(joined.to_float32(1, 2), meaning[1:2])
        if len(shape) == 3:
            assert np.array_equal(joined.take_matrix(2).to_float32(), meaning[2])
        broken = parts | {"x.scales": TensorSource("x.scales", "u8", raw.shape, np.full(raw.size, 255, np.uint8))}
        if mode != "mxfp4":
            with pytest.raises(ModelError, match=r"tensor x\.weight has the number nan"):
                _ = next(iter(join_affine(broken, stated).values())).data


def test_factors_of_nvfp4_in_gguf_files_are_multiplied() -> None:
    """A matrix and a stack; other tensors stay, and wrong factors are refused by name."""
    random = np.random.default_rng(5)
    tensors = {}
    for name, shape in (("a", (6, 128)), ("b", (3, 4, 64))):
        raw = random.integers(0, 256, (math.prod(shape) // 64, 36), dtype=np.uint8)
        tensors[f"{name}.weight"] = TensorSource(f"{name}.weight", "nvfp4", shape, raw.reshape(-1))
        factors = random.standard_normal(3 if name == "b" else 1)
        tensors[f"{name}.scale"] = make_source(f"{name}.scale", factors, "f32")
        tensors[f"{name}.input_scale"] = make_source(f"{name}.input_scale", np.ones(1), "f32")
    alone = TensorSource("c.weight", "nvfp4", (1, 64), np.zeros(36, np.uint8))
    plain = {"c.weight": alone, "d.scale": make_source("d.scale", np.ones(2), "f32")}
    joined = join_factors(tensors | plain)
    assert joined.keys() == {"a.weight", "b.weight", *plain}
    assert joined["c.weight"] is alone
    for name in ("a", "b"):
        tensor, blocks = joined[f"{name}.weight"], tensors[f"{name}.weight"].to_float32()
        factors = tensors[f"{name}.scale"].to_float32().reshape(-1, *[1] * (blocks.ndim - 1))
        assert np.allclose(tensor.to_float32(), blocks * factors, rtol=1e-6, atol=0)
        assert (tensor.type_name, tensor.nbytes) == ("nvfp4_scaled", tensor.data.size)
        assert np.array_equal(tensor.take_rows(1, 3).to_float32(), tensor.to_float32(1, 3))
        assert tensor.to_float32(2, 2).shape == (0, *tensor.shape[1:])
    assert np.array_equal(joined["b.weight"].take_matrix(2).to_float32(), joined["b.weight"].to_float32()[2])
    for factors in (np.full(3, np.nan), np.full(3, 1e36), np.ones(2)):
        broken = tensors | {"b.scale": make_source("b.scale", factors, "f32")}
        with pytest.raises(ModelError, match=r"tensor b\.weight \(3, 4, 64\) has \d factors, of up to"):
            join_factors(broken)


def test_single_modules_have_their_own_way() -> None:
    tensors = {**quantize("a", random_floats(4, 128), 4, 64)[0], **quantize("b", random_floats(4, 128), 6, 32)[0]}
    tensors |= quantize("c", random_floats(4, 128), 4, 64)[0]
    plain = {
        "d.weight": make_source("d.weight", random_floats(4, 128), "f16"),
        "norm.weight": make_source("norm.weight", random_floats(128), "bf16"),
        "a.bias": make_source("a.bias", random_floats(4), "bf16"),
    }
    own = {"b": {"bits": 6, "group_size": 32, "mode": "affine"}, "c": True, "d": False}
    joined = join_affine(tensors | plain, {"quantization": CONFIG["quantization"] | own})
    assert joined.keys() == {"a.weight", "b.weight", "c.weight", *plain}
    found = {name: tensor.quantization for name, tensor in joined.items() if isinstance(tensor, AffineTensor)}
    assert {name: (one.bits, one.group_size) for name, one in found.items()} == {
        "a.weight": (4, 64),
        "b.weight": (6, 32),
        "c.weight": (4, 64),
    }
    assert all(joined[name] is tensor for name, tensor in plain.items())


def test_plain_folders_stay_as_they_are() -> None:
    plain = {"d.weight": make_source("d.weight", random_floats(4, 128), "f16")}
    assert join_affine(plain, {}) == plain


def break_parts(**changes: TensorSource | None) -> dict[str, TensorSource]:
    parts: dict[str, TensorSource | None] = dict(quantize("x", random_floats(4, 128), 4, 64)[0])
    parts |= {f"x.{name}": tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in parts.items() if tensor is not None}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (break_parts(scales=None), r"tensor x\.scales is missing, which the quantised x\.weight needs"),
        (break_parts(biases=None), r"tensor x\.biases is missing"),
        (break_parts(weight=None), r"tensor x\.(scales|biases) has no x\.weight"),
        (break_parts(scales=make_source("x.scales", random_floats(4, 4), "f16")), r"x\.scales has shape \(4, 4\), exp.*"
         r"\(4, 2\) by 4 x 128 values of 4 bits in groups of 64"),
        (break_parts(biases=make_source("x.biases", random_floats(2, 4), "f16")), r"x\.biases has shape \(2, 4\)"),
        (break_parts(scales=make_source("x.scales", np.zeros((4, 2), np.uint32), "u32")), r"x\.scales is u32 \(4, 2\)"),
        (break_parts(weight=make_source("x.weight", random_floats(4, 128), "f16")), r"x\.weight is f16 .* of u32"),
        (break_parts(weight=make_source("x.weight", np.zeros((4, 15), np.uint32), "u32")), "15 words a row"),
        (break_parts(weight=make_source("x.weight", np.zeros(16, np.uint32), "u32")), "expected a matrix of u32"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(parts: dict[str, TensorSource], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        join_affine(parts, CONFIG)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (None, r"tensor x\.weight is quantised, but in config\.json there is no quantization"),
        ("4bit", "quantization is '4bit', expected an object"),
        ({"bits": 4}, r"quantization\.group_size is missing, expected one of 32, 64, 128"),
        ({"bits": 7, "group_size": 64}, r"quantization\.bits is 7, expected one of 1, 2, 3, 4, 5, 6, 8"),
        ({"bits": True, "group_size": 64}, r"quantization\.bits is True"),
        ({"bits": 4, "group_size": 16}, r"quantization\.group_size is 16"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp3"}, r"quantization\.mode is 'mxfp3', which is not supported"),
        ({"bits": 4, "group_size": 64, "mode": "mxfp4"}, r"quantization\.group_size is 64, expected one of 32"),
        ({"bits": 4, "group_size": 16, "mode": "nvfp4"}, r"expected u32 \(4, 4\), as x\.scales is bf16 \(4, 2\)"),
        (
            {"bits": 4, "group_size": 64, "x": False},
            r"tensor x\.weight is quantised, but .* quantization leaves it out",
        ),
        ({"bits": 4, "group_size": 64, "x": 8}, r"quantization\.x is 8, expected true, false or an object"),
        ({"bits": 4, "group_size": 64, "x": {"bits": 8}}, r"quantization\.x\.group_size is missing"),
        ({"bits": 8, "group_size": 64}, r"tensor x\.scales has shape \(4, 2\), expected \(4, 1\)"),
    ],
)
def test_what_the_configuration_may_not_say(quantization: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        join_affine(break_parts(), {"quantization": quantization})
