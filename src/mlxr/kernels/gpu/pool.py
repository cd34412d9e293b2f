"""One pool of pages on a GPU: plain numbers (pages, kv_heads, page_size, head_dim), written in place.

Kernels write through the array that MLX knows as their input; MLX's own writes happen in place too, since nobody else
holds the array (see `update`). So a pool never takes twice its memory. For the thread that runs the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlxr.kernels.gpu.launcher import view_host
from mlxr.kernels.tensor import ByteArray


class Pool:
    """`array` is the current handle of the memory; `kind` the type of its numbers as ggml spells it."""

    __slots__ = ("_mx", "array", "kind", "shape")

    def __init__(self, mx: Any, shape: tuple[int, int, int, int], kind: str) -> None:
        self._mx, self.shape, self.kind = mx, shape, kind
        self.array = mx.zeros(shape, {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}[kind])
        mx.eval(self.array)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        count: int = self.array.nbytes
        return count

    def copy_page(self, source: int, target: int) -> None:
        """Copy the numbers of one page to another."""
        page = self._mx.take(self.array, self._mx.array([source]), axis=0)
        self._write(page, target)

    def read_page(self, page: int) -> ByteArray:
        """The bytes of one page, on the host."""
        held = self._mx.take(self.array, self._mx.array([page]), axis=0)
        self._mx.eval(held)
        return np.ascontiguousarray(view_host(self._mx, held)).reshape(-1).view(np.uint8)

    def write_page(self, page: int, source: ByteArray) -> None:
        """Overwrite one page with bytes that `read_page` gave."""
        array = self._mx.array(np.ascontiguousarray(source)).view(self.array.dtype)
        self._write(array.reshape(1, *self.shape[1:]), page)

    def _write(self, page: Any, target: int) -> None:
        self._mx.eval(page)  # made from the old memory before that is written
        self.array[target : target + 1] = page
        self._mx.eval(self.array)
