"""Weights as MLX, AWQ, GPTQ, compressed-tensors and FP8 folders keep them, in NumPy, and a safetensors file of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxr.formats import TensorSource, by_name

Floats = NDArray[np.float32]
DTYPES = {"u32": "U32", "f32": "F32", "f16": "F16", "bf16": "BF16", "i8": "I8", "i32": "I32", "i64": "I64"}
DTYPES |= {"f8_e4m3": "F8_E4M3", "f8_e5m2": "F8_E5M2", "u8": "U8"}


def pack_words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Numbers (rows, columns) as rows of words: one stream of bits, the lowest first."""
    stream = np.unpackbits(codes[..., None], axis=2, bitorder="little")[..., :bits]
    return np.packbits(stream.reshape(len(codes), -1), axis=1, bitorder="little").view("<u4")


def make_source(name: str, values: NDArray[Any], type_name: str) -> TensorSource:
    """A tensor in memory: words as they are, numbers in a type of floats."""
    encode = by_name(type_name).encode
    raw = values.view(np.uint8) if encode is None else encode(values.astype(np.float32).reshape(-1, 1))
    return TensorSource(name, type_name, values.shape, raw.reshape(-1))


def quantize(
    module: str, values: Floats, bits: int, group_size: int, type_name: str = "bf16"
) -> tuple[dict[str, TensorSource], Floats]:
    """Quantise a weight (rows, columns); return its three tensors, and the numbers that they mean."""
    groups = values.reshape(len(values), -1, group_size)
    low = groups.min(axis=2)
    scale = (groups.max(axis=2) - low) / np.float32((1 << bits) - 1)
    scales, biases = (
        make_source(f"{module}.{name}", part, type_name) for name, part in (("scales", scale), ("biases", low))
    )
    codes = np.rint((groups - low[..., None]) / scale[..., None]).astype(np.uint8)
    meaning = codes.astype(np.float32) * scales.to_float32()[..., None] + biases.to_float32()[..., None]
    words = make_source(f"{module}.weight", pack_words(codes.reshape(values.shape), bits), "u32")
    return {source.name: source for source in (words, scales, biases)}, meaning.reshape(values.shape)


def make_part(name: str, values: NDArray[Any], type_name: str) -> TensorSource:
    """A tensor of whole numbers or of bytes, as they are."""
    kinds: dict[str, Any] = {"i32": np.int32, "i64": np.int64, "i8": np.int8}
    raw = np.ascontiguousarray(values).astype(kinds.get(type_name, np.uint8), casting="unsafe")
    return TensorSource(name, type_name, values.shape, raw.view(np.uint8).reshape(-1))


