"""Weights in the quantised forms of other makers' folders: several tensors become one that kernels multiply.

Integers of 2, 3, 4 and 8 bits mean (q - zero) * scale for each group of columns. They go into MLX's affine blocks with
scale and -zero * scale, which are exact in f32 for scales in 16 bits; a tensor whose numbers are not is refused, never
rounded. If the columns of a group are not neighbours (`g_idx`), the results become f16, as in the makers' libraries.
FP8 numbers in E4M3 stay as they are if a scale is for a multiple of 128 columns; others times their scales become bf16,
as transformers dequantises them, which is exact if scales are powers of two. `quantization_config` in `config.json`
names the method; bits and groups follow from shapes. Knows no models.

- AWQ (gemm): `qweight` (columns, rows / 8) words, in each the rows 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up;
  `qzeros` (groups, rows / 8) likewise, `scales` (groups, rows). https://github.com/casper-hansen/AutoAWQ
- GPTQ: `qweight` (columns * bits / 32, rows), a stream of bits down each row's words; `qzeros` (groups, rows * bits /
  32), a stream along them, of zero - 1 in the first version of the format; `scales` (groups, rows); `g_idx` (columns,),
  the group of each column. https://github.com/ModelCloud/GPTQModel
- compressed-tensors: `weight_packed` (rows, words) or int8 `weight`, `weight_scale` (rows, groups), `weight_zero_point`
  packed down the rows, all stored with 2 ** (bits - 1) added. https://github.com/vllm-project/compressed-tensors
- FP8: `weight` in e4m3 or e5m2, `weight_scale` or `weight_scale_inv` of one number, (rows, 1), or for each block.
- NVFP4: bytes of two numbers, `weight_scale` (rows, columns / 16) in e4m3, and a factor: of compressed-tensors
  `weight_packed` and `weight_global_scale`, by which scales are divided; of ModelOpt `weight` and `weight_scale_2`, by
  which they are multiplied. https://github.com/NVIDIA/Model-Optimizer
- bitsandbytes: `weight` (n / 2, 1), of two numbers the first one in the upper half, each a level of
  `weight.quant_map` times the `weight.absmax` of so many neighbours, which is a number or one of 256
  (`nested_quant_map`) times `nested_absmax`, plus an offset; JSON in `weight.quant_state.bitsandbytes__nf4`. Products
  are rounded to the type of the original, as the library does. 8 bits: int8 `weight`, and `SCB`, 127 times the scale of
  a row. https://github.com/bitsandbytes-foundation/bitsandbytes
- torchao: `_weight_qdata` int8 (rows, columns) with `_weight_scale` and `_weight_zero_point` (rows, groups), or of int4
  (rows, columns / 2), the first one in the lower half, with scales and zeros (groups, rows), of which a weight is
  q * scale + zero. https://github.com/pytorch/ao
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import ModelError
from mlxr.formats.ggml_types import by_name, decode_blocks
from mlxr.formats.mlx_affine import (
    AffineBlocks,
    Bf16Tensor,
    Float4Tensor,
    FloatGroups,
    MicroscaledTensor,
    Quantization,
    join_affine,
    order_nibbles,
    unpack_codes,
)
from mlxr.formats.quants import F8_E4M3_128, Bytes, Floats
from mlxr.formats.tensor import TensorSource

Words = NDArray[np.uint32]
Parts = Mapping[str, TensorSource]
_BITS = (2, 3, 4, 8)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FLOATS = ("f32", "f16", "bf16")
_ROWS = 32  # packed numbers of so many rows begin and end with whole words
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # one in each field of a word
_PIECE_VALUES = 1 << 18


class PackedTensor(AffineBlocks):
    """A matrix, or rows [first, last) of it, of integers with a scale and a zero for each group of columns.

    Raises ModelError, naming the tensor, for parts that do not fit together and, when it is read, for scales that are
    NaN or not exact.
    """

    __slots__ = ("_first", "_parts")

    def __init__(self, name: str, parts: Parts, shape: tuple[int, int], bits: int, groups: int) -> None:
        rows, columns = shape
        size = columns // groups if groups else 0
        if bits not in _BITS or not size or columns % groups or size % 32:
            raise ModelError(
                f"tensor {name} of {rows} x {columns} numbers of {bits} bits has {groups} groups of columns; supported "
                f"are {', '.join(map(str, _BITS))} bits and groups of a multiple of 32 columns"
            )
        super().__init__(name, shape, Quantization(bits, size))
        self._parts, self._first = parts, 0

    def take_rows(self, start: int, stop: int) -> PackedTensor:
        """Rows [start:stop] as a tensor of their own, under the same name."""
        groups = self.shape[1] // self.quantization.group_size
        taken = type(self)(self.name, self._parts, (stop - start, self.shape[1]), self.quantization.bits, groups)
        taken._first = self._first + start
        return taken

    def take_matrix(self, index: int) -> PackedTensor:
        """Refuse: this is one."""
        raise ValueError(f"tensor {self.name} has no part {index}, as it is a matrix")

    def release(self) -> None:
        """Forget the blocks and let the mapped pages go; all comes back when asked for."""
        self._blocks = None
        for part in self._parts.values():
            part.release()

    def _read_steps(self, first: int, last: int) -> tuple[Floats, Floats]:
        first, last = self._first + first, self._first + last
        scales, zeros = self._read_scales(first, last), self._read_zeros(first, last)
        with np.errstate(all="ignore"):  # overflow is refused below
            exact = -zeros.astype(np.float64) * scales
            biases = exact.astype(np.float32)
            is_exact = np.isfinite(scales) & (biases == exact)
        if not is_exact.all():
            row, group = map(int, np.argwhere(~is_exact)[0])
            raise ModelError(
                f"tensor {self.name} has the scale {scales[row, group]} and the zero {zeros[row, group]} in row "
                f"{first + row}, group {group}, whose product f32 does not keep; take the original weights"
            )
        return scales, biases

    def _read_codes(self, first: int, last: int) -> Bytes:
        return self._unpack(self._first + first, self._first + last)

    def _unpack(self, first: int, last: int) -> Bytes:
        raise NotImplementedError

    def _read_scales(self, first: int, last: int) -> Floats:
        raise NotImplementedError

    def _read_zeros(self, first: int, last: int) -> NDArray[np.int16]:
        raise NotImplementedError


class _ColumnsFirst(PackedTensor):
    """A weight whose parts have columns, or groups of them, first."""

    __slots__ = ()

    def _cut(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        step = max(512, _PIECE_VALUES // self.shape[-1])  # rows that are neighbours in the file
        for start in range(first, last, step):
            yield start, min(last, start + step)

    def _read_scales(self, first: int, last: int) -> Floats:
        part = self._parts["scales"]
        kind = by_name(part.type_name)
        raw = part.data.reshape(part.shape[0], -1, kind.type_size)[:, first:last]
        values = decode_blocks(kind, np.ascontiguousarray(raw).reshape(-1))
        return np.ascontiguousarray(values.reshape(part.shape[0], -1).T)


class AWQTensor(_ColumnsFirst):
    """A weight of AWQ in the layout `gemm`."""

    __slots__ = ()

    maker = "awq"

    def _unpack(self, first: int, last: int) -> Bytes:
        return self._take("qweight", first, last).reshape(-1)

    def _read_zeros(self, first: int, last: int) -> NDArray[np.int16]:
        return self._take("qzeros", first, last).astype(np.int16)

    def _take(self, part: str, first: int, last: int) -> Bytes:
        """The numbers of rows [first, last): (rows, first axis of the part)."""
        start = first // 8
        words = _words(self._parts[part])[:, start : -(-last // 8)]
        codes = unpack_codes(np.ascontiguousarray(words).view(np.uint8), 4).reshape(len(words), -1, 8)
        ordered = np.empty_like(codes)
        ordered[:, :, _AWQ_ORDER] = codes
        rows = ordered.reshape(len(words), -1)[:, first - 8 * start : last - 8 * start]
        return np.ascontiguousarray(rows.T)


class GPTQTensor(_ColumnsFirst):
    """A weight of GPTQ whose zeros are stored unchanged (the second version of the format)."""

    __slots__ = ()

    maker = "gptq"

    def _unpack(self, first: int, last: int) -> Bytes:
        words = np.ascontiguousarray(_words(self._parts["qweight"])[:, first:last].T)
        return unpack_codes(words.view(np.uint8), self.quantization.bits)

    def _read_zeros(self, first: int, last: int) -> NDArray[np.int16]:
        bits, words = self.quantization.bits, _words(self._parts["qzeros"])
        start, stop = first // _ROWS * _ROWS, -(-last // _ROWS) * _ROWS
        words = self._correct(np.ascontiguousarray(words[:, start * bits // 32 : stop * bits // 32]))
        zeros = self._count(unpack_codes(words.view(np.uint8), bits).reshape(len(words), -1))
        return np.ascontiguousarray(zeros[:, first - start : last - start].T)

    def _correct(self, words: Words) -> Words:
        return words

    def _count(self, zeros: Bytes) -> NDArray[np.int16]:
        return zeros.astype(np.int16)


class GPTQFirstTensor(GPTQTensor):
    """A weight of GPTQ whose zeros are stored less one (the first version of the format).

    One is added to each field of a word, as an addition to the word: this undoes the subtraction with its borrows.
    """

    __slots__ = ()

    def _correct(self, words: Words) -> Words:
        return words + np.uint32(_ONES.get(self.quantization.bits, 0))

    def _count(self, zeros: Bytes) -> NDArray[np.int16]:
        return (zeros.astype(np.int16) + 1) & 7 if self.quantization.bits == 3 else zeros.astype(np.int16)


class CompressedTensor(PackedTensor):
    """A weight of compressed-tensors: packed integers, or a byte each."""

    __slots__ = ()

    maker = "int"

    @property
    def recipe(self) -> str:
        """The usual name: int4, int8."""
        return f"int{self.quantization.bits}"

    def _read_raw(self, first: int, last: int) -> Bytes:
        part = self._parts["weight_packed" if "weight_packed" in self._parts else "weight"]
        return part.data.reshape(part.shape[0], -1)[first:last]

    def _unpack(self, first: int, last: int) -> Bytes:
        raw = self._read_raw(first, last)
        is_packed = "weight_packed" in self._parts
        return unpack_codes(raw, self.quantization.bits) if is_packed else (raw ^ np.uint8(128)).reshape(-1)

    def _read_packed(self, first: int, last: int) -> Bytes:
        if self.quantization.bits == 4:
            return order_nibbles(self._read_raw(self._first + first, self._first + last))
        return super()._read_packed(first, last)

    def _read_scales(self, first: int, last: int) -> Floats:
        scale = self._parts["weight_scale"]
        if math.prod(scale.shape) == 1:
            return np.full((last - first, 1), scale.to_float32().reshape(-1)[0], np.float32)
        return scale.to_float32(first, last).reshape(last - first, -1)

    def _read_zeros(self, first: int, last: int) -> NDArray[np.int16]:
        bits, part = self.quantization.bits, self._parts.get("weight_zero_point")
        middle, groups = 1 << (bits - 1), self.shape[1] // self.quantization.group_size
        if part is None:
            return np.full((last - first, groups), middle, np.int16)
        if part.type_name == "i8" and math.prod(part.shape) == 1:
            return np.full((last - first, 1), part.data.view(np.int8)[0] + middle, np.int16)
        if part.type_name == "i8":
            return part.data.reshape(part.shape[0], -1)[first:last].view(np.int8).astype(np.int16) + np.int16(middle)
        start, stop = first // _ROWS * _ROWS, -(-last // _ROWS) * _ROWS
        words = np.ascontiguousarray(_words(part)[start * bits // 32 : stop * bits // 32].T)
        zeros = unpack_codes(words.view(np.uint8), bits).reshape(len(words), -1)
        return np.ascontiguousarray(zeros[:, first - start : last - start].T).astype(np.int16)


class ScatteredTensor(Bf16Tensor):
    """A weight whose groups' columns are not neighbours: (q - zero) * scale of each column's group, rounded to f16."""

    __slots__ = ("_groups", "_packed")

    def __init__(self, packed: PackedTensor, groups: NDArray[np.int32]) -> None:
        super().__init__(packed.name, packed.shape, "f16")
        self._packed, self._groups = packed, groups

    @property
    def recipe(self) -> str:
        """As others call it."""
        return self._packed.recipe

    def take_rows(self, start: int, stop: int) -> ScatteredTensor:
        """Rows [start:stop] as a tensor of their own, under the same name."""
        return ScatteredTensor(self._packed.take_rows(start, stop), self._groups)

    def take_matrix(self, index: int) -> ScatteredTensor:
        """Refuse: this is one."""
        raise ValueError(f"tensor {self.name} has no part {index}, as it is a matrix")

    def release(self) -> None:
        """Forget the numbers and let the mapped pages go; all comes back when asked for."""
        super().release()
        self._packed.release()

    def _make(self, first: int, last: int) -> Floats:
        codes = self._packed._read_codes(first, last).reshape(last - first, -1).astype(np.float32)
        steps, biases = (part[:, self._groups] for part in self._packed._read_steps(first, last))
        values: Floats = codes * steps + biases  # both exact in f32, and so is the sum
        return values


class Float8Tensor(Bf16Tensor):
    """A matrix of FP8 numbers and their scales, or rows from `first` on of it.

    `block` is the rows and columns that share a scale. Raises ModelError, naming the tensor, for NaN among numbers and
    scales.
    """

    __slots__ = ("_block", "_first", "_scale", "_weight")

    recipe = "fp8"

    def __init__(self, weight: TensorSource, scale: TensorSource, block: tuple[int, int]) -> None:
        rows, columns = weight.shape
        super().__init__(weight.name, (rows, columns))
        self._weight, self._scale, self._first = weight, scale, 0
        found = scale.shape if len(scale.shape) == 2 else (*scale.shape, 1)
        sizes = {(1, 1): (rows, columns), (rows, 1): (1, columns)}
        sizes |= {(-(-rows // block[0]), -(-columns // block[1])): block}
        if found not in sizes or scale.type_name not in _FLOATS:
            raise ModelError(
                f"tensor {scale.name} is {scale.type_name} {scale.shape}, expected a number for all of {self.name} "
                f"{self.shape}, for each row, or for each {block[0]} x {block[1]} numbers"
            )
        self._block = sizes[found]
        wide = self._block[1]
        if weight.type_name == "f8_e4m3" and columns % _RUN == 0 and (wide % _RUN == 0 or wide == columns):
            self.type_name = "f8_e4m3_128"

    def take_rows(self, start: int, stop: int) -> Float8Tensor:
        """Rows [start:stop] as a tensor of their own, under the same name."""
        taken = Float8Tensor(self._weight, self._scale, self._block)
        taken.shape, taken._first, taken._block = (stop - start, self.shape[1]), self._first + start, self._block
        return taken

    def take_matrix(self, index: int) -> Float8Tensor:
        """Refuse: this is one."""
        raise ValueError(f"tensor {self.name} has no part {index}, as it is a matrix")

    def release(self) -> None:
        """Forget the numbers and let the mapped pages go; all comes back when asked for."""
        super().release()
        self._weight.release()
        self._scale.release()

    def _read_scales(self, first: int, last: int, columns: int) -> Floats:
        """The scales of each `columns` neighbouring columns: (rows, columns of the weight / columns)."""
        (high, wide), count = self._block, self.shape[1] // columns
        scales = self._scale.to_float32().reshape(-1, -(-self.shape[1] // wide))[np.arange(first, last) // high]
        repeated: Floats = np.repeat(scales, -(-wide // columns), axis=1)[:, :count]
        return repeated

    def _make(self, first: int, last: int) -> Floats:
        first, last = self._first + first, self._first + last
        with np.errstate(all="ignore"):  # overflow is refused below
            values: Floats = self._weight.to_float32(first, last) * self._read_scales(first, last, 1)
        self._refuse_rows(np.flatnonzero(~np.isfinite(values).all(axis=1)), first)
        return values

    def _encode(self, first: int, last: int) -> Bytes:
        if self.type_name == "bf16":
            return super()._encode(first, last)
        first, last = self._first + first, self._first + last
        codes, scales = self._weight.take_rows(first, last).data, self._read_scales(first, last, _RUN)
        blocks = np.empty(scales.size, F8_E4M3_128)
        blocks["codes"], blocks["scale"] = codes.reshape(-1, _RUN), scales.reshape(-1)
        is_number = (np.abs(scales) < _MOST).all(axis=1)
        is_number &= (codes & 127 != 127).reshape(last - first, self.shape[1]).all(axis=1)
        self._refuse_rows(np.flatnonzero(~is_number), first)
        return blocks.view(np.uint8)

    def _refuse_rows(self, rows: NDArray[np.intp], first: int) -> None:
        if rows.size:
            row = first + int(rows[0])
            raise ModelError(f"tensor {self.name} has numbers or scales in row {row} that are none; fetch it again")


class LevelsTensor(Bf16Tensor):
    """A weight of bitsandbytes in 4 bits, or its rows from `first` on, in the type of the original."""

    __slots__ = ("_absmax", "_block", "_first", "_levels", "_weight", "recipe")

    def __init__(self, name: str, parts: Parts, state: Mapping[str, object], recipe: str) -> None:
        shape, kinds = state.get("shape"), {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
        sizes = [one for one in shape if type(one) is int and one > 0] if isinstance(shape, list) else []
        self._block = state.get("blocksize")
        count, kind = math.prod(sizes), kinds.get(str(state.get("dtype")))
        if len(sizes) != 2 or kind is None or type(self._block) is not int or not 0 < self._block <= _MOST_BLOCK:
            raise ModelError(f"tensor {name} states the shape {shape!r:.40}, {state.get('dtype')!r:.40} and blocks of "
                             f"{self._block!r:.40}, expected a matrix of {', '.join(kinds)}")  # fmt: skip
        super().__init__(name, (sizes[0], sizes[1]), kind)
        self._weight, self._first, self.recipe = parts["weight"], 0, recipe
        groups, levels = -(-count // self._block), parts["quant_map"]
        _expect(self._weight, ("u8",), self._weight.shape[:1] if len(self._weight.shape) == 1 else (-(-count // 2), 1))
        _expect(levels, ("f32",), (16,))
        self._levels = levels.to_float32()
        absmax = parts["absmax"]
        if "nested_absmax" not in parts:
            _expect(absmax, ("f32",), (groups,))
            self._absmax = absmax.to_float32()
        else:
            _expect(absmax, ("u8",), (groups,))
            size, offset = state.get("nested_blocksize"), state.get("nested_offset")
            table = _need(name.removesuffix(".weight") + ".weight", parts, "nested_quant_map")
            _expect(table, ("f32",), (256,))
            if type(size) is not int or not 0 < size <= _MOST_BLOCK or not isinstance(offset, float):
                raise ModelError(f"tensor {name} states nested blocks of {size!r:.40} and the offset {offset!r:.40}")
            outer = parts["nested_absmax"]
            _expect(outer, ("f32",), (-(-groups // size),))
            inner = table.to_float32()[absmax.data] * np.repeat(outer.to_float32(), min(size, groups))[:groups]
            self._absmax = inner + np.float32(offset)

    def take_rows(self, start: int, stop: int) -> LevelsTensor:
        """Rows [start:stop] as a tensor of their own, under the same name."""
        taken = copy.copy(self)
        taken.shape, taken._first, taken._made = (stop - start, self.shape[1]), self._first + start, None
        return taken

    def take_matrix(self, index: int) -> LevelsTensor:
        """Refuse: this is one."""
        raise ValueError(f"tensor {self.name} has no part {index}, as it is a matrix")

    def release(self) -> None:
        """Forget the numbers and let the mapped pages go; all comes back when asked for."""
        super().release()
        self._weight.release()

    def _make(self, first: int, last: int) -> Floats:
        columns = self.shape[1]
        at, end = (self._first + first) * columns, (self._first + last) * columns
        raw = self._weight.data[at // 2 : -(-end // 2)]
        codes = np.stack([raw >> 4, raw & 15], axis=1).reshape(-1)[at % 2 : at % 2 + end - at]
        assert isinstance(self._block, int)
        with np.errstate(all="ignore"):  # overflow is refused below
            values: Floats = self._levels[codes] * self._absmax[np.arange(at, end) // self._block]
        if not np.isfinite(values).all():
            row = self._first + first + int(np.flatnonzero(~np.isfinite(values))[0]) // columns
            raise ModelError(f"tensor {self.name} has numbers or scales in row {row} that are none; fetch it again")
        return values.reshape(last - first, columns)


class ByteTensor(CompressedTensor):
    """A weight of torchao: int8 (rows, columns), or int4 in half as many, and scales and zeros, which may be floats."""

    __slots__ = ()

    maker = "int"

    def _unpack(self, first: int, last: int) -> Bytes:
        raw = self._parts["weight"].data.reshape(self._parts["weight"].shape[0], -1)[first:last]
        if self.quantization.bits == 8:
            return (raw ^ np.uint8(128)).reshape(-1)
        return unpack_codes(raw, 4) ^ np.uint8(8)

    def _read_packed(self, first: int, last: int) -> Bytes:
        return PackedTensor._read_packed(self, first, last)

    def _read_steps(self, first: int, last: int) -> tuple[Floats, Floats]:
        if self.quantization.bits == 8:
            return super()._read_steps(first, last)
        first, last = self._first + first, self._first + last
        scales, zeros = (
            np.ascontiguousarray(self._parts[name].to_float32()[:, first:last].T)
            for name in ("weight_scale", "weight_zero_point")
        )
        exact = zeros.astype(np.float64) - 8 * scales.astype(np.float64)
        biases = exact.astype(np.float32)
        is_exact = np.isfinite(scales) & (biases == exact)
        if not is_exact.all():
            row, group = map(int, np.argwhere(~is_exact)[0])
            raise ModelError(
                f"tensor {self.name} has the scale {scales[row, group]} and the zero {zeros[row, group]} in row "
                f"{first + row}, group {group}, whose sum f32 does not keep; take the original weights"
            )
        return scales, biases


_Made = Float4Tensor | FloatGroups | ScatteredTensor | Float8Tensor | LevelsTensor
Joined = TensorSource | AffineBlocks | MicroscaledTensor | _Made
_RANGES = (
    "input_scale",
    "input_global_scale",
    "output_scale",
    "q_scale",
    "k_scale",
    "v_scale",
)  # of activations, cache
_RUN, _MOST = 128, np.float32(2.0**96)  # columns of a block of FP8; scales are below
_MOST_BLOCK = 1 << 20  # numbers with one scale
_FLOAT8 = ("f8_e4m3", "f8_e5m2")


def _words(part: TensorSource) -> Words:
    return part.data.view("<u4").reshape(part.shape)


def _expect(part: TensorSource, types: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if part.type_name not in types or part.shape != shape:
        known = " or ".join(types)
        raise ModelError(f"tensor {part.name} is {part.type_name} {part.shape}, expected {known} {shape}")


def _need(module: str, parts: Parts, name: str) -> TensorSource:
    if name not in parts:
        raise ModelError(f"tensor {module}.{name} is missing, which the quantised {module}.weight needs")
    return parts[name]


def _join_columns_first(module: str, parts: Parts, kind: type[_ColumnsFirst], stated: Mapping[str, object]) -> Joined:
    """A weight of AWQ or GPTQ."""
    name, (codes, zeros, scales) = f"{module}.weight", (_need(module, parts, one) for one in _COLUMN_PARTS)
    for part in (codes, zeros, scales):
        if len(part.shape) != 2:
            raise ModelError(f"tensor {part.name} has shape {part.shape}, expected a matrix")
    (groups, rows), words = scales.shape, zeros.shape[1]
    bits = 4 if kind is AWQTensor else 32 * words // rows
    if bits not in _BITS or 32 * words != rows * bits:
        raise ModelError(
            f"tensor {zeros.name} has {words} words for {rows} rows, which are no zeros of 2, 3, 4 or 8 bits"
        )
    if not stated.get("dynamic") and stated.get("bits", bits) != bits:
        raise ModelError(f"tensor {name} has {bits} bits, quantization_config.bits is {stated['bits']!r:.40}")
    columns = codes.shape[0] if kind is AWQTensor else 32 * codes.shape[0] // bits
    shape = (columns, words) if kind is AWQTensor else (columns * bits // 32, rows)
    _expect(codes, ("i32",), shape)
    _expect(zeros, ("i32",), (groups, words))
    _expect(scales, _FLOATS, (groups, rows))
    joined = kind(name, parts, (rows, columns), bits, groups)
    return joined if (order := parts.get("g_idx")) is None else _scatter(joined, order)


def _scatter(packed: PackedTensor, order: TensorSource) -> Joined:
    """The weight with the groups that `order` gives its columns, which need not be neighbours (desc_act, actorder)."""
    columns, size = packed.shape[1], packed.quantization.group_size
    _expect(order, ("i32",), (columns,))
    found = order.data.view("<i4")
    if found.min() < 0 or found.max() >= columns // size:
        raise ModelError(f"tensor {order.name} names groups from {found.min()} to {found.max()} of {columns // size}")
    return packed if np.array_equal(found, np.arange(columns) // size) else ScatteredTensor(packed, found.copy())


_COLUMN_PARTS = ("qweight", "qzeros", "scales")


def _join_awq(module: str, parts: Parts, stated: Mapping[str, object]) -> Joined:
    return _join_columns_first(module, parts, AWQTensor, stated)


def _join_gptq(module: str, parts: Parts, stated: Mapping[str, object]) -> Joined:
    is_second = _read_format(stated) == "gptq_v2"
    return _join_columns_first(module, parts, GPTQTensor if is_second else GPTQFirstTensor, stated)


def _join_compressed(module: str, parts: Parts, stated: Mapping[str, object]) -> Joined:
    """A weight of compressed-tensors: packed integers, bytes, or FP8."""
    scale, name = _need(module, parts, "weight_scale"), f"{module}.weight"
    weight = parts.get("weight_packed") or _need(module, parts, "weight")
    if weight.type_name in _FLOAT8:
        return Float8Tensor(weight, scale, _read_block(stated))
    if "weight_global_scale" in parts:
        return _join_float4(module, weight, scale, parts["weight_global_scale"], divides=True)
    is_packed = "weight_packed" in parts
    shape = weight.shape
    if is_packed:
        _expect(stored := _need(module, parts, "weight_shape"), ("i64",), (2,))
        shape = tuple(map(int, stored.data.view("<i8")))
    if len(shape) != 2 or len(weight.shape) != 2 or min(shape) < 1:
        raise ModelError(f"tensor {weight.name} has shape {weight.shape}, expected a matrix, as {module}.weight_shape")
    rows, columns = shape
    bits = 32 * weight.shape[1] // columns if is_packed else 8
    _expect(weight, ("i32",) if is_packed else ("i8",), (rows, -(-columns * bits // 32) if is_packed else columns))
    groups = math.prod(scale.shape[1:])
    if math.prod(scale.shape) != 1:
        _expect(scale, _FLOATS, (rows, groups) if len(scale.shape) == 2 else (rows,))
    zero = parts.get("weight_zero_point")
    if zero is not None:
        is_byte = zero.type_name == "i8"
        _expect(zero, ("i8", "i32"), scale.shape if is_byte else (-(-rows * bits // 32), groups))
    joined = CompressedTensor(name, parts, (rows, columns), bits, groups)
    return joined if (order := parts.get("weight_g_idx")) is None else _scatter(joined, order)


def _join_float8(module: str, parts: Parts, stated: Mapping[str, object]) -> Joined:
    weight = _need(module, parts, "weight")
    scale = parts.get("weight_scale_inv") or _need(module, parts, "weight_scale")
    if weight.type_name not in _FLOAT8 or len(weight.shape) != 2:
        raise ModelError(f"tensor {weight.name} is {weight.type_name} {weight.shape}, expected a matrix of FP8")
    return Float8Tensor(weight, scale, _read_block(stated))


def _join_float4(
    module: str, weight: TensorSource, scale: TensorSource, factor: TensorSource, *, divides: bool = False
) -> Joined:
    """A weight in NVFP4, whose scales `factor` multiplies, or divides."""
    if len(weight.shape) != 2 or weight.shape[1] % 32:
        raise ModelError(f"tensor {weight.name} has shape {weight.shape}, expected a matrix of a multiple of 32 bytes")
    _expect(weight, ("u8",), weight.shape)
    _expect(scale, ("f8_e4m3",), (weight.shape[0], weight.shape[1] // 8))
    _expect(factor, ("f32",), factor.shape if math.prod(factor.shape) == 1 else (1,))
    value = factor.to_float32().reshape(-1)
    with np.errstate(divide="ignore"):
        return Float4Tensor(f"{module}.weight", (weight, scale), np.float32(1) / value if divides else value)


def _join_modelopt(module: str, parts: Parts, stated: Mapping[str, object]) -> Joined:
    """A weight of ModelOpt: NVFP4 or FP8."""
    weight, scale = _need(module, parts, "weight"), _need(module, parts, "weight_scale")
    if weight.type_name == "u8":
        return _join_float4(module, weight, scale, _need(module, parts, "weight_scale_2"))
    return _join_float8(module, parts, stated)


_LEVELS = ("bitsandbytes__nf4", "bitsandbytes__fp4")


def _join_bitsandbytes(module: str, parts: Parts, _stated: Mapping[str, object]) -> Joined:
    weight = _need(module, parts, "weight")
    if weight.type_name == "i8":
        scale = _need(module, parts, "SCB")
        _expect(scale, ("f32", "f16", "bf16"), weight.shape[:1])
        return _join_bytes(module, weight, scale.to_float32()[:, None] * np.float32(1 / 127))
    found = [part for part in _LEVELS if part in parts]
    state = _need(f"{module}.weight.quant_state", parts, found[0] if found else _LEVELS[0])
    for part in ("absmax", "quant_map"):
        _need(f"{module}.weight", parts, part)
    try:
        stated = json.loads(state.data.tobytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"tensor {state.name} is not JSON: {error}") from None
    if not isinstance(stated, dict):
        raise ModelError(f"tensor {state.name} is {stated!r:.40}, expected an object")
    return LevelsTensor(f"{module}.weight", parts, stated, f"bnb_{found[0].rpartition('_')[2]}")


def _join_bytes(
    module: str, weight: TensorSource, scales: Floats, zeros: TensorSource | None = None, groups: int = 1
) -> Joined:
    """A matrix of int8, and scales (rows, groups)."""
    if len(weight.shape) != 2:
        raise ModelError(f"tensor {weight.name} has shape {weight.shape}, expected a matrix")
    raw = np.ascontiguousarray(scales).view(np.uint8).reshape(-1)
    parts = {"weight": weight, "weight_scale": TensorSource(f"{module}.weight_scale", "f32", scales.shape, raw)}
    if zeros is not None:
        parts["weight_zero_point"] = zeros
    return CompressedTensor(f"{module}.weight", parts, (weight.shape[0], weight.shape[1]), 8, groups)


def _join_torchao(module: str, parts: Parts, _stated: Mapping[str, object]) -> Joined:
    weight = _need(module, parts, "_weight_qdata")
    if "_weight_scale" not in parts or "_weight_act_pre_scale" in parts or len(weight.shape) != 2:
        raise ModelError(f"tensor {weight.name} {weight.shape} is packed in a way that is not supported; take a matrix "
                         "packed plainly, or the original weights")  # fmt: skip
    rows, scale, zero = weight.shape[0], parts["_weight_scale"], parts.get("_weight_zero_point")
    if weight.type_name in _FLOAT8:
        named = TensorSource(f"{module}.weight", weight.type_name, weight.shape, weight.data, weight.mapping)
        return Float8Tensor(named, scale, (1, math.prod(weight.shape[1:])))
    if (len(scale.shape) == 2 and scale.shape[0] != rows) or (zero is not None and zero.type_name in _FLOATS):
        columns, groups = 2 * weight.shape[1], scale.shape[0]
        _expect(weight, ("i8", "u8"), weight.shape)
        for part in (scale, zero or _need(module, parts, "_weight_zero_point")):
            _expect(part, _FLOATS, (groups, rows))
        assert zero is not None
        taken = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        return ByteTensor(f"{module}.weight", taken, (rows, columns), 4, groups)
    groups = math.prod(scale.shape[1:])
    _expect(weight, ("i8",), weight.shape)
    _expect(scale, _FLOATS, (rows, groups) if len(scale.shape) == 2 else (rows,))
    if zero is not None:
        _expect(zero, ("i8",), scale.shape)
    return _join_bytes(module, weight, scale.to_float32().reshape(rows, groups), zero, groups)


def _read_block(stated: Mapping[str, object]) -> tuple[int, int]:
    """Return the rows and columns of a block with one scale: the configuration's, 128 x 128 by default."""
    found = stated.get("weight_block_size")
    for group in _objects(stated.get("config_groups")):
        for weights in _objects({"weights": group.get("weights")}):
            found = weights.get("block_structure") or found
    if found is None:
        return 128, 128
    sizes = [one for one in found if type(one) is int and one > 0] if isinstance(found, list) else []
    if len(sizes) != 2:
        raise ModelError(f"quantization_config states blocks of {found!r:.40}, expected two sizes")
    return sizes[0], sizes[1]


