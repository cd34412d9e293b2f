"""MLX's affine quantisation in NumPy, and a safetensors file of it: what mlx-community's folders hold."""

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
DTYPES = {"u32": "U32", "f32": "F32", "f16": "F16", "bf16": "BF16"}


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
    """The three tensors of a weight (rows, columns), and what they mean."""
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


def write_safetensors(path: Path, tensors: Mapping[str, TensorSource]) -> None:
    """A file of any of DTYPES; the safetensors library has no bf16 for NumPy."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        offsets = [at, at + tensor.nbytes]
        header[name] = {"dtype": DTYPES[tensor.type_name], "shape": tensor.shape, "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values()))
