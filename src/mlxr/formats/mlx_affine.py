"""Weights in MLX's quantisation: three tensors of a folder become one, in blocks that kernels multiply by.

`x.weight` holds 32-bit words, `x.scales` and `x.biases` a number for each group of 32, 64 or 128 columns. A row's words
are one stream of bits from the lowest up; value i is its bits [i * bits, (i + 1) * bits), and means scale * q + bias.
`quantization` in `config.json` gives bits and group size, for all or for a single module. Up to 4 bits go into blocks
of 4, more into blocks of 8 (`quants`): no number changes. Knows no models.

Its other modes have small floats and no biases: `mxfp4` and `nvfp4` (E2M1, scales in E4M3) are ggml's types of these
names, except nvfp4 in rows of no multiple of 64 columns. Those, and numbers of `mxfp8` (E4M3, scales that are powers of
two), have at most 6 significant bits, so bf16 holds them. Other makers' NVFP4 has a factor for the whole matrix, too.
Layout: `mlx.core.quantize`, https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.formats.ggml_types import by_name, decode_blocks, encode_tensor
from mlxr.formats.quants import AFFINE_BLOCKS, NVFP4, NVFP4_SCALED, Bytes, Floats, decode_f8_e4m3, decode_mxfp4
from mlxr.formats.tensor import TensorSource

BITS = (1, 2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
MODES = {"affine": (BITS, GROUP_SIZES), "mxfp4": ((4,), (32,)), "mxfp8": ((8,), (32,)), "nvfp4": ((4,), (16,))}
_KEYS = ("group_size", "bits", "mode")
_PIECE_VALUES = 1 << 18  # at a time: temporaries stay within a cache
_SCALE_TYPES = ("f32", "f16", "bf16")
_SPREADS = ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F))


@frozen
class Quantization:
    """The storage form of one weight."""

    bits: int
    group_size: int
    mode: str = "affine"


class AffineBlocks(ABC):
    """A weight whose integers mean scale * q + bias for each group of columns, with the attributes of a TensorSource.

    `data`, blocks of such a type, is made when it is first asked for, and kept until `release`. Subclasses read the
    parts from a kind of checkpoint.
    """

    __slots__ = ("_blocks", "_rows", "name", "quantization", "shape", "type_name")

    maker: ClassVar[str] = "mlx"  # of the checkpoint

    def __init__(self, name: str, shape: tuple[int, ...], quantization: Quantization) -> None:
        self.name, self.shape, self.quantization = name, shape, quantization
        self._blocks: NDArray[np.uint8] | None = None
        self._rows = math.prod(shape[:-1])
        self.type_name = f"affine{4 if quantization.bits <= 4 else 8}_{self._block_columns}"

    @property
    def _block_columns(self) -> int:
        return 32 if self.quantization.group_size % 64 else 64

    @property
    def recipe(self) -> str:
        """Name the checkpoint by its maker and the bits of a number."""
        return f"{self.maker}_{self.quantization.bits}bit"

    @property
    def nbytes(self) -> int:
        """Size of the blocks in bytes."""
        return self._rows * by_name(self.type_name).row_bytes(self.shape[-1])

    @property
    def is_mapped(self) -> bool:
        """No: the blocks are made."""
        return False

    @property
    def data(self) -> NDArray[np.uint8]:
        """The blocks, uint8 (nbytes,)."""
        if self._blocks is None:
            blocks = np.empty(self.nbytes, np.uint8)
            rows = blocks.reshape(self._rows, -1)
            for first, last in self._cut(0, self._rows):
                rows[first:last] = self._make_blocks(first, last)
            self._blocks = blocks
        return self._blocks

    def to_float32(self, start: int | None = None, stop: int | None = None) -> Floats:
        """Rows [start:stop] (NumPy's rules), or parts of a stack, decoded from the file."""
        part, end, _ = slice(start, stop).indices(self.shape[0])
        count, each = max(0, end - part), self._rows // self.shape[0]
        begin, end = part * each, (part + count) * each
        values = np.empty((count * each, self.shape[-1]), np.float32)
        for first, last in self._cut(begin, end):
            groups = self._read_codes(first, last).reshape(-1, self.quantization.group_size).astype(np.float32)
            scale, bias = (part.reshape(-1, 1) for part in self._read_steps(first, last))
            values[first - begin : last - begin] = (groups * scale + bias).reshape(last - first, -1)
        return values.reshape(count, *self.shape[1:])

    @abstractmethod
    def take_rows(self, start: int, stop: int) -> AffineBlocks:
        """Rows [start:stop] as a tensor of their own, under the same name."""

    @abstractmethod
    def take_matrix(self, index: int) -> AffineBlocks:
        """Part `index` of a stack."""

    @abstractmethod
    def release(self) -> None:
        """Forget the blocks and let the mapped pages go; all comes back when asked for."""

    @abstractmethod
    def _read_codes(self, first: int, last: int) -> Bytes:
        """The integers of some rows, (values,)."""

    @abstractmethod
    def _read_steps(self, first: int, last: int) -> tuple[Floats, Floats]:
        """Scales and biases of some rows, each (rows, groups)."""

    def _read_packed(self, first: int, last: int) -> Bytes:
        """The integers of some rows, packed as in the blocks."""
        codes = self._read_codes(first, last)
        return codes if self.quantization.bits > 4 else pack_halves(codes)

    def _cut(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        step = max(1, _PIECE_VALUES // self.shape[-1])
        for start in range(first, last, step):
            yield start, min(last, start + step)

    def _make_blocks(self, first: int, last: int) -> Bytes:
        columns, bits = self._block_columns, 4 if self.quantization.bits <= 4 else 8
        blocks = np.empty((last - first) * self.shape[-1] // columns, AFFINE_BLOCKS[bits, columns])
        repeats = self.quantization.group_size // columns
        for field, part in zip(("scale", "bias"), self._read_steps(first, last), strict=True):
            blocks[field] = np.repeat(part.reshape(-1), repeats)
        blocks["q"] = self._read_packed(first, last).reshape(len(blocks), -1)
        return blocks.view(np.uint8).reshape(last - first, -1)


class AffineTensor(AffineBlocks):
    """A weight that MLX quantised, or a stack of them (parts, rows, columns).

    Raises ModelError, naming the tensor, for parts that do not fit together.
    """

    __slots__ = ("_biases", "_scales", "_weight")

    def __init__(
        self, weight: TensorSource, scales: TensorSource, biases: TensorSource, quantization: Quantization
    ) -> None:
        stack = weight.shape[:-2]
        if scales.shape[:-2] != stack or biases.shape[:-2] != stack:
            raise ModelError(f"tensor {scales.name} has shape {scales.shape}, expected that of {stack} matrices")
        self._weight, self._scales, self._biases = map(_flatten, (weight, scales, biases))
        self.name, self.quantization = weight.name, quantization
        super().__init__(weight.name, (*weight.shape[:-1], self._check()), quantization)

    def take_rows(self, start: int, stop: int) -> AffineTensor:
        """Rows [start:stop] as a tensor of their own, under the same name."""
        if len(self.shape) > 2:
            raise ValueError(f"tensor {self.name} is a stack of matrices, which has no rows of its own")
        return self._take(start, stop)

    def take_matrix(self, index: int) -> AffineTensor:
        """Part `index` of a stack."""
        each = self._rows // self.shape[0]
        return self._take(index * each, (index + 1) * each)

    def _take(self, start: int, stop: int) -> AffineTensor:
        weight, scales, biases = (part.take_rows(start, stop) for part in (self._weight, self._scales, self._biases))
        return AffineTensor(weight, scales, biases, self.quantization)

    def release(self) -> None:
        """Forget the blocks and let the mapped pages go; all comes back when asked for."""
        self._blocks = None
        for part in (self._weight, self._scales, self._biases):
            part.release()

    def _check(self) -> int:
        rows, words = self._expect_matrix(self._weight, ("u32",))
        bits, size = self.quantization.bits, self.quantization.group_size
        if words * 32 % (bits * size):
            raise ModelError(
                f"tensor {self.name} has {words} words a row, which are no groups of {size} values of {bits} bits"
            )
        columns = words * 32 // bits
        for part in (self._scales, self._biases):
            if self._expect_matrix(part, _SCALE_TYPES) != (rows, columns // size):
                raise ModelError(
                    f"tensor {part.name} has shape {part.shape}, expected {(rows, columns // size)} by {rows} x "
                    f"{columns} values of {bits} bits in groups of {size}"
                )
        return columns

    @staticmethod
    def _expect_matrix(part: TensorSource, types: tuple[str, ...]) -> tuple[int, int]:
        if len(part.shape) != 2 or part.type_name not in types:
            known = " or ".join(types)
            raise ModelError(f"tensor {part.name} is {part.type_name} {part.shape}, expected a matrix of {known}")
        return part.shape[0], part.shape[1]

    def _read_raw(self, first: int, last: int) -> Bytes:
        return self._weight.data.reshape(self._rows, -1)[first:last]

    def _read_codes(self, first: int, last: int) -> Bytes:
        return unpack_codes(self._read_raw(first, last), self.quantization.bits)

    def _read_steps(self, first: int, last: int) -> tuple[Floats, Floats]:
        return self._scales.to_float32(first, last), self._biases.to_float32(first, last)

    def _read_packed(self, first: int, last: int) -> Bytes:
        if self.quantization.bits == 4:
            return order_nibbles(self._read_raw(first, last))
        return super()._read_packed(first, last)


def _flatten(part: TensorSource) -> TensorSource:
    """A stack of matrices as one matrix, with the rows of one after those of another."""
    if len(part.shape) < 3:
        return part
    shape = (math.prod(part.shape[:-1]), part.shape[-1])
    return TensorSource(part.name, part.type_name, shape, part.data, part.mapping)


def unpack_codes(raw: Bytes, bits: int) -> Bytes:
    """Unpack the numbers in a stream of bits, lowest first: uint8 (..., 4 n) to uint8 (values,)."""
    if bits == 8:
        return raw.reshape(-1)
    eights = np.zeros((raw.size // bits, 8), np.uint8)  # eight numbers fill `bits` bytes
    eights[:, :bits] = raw.reshape(-1, bits)
    words = eights.view("<u8")
    codes = np.empty((len(words), 8), np.uint8)
    for place in range(8):
        codes[:, place] = ((words[:, 0] >> np.uint64(bits * place)) & np.uint64((1 << bits) - 1)).astype(np.uint8)
    return codes.reshape(-1)


def pack_halves(codes: Bytes) -> Bytes:
    """Pack each 32 numbers below 16 into 16 bytes: the first sixteen in the low halves, the others above."""
    halves = codes.reshape(-1, 2, 16)
    return halves[:, 0] | halves[:, 1] << np.uint8(4)


def order_nibbles(raw: Bytes) -> Bytes:
    """`pack_halves` of packed 4-bit numbers: the eight numbers of a word go into eight bytes at once."""
    spread = np.ascontiguousarray(raw).view("<u4").reshape(-1, 4).astype(np.uint64)
    for shift, mask in _SPREADS:
        spread |= spread << np.uint64(shift)
        spread &= np.uint64(mask)
    ordered: Bytes = (spread[:, :2] | spread[:, 2:] << np.uint64(4)).astype("<u8").view(np.uint8)
    return ordered


def join_affine(tensors: Mapping[str, TensorSource], config: Mapping[str, object]) -> dict[str, Joined]:
    """The tensors of a folder with each weight, its scales and its biases as one; others as they are.

    Raises ModelError, naming the tensor or the key, for a part that is missing or does not fit, and for modes, bits and
    group sizes that are not supported.
    """
    default, own = _read_quantization(config)
    joined: dict[str, Joined] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        scales, biases = tensors.get(f"{module}.scales"), tensors.get(f"{module}.biases")
        if part in ("scales", "biases"):
            if f"{module}.weight" not in tensors:
                raise ModelError(f"tensor {name} has no {module}.weight that it could belong to")
        elif part != "weight" or (tensor.type_name != "u32" and scales is None and biases is None):
            joined[name] = tensor
        else:
            quantization = own.get(module, default)
            if quantization is None:
                why = "quantization leaves it out" if module in own else "there is no quantization"
                raise ModelError(f"tensor {name} is quantised, but in config.json {why}")
            is_affine = quantization.mode == "affine"
            for missing, found in (("scales", scales), ("biases", biases)):
                if found is None and (is_affine or missing == "scales"):
                    raise ModelError(f"tensor {module}.{missing} is missing, which the quantised {name} needs")
            assert scales is not None
            if is_affine:
                assert biases is not None
                joined[name] = AffineTensor(tensor, scales, biases, quantization)
            else:
                joined[name] = _join_floats(tensor, scales, quantization)
    return joined


def _read_quantization(config: Mapping[str, object]) -> tuple[Quantization | None, dict[str, Quantization | None]]:
    """Read `quantization`: the default of all modules, and the entries of single ones (None: not quantised)."""
    stated = config.get("quantization")
    if stated is None:
        return None, {}
    if not isinstance(stated, dict):
        raise ModelError(f"quantization is {stated!r:.80}, expected an object")
    default = _read_one("quantization", stated)
    own: dict[str, Quantization | None] = {}
    for module, value in stated.items():
        if module in _KEYS:
            continue
        if isinstance(value, bool):
            own[module] = default if value else None
        elif isinstance(value, dict):
            own[module] = _read_one(f"quantization.{module}", value)
        else:
            raise ModelError(f"quantization.{module} is {value!r:.80}, expected true, false or an object")
    return default, own


def _read_one(key: str, stated: Mapping[str, object]) -> Quantization:
    mode = stated.get("mode", "affine")
    if not isinstance(mode, str) or mode not in MODES:
        raise ModelError(f"{key}.mode is {mode!r:.80}, which is not supported; supported are {', '.join(MODES)}")
    found = []
    for name, allowed in zip(("bits", "group_size"), MODES[mode], strict=True):
        value = stated.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
            has = "missing" if value is None else f"{value!r:.80}"
            raise ModelError(f"{key}.{name} is {has}, expected one of {', '.join(map(str, allowed))}")
        found.append(value)
    return Quantization(found[0], found[1], mode)


def _join_floats(
    weight: TensorSource, scales: TensorSource, quantization: Quantization
) -> MicroscaledTensor | Float4Tensor | FloatGroups:
    """A weight of a mode of floats. Raises ModelError, naming the tensor, for parts that do not fit."""
    size, bits = quantization.group_size, quantization.bits
    wanted = (*scales.shape[:-1], scales.shape[-1] * size * bits // 32)
    if weight.type_name != "u32" or scales.type_name != "u8" or weight.shape != wanted or len(wanted) not in (2, 3):
        raise ModelError(
            f"tensor {weight.name} is {weight.type_name} {weight.shape}, expected u32 {wanted}, as {scales.name} is "
            f"{scales.type_name} {scales.shape}"
        )
    if quantization.mode == "nvfp4" and scales.shape[-1] % 4 == 0:
        return Float4Tensor(weight.name, (weight, scales), recipe="mlx_nvfp4")
    if quantization.mode != "mxfp4":
        return FloatGroups(weight, scales, quantization)
    blocks = TensorSource(weight.name, "u8", (*scales.shape, _HALF_BYTES), weight.data, weight.mapping)
    return MicroscaledTensor(weight.name, blocks, scales)


class Bf16Tensor(ABC):
    """Numbers of a folder converted to bf16 or another type of 16 bits. `data` is made when it is first asked for, and
    kept until `release`."""

    __slots__ = ("_made", "name", "shape", "type_name")

    def __init__(self, name: str, shape: tuple[int, ...], type_name: str = "bf16") -> None:
        self.name, self.shape, self.type_name = name, shape, type_name
        self._made: Bytes | None = None

    def _encode(self, first: int, last: int) -> Bytes:
        """Rows [first:last], or parts of a stack, in the form of `data`."""
        return encode_tensor(self.type_name, self._make(first, last))

    @abstractmethod
    def _make(self, first: int, last: int) -> Floats:
        """Return rows [first:last], or parts of a stack, before they are rounded. Raises ModelError for bad numbers."""

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        return math.prod(self.shape[:-1]) * by_name(self.type_name).row_bytes(self.shape[-1])

    @property
    def is_mapped(self) -> bool:
        """No: the numbers are made."""
        return False

    @property
    def data(self) -> Bytes:
        """The numbers, uint8 (nbytes,)."""
        if self._made is None:
            step, rows = max(1, _PIECE_VALUES // math.prod(self.shape[1:])), self.shape[0]
            self._made = np.concatenate([self._encode(at, min(at + step, rows)) for at in range(0, rows, step)])
        return self._made

    def to_float32(self, start: int | None = None, stop: int | None = None) -> Floats:
        """Decode rows [start:stop], or parts of a stack, of `data`."""
        first, last, _ = slice(start, stop).indices(self.shape[0])
        rounded = self._encode(first, max(first, last))
        return decode_blocks(by_name(self.type_name), rounded).reshape(-1, *self.shape[1:])

    def release(self) -> None:
        """Forget the numbers; they come back when asked for."""
        self._made = None


class FloatGroups(Bf16Tensor):
    """A stack of matrices, or one, of small floats with a scale for each group of columns; bf16 holds all of them.

    Raises ModelError, naming the tensor, if a number is NaN, or bf16 cannot hold it.
    """

    __slots__ = ("_scales", "_weight", "quantization")

    def __init__(self, weight: TensorSource, scales: TensorSource, quantization: Quantization) -> None:
        super().__init__(weight.name, (*scales.shape[:-1], scales.shape[-1] * quantization.group_size))
        self.quantization, self._weight, self._scales = quantization, weight, scales

    @property
    def recipe(self) -> str:
        """Name the checkpoint by MLX's mode."""
        return f"mlx_{self.quantization.mode}"

    def _make(self, first: int, last: int) -> Floats:
        weight, scales = (part.take_rows(first, last).data for part in (self._weight, self._scales))
        if self.quantization.bits == 4:
            numbers, steps = _E2M1[unpack_codes(weight, 4)], _E4M3[scales]
        else:
            with np.errstate(all="ignore"):
                numbers, steps = _E4M3[weight], np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(int) - 127))
        with np.errstate(all="ignore"):  # overflow is refused below
            values = (numbers.reshape(-1, self.quantization.group_size) * steps.astype(np.float32)[:, None]).reshape(-1)
            is_kept = np.isfinite(values) & (values.view(np.uint32) & 0xFFFF == 0)
        if not is_kept.all():
            raise ModelError(f"tensor {self.name} has the number {values[~is_kept][0]}, which bf16 does not hold")
        return values.reshape(-1, *self.shape[1:])

    def take_rows(self, start: int, stop: int) -> FloatGroups:
        """Rows [start:stop], or parts of a stack, as a tensor of their own, under the same name."""
        return FloatGroups(self._weight.take_rows(start, stop), self._scales.take_rows(start, stop), self.quantization)

    def take_matrix(self, index: int) -> FloatGroups:
        """Part `index` of a stack."""
        return FloatGroups(self._weight.take_matrix(index), self._scales.take_matrix(index), self.quantization)

    def release(self) -> None:
        """Forget the numbers and let the mapped pages go; all comes back when asked for."""
        super().release()
        self._weight.release()
        self._scales.release()


_E2M1 = decode_mxfp4(np.array([[127, *range(0, 256, 17)]], np.uint8))[0, :16]  # 2**0 times each of the numbers
_E4M3 = decode_f8_e4m3(np.arange(256, dtype=np.uint8)[:, None])[:, 0]
_HALF_BYTES = 16  # of a group


class MicroscaledTensor:
    """A stack of matrices, or one, in MXFP4, with the attributes of a TensorSource.

    `data` is made when it is first asked for, and kept until `release`. Raises ModelError, naming the tensor, for
    parts that do not fit together.
    """

    __slots__ = ("_blocks", "_made", "_scales", "name", "shape")

    type_name = "mxfp4"

    def __init__(self, name: str, blocks: TensorSource, scales: TensorSource) -> None:
        self.name, self._blocks, self._scales = name, blocks, scales
        self._made: NDArray[np.uint8] | None = None
        for part in (blocks, scales):
            if part.type_name != "u8":
                raise ModelError(f"tensor {part.name} is {part.type_name}, expected u8")
        if blocks.shape != (*scales.shape, _HALF_BYTES) or len(scales.shape) < 2:
            raise ModelError(
                f"tensor {blocks.name} has shape {blocks.shape}, expected 16 bytes for each scale of {scales.shape}"
            )
        self.shape: tuple[int, ...] = (*scales.shape[:-1], 2 * _HALF_BYTES * scales.shape[-1])

    @property
    def nbytes(self) -> int:
        """Size of the blocks in bytes."""
        return math.prod(self.shape[:-1]) * by_name(self.type_name).row_bytes(self.shape[-1])

    @property
    def is_mapped(self) -> bool:
        """No: the blocks are made."""
        return False

    @property
    def data(self) -> NDArray[np.uint8]:
        """The blocks, uint8 (nbytes,)."""
        if self._made is None:
            made = np.empty((self._scales.data.size, 1 + _HALF_BYTES), np.uint8)
            made[:, 0] = self._scales.data
            made[:, 1:] = order_nibbles(self._blocks.data).reshape(-1, _HALF_BYTES)
            self._made = made.reshape(-1)
        return self._made

    def to_float32(self, start: int | None = None, stop: int | None = None) -> Floats:
        """Decode [start:stop] of the first axis."""
        first, last, _ = slice(start, stop).indices(self.shape[0])
        part = self.take_rows(first, max(first, last))
        return TensorSource(self.name, self.type_name, part.shape, part.data).to_float32()

    def take_rows(self, start: int, stop: int) -> MicroscaledTensor:
        """Rows [start:stop], or parts of a stack, as a tensor of their own."""
        return MicroscaledTensor(self.name, self._blocks.take_rows(start, stop), self._scales.take_rows(start, stop))

    def take_matrix(self, index: int) -> MicroscaledTensor:
        """Part `index` of a stack."""
        return MicroscaledTensor(self.name, self._blocks.take_matrix(index), self._scales.take_matrix(index))

    def release(self) -> None:
        """Forget the blocks and let the mapped pages go; all comes back when asked for."""
        self._made = None
        self._blocks.release()
        self._scales.release()


class Float4Tensor:
    """E2M1 numbers with a scale in E4M3 for 16 columns, a stack of matrices or one, with a TensorSource's attributes.

    `parts`: bytes of two numbers each, the first one in the lower half, and scales; or blocks of nvfp4. `factors`, one
    for each matrix, multiply the scales (nvfp4_scaled). `data` is made when it is first asked for, and kept until
    `release`. Raises ModelError, naming the tensor, for parts that do not fit together, and for NaN.
    """

    __slots__ = ("_factors", "_made", "_parts", "name", "recipe", "shape", "type_name")

    def __init__(
        self, name: str, parts: Sequence[TensorSource], factors: Floats | None = None, recipe: str = "nvfp4"
    ) -> None:
        self.name, self.recipe, self._parts, self._factors = name, recipe, parts, factors
        self._made: Bytes | None = None
        rows, width = parts[-1].shape[:-1], parts[-1].shape[-1]
        self.shape: tuple[int, ...] = (*rows, width if len(parts) == 1 else 16 * width)
        self.type_name = "nvfp4" if factors is None else "nvfp4_scaled"
        if factors is None:
            return
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(factors * np.float32(_LARGEST_NVFP4)).all()
        if len(factors) != math.prod(rows[:-1]) or not is_finite:
            raise ModelError(
                f"tensor {name} {self.shape} has {len(factors)} factors, of up to {np.abs(factors).max(initial=0):g}; "
                "expected a number that f32 multiplies by for each matrix"
            )

    @property
    def nbytes(self) -> int:
        """Size of the blocks in bytes."""
        return math.prod(self.shape[:-1]) * by_name(self.type_name).row_bytes(self.shape[-1])

    @property
    def is_mapped(self) -> bool:
        """No: the blocks are made."""
        return False

    @property
    def data(self) -> Bytes:
        """The blocks, uint8 (nbytes,)."""
        if self._made is None:
            rows, step = math.prod(self.shape[:-1]), max(1, _PIECE_VALUES // self.shape[-1])
            made = np.empty((rows, self.nbytes // max(rows, 1)), np.uint8)
            for first in range(0, rows, step):
                made[first : first + step] = self._make(first, min(rows, first + step))
            self._made = made.reshape(-1)
        return self._made

    def _make(self, first: int, last: int) -> Bytes:
        """Some rows, (rows, bytes)."""
        blocks = self._read_blocks(first, last)
        if self._factors is not None:
            scaled = np.empty(len(blocks), NVFP4_SCALED)
            owners = np.arange(first, last) // self.shape[-2]
            scaled["factor"] = np.repeat(self._factors[owners], len(blocks) // (last - first))
            scaled["blocks"] = blocks
            blocks = scaled.view(np.uint8)
        return blocks.reshape(last - first, -1)

    def _read_blocks(self, first: int, last: int) -> Bytes:
        """The blocks of some rows in nvfp4, (blocks, bytes)."""
        rows = math.prod(self.shape[:-1])
        raw = [part.data.reshape(rows, -1)[first:last] for part in self._parts]
        if len(raw) == 1:
            return raw[0].reshape(-1, NVFP4.itemsize)
        codes, scales = raw
        is_none = np.flatnonzero((scales & 127 == 127).any(axis=1))
        if is_none.size:
            raise ModelError(f"tensor {self.name} has the number nan for a scale in row {first + is_none[0]}")
        blocks = np.empty(scales.size // 4, NVFP4)
        blocks["d"] = (scales & 127).reshape(-1, 4)
        numbers = unpack_codes(codes, 4).reshape(-1, 2, 8) ^ (scales >> 7 << 3).reshape(-1, 1, 1)
        blocks["qs"] = (numbers[:, 0] | numbers[:, 1] << np.uint8(4)).reshape(-1, 32)
        return blocks.view(np.uint8).reshape(-1, NVFP4.itemsize)

    def to_float32(self, start: int | None = None, stop: int | None = None) -> Floats:
        """Decode [start:stop] of the first axis."""
        first, last, _ = slice(start, stop).indices(self.shape[0])
        part = self.take_rows(first, max(first, last))
        return decode_blocks(by_name(self.type_name), part.data).reshape(part.shape)

    def take_rows(self, start: int, stop: int) -> Float4Tensor:
        """Rows [start:stop], or parts of a stack, as a tensor of their own, under the same name."""
        factors = self._factors if self._factors is None or len(self.shape) < 3 else self._factors[start:stop]
        return Float4Tensor(self.name, [part.take_rows(start, stop) for part in self._parts], factors, self.recipe)

    def take_matrix(self, index: int) -> Float4Tensor:
        """Part `index` of a stack."""
        factors = None if self._factors is None else self._factors[index : index + 1]
        return Float4Tensor(self.name, [part.take_matrix(index) for part in self._parts], factors, self.recipe)

    def release(self) -> None:
        """Forget the blocks and let the mapped pages go; all comes back when asked for."""
        self._made = None
        for part in self._parts:
            part.release()


_LARGEST_NVFP4 = 448 * 6  # without a factor
Joined = TensorSource | AffineTensor | MicroscaledTensor | Float4Tensor | FloatGroups


def join_factors(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource | Float4Tensor]:
    """The tensors of a GGUF file with each weight in NVFP4 and its `.scale`, a factor for each matrix, as one.

    `.input_scale` is left out: it is for activations in four bits. Raises ModelError, naming the tensor, for bad
    factors.
    """
    joined: dict[str, TensorSource | Float4Tensor] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        weight, scale = tensors.get(f"{module}.weight"), tensors.get(f"{module}.scale")
        if part == "weight" and tensor.type_name == "nvfp4" and scale is not None:
            joined[name] = Float4Tensor(name, [tensor], scale.to_float32().reshape(-1))
        elif part not in ("scale", "input_scale") or weight is None or weight.type_name != "nvfp4":
            joined[name] = tensor
    return joined
