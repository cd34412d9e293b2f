"""The table of weight types, ggml's and our own: a row per type, with its layout's sizes, its decoder and its encoder.

Knows blocks of bytes and float32; nothing of files, tensors or models. `decode_blocks` and `encode_tensor` work in
pieces, so that temporary memory stays small whatever the tensor's size. A new type is a row in csrc/tables/types.def
and a body in `quants`, or `quants_encode` where an encoder searches. Ids and sizes are ggml's (ggml.h, ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.core.tables import OWN_CODES, WEIGHT_TYPES, WeightType
from mlxr.formats import quants, quants_encode
from mlxr.formats.quants import Bytes, Floats

_PIECE_VALUES = 1 << 18  # values decoded or encoded at a time: temporaries stay within a few MiB of cache
_LARGEST_F16 = 65504.0


@frozen
class GGMLType:
    """A row: `block_size` values take `type_size` bytes.

    decode: uint8 (blocks, type_size) to float32 (blocks, block_size); encode: the reverse, None if we write none.
    limit: the largest magnitude that the type's scales can hold, None when it is float32's own. id: ggml's number,
    None for a type that GGUF files cannot hold.
    """

    name: str
    id: int | None
    block_size: int
    type_size: int
    decode: Callable[[Bytes], Floats]
    encode: Callable[[Floats], Bytes] | None = None
    limit: float | None = None

    @property
    def is_quantized(self) -> bool:
        """True if several values share a scale."""
        return self.block_size > 1

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of one row; raises ModelError if the columns do not fill whole blocks."""
        if columns % self.block_size:
            raise ModelError(f"{self.name} needs rows of a multiple of {self.block_size} values, not {columns}")
        return columns // self.block_size * self.type_size


_NUMBERS = {"f32": "<f4", "f16": "<f2", "f64": "<f8", "u32": "<u4", "u8": "<u1"}
_NUMBERS |= {"i8": "<i1", "i16": "<i2", "i32": "<i4", "i64": "<i8"}
_UNMULTIPLIED = ((24, "i8"), (25, "i16"), (26, "i32"), (27, "i64"), (28, "f64"))  # types without kernels


def _describe(row: WeightType) -> GGMLType:
    """A row of the kernels' table, with the functions of its name in `quants` and `quants_encode`."""
    if row.name in _NUMBERS:
        return _describe_numbers(row.code, row.name, encode=True)
    decode = getattr(quants, f"decode_{row.name}")
    encode = getattr(quants, f"encode_{row.name}", getattr(quants_encode, f"encode_{row.name}", None))
    is_limited = any(kind == "halves" for kind, _, _ in row.fields)
    return GGMLType(
        row.name, row.code, row.block_size, row.block_bytes, decode, encode, _LARGEST_F16 if is_limited else None
    )


def _describe_numbers(number: int | None, name: str, *, encode: bool = False) -> GGMLType:
    kind = _NUMBERS[name]
    encoder = quants.encode_numbers(kind) if encode else None
    limit = _LARGEST_F16 if name == "f16" else None
    return GGMLType(name, number, 1, np.dtype(kind).itemsize, quants.decode_numbers(kind), encoder, limit)


GGML_TYPES: tuple[GGMLType, ...] = tuple(
    sorted(
        [
            *(_describe(row) for row in WEIGHT_TYPES if row.code < OWN_CODES),
            *(_describe_numbers(number, name) for number, name in _UNMULTIPLIED),
        ],
        key=lambda row: row.id or 0,
    )
)

# Further types for folders: words, FP8 numbers, and the blocks that `mlx_affine` and `packed` make of them.
MLX_TYPES: tuple[GGMLType, ...] = (
    _describe_numbers(None, "u32"),
    _describe_numbers(None, "u8"),
    GGMLType("f8_e4m3", None, 1, 1, quants.decode_f8_e4m3),
    GGMLType("f8_e5m2", None, 1, 1, quants.decode_f8_e5m2),
    GGMLType("f8_e4m3_128", None, 128, 132, quants.decode_f8_e4m3_128),
    GGMLType("nvfp4_scaled", None, 64, 40, quants.decode_nvfp4_scaled),
    *(
        GGMLType(
            f"affine{bits}_{columns}",
            None,
            columns,
            8 + columns * bits // 8,
            partial(quants.decode_affine, bits=bits, columns=columns),
            partial(quants.encode_affine, bits=bits),
        )
        for bits in (4, 8)
        for columns in (32, 64)
    ),
)

_BY_ID = {row.id: row for row in GGML_TYPES}
_BY_NAME = {row.name: row for row in (*GGML_TYPES, *MLX_TYPES)}

# Ids that ggml has or had and that we do not read: listed so that a refusal can name the type.
_OTHER_NAMES = {
    4: "q4_2 (removed from ggml)",
    5: "q4_3 (removed from ggml)",
    9: "q8_1",
    31: "q4_0_4_4 (removed from ggml)",
    32: "q4_0_4_8 (removed from ggml)",
    33: "q4_0_8_8 (removed from ggml)",
    36: "iq4_nl_4_4 (removed from ggml)",
    37: "iq4_nl_4_8 (removed from ggml)",
    38: "iq4_nl_8_8 (removed from ggml)",
    41: "q1_0",
    42: "q2_0",
}
UNSUPPORTED_TYPES = {number: name for number, name in _OTHER_NAMES.items() if number not in _BY_ID}


def by_id(type_id: int) -> GGMLType:
    """Return the row of a ggml type number; raises ModelError naming the type if it is not supported."""
    if type_id in _BY_ID:
        return _BY_ID[type_id]
    if type_id in UNSUPPORTED_TYPES:
        raise ModelError(f"type {UNSUPPORTED_TYPES[type_id]} is not supported; supported are {_names()}")
    raise ModelError(f"type number {type_id} is not a ggml type")


