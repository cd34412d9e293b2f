"""A file of weights mapped into memory, read only.

Knows bytes; nothing of what they mean. Views are zero-copy and keep the mapping alive, so closing a file never pulls
the ground from under an array: the mapping goes with its last view.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import FormatError, NotFound


class MappedFile:
    """`path` mapped whole. NotFound when it is not there; FormatError when it is empty or no regular file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            mode = self.path.stat().st_mode
            if not stat.S_ISREG(mode):  # looked at before opening: opening a pipe would wait for its writer
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
        """Where the mapping starts in memory."""
        return int(np.frombuffer(self._map, np.uint8, 1).ctypes.data)

    def close(self) -> None:
        """Let go of the mapping; it stays while arrays still look into it."""
        self.bytes = np.empty(0, np.uint8)
        try:
            self._map.close()
        except BufferError:  # views are alive: the mapping is freed with the last of them
            return