def _objects(value: object) -> list[dict[str, object]]:
    return [one for one in value.values() if isinstance(one, dict)] if isinstance(value, dict) else []


def _read_format(stated: Mapping[str, object]) -> str:
    for key in ("checkpoint_format", "format", "version"):
        if isinstance(name := stated.get(key), str):
            return name.lower()
    return ""


_Join = Callable[[str, Parts, Mapping[str, object]], Joined]
# For each method: the parts that make a weight, its formats ("": unstated), and how they are joined.
_METHODS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], _Join]] = {
    "awq": (_COLUMN_PARTS, ("gemm", ""), _join_awq),
    "gptq": ((*_COLUMN_PARTS, "g_idx"), ("gptq", "gptq_v2", ""), _join_gptq),
    "compressed-tensors": (
        ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale"),
        (
            *("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision"),
            "nvfp4-pack-quantized",
        ),
        _join_compressed,
    ),
    "fp8": (("weight_scale_inv", "weight_scale"), ("",), _join_float8),
    "fbgemm_fp8": (("weight_scale",), ("",), _join_float8),
    "modelopt": (("weight_scale", "weight_scale_2"), ("",), _join_modelopt),
    "bitsandbytes": (
        ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "SCB", "weight_format", *_LEVELS),
        ("",),
        _join_bitsandbytes,
    ),
    "torchao": (
        ("_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_scale_and_zero", "_weight_act_pre_scale"),
        ("",),
        _join_torchao,
    ),
}


