"""What open files of weights have in common, whatever their format."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from .mapped_file import MappedFile
from .tensor import TensorSource


class WeightFiles:
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
        """Let go of the files; tensors still in use elsewhere keep their mapping alive."""
        self.tensors.clear()
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
