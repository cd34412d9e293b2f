"""A matrix whose rows are multiplied by numbers, as a weight tensor: a file states these numbers beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxr.kernels.packing import round_to_bf16, widen_bf16
from mlxr.kernels.tensor import ByteArray, FloatArray, TensorSource


def scale_rows(source: TensorSource, factors: Sequence[float], counts: Sequence[int]) -> Scaled:
    """The tensor with the first `counts[0]` rows multiplied by `factors[0]`, the next ones by the next factor.

    Raises ValueError where the counts are not those of its rows.
    """
    rows = np.repeat(np.asarray(factors, np.float32), counts)
    if (len(rows),) != source.shape[:1] or len(source.shape) != 2:
        raise ValueError(f"scale_rows: tensor {source.name} has shape {source.shape}, expected {len(rows)} rows")
    return Scaled(source, rows)


class Scaled:
    """The rows of `source`, each times its one of `factors` (rows,), in the source's type, or in f32 if that is none
    of floats.

    `data` is made when it is first asked for, and kept until `release`.
    """

    __slots__ = ("_data", "_factors", "_source", "type_name")

    def __init__(self, source: TensorSource, factors: FloatArray) -> None:
        self._source, self._factors = source, factors
        self._data: ByteArray | None = None
        self.type_name = source.type_name if source.type_name in ("f16", "bf16") else "f32"

    @property
    def name(self) -> str:
        """The name of the source."""
        return self._source.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows and columns."""
        return self._source.shape

    @property
    def data(self) -> ByteArray:
        """The numbers as bytes, uint8 (nbytes,)."""
        if self._data is None:
            self._data = self._multiply(None, None).view(np.uint8).reshape(-1)
        return self._data

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        rows, columns = self.shape
        return rows * columns * (4 if self.type_name == "f32" else 2)

    @property
    def is_mapped(self) -> bool:
        """No: the bytes are not those of a file."""
        return False

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Rows [start:stop], decoded and multiplied."""
        values = self._multiply(start, stop)
        return widen_bf16(values) if self.type_name == "bf16" else values.astype(np.float32)

    def take_rows(self, start: int, stop: int) -> Scaled:
        """Rows [start:stop] as a tensor of their own."""
        return Scaled(self._source.take_rows(start, stop), self._factors[start:stop])

    def take_matrix(self, index: int) -> TensorSource:
        """Refuse: there is one matrix."""
        raise ValueError(f"tensor {self.name} has no part {index}, as it is a matrix")

    def release(self) -> None:
        """Release the source, and what was made."""
        self._data = None
        self._source.release()

    def _multiply(self, start: int | None, stop: int | None) -> npt.NDArray[Any]:
        """Rows [start:stop] in the type that this has, bf16 as words."""
        values: FloatArray = self._source.to_float32(start, stop) * self._factors[start:stop, None]
        match self.type_name:
            case "bf16":
                return round_to_bf16(values)
            case "f16":
                return values.astype(np.float16)
            case _:
                return values
