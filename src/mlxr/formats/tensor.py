"""A tensor of a file: a name, a type, a shape and the raw blocks in the file's form.

Knows one tensor and the mapping that its bytes lie in; not the file format that they came from. `data` is a read-only
view of the mapped file (nothing is copied until a value is wanted); `to_float32` decodes; `release` gives the pages
back to the operating system once the weights have been repacked.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import FormatError, ModelError, NotFound
from mlxr.core.frozen import frozen
from mlxr.core.types import Closes
from mlxr.formats.ggml_types import by_name, decode_blocks


class WeightSource(Protocol):
    """A tensor that can be written to another file: a `TensorSource`, or several that count as one."""

    @property
    def name(self) -> str:
        """The tensor's name in its file."""
        ...

    @property
    def type_name(self) -> str:
        """The type in ggml's spelling."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in NumPy order; a stack of matrices has three axes."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the raw blocks."""
        ...

    @property
    def data(self) -> NDArray[np.uint8]:
        """The raw blocks, as bytes."""
        ...

    def to_float32(self, start: int | None = None, stop: int | None = None) -> NDArray[np.float32]:
        """Decode [start:stop] of the first axis."""
        ...

    def take_matrix(self, index: int) -> WeightSource:
        """Part `index` of a stack."""
        ...

    def release(self) -> None:
        """Say that the mapped pages may go."""
        ...


@frozen(eq=False)
class TensorSource:
    """Weights in the form of their file.

    name: the file's own. type_name: ggml's spelling. shape: NumPy order, so (out_features, in_features) for a matrix;
    blocks run along the last axis. data: uint8 (nbytes,), read-only. mapping: the file behind `data`, None for memory.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8] = field(repr=False)
    mapping: MappedFile | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        row = by_name(self.type_name)
        wanted = math.prod(self.shape[:-1]) * row.row_bytes(self.shape[-1])
        if self.data.dtype != np.uint8 or self.data.shape != (wanted,):
            raise ModelError(
                f"{self.name}: {self.type_name} {self.shape} needs uint8 ({wanted},), not "
                f"{self.data.dtype} {self.data.shape}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the raw blocks."""
        return self.data.size

    @property
    def is_mapped(self) -> bool:
        """True if `data` is a view of a mapped file."""
        return self.mapping is not None

    def to_float32(self, start: int | None = None, stop: int | None = None) -> NDArray[np.float32]:
        """Decode to a fresh array of the tensor's shape, or only [start:stop] of its first axis (NumPy's rules).

        A vector is decoded whole before it is cut, as its blocks are not rows.
        """
        row = by_name(self.type_name)
        if len(self.shape) == 1:
            return decode_blocks(row, self.data)[start:stop]
        first, last, _ = slice(start, stop).indices(self.shape[0])
        count = max(0, last - first)
        stride = self.nbytes // self.shape[0]
        values = decode_blocks(row, self.data[first * stride : (first + count) * stride])
        return values.reshape(count, *self.shape[1:])

    def take_rows(self, start: int, stop: int) -> TensorSource:
        """Rows [start:stop] of a matrix as a tensor of their own, under the same name; nothing is copied."""
        stride = self.nbytes // self.shape[0]
        shape, data = (stop - start, *self.shape[1:]), self.data[start * stride : stop * stride]
        return TensorSource(self.name, self.type_name, shape, data, self.mapping)

    def take_matrix(self, index: int) -> TensorSource:
        """Part `index` of the first axis, which the result lacks; nothing is copied."""
        part = self.take_rows(index, index + 1)
        return TensorSource(self.name, self.type_name, self.shape[1:], part.data, self.mapping)

    def release(self) -> None:
        """Tell the operating system that the mapped pages may go; they come back by themselves when read again."""
        if self.mapping is not None:
            self.mapping.release(self.data)


class WeightFiles(Closes):
    """Mapped files, and the tensors that are views of them, by name. Closes them at the end of a `with` block."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self.paths = [file.path for file in files]
        self.tensors: dict[str, TensorSource] = {}
        self._files = files

    @property
    def size_bytes(self) -> int:
        """Size of all files together, in bytes."""
        return sum(file.size_bytes for file in self._files)

    def close(self) -> None:
        """Close the files; tensors still in use elsewhere keep their mapping alive."""
        self.tensors.clear()
        for file in self._files:
            file.close()


class MappedFile:
    """`path` mapped whole. Raises NotFound if it is not there, FormatError if it is empty or no regular file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            mode = self.path.stat().st_mode
            if not stat.S_ISREG(mode):  # checked before opening: opening a pipe would wait for its writer
                raise FormatError(self.path, "file", None, "is not a regular file")
            with self.path.open("rb") as handle:
                self.size_bytes = os.fstat(handle.fileno()).st_size
                if self.size_bytes == 0:
                    raise FormatError(self.path, "file", 0, "is empty")
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"{self.path}: no such file") from None
        except (OSError, ValueError) as error:
            raise FormatError(self.path, "file", None, f"cannot be read: {error}") from error
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def release(self, view: NDArray[np.uint8]) -> None:
        """Drop the pages of a view of this file from memory; a later read maps them again."""
        if not hasattr(self._map, "madvise") or self._map.closed:
            return
        start = view.ctypes.data - self.bytes_address
        if view.size and 0 <= start < self.size_bytes:
            first_page = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first_page, start + view.size - first_page)

    @property
    def bytes_address(self) -> int:
        """The address of the mapping in memory."""
        return int(np.frombuffer(self._map, np.uint8, 1).ctypes.data)

    def close(self) -> None:
        """Close the mapping; it stays while arrays still view it."""
        self.bytes = np.empty(0, np.uint8)
        try:
            self._map.close()
        except BufferError:  # views are alive: the mapping is freed with the last of them
            return


SAMPLE_BYTES = 1024
SAMPLES = 8  # of each tensor, evenly spread, its first and last bytes among them
DIGEST_BYTES = 32


def hash_tensors(tensors: Mapping[str, TensorSource], paths: Iterable[Path]) -> bytes:
    """BLAKE2b-256 of names, types, shapes and samples of `tensors`, and of size and change time of the files.

    The change time makes an edited file another one, however small the edit; a file that is moved stays the same.
    Pages mapped for sampling are released again.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(repr((name, tensor.type_name, tensor.shape)).encode())
        for sample in _cut_samples(tensor.data):
            digest.update(sample.tobytes())
        tensor.release()
    for path in paths:
        status = path.stat()
        digest.update(repr((status.st_size, status.st_mtime_ns)).encode())
    return digest.digest()


def _cut_samples(data: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    if data.size <= SAMPLES * SAMPLE_BYTES:
        yield data
        return
    for index in range(SAMPLES):
        start = (data.size - SAMPLE_BYTES) * index // (SAMPLES - 1)
        yield data[start : start + SAMPLE_BYTES]
