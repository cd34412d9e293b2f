"""Weights of AWQ, GPTQ, compressed-tensors and FP8: their meaning, blocks without loss, and parts that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_words import make_part, make_source, quantize_packed

from mlxr.core.errors import ModelError
from mlxr.formats import TensorSource, by_name, join_quantised
from mlxr.formats.packed import Float8Tensor, PackedTensor

Stated = dict[str, Any]
STATED: Mapping[str, Stated] = {
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "gptq": {"quant_method": "gptq"},
    "gptq_v2": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "packed": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "bytes": {"quant_method": "compressed-tensors", "format": "int-quantized"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [32, 64]},
    "nvfp4": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "ao4": {"quant_method": "torchao"},
    "ao8": {"quant_method": "torchao"},
}
KINDS = [("awq", 4), ("gptq", 2), ("gptq", 3), ("gptq", 4), ("gptq", 8), ("gptq_v2", 3), ("gptq_v2", 4), ("packed", 4),
         ("packed", 8), ("bytes", 8), ("fp8", 8), ("nvfp4", 4), ("modelopt", 4), ("nf4", 4), ("int8", 8), ("ao4", 4),
         ("ao8", 8)]  # fmt: skip
FLOATS = {"nvfp4": "nvfp4_scaled", "modelopt": "nvfp4_scaled", "nf4": "bf16", "int8": "affine8_64"}


def random_floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def join(parts: Mapping[str, TensorSource], stated: Stated) -> Any:
    (joined,) = join_quantised(parts, {"quantization_config": stated}).values()
    return joined


@pytest.mark.parametrize(("method", "bits"), KINDS)
def test_blocks_mean_what_the_checkpoint_says(method: str, bits: int) -> None:
    """In groups of 32 and 128 columns, for rows that begin and end within words, and scales in each type."""
    for size, type_name in ((32, "f16"), (128, "bf16"), (384, "f16")):
        if method in FLOATS and size != 32:
            continue
        parts, meaning = quantize_packed("x", random_floats(96, 384), method, bits, size, type_name)
        stated = STATED[method] | ({"weight_block_size": [32, size]} if method == "fp8" else {})
        tensor = join(parts, stated)
        is_same = partial(np.allclose, rtol=0, atol=1e-6) if method == "int8" else np.array_equal  # scales of 24 bits
        assert (tensor.name, tensor.shape) == ("x.weight", (96, 384))
        assert is_same(tensor.to_float32(), meaning)
        assert is_same(tensor.to_float32(5, -3), meaning[5:-3])
        assert tensor.to_float32(5, 2).shape == (0, 384)
        cut = tensor.take_rows(7, 90).take_rows(2, 50)
        assert is_same(cut.to_float32(), meaning[9:57])
        for one, expected in ((tensor, meaning), (cut, meaning[9:57])):
            assert one.nbytes == one.data.size
            assert is_same(TensorSource("b", one.type_name, one.shape, one.data).to_float32(), expected)
        if method == "fp8":
            assert (tensor.type_name, tensor.recipe) == ("bf16" if size % 128 else "f8_e4m3_128", "fp8")
        elif method in FLOATS:
            assert tensor.type_name == FLOATS[method]
        else:
            bits = {"ao8": 8, "ao4": 4}.get(method, bits)
            assert tensor.type_name == f"affine{4 if bits <= 4 else 8}_{min(64, size)}"
        data = tensor.data
        tensor.release()
        assert tensor.data is not data


def test_parts_mean_what_the_libraries_that_make_them_say() -> None:
    """As gptqmodel, compressed-tensors, bitsandbytes, torchao and torch have it: see tools/make_packed_goldens.py."""
    with np.load(Path(__file__).with_name("packed_goldens.npz")) as stored:
        goldens = dict(stored)
    cases = sorted({name.partition(".")[0] for name in goldens})
    assert len(cases) == 18
    for case in cases:
        if case.startswith("f8"):
            values = by_name(case).decode(np.arange(256, dtype=np.uint8)[:, None])[:, 0]
            assert np.array_equal(values, goldens[f"{case}.values"], equal_nan=True)
            continue
        if f"{case}.meaning" in goldens:
            compare_made(case, {name: array for name, array in goldens.items() if name.startswith(f"{case}.")})
            continue
        method = "packed" if case.startswith("int") else "gptq_v2" if case.endswith("v2") else case.rstrip("v12348")
        parts = {
            f"x.{part}": make_part(f"x.{part}", array, "i64" if part == "weight_shape" else "i32")
            for part, array in (
                (name.partition(".")[2], array) for name, array in goldens.items() if name.startswith(case)
            )
            if part not in ("codes", "zeros")
        }
        codes, zeros = goldens[f"{case}.codes"].astype(np.float32), goldens[f"{case}.zeros"].astype(np.float32)
        step = random_floats(*zeros.shape).astype(np.float16).astype(np.float32)
        name = "x.weight_scale" if method == "packed" else "x.scales"
        parts[name] = make_source(name, step if method == "packed" else np.ascontiguousarray(step.T), "f16")
        meaning = (codes.reshape(*zeros.shape, -1) - zeros[..., None]) * step[..., None]
        assert np.array_equal(join(parts, STATED[method]).to_float32(), meaning.reshape(codes.shape)), case


def compare_made(case: str, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Compare with a library's numbers; torchao's are bf16, and int8 and NVFP4 round scales in f32 in another way."""
    kinds, parts = {"uint8": "u8", "int8": "i8"}, {}
    for full_name, array in arrays.items():
        name, kind = f"x.{full_name.partition('.')[2]}", kinds.get(array.dtype.name)
        kind = "f8_e4m3" if name == "x.weight_scale" else kind
        parts[name] = make_source(name, array, "f32") if kind is None else make_part(name, array, kind)
    meaning = parts.pop("x.meaning").to_float32()
    stated = STATED["nvfp4" if case == "nvfp4" else "ao8" if case == "torchao" else "nf4"]
    found = join(parts, stated).to_float32()
    if case in ("bnb_int8", "nvfp4"):
        assert np.allclose(found, meaning, rtol=2e-7, atol=1e-6 if case == "bnb_int8" else 0), case
        return
    assert np.array_equal(make_source("", found, "bf16").to_float32(), meaning), case
    assert case == "torchao" or np.array_equal(found, meaning), case