def by_name(name: str) -> GGMLType:
    """The row of a type by name, in ggml's spelling (`q4_k`); raises ModelError listing the names if there is none."""
    if name not in _BY_NAME:
        raise ModelError(f"type {name} is not supported; supported are {_names()}")
    return _BY_NAME[name]


def _names() -> str:
    return ", ".join(row.name for row in GGML_TYPES)


def decode_blocks(row: GGMLType, data: Bytes) -> Floats:
    """Decode whole blocks: uint8 (blocks * type_size,) to a fresh float32 (blocks * block_size,)."""
    blocks = data.reshape(-1, row.type_size)
    result = np.empty((len(blocks), row.block_size), np.float32)
    step = max(1, _PIECE_VALUES // row.block_size)
    with np.errstate(all="ignore"):  # scales in a file may be NaN or infinite, and stay so
        for start in range(0, len(blocks), step):
            result[start : start + step] = row.decode(blocks[start : start + step])
    return result.reshape(-1)


def encode_tensor(type_name: str, rows: NDArray[np.float32]) -> Bytes:
    """Encode float32 (rows, columns) or (columns,) and give the raw blocks, uint8 (bytes,).

    Blocks run along the last axis. Raises ModelError if the type has no encoder, the columns do not fill whole blocks,
    or a value (NaN, infinite, or too large for the type's float16 scales) cannot be stored.
    """
    row = by_name(type_name)
    result = np.empty(rows.size // max(rows.shape[-1], 1) * row.row_bytes(rows.shape[-1]), np.uint8)
    at = 0
    for piece in encode_pieces(row, rows):
        result[at : at + piece.size] = piece
        at += piece.size
    return result


def encode_pieces(row: GGMLType, rows: NDArray[np.float32], importance: Floats | None = None) -> Iterator[Bytes]:
    """`encode_tensor` piece by piece: uint8 pieces whose concatenation is the whole.

    `importance` (columns,) weights the errors of columns, in types whose encoders search for the smallest one.
    """
    if row.encode is None:
        raise ModelError(f"cannot write type {row.name}; it is read only")
    row.row_bytes(rows.shape[-1])
    values = np.ascontiguousarray(rows, np.float32).reshape(-1, row.block_size)
    step = max(1, _PIECE_VALUES // row.block_size)
    weighted = None if importance is None else quants_encode.WEIGHTED.get(row.name)
    blocks = None if importance is None or weighted is None else importance.reshape(-1, row.block_size)
    for start in range(0, len(values), step):
        piece = values[start : start + step]
        _check_values(row, piece)
        with np.errstate(all="ignore"):  # 1 / a subnormal scale overflows; the encoders give what ggml gives
            if weighted is None or blocks is None:
                yield row.encode(piece).reshape(-1)
            else:
                yield weighted(piece, blocks[np.arange(start, start + len(piece)) % len(blocks)]).reshape(-1)


def _check_values(row: GGMLType, values: Floats) -> None:
    if not row.is_quantized and row.limit is None:
        return
    largest = float(max(-values.min(), values.max()))  # NaN if any value is
    if not np.isfinite(largest) and (row.is_quantized or np.isnan(largest)):
        raise ModelError(f"the weights hold {largest}, which cannot be written as {row.name}; f32 and bf16 hold it")
    if row.limit is not None and largest > row.limit:
        raise ModelError(f"the weights hold {largest:g}, {row.name} goes to {row.limit:g}; use bf16 or f32")


def find_halves(row: WeightType) -> tuple[int, ...]:
    """Offsets of half-precision scales in a block."""
    if row.name == "iq4_xs":  # the other half holds bits of scales
        return (0,)
    if row.name == "ptq1_0":  # the first bytes are digits
        return (26,)
    return tuple(at + 2 * i for kind, at, count in row.fields if kind == "halves" for i in range(count))


def put_iq1_m_scales(blocks: Bytes, scales: NDArray[np.float16]) -> None:
    """Write the scale of each block, (blocks, 56), in iq1_m's place: four bits on top of each of four numbers."""
    fours = scales.view(np.uint16)[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15
    blocks[:, 49:56:2] = (blocks[:, 49:56:2] & 15) | (fours << 4).astype(np.uint8)


def make_random_blocks(row: WeightType, count: int, random: np.random.Generator) -> Bytes:
    """Make blocks (count, type_size) that use every bit of every field, with scales of both signs of about 0.01."""

    def draw(*shape: int) -> Floats:
        return (random.standard_normal(shape) * 0.01).astype(np.float32)

    blocks = random.integers(0, 256, (count, row.block_bytes), dtype=np.uint8)
    for offset in find_halves(row):
        blocks[:, offset : offset + 2] = draw(count).astype(np.float16).view(np.uint8).reshape(-1, 2)
    if row.name == "iq1_m":
        put_iq1_m_scales(blocks, draw(count).astype(np.float16))
    if row.name == "mxfp4":
        blocks[:, 0] = random.integers(110, 130, count)
    if row.name.startswith("nvfp4"):
        blocks[:, -36:-32] = random.integers(0, 40, (count, 4))
    if row.name == "f8_e4m3_128":
        blocks[blocks & 127 == 127] = 0
    if row.name in ("f8_e4m3_128", "nvfp4_scaled"):
        blocks[:, :4] = draw(count).view(np.uint8).reshape(-1, 4)
    if row.name.startswith("affine"):
        blocks[:, :8] = draw(count, 2).view(np.uint8)
    if row.name == "q8_k":
        blocks[:, :4] = draw(count).view(np.uint8).reshape(-1, 4)
    return blocks
