"""Machine code of our kernels for one NVIDIA GPU: compiled from source once, and kept in the user's cache folder.

MLX keeps the code of its own kernels on disk, but compiles ours anew in every process. So they are compiled here, for
MLX's launches as well as for recorded ones. Knows no arrays.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import platformdirs

from mlxr.kernels.gpu.kernel import Kernel, Variant, make_cuda_source, name_cuda_function

logger = logging.getLogger(__name__)
MAX_COMPILERS = 8
KEPT_BYTES = 256 * 2**20  # of code in the folder; a model of one type has some 2 MB


class Compiler(Protocol):
    """What compiles for a GPU: `mlxr.kernels.gpu.cuda.driver.CudaDriver` is one."""

    compiler: str
    architecture: str
    starts_early: bool

    def compile(self, source: str) -> bytes:
        """Machine code of a CUDA C++ source."""


class CudaCode:
    """Code by kernel and variant; `folder` keeps it between processes (default: in the user's cache folder)."""

    def __init__(self, compiler: Compiler, folder: Path | None = None) -> None:
        self._compiler = compiler
        self._folder = folder or platformdirs.user_cache_path("mlxr", appauthor=False) / "kernels"
        self._found: dict[tuple[Kernel, Variant], tuple[str, bytes]] = {}

    def find(self, kernel: Kernel, variant: Variant) -> tuple[str, bytes]:
        """The function's name and the code that has it. Raises DeviceError with what the compiler says."""
        found = self._found.get((kernel, variant))
        if found is None:
            found = self._found[kernel, variant] = (name_cuda_function(kernel, variant), self._load(kernel, variant))
        return found

    def find_all(self, keys: Iterable[tuple[Kernel, Variant]]) -> list[tuple[str, bytes]]:
        """`find` for each, some compiled at the same time."""
        with ThreadPoolExecutor(MAX_COMPILERS) as pool:
            return list(pool.map(lambda key: self.find(*key), keys))

    def _load(self, kernel: Kernel, variant: Variant) -> bytes:
        """From the folder, where it is there; else compiled, and kept if the folder takes it."""
        compiler = self._compiler
        source = make_cuda_source(kernel, variant, starts_early=compiler.starts_early)
        key = "\0".join((compiler.compiler, compiler.architecture, source))
        path = self._folder / f"{kernel.name}-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.cubin"
        try:
            code = path.read_bytes()
            os.utime(path)  # what is used stays
            return code
        except OSError:
            code = compiler.compile(source)
        scratch = path.with_suffix(f".{os.getpid()}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch.write_bytes(code)
            scratch.replace(path)  # whole or not at all, also when two processes compile the same
            prune_folder(self._folder, KEPT_BYTES)
        except OSError as error:
            logger.warning("compiled kernels are not kept: %s", error)
        return code


def prune_folder(folder: Path, kept_bytes: int) -> None:
    """Remove what was not used for the longest time until the rest is no more than that. Raises OSError."""
    files = sorted(((path, path.stat()) for path in folder.glob("*.cubin")), key=lambda file: file[1].st_mtime)
    excess_bytes = sum(told.st_size for _, told in files) - kept_bytes
    for path, told in files:
        if excess_bytes <= 0:
            break
        path.unlink(missing_ok=True)
        excess_bytes -= told.st_size
