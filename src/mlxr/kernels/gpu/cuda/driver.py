"""NVIDIA's driver and run-time compiler through ctypes, for recorded steps, which MLX cannot make.

Kernels are compiled from source and launched into a stream while it is captured; the captured graph is launched as a
whole: one call for hundreds of launches. Everything happens in the device's primary context, which MLX uses as well, so
addresses of its arrays are valid here. This module knows no arrays, only addresses. The API is that of the CUDA driver
and of NVRTC 12 and later (docs.nvidia.com/cuda/cuda-driver-api, .../nvrtc).

Compiled code is kept in the user's cache folder: MLX keeps that of its own kernels, but would compile ours again in
every process. So they are compiled here, for MLX's launches as well as for recorded ones.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Protocol

import platformdirs

from mlxr.core.errors import DeviceError
from mlxr.kernels.gpu.kernel import Box, Kernel, Variant, make_cuda_source, name_cuda_function

_COMPILERS = ("libnvrtc.so.13", "libnvrtc.so.12")
_CUDA_FOLDER = Path("/usr/local/cuda")
_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _PROCESSORS, _LARGEST_ROOM = 75, 76, 16, 97  # CUdevice_attribute
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_TIMING, _NO_TIMING = 0, 2  # CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: other threads may use the device meanwhile
_MOST_ROOM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ROOM_SHARE = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: percent of what it shares with the cache
_EARLY_START = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64  # CUtensorMap
_MAP_NUMBERS, _MAP_CROSSWISE, _MAP_FETCH = 1, 3, 2  # its UINT16, SWIZZLE_128B and L2_PROMOTION_L2_128B
_MAP_COLUMNS, _MAP_ROWS = 64, 8  # columns and rows of a block: 128 bytes are swizzled, eight rows at a time
_BOXES = "sm_90a"  # the only architecture with the instructions of rings.h
_HANDLE_BYTES = 64  # CUipcMemHandle
_REACH_LAZILY = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_ARGUMENTS: dict[str, list[Any]] = {
    "cuMemcpyHtoDAsync_v2": [c_uint64, c_void_p, c_size_t, c_void_p],
    "cuMemcpyDtoHAsync_v2": [c_void_p, c_uint64, c_size_t, c_void_p],
    "cuGraphLaunch": [c_void_p, c_void_p],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventSynchronize": [c_void_p],
    "cuStreamSynchronize": [c_void_p],
    "cuCtxSetCurrent": [c_void_p],
    "cuMemFree_v2": [c_uint64],
    "cuGraphExecDestroy": [c_void_p],
    "cuMemsetD8_v2": [c_uint64, ctypes.c_ubyte, c_size_t],
    "cuEventQuery": [c_void_p],
    "cuStreamQuery": [c_void_p],
}
# Calls that wait for nothing keep the interpreter's lock. A thread that releases it beside a busy one, as that of a
# server with many streams, gets it back milliseconds later, and a step has about twenty such calls.
_QUICK = (
    *("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuGraphLaunch"),
    *("cuEventRecord", "cuEventQuery", "cuStreamQuery", "cuCtxSetCurrent"),
)


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Attribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", ctypes.c_char * 60))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", c_uint),
    )


class CudaDriver:
    """The driver of device 0. Raises DeviceError if the driver, the compiler or its headers are missing."""

    def __init__(self) -> None:
        self._cuda, quick = (load_library(("libcuda.so.1",), kind) for kind in (ctypes.CDLL, ctypes.PyDLL))
        for name in _QUICK:
            setattr(self._cuda, name, getattr(quick, name))
        self._compiler = load_library(_COMPILERS)
        self._headers = _find_headers()
        self.compiler = name_compiler(self._compiler)
        for name, kinds in _ARGUMENTS.items():
            getattr(self._cuda, name).argtypes = kinds
        self._call("cuInit", c_uint(0))
        device = c_int()
        self._call("cuDeviceGet", byref(device), c_int(0))
        self._context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), device)
        self.enter()
        major, minor, self.processors, self.room_bytes = (
            self._read_attribute(device, number)
            for number in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _PROCESSORS, _LARGEST_ROOM)
        )
        # the letter allows instructions that only this architecture has
        self.architecture = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
        self.starts_early = major >= 9
        self.has_boxes = self.architecture == _BOXES
        self.stream = c_void_p()
        self._call("cuStreamCreate", byref(self.stream), c_uint(_NON_BLOCKING))
        self._begin, self._end = self.make_event(_TIMING), self.make_event(_TIMING)
        self._held: dict[int, int] = {}  # bytes by address
        weakref.finalize(self, _free_all, self._cuda, self._context, self._held).atexit = False

    def _read_attribute(self, device: c_int, number: int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), c_int(number), device)
        return value.value

    def count_devices(self) -> int:
        """Return the number of GPUs that this process sees."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return count.value

    def enter(self) -> None:
        """Let the calling thread use the device."""
        self._call("cuCtxSetCurrent", self._context)

    def compile(self, source: str) -> bytes:
        """Return the machine code of a CUDA C++ source. Raises DeviceError with the compiler's message."""
        return compile_source(self._compiler, self._headers, source, self.architecture)

    def load(self, code: bytes, name: str) -> int:
        """Return the kernel `name` of compiled code, which stays loaded for good."""
        module, function = c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), c_char_p(code))
        self._call("cuModuleGetFunction", byref(function), module, c_char_p(name.encode()))
        return function.value or 0

    def give_room(self, function: int, room_bytes: int) -> None:
        """Allow the kernel `room_bytes` of a threadgroup's memory besides what it declares."""
        self._call("cuFuncSetAttribute", c_void_p(function), c_int(_MOST_ROOM), c_int(room_bytes))
        self._call("cuFuncSetAttribute", c_void_p(function), c_int(_ROOM_SHARE), c_int(100))

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new memory on the device."""
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), c_size_t(size_bytes))
        self._held[address.value] = size_bytes
        return address.value

    @property
    def held_bytes(self) -> int:
        """Bytes of all memory from `allocate`, which is freed with the driver."""
        return sum(self._held.values())

    def allocate_host(self, size_bytes: int) -> int:
        """Return the address of new pinned memory on the host."""
        address = c_void_p()
        self._call("cuMemAllocHost_v2", byref(address), c_size_t(size_bytes))
        return address.value or 0

    def clear(self, address: int, size_bytes: int) -> None:
        """Zero memory on the device, and wait for it."""
        self._call("cuMemsetD8_v2", address, 0, size_bytes)
        self._call("cuCtxSynchronize")

    def share(self, address: int) -> bytes:
        """Export memory from `allocate`: return the handle by which other processes `reach` it."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle.data)

    def reach(self, handle: bytes) -> int:
        """Return the address of memory that another process shares, perhaps on another device."""
        address = c_uint64()
        given = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(address), given, c_uint(_REACH_LAZILY))
        return address.value

    def make_event(self, flags: int = _NO_TIMING) -> int:
        """Return a new event, which has not happened."""
        event = c_void_p()
        self._call("cuEventCreate", byref(event), c_uint(flags))
        return event.value or 0

    def record(self, event: int) -> None:
        """Let `event` happen after all present work of the stream."""
        self._call("cuEventRecord", event, self.stream)

    def wait(self, event: int) -> None:
        """Wait until `event` has happened."""
        if self._cuda.cuEventQuery(event):  # not yet, or it has failed, which the next call reports
            self._call("cuEventSynchronize", event)

    def synchronize(self) -> None:
        """Wait until the stream is empty."""
        if self._cuda.cuStreamQuery(self.stream):  # not yet, or it has failed, which the next call reports
            self._call("cuStreamSynchronize", self.stream)

    def copy_in(self, address: int, host_address: int, size_bytes: int) -> None:
        """Copy from the host in the stream; the host memory must not change until the copy is done."""
        self._call("cuMemcpyHtoDAsync_v2", address, host_address, size_bytes, self.stream)

    def copy_out(self, host_address: int, address: int, size_bytes: int) -> None:
        """Copy to the host in the stream."""
        self._call("cuMemcpyDtoHAsync_v2", host_address, address, size_bytes, self.stream)

    def make_box(self, address: int, box: Box) -> bytes:
        """Return a kernel's argument (a CUtensorMap) for a matrix at `address` that it loads in boxes."""
        held = (ctypes.c_uint8 * (_MAP_BYTES + _MAP_ALIGNMENT))()
        offset = -ctypes.addressof(held) % _MAP_ALIGNMENT
        row_bytes, rank = 2 * box.columns, 4
        self._call(
            "cuTensorMapEncodeTiled",
            c_void_p(ctypes.addressof(held) + offset),
            c_int(_MAP_NUMBERS),
            c_uint(rank),
            c_void_p(address),
            (c_uint64 * rank)(_MAP_COLUMNS, _MAP_ROWS, box.columns // _MAP_COLUMNS, -(-box.rows // _MAP_ROWS)),
            (c_uint64 * (rank - 1))(row_bytes, 2 * _MAP_COLUMNS, _MAP_ROWS * row_bytes),
            (c_uint * rank)(_MAP_COLUMNS, _MAP_ROWS, box.blocks, box.box_rows // _MAP_ROWS),
            (c_uint * rank)(1, 1, 1, 1),
            c_int(0),
            c_int(_MAP_CROSSWISE),
            c_int(_MAP_FETCH),
            c_int(0),
        )
        return bytes(held[offset : offset + _MAP_BYTES])

    def capture(self, launch_all: Callable[[], None]) -> int:
        """Return a graph of what `launch_all` gives to the stream; nothing of it runs now."""
        self._call("cuStreamBeginCapture_v2", self.stream, c_int(_CAPTURE_RELAXED))
        graph, executable = c_void_p(), c_void_p()
        try:
            launch_all()
        finally:
            self._call("cuStreamEndCapture", self.stream, byref(graph))
        self._call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
        self._call("cuGraphDestroy", graph)
        return executable.value or 0

    def start(self, graph: int) -> None:
        """Run a captured graph after all present work of the stream."""
        self._call("cuGraphLaunch", graph, self.stream)

    def time(self, graph: int) -> float:
        """Return the seconds that the device takes for a captured graph, after running it once; wait for both."""
        self.start(graph)
        self.record(self._begin)
        self.start(graph)
        self.record(self._end)
        self.wait(self._end)
        milliseconds = c_float()
        self._call("cuEventElapsedTime", byref(milliseconds), c_void_p(self._begin), c_void_p(self._end))
        return milliseconds.value / 1e3

    def drop(self, graph: int) -> None:
        """Free a captured graph."""
        self._call("cuGraphExecDestroy", graph)

    def launch(
        self,
        function: int,
        groups: tuple[int, int, int],
        threads: int,
        arguments: Sequence[int | bytes],
        *,
        early: bool,
        room_bytes: int = 0,
    ) -> None:
        """Launch a kernel over arrays at these addresses, or boxes; `early` lets it start beside the last launch."""
        attribute = _Attribute(_EARLY_START, 0, 1)
        launch = _Launch(
            (c_uint * 3)(*groups),
            (c_uint * 3)(threads, 1, 1),
            room_bytes,
            self.stream,
            ctypes.pointer(attribute),
            int(early),
        )
        held = [
            c_uint64(one) if isinstance(one, int) else ctypes.create_string_buffer(one, len(one)) for one in arguments
        ]
        pointers = (c_void_p * len(held))(*(ctypes.addressof(one) for one in held))
        self._call("cuLaunchKernelEx", byref(launch), c_void_p(function), pointers, c_void_p())

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise DeviceError(f"CUDA: {name} failed with error {code}")


def _free_all(cuda: Any, context: c_void_p, held: dict[int, int]) -> None:
    cuda.cuCtxSetCurrent(context)
    for address in held:
        cuda.cuMemFree_v2(address)  # waits for work that uses it


def compile_source(compiler: Any, headers: Sequence[Path], source: str, architecture: str) -> bytes:
    """Return machine code for `architecture`, compiled by the NVRTC library `compiler`."""
    program = c_void_p()
    _check(compiler.nvrtcCreateProgram(byref(program), c_char_p(source.encode()), None, 0, None, None))
    try:
        options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"--include-path={at}" for at in headers)]
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        failed = compiler.nvrtcCompileProgram(program, len(options), given)
        size = c_size_t()
        if failed:
            _check(compiler.nvrtcGetProgramLogSize(program, byref(size)))
            log = ctypes.create_string_buffer(size.value)
            _check(compiler.nvrtcGetProgramLog(program, log))
            raise DeviceError(f"CUDA: a kernel does not compile:\n{log.value.decode(errors='replace')[:4000]}")
        _check(compiler.nvrtcGetCUBINSize(program, byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(compiler.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        compiler.nvrtcDestroyProgram(byref(program))


def name_compiler(compiler: Any) -> str:
    """Return the NVRTC library's name and version."""
    major, minor = c_int(), c_int()
    _check(compiler.nvrtcVersion(byref(major), byref(minor)))
    return f"nvrtc {major.value}.{minor.value}"


def _check(code: int) -> None:
    if code:
        raise DeviceError(f"CUDA: the run-time compiler failed with error {code}")


def load_library(names: Sequence[str], kind: type[ctypes.CDLL] = ctypes.CDLL) -> Any:
    """Return the first of these shared libraries that loads; DeviceError if none does."""
    for name in names:
        try:
            return kind(name)
        except OSError:
            continue
    raise DeviceError(f"CUDA: none of {', '.join(names)} loads")


def _find_headers() -> list[Path]:
    """Return the folders of CUDA's headers: in the toolkit, or in NVIDIA's Python packages."""
    folders = [_CUDA_FOLDER / "include"]
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folders += sorted(Path(root).glob("*/include"))
    found = [folder for folder in folders if (folder / "cuda_bf16.h").exists()]
    if not found:
        raise DeviceError("CUDA: no folder with cuda_bf16.h was found")
    return found


logger = logging.getLogger(__name__)
MAX_COMPILERS = 8
KEPT_BYTES = 256 * 2**20  # most bytes of code in the folder; a model of one type has about 2 MB


class Compiler(Protocol):
    """A compiler for a GPU; `CudaDriver` implements it."""

    compiler: str
    architecture: str
    starts_early: bool

    def compile(self, source: str) -> bytes:
        """Return the machine code of a CUDA C++ source."""


class CudaCode:
    """Compiled code by kernel and variant; `folder` keeps it between processes (default: the user's cache folder)."""

    def __init__(self, compiler: Compiler, folder: Path | None = None) -> None:
        self._compiler = compiler
        self._folder = folder or platformdirs.user_cache_path("mlxr", appauthor=False) / "kernels"
        self._found: dict[tuple[Kernel, Variant], tuple[str, bytes]] = {}

    def find(self, kernel: Kernel, variant: Variant) -> tuple[str, bytes]:
        """Return the function's name and its code. Raises DeviceError with the compiler's message."""
        found = self._found.get((kernel, variant))
        if found is None:
            found = self._found[kernel, variant] = (name_cuda_function(kernel, variant), self._load(kernel, variant))
        return found

    def find_all(self, keys: Iterable[tuple[Kernel, Variant]]) -> list[tuple[str, bytes]]:
        """Return `find` of each key; up to MAX_COMPILERS are compiled at the same time."""
        with ThreadPoolExecutor(MAX_COMPILERS) as pool:
            return list(pool.map(lambda key: self.find(*key), keys))

    def _load(self, kernel: Kernel, variant: Variant) -> bytes:
        """Return code from the folder; if it is not there, compile it, and keep it if the folder allows."""
        compiler = self._compiler
        source = make_cuda_source(kernel, variant, starts_early=compiler.starts_early)
        key = "\0".join((compiler.compiler, compiler.architecture, source))
        path = self._folder / f"{kernel.name}-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.cubin"
        try:
            code = path.read_bytes()
            os.utime(path)  # files that are used stay
            return code
        except OSError:
            code = compiler.compile(source)
        scratch = path.with_suffix(f".{os.getpid()}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch.write_bytes(code)
            scratch.replace(path)  # whole or not at all, even if two processes compile the same
            prune_folder(self._folder, KEPT_BYTES)
        except OSError as error:
            logger.warning("compiled kernels are not kept: %s", error)
        return code


def prune_folder(folder: Path, kept_bytes: int) -> None:
    """Remove the least recently used files until at most `kept_bytes` remain. Raises OSError."""
    files = sorted(((path, path.stat()) for path in folder.glob("*.cubin")), key=lambda file: file[1].st_mtime)
    excess_bytes = sum(told.st_size for _, told in files) - kept_bytes
    for path, told in files:
        if excess_bytes <= 0:
            break
        path.unlink(missing_ok=True)
        excess_bytes -= told.st_size