@pytest.mark.parametrize("method", ["gptq", "gptq_v2", "packed"])
def test_columns_of_a_group_may_stand_apart(method: str) -> None:
    """The same numbers with columns exchanged mean the same with columns exchanged, rounded to 16 bits."""
    parts, meaning = quantize_packed("x", random_floats(96, 384), method, 4, 128, "f16")
    name, order = ("weight_packed", "weight_g_idx") if method == "packed" else ("qweight", "g_idx")
    chosen = np.random.default_rng(1).permutation(384)
    words = parts[f"x.{name}"].data.view("<u4").reshape(parts[f"x.{name}"].shape)
    words = words if method == "packed" else words.T  # a row's columns in words, eight in each from the lowest bits up
    codes = (words[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(96, 384)[:, chosen]
    moved = (codes.reshape(96, -1, 8) << np.arange(0, 32, 4, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)
    moved = np.ascontiguousarray(moved if method == "packed" else moved.T).view(np.int32)
    apart = [make_part(f"x.{name}", moved, "i32"), make_part(f"x.{order}", chosen // 128, "i32")]
    tensor = join(dict(parts) | {one.name: one for one in apart}, STATED[method])
    assert (tensor.type_name, tensor.recipe) == ("f16", "int4" if method == "packed" else "gptq_4bit")
    expected = meaning[:, chosen].astype(np.float16)
    assert np.array_equal(tensor.to_float32(), expected)
    cut = tensor.take_rows(7, 90).take_rows(2, 50)
    assert np.array_equal(cut.data.view(np.float16).reshape(48, 384), expected[9:57])
    in_order = make_part(f"x.{order}", np.arange(384) // 128, "i32")
    assert join(dict(parts) | {in_order.name: in_order}, STATED[method]).type_name == "affine4_64"


def test_scales_may_be_for_rows_or_for_all() -> None:
    weight = make_part("x.weight", np.arange(256).reshape(4, 64) % 127, "f8_e4m3")
    scale = make_source("x.weight_scale", np.array([0.5, 2, 4, 0.25], np.float32)[:, None], "bf16")
    stated = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    ranges = {"x.input_scale": make_source("x.input_scale", np.ones(1, np.float32), "f32")}
    plain = by_name("f8_e4m3").decode(weight.data[:, None]).reshape(4, 64)
    found = join({weight.name: weight, scale.name: scale} | ranges, stated)
    assert isinstance(found, Float8Tensor)
    assert np.array_equal(found.to_float32(), plain * scale.to_float32())
    assert np.array_equal(found.take_rows(2, 4).to_float32(), (plain * scale.to_float32())[2:])
    one = make_source("x.weight_scale", np.full(1, 0.125, np.float32), "f32")
    assert np.array_equal(join({weight.name: weight, one.name: one}, stated).to_float32(), plain * 0.125)
    assert np.array_equal(
        join({weight.name: weight, one.name: one}, {"quant_method": "fp8"}).to_float32(), plain * 0.125
    )
    weight = make_part("x.weight", np.arange(-128, 128).reshape(4, 64), "i8")
    found = join({weight.name: weight, scale.name: scale}, STATED["bytes"])
    assert isinstance(found, PackedTensor)
    assert np.array_equal(found.to_float32(), np.arange(-128, 128).reshape(4, 64) * scale.to_float32())


def test_float8_numbers() -> None:
    """All of E4M3 and E5M2, by their definition: sign, exponent, fraction."""
    codes = np.arange(256, dtype=np.uint8)[:, None]
    for name, fraction_bits, bias in (("f8_e4m3", 3, 7), ("f8_e5m2", 2, 15)):
        found = by_name(name).decode(codes)[:, 0]
        for code in range(256):
            exponent, fraction = code >> fraction_bits & (127 >> fraction_bits), code & ((1 << fraction_bits) - 1)
            value = (fraction / (1 << fraction_bits) + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
            if np.isfinite(found[code]):
                assert found[code] == (-value if code > 127 else value), code
        assert int(np.isfinite(found).sum()) == {"f8_e4m3": 254, "f8_e5m2": 248}[name]


def change(method: str, **changes: TensorSource | None) -> dict[str, TensorSource]:
    parts: dict[str, TensorSource | None] = dict(quantize_packed("x", random_floats(32, 128), method)[0])
    parts |= {f"x.{name}": tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in parts.items() if tensor is not None}


def words(name: str, *shape: int) -> TensorSource:
    return make_part(f"x.{name}", np.zeros(shape), "i32")


def codes(name: str, value: int, *shape: int, type_name: str = "u8") -> TensorSource:
    return make_part(f"x.{name}", np.full(shape, value), type_name)


def scales(name: str, value: float, *shape: int, type_name: str = "f16") -> TensorSource:
    return make_source(f"x.{name}", np.full(shape, value, np.float32), type_name)


ORDER, STATE = np.arange(128) // 64, "weight.quant_state.bitsandbytes__nf4"
REFUSED: list[tuple[str, dict[str, TensorSource | None], Stated, str]] = [
    ("awq", {"scales": None}, {}, r"tensor x\.scales is missing, which the quantised x\.weight needs"),
    ("awq", {"qzeros": words("qzeros", 3, 4)}, {}, r"tensor x\.qzeros is i32 \(3, 4\), expected i32 \(2, 4\)"),
    ("awq", {}, {"version": "gemv"}, "quantization_config states the format 'gemv'; supported is gemm"),
    ("awq", {}, {"bits": 8}, r"tensor x\.weight has 4 bits, quantization_config\.bits is 8"),
    ("awq", {"scales": scales("scales", np.nan, 2, 32)}, {}, r"x\.weight has the scale nan .* in row 0, group 0"),
    ("awq", {"scales": scales("scales", 3e38, 2, 32, type_name="f32")}, {}, r"x\.weight has the scale 3.*e\+38"),
    ("awq", {"scales": scales("scales", 1 / 3, 2, 32, type_name="f32")}, {}, "whose product f32 does not keep"),
    ("awq", {"weight": scales("weight", 1, 32, 128)}, {}, r"tensor x\.weight is f16, but has qweight"),
    ("gptq", {"qweight": words("qweight", 15, 32)}, {}, r"x\.weight of 32 x 120 numbers .* has 2 groups"),
    ("gptq", {"qzeros": words("qzeros", 2, 5)}, {}, r"tensor x\.qzeros has 5 words for 32 rows"),
    ("gptq", {"g_idx": make_part("x.g_idx", ORDER * 5, "i32")}, {}, r"x\.g_idx names groups from 0 to 5 of 2"),
    ("gptq", {}, {"checkpoint_format": "marlin"}, "states the format 'marlin'; supported is gptq or gptq_v2"),
    ("packed", {"weight_shape": make_part("x.weight_shape", np.array([32, 96]), "i64")}, {}, r"weight_packed is i32"),
    ("packed", {"weight_shape": make_part("x.weight_shape", np.array([32, 0]), "i64")}, {}, "expected a matrix"),
    ("packed", {"weight_scale": scales("weight_scale", 1, 32, 8)}, {}, r"x\.weight_zero_point is i32 \(4, 2\), exp"),
    ("packed", {"weight_g_idx": words("weight_g_idx", 64)}, {}, r"weight_g_idx is i32 \(64,\), expected i32 \(128,\)"),
    ("bytes", {"weight_scale": scales("weight_scale", 1, 32, 8)}, {}, "has 8 groups of columns; supported are"),
    ("fp8", {"weight_scale_inv": scales("weight_scale_inv", 1, 3, 2)}, {}, r"x\.weight_scale_inv is f16 \(3, 2\)"),
    ("fp8", {"weight_scale_inv": scales("weight_scale_inv", np.inf, 1, 2)}, {}, r"x\.weight has numbers or .* row 0"),
    ("fp8", {}, {"weight_block_size": [0, 8]}, r"states blocks of \[0, 8\], expected two sizes"),
    ("nvfp4", {"weight_global_scale": scales("weight_global_scale", 0, 1, type_name="f32")}, {}, "of up to inf"),
    ("nvfp4", {"weight_scale": codes("weight_scale", 127, 32, 8, type_name="f8_e4m3")}, {}, "nan for a scale"),
    ("modelopt", {"weight_scale_2": None}, {}, r"tensor x\.weight_scale_2 is missing, which the quantised"),
    ("modelopt", {"weight_scale": codes("weight_scale", 1, 32, 9, type_name="f8_e4m3")}, {}, r"f8_e4m3 \(32, 8"),
    ("nf4", {"weight.absmax": codes("weight.absmax", 0, 7)}, {}, r"absmax is u8 \(7,\), expected u8 \(64,"),
    ("nf4", {"weight.nested_absmax": scales("weight.nested_absmax", np.nan, 1, type_name="f32")}, {}, "none"),
    ("nf4", {STATE: make_part(f"x.{STATE}", np.frombuffer(b"[1", np.uint8), "u8")}, {}, "__nf4 is not JSON"),
    ("nf4", {STATE: make_part(f"x.{STATE}", np.frombuffer(b"{}", np.uint8), "u8")}, {}, "states the shape None, None"),
    ("int8", {"SCB": None}, {}, r"tensor x\.SCB is missing"),
    ("ao4", {"_weight_zero_point": scales("_weight_zero_point", 1e-9, 2, 32, type_name="f32")}, {}, "whose sum f32"),
    ("ao8", {"_weight_scale": None}, {}, r"_weight_qdata \(32, 128\) is packed in a way that is not supported"),
    ("fp8", {}, {"quant_method": None}, r"x\.weight is f8_e4m3, and config\.json has no quantization_config for it"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "changes", "stated", "message"), REFUSED)
def test_parts_that_do_not_fit_are_refused(
    method: str, changes: dict[str, TensorSource | None], stated: Stated, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        _ = join(change(method, **changes), {**STATED[method], **stated}).data
