"""An emulator of GPUs: it compiles kernels with the host's C++ compiler and runs them over MLX's memory.

It is slow and exact: every thread of a threadgroup is a fiber, so barriers and SIMD-group operations work as on a GPU.
With `sanitize`, a kernel runs in its own process under the address sanitizer, on copies that end where the arrays end.
Compiled kernels are kept in a folder, by the hash of their source. GCC's compiled form of their common beginning is
kept there, too, which saves a quarter of the time for each. `EmulatedMachine` runs recorded launches in this way.

With `words="apple"`, kernels use the words of metal.h, with a stand-in for Metal's own, and have the limits of an Apple
GPU: buffers, memory of a threadgroup, only matrices of 8 x 8, and fewer threads if each keeps much. What a thread keeps
is measured by its stack.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import DeviceError
from mlxr.kernels.gpu.kernel import LANES, HostWords, Kernel, Variant, make_host_source, read_prelude
from mlxr.kernels.gpu.mlx import Mlx, view_host
from mlxr.kernels.gpu.recording import Launch, Product, StepMemory

AnyArray = npt.NDArray[Any]
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O2", "-fno-strict-aliasing", "-w", "-fPIC")
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_CHECKED_FLAGS = ("-std=c++17", "-O1", "-g1", "-fno-strict-aliasing", "-w", *_SANITIZERS, "-DMLXR_MAIN")

MOST_BUFFERS, MOST_SHARED_BYTES, MOST_THREADS = 31, 32768, 1024  # Apple's feature set tables, from the M1 on
REGISTER_BYTES = 208 * 1024  # registers of a core, github.com/philipturner/metal-benchmarks
LEAST_THREADS = 384  # threads of a core even if they keep most; what does not fit goes to device memory
FRAME_BYTES = 512  # bytes of a stack that the emulator itself uses

# Reads the arrays from standard input, each in memory of exactly its size; writes all of them back.
_MAIN = """
#include <unistd.h>
int main() {
  int counts[5];
  if (fread(counts, sizeof(int), 5, stdin) != 5) return 2;
  std::vector<void *> arrays(counts[4]);
  std::vector<size_t> sizes(counts[4]);
  for (int i = 0; i < counts[4]; ++i) {
    if (fread(&sizes[i], sizeof(size_t), 1, stdin) != 1) return 2;
    if (posix_memalign(&arrays[i], 64, sizes[i] ? sizes[i] : 1)) return 2;
    if (fread(arrays[i], 1, sizes[i], stdin) != sizes[i]) return 2;
  }
  mlxr_run(arrays.data(), counts, counts[3]);
  for (int i = 0; i < counts[4]; ++i)
    fwrite(arrays[i], 1, sizes[i], stdout);
  fflush(stdout);
  _exit(0); // what is allocated stays so, which the sanitizer would call a leak
}
"""


class Emulator:
    """The emulator: compiled kernels by source; `folder` keeps them between processes (default: a temporary one)."""

    usual_words: HostWords = "emulated"  # the default of `words`

    def __init__(self, *, sanitize: bool = False, folder: Path | None = None, words: HostWords | None = None) -> None:
        self._compiler = find_compiler()
        self.sanitizes, self.words = sanitize, words or self.usual_words
        self._folder = folder or Path(tempfile.gettempdir()) / f"mlxr-emulated-{os.getuid()}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._libraries: dict[tuple[Kernel, Variant], Any] = {}
        self._fitting: set[tuple[Any, int, int]] = set()  # launches known to be within Apple's limits

    def run(
        self, kernel: Kernel, variant: Variant, arrays: Sequence[AnyArray], groups: tuple[int, int, int], threads: int
    ) -> None:
        """Run all threadgroups over `arrays` (inputs, then outputs), which are contiguous and written in place.

        Raises DeviceError, with the message of the sanitizer or the emulator, if the kernel fails.
        """
        if self.sanitizes:
            self._run_apart(self._compile(kernel, variant), arrays, groups, threads)
            return
        self.run_at(kernel, variant, [array.ctypes.data for array in arrays], groups, threads)

    def run_at(
        self, kernel: Kernel, variant: Variant, addresses: Sequence[int], groups: tuple[int, int, int], threads: int
    ) -> None:
        """Run over arrays at these addresses, without the sanitizer."""
        library = self._libraries.get((kernel, variant))
        if library is None:
            library = self._libraries[kernel, variant] = ctypes.CDLL(str(self._compile(kernel, variant)))
        library.mlxr_run((ctypes.c_void_p * len(addresses))(*addresses), (ctypes.c_int * 3)(*groups), threads)
        if self.words == "apple":
            self._check_limits(kernel, library, len(addresses), threads)

    def _check_limits(self, kernel: Kernel, library: Any, buffers: int, threads: int) -> None:
        """Raise DeviceError if an Apple GPU would have refused the launch."""
        if (library, buffers, threads) in self._fitting:
            return
        shared_bytes, kept_bytes = library.mlxr_shared_bytes(), library.mlxr_stack_bytes() - FRAME_BYTES
        most = count_threads(kept_bytes)
        for count, limit, what in (
            (buffers, MOST_BUFFERS, "buffers"),
            (shared_bytes, MOST_SHARED_BYTES, "bytes of threadgroup memory"),
            (threads, most, f"threads that keep {max(0, kept_bytes)} bytes each"),
        ):
            if count > limit:
                raise DeviceError(f"kernel {kernel.name} takes {count} {what}; an Apple GPU has {limit}")
        self._fitting.add((library, buffers, threads))

    def _run_apart(self, program: Path, arrays: Sequence[AnyArray], groups: tuple[int, int, int], threads: int) -> None:
        blob = [struct.pack("5i", *groups, threads, len(arrays))]
        for array in arrays:
            blob += [struct.pack("N", array.nbytes), array.tobytes()]
        done = subprocess.run([program], input=b"".join(blob), capture_output=True, check=False)
        if done.returncode:
            raise DeviceError(f"emulated kernel failed ({done.returncode}):\n{done.stderr.decode()[:4000]}")
        at = 0
        for array in arrays:
            target = array.reshape(-1).view(np.uint8)
            ctypes.memmove(target.ctypes.data, done.stdout[at : at + array.nbytes], array.nbytes)
            at += array.nbytes

    def _compile(self, kernel: Kernel, variant: Variant) -> Path:
        if kernel.cuda_only and self.words == "apple":
            raise TypeError(f"{kernel.name} is only launched on CUDA")
        source = make_host_source(kernel, variant, self.words) + (_MAIN if self.sanitizes else "")
        name, ending = f"{kernel.name}-{_name(*self._flags, source)}", "" if self.sanitizes else ".so"
        target = self._folder / f"{name}{ending}"
        if not target.exists():
            begin = read_prelude(self.words) if self._precompiles else ""
            options = [*(["-include", str(self._precompile(begin))] if begin else []), *(["-shared"] if ending else [])]
            with self._making(target) as made:
                path = made.with_name(f"{kernel.name}.cpp")
                path.write_text(source.removeprefix(begin))
                done = self._run_compiler(*options, str(path), "-o", str(made))
            if done.returncode:
                raise DeviceError(f"kernel {kernel.name} does not compile for the host:\n{done.stderr[:4000]}")
        return target

    @property
    def _flags(self) -> tuple[str, ...]:
        return _CHECKED_FLAGS if self.sanitizes else _FLAGS

    @cached_property
    def _version(self) -> str:
        return subprocess.run([self._compiler, "--version"], capture_output=True, text=True, check=False).stdout

    @property
    def _precompiles(self) -> bool:
        return "Free Software Foundation" in self._version

    def _precompile(self, text: str) -> Path:
        """Return a header with `text`, beside GCC's compiled form of it; GCC reads the text if that does not suit."""
        header = self._folder / f"prelude-{_name(self._version, *self._flags, text)}.h"
        if not header.exists():
            with self._making(header.with_suffix(".h.gch")) as made:
                path = made.with_name("prelude.h")
                path.write_text(text)
                self._run_compiler("-x", "c++-header", str(path), "-o", str(made))
            with self._making(header) as made:
                made.write_text(text)
        return header

    def _run_compiler(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [self._compiler, *self._flags, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    @contextmanager
    def _making(self, target: Path) -> Iterator[Path]:
        """Yield a path whose file becomes `target`, whole or not at all, even if two processes make the same one."""
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            made = Path(scratch) / "made"
            yield made
            if made.exists():
                made.replace(target)


def _name(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def count_threads(kept_bytes: int) -> int:
    """Return the most threads of a threadgroup on an Apple GPU if each keeps `kept_bytes` in registers."""
    fitting = REGISTER_BYTES // max(1, kept_bytes) // LANES * LANES
    return max(LEAST_THREADS, min(MOST_THREADS, fitting))


def find_compiler() -> str:
    """Return the path of the C++ compiler; DeviceError if there is none."""
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise DeviceError(f"device 'emulated' needs a C++ compiler; none of {', '.join(_COMPILERS)} was found")


class EmulatedMachine:
    """A machine that runs everything at once, in host memory."""

    multiplies = True
    processors = room_bytes = 0

    def __init__(self, mx: Mlx, emulator: Emulator) -> None:
        self._mx, self._emulator = mx, emulator
        self.has_boxes = emulator.words != "apple"
        self._held: list[AnyArray] = []
        self.memory = StepMemory(self._allocate)

    @property
    def held_bytes(self) -> int:
        """Bytes that `memory` holds for steps."""
        return self.memory.nbytes

    def drop(self, prepared: Mapping[str, Any]) -> None:
        """Do nothing: a prepared step holds no memory here."""

    def prepare(self, launches: Sequence[Launch | Product]) -> list[tuple[Launch | Product, list[int]]]:
        """Return each launch with the addresses of its arrays."""
        return [(launch, [self._find(array) for array in launch.arrays]) for launch in launches]

    def start(self, prepared: list[tuple[Launch | Product, list[int]]]) -> None:
        """Run the prepared launches in order, at once."""
        for launch, addresses in prepared:
            if isinstance(launch, Product):
                _multiply(launch, *addresses)
                continue
            self._emulator.run_at(launch.kernel, launch.variant, addresses, launch.groups, launch.threads)

    def write(self, address: int, values: AnyArray) -> None:
        """Copy `values` to `address`."""
        ctypes.memmove(address, values.ctypes.data, values.nbytes)

    def read(self, address: int, size: int, dtype: npt.DTypeLike) -> _Here:
        """Return a copy of `size` numbers at `address`."""
        values = np.empty(size, dtype)
        ctypes.memmove(values.ctypes.data, address, values.nbytes)
        return _Here(values)

    def synchronize(self) -> None:
        """Do nothing: launches here have ended when `start` returns."""

    def _allocate(self, size_bytes: int) -> int:
        """Return the address of new memory, filled so that unwritten numbers show."""
        self._held.append(np.full(size_bytes, 0xFF, np.uint8))
        return int(self._held[-1].ctypes.data)

    def _find(self, array: Any) -> int:
        return array if isinstance(array, int) else int(view_host(self._mx, array).ctypes.data)


class _Here:
    def __init__(self, values: AnyArray) -> None:
        self._values = values

    def wait(self) -> AnyArray:
        return self._values


def _multiply(product: Product, x: int, weight: int, out: int) -> None:
    """Run a library's product with NumPy, in f32."""
    shares = max(1, product.shares)
    left = _widen(_view(x, (product.tokens, product.inputs), product.kind))
    right = _widen(_view(weight, (product.outputs, product.inputs), product.weight_kind))
    made = _view(out, (shares * product.tokens, product.outputs), "float32")
    each = product.inputs // shares
    for i in range(shares):
        columns = slice(i * each, (i + 1) * each)
        made[i * product.tokens : (i + 1) * product.tokens] = left[:, columns] @ right[:, columns].T


def _view(address: int, shape: tuple[int, int], kind: str) -> AnyArray:
    dtype: np.dtype[Any] = np.dtype({"float32": "f4", "float16": "f2", "bfloat16": "u2"}[kind])
    held = (ctypes.c_uint8 * (shape[0] * shape[1] * dtype.itemsize)).from_address(address)
    array: AnyArray = np.ctypeslib.as_array(held).view(dtype).reshape(shape)
    return array


def _widen(array: AnyArray) -> AnyArray:
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array.astype(np.float32)