def pack_down(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Numbers (n, columns) as words (n * bits / 32, columns): a stream of bits down each column."""
    return np.ascontiguousarray(pack_words(np.ascontiguousarray(codes.T), bits).T)


def pack_awq(codes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Numbers (n, rows) as words (n, rows / 8), whose fields from the lowest up are rows 0, 2, 4, 6, 1, 3, 5, 7."""
    fields = codes.reshape(len(codes), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
    return pack_words(np.ascontiguousarray(fields).reshape(len(codes), -1), 4)


def quantize_packed(
    module: str, values: Floats, method: str, bits: int = 4, group_size: int = 64, type_name: str = "f16"
) -> tuple[dict[str, TensorSource], Floats]:
    """The tensors of a weight (rows, columns) by a method, and what they mean; FP8 has blocks of 32 x `group_size`.

    Methods are awq, gptq, gptq_v2, packed, bytes (compressed-tensors), nvfp4 (of it), modelopt (nvfp4), nf4 and int8 of
    bitsandbytes, ao8 and ao4 of torchao and fp8; asymmetric but for bytes, int8 and floats.
    """
    if method == "fp8":
        return _quantize_float8(module, values, group_size)
    if method in ("nvfp4", "modelopt"):
        return _quantize_float4(module, values, method)
    if method in ("nf4", "int8"):
        return _quantize_as_bitsandbytes(module, values, method)
    if method in ("ao4", "ao8"):
        return _quantize_as_torchao(module, values, method, group_size)
    most, groups = (1 << bits) - 1, values.reshape(len(values), -1, group_size)
    low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
    is_even = method == "bytes"
    step = np.abs(groups).max(axis=2) / np.float32(127) if is_even else (high - low) / np.float32(most)
    first = method == "gptq"  # whose zeros are stored less one
    zeros = np.full(step.shape, 128) if is_even else np.clip(np.rint(-low / step), first, most)
    across = method in ("awq", "gptq", "gptq_v2")
    scale_name = f"{module}.{'scales' if across else 'weight_scale'}"
    scales = make_source(scale_name, np.ascontiguousarray(step.T) if across else step, type_name)
    kept = scales.to_float32().T if across else scales.to_float32()
    codes = np.clip(np.rint(groups / kept[..., None]) + zeros[..., None], 0, most)
    meaning = ((codes - zeros[..., None]).astype(np.float32) * kept[..., None]).reshape(values.shape)
    codes, zeros = codes.astype(np.uint8).reshape(values.shape), zeros.astype(np.uint8)
    match method:
        case "awq":
            found = {"qweight": (pack_awq(np.ascontiguousarray(codes.T)), "i32"), "qzeros": (pack_awq(zeros.T), "i32")}
        case "packed":
            words, shape = pack_words(codes, bits), np.array(values.shape)
            found = {"weight_packed": (words, "i32"), "weight_shape": (shape, "i64")}
            found["weight_zero_point"] = (pack_down(zeros, bits), "i32")
        case "bytes":
            found = {"weight": ((codes ^ 128).view(np.int8), "i8")}
        case _:
            order = np.arange(values.shape[1]) // group_size
            words = pack_words(np.ascontiguousarray(zeros.T) - np.uint8(first), bits)
            found = {"qweight": (pack_down(codes.T, bits), "i32"), "qzeros": (words, "i32"), "g_idx": (order, "i32")}
    parts = [make_part(f"{module}.{name}", array, kind) for name, (array, kind) in found.items()]
    return {part.name: part for part in (*parts, scales)}, meaning


def _quantize_float8(module: str, values: Floats, width: int) -> tuple[dict[str, TensorSource], Floats]:
    blocks = values.reshape(len(values) // 32, 32, -1, width)
    scales = (np.abs(blocks).max(axis=(1, 3)) / np.float32(448)).astype(np.float32)
    table = by_name("f8_e4m3").decode(np.arange(127, dtype=np.uint8)[:, None])[:, 0]
    wanted = blocks / scales[:, None, :, None]
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, np.abs(wanted)).astype(np.uint8)
    codes |= np.where(wanted < 0, 128, 0).astype(np.uint8)
    weight = make_part(f"{module}.weight", codes.reshape(values.shape), "f8_e4m3")
    scale = make_source(f"{module}.weight_scale_inv", scales, "f32")
    meaning = weight.to_float32().reshape(blocks.shape) * scales[:, None, :, None]
    if width % 128:  # which no block of FP8 keeps
        meaning = make_source("", meaning, "bf16").to_float32()
    return {weight.name: weight, scale.name: scale}, meaning.reshape(values.shape)


def find_nearest(values: Floats, levels: Floats) -> NDArray[np.uint8]:
    """Return the index of the nearest of some ascending levels."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values).astype(np.uint8)


def pack_pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two neighbours of four bits in a byte, the first one low."""
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)


def _quantize_float4(module: str, values: Floats, method: str) -> tuple[dict[str, TensorSource], Floats]:
    groups, e2m1 = values.reshape(len(values), -1, 16), np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = by_name("f8_e4m3").decode(np.arange(127, dtype=np.uint8)[:, None])[:, 0]
    divisor = np.float32(6 * 448) / np.abs(values).max()
    factor = np.float32(1) / divisor
    scales = find_nearest(np.abs(groups).max(axis=2) / 6 / factor, table)
    steps = (table[scales] * factor)[..., None]
    codes = find_nearest(np.abs(groups) / np.maximum(steps, np.float32(1e-30)), e2m1)
    meaning = np.where(groups < 0, -e2m1[codes], e2m1[codes]) * steps
    packed = pack_pairs((codes | np.where(groups < 0, 8, 0).astype(np.uint8)).reshape(values.shape))
    names = ("weight_packed", "weight_global_scale") if method == "nvfp4" else ("weight", "weight_scale_2")
    parts = [make_part(f"{module}.{names[0]}", packed, "u8"), make_part(f"{module}.weight_scale", scales, "f8_e4m3")]
    parts.append(make_source(f"{module}.{names[1]}", np.array([divisor if method == "nvfp4" else factor]), "f32"))
    return {part.name: part for part in parts}, meaning.reshape(values.shape)


def _quantize_as_bitsandbytes(module: str, values: Floats, method: str) -> tuple[dict[str, TensorSource], Floats]:
    if method == "int8":
        most = np.abs(values).max(axis=1)
        codes = np.rint(values / most[:, None] * 127).astype(np.int8)
        parts = [make_part(f"{module}.weight", codes, "i8"), make_source(f"{module}.SCB", most, "f32")]
        parts.append(make_part(f"{module}.weight_format", np.zeros(1), "u8"))
        return {part.name: part for part in parts}, codes * (most * np.float32(1 / 127))[:, None]
    levels = (np.linspace(-1, 1, 16) ** 3).astype(np.float32)
    blocks = values.reshape(-1, 64)
    table = np.linspace(-1, 1, 256, dtype=np.float32)
    most = np.abs(blocks).max(axis=1)
    offset = np.float32(most.mean())
    outer = np.array([np.abs(part - offset).max() for part in np.split(most, range(256, len(most), 256))], np.float32)
    inner = find_nearest((most - offset) / np.repeat(outer, 256)[: len(most)], table)
    absmax = table[inner] * np.repeat(outer, 256)[: len(most)] + offset
    codes = find_nearest(blocks / absmax[:, None], levels)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": values.shape}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    pairs = codes.reshape(-1, 2)
    parts = [
        make_part(f"{module}.weight", (pairs[:, :1] << np.uint8(4)) | pairs[:, 1:], "u8"),
        make_part(f"{module}.weight.absmax", inner, "u8"),
        make_part(f"{module}.weight.quant_state.bitsandbytes__nf4", text, "u8"),
        make_source(f"{module}.weight.quant_map", levels, "f32"),
        make_source(f"{module}.weight.nested_absmax", outer, "f32"),
        make_source(f"{module}.weight.nested_quant_map", table, "f32"),
    ]
    meaning = make_source("", levels[codes] * absmax[:, None], "bf16").to_float32()
    return {part.name: part for part in parts}, meaning.reshape(values.shape)


def _quantize_as_torchao(
    module: str, values: Floats, method: str, group_size: int
) -> tuple[dict[str, TensorSource], Floats]:
    groups = values.reshape(len(values), -1, group_size)
    low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
    scale = make_source("", (high - low) / np.float32(15), "bf16").to_float32()
    if method == "ao8":  # four bits, a byte each
        zeros = np.clip(-8 - np.rint(low / scale), -8, 7)
        codes = np.clip(np.rint(groups / scale[..., None]) + zeros[..., None], -8, 7)
        meaning = (codes - zeros[..., None]) * scale[..., None]
        kept = {"_weight_qdata": (codes.reshape(values.shape), "i8"), "_weight_zero_point": (zeros, "i8")}
        parts = [make_part(f"{module}.{name}", array, kind) for name, (array, kind) in kept.items()]
        parts.append(make_source(f"{module}._weight_scale", scale, "bf16"))
    else:
        zeros = make_source("", low + 8 * scale, "bf16").to_float32()
        codes = np.clip(np.rint((groups - zeros[..., None]) / scale[..., None]), -8, 7)
        meaning = codes * scale[..., None] + zeros[..., None]
        packed = pack_pairs((codes.astype(np.int8).view(np.uint8) & 15).reshape(values.shape))
        parts = [make_part(f"{module}._weight_qdata", packed.view(np.int8), "i8")]
        for name, part in (("_weight_scale", scale), ("_weight_zero_point", zeros)):
            parts.append(make_source(f"{module}.{name}", np.ascontiguousarray(part.T), "bf16"))
    return {part.name: part for part in parts}, meaning.astype(np.float32).reshape(values.shape)


def write_safetensors(path: Path, tensors: Mapping[str, TensorSource]) -> None:
    """A file of any of DTYPES; the safetensors library has no bf16 for NumPy."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        offsets = [at, at + tensor.nbytes]
        header[name] = {"dtype": DTYPES[tensor.type_name], "shape": tensor.shape, "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values()))
