"""Weights of folders that several tensors make up: MLX's (`mlx_affine`), and MXFP4 as gpt-oss stores it.

Of the latter `x_blocks` (..., rows, groups, 16) holds 32 numbers of four bits in each group, the lower half of a byte
first, and `x_scales` (..., rows, groups) an exponent for each group. They become blocks of ggml's mxfp4; no number
changes. Layout: OCP Microscaling Formats (MX) 1.0, and https://huggingface.co/openai/gpt-oss-20b
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import ModelError

from .ggml_types import by_name
from .mlx_affine import AffineTensor, join_affine, order_nibbles
from .quants_plain import Floats
from .tensor import TensorSource

_BLOCKS, _SCALES = "_blocks", "_scales"
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


def join_quantised(
    tensors: Mapping[str, TensorSource], config: Mapping[str, object]
) -> dict[str, TensorSource | AffineTensor | MicroscaledTensor]:
    """The tensors of a folder with each weight and its scales as one; others as they are.

    Raises ModelError, naming the tensor or the key, for a part that is missing or does not fit.
    """
    joined: dict[str, TensorSource | AffineTensor | MicroscaledTensor] = {}
    plain: dict[str, TensorSource] = {}
    for name, tensor in tensors.items():
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