def join_packed(tensors: Parts, config: Mapping[str, object]) -> tuple[dict[str, Joined], dict[str, TensorSource]]:
    """The weights of a folder that its `quantization_config` quantised, each as one, and the other tensors.

    Raises ModelError, naming the tensor or the key, if it does not fit, is missing, or is not supported.
    """
    stated = config.get("quantization_config")
    stated = stated if isinstance(stated, dict) else {}
    part_names, formats, join = _METHODS.get(str(stated.get("quant_method")), ((), (), _join_float8))
    if formats and (found := _read_format(stated)) not in formats:
        raise ModelError(f"quantization_config states the format {found!r:.40}; supported is {' or '.join(formats)}")
    modules: dict[str, dict[str, TensorSource]] = {}
    plain: dict[str, TensorSource] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        module = module.removesuffix(".weight.quant_state").removesuffix(".weight")  # of bitsandbytes
        if part in part_names or (part == "weight" and tensor.type_name in ("i8", "u8", *_FLOAT8)):
            modules.setdefault(module, {})[part] = tensor
        elif not formats or part not in _RANGES:
            plain[name] = tensor
    for module, parts in modules.items():
        if not formats:
            found = parts["weight"].type_name
            raise ModelError(f"tensor {module}.weight is {found}, and config.json has no quantization_config for it")
        if f"{module}.weight" in plain:
            raise ModelError(f"tensor {module}.weight is {plain[f'{module}.weight'].type_name}, but has {min(parts)}")
    return {f"{module}.weight": join(module, parts, stated) for module, parts in modules.items()}, plain


_BLOCKS, _SCALES = "_blocks", "_scales"


def join_quantised(tensors: Parts, config: Mapping[str, object]) -> dict[str, Joined]:
    """The tensors of a folder with each weight and its scales as one; others as they are.

    Raises ModelError, naming the tensor or the key, for a part that is missing or does not fit.
    """
    joined, others = join_packed(tensors, config)
    plain: dict[str, TensorSource] = {}
    for name, tensor in others.items():
        if name.endswith(_BLOCKS):
            weight = name.removesuffix(_BLOCKS)
            scales = tensors.get(weight + _SCALES)
            if scales is None:
                raise ModelError(f"tensor {weight}{_SCALES} is missing, which the quantised {name} needs")
            joined[weight] = MicroscaledTensor(weight, tensor, scales)
        elif not name.endswith(_SCALES):
            plain[name] = tensor
        elif name.removesuffix(_SCALES) + _BLOCKS not in tensors:
            raise ModelError(f"tensor {name} has no {name.removesuffix(_SCALES)}{_BLOCKS} that it could belong to")
    return joined | join_affine(plain, config)
