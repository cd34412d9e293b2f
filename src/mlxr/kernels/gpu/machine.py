"""What runs recorded launches: NVIDIA's driver, or the emulator over the host's memory.

Both have one stream in which everything happens in the order given.
A machine is used by one thread at a time.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import DeviceError
from mlxr.kernels.gpu.cuda_code import CudaCode
from mlxr.kernels.gpu.cuda_driver import CudaDriver
from mlxr.kernels.gpu.cuda_products import CudaProducts, Shape
from mlxr.kernels.gpu.emulator import Emulator
from mlxr.kernels.gpu.kernel import OPENS, Kernel, Variant
from mlxr.kernels.gpu.launcher import Launcher, view_host
from mlxr.kernels.gpu.recording import Launch, Product
from mlxr.kernels.gpu.step_memory import StepMemory
from mlxr.kernels.gpu.steps import Results

logger = logging.getLogger(__name__)
AnyArray = npt.NDArray[Any]
ADDRESS = Kernel("address", Path(__file__).parent, "address.body", ("source",), ("out",))


class Machine(Protocol):
    """Where recorded launches run; `multiplies` says whether products are among them, `memory` is for their results.

    `has_boxes`: kernels may bring boxes of matrices into their memory, and multiply them there (`Box`).

    `processors` are the multiprocessors that share the threadgroups of a launch, each with `room_bytes` for one
    threadgroup; 0 where threadgroups run one after another.
    """

    multiplies: bool
    has_boxes: bool
    memory: StepMemory
    processors: int
    room_bytes: int

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that it holds."""

    def drop(self, prepared: Mapping[str, Any]) -> None:
        """Let go of prepared launches."""

    def prepare(self, launches: Sequence[Launch | Product]) -> Any:
        """The launches in a form that `start` takes."""

    def start(self, prepared: Any) -> None:
        """Run prepared launches after what was given before."""

    def write(self, address: int, values: AnyArray) -> None:
        """Copy numbers to the device."""

    def read(self, address: int, size: int, dtype: npt.DTypeLike) -> Results:
        """Have `size` numbers copied to the host."""

    def synchronize(self) -> None:
        """Wait until all is done."""


class EmulatedMachine:
    """Everything happens at once, over the host's memory."""

    multiplies = has_boxes = True
    processors = room_bytes = 0

    def __init__(self, mx: Any, emulator: Emulator) -> None:
        self._mx, self._emulator = mx, emulator
        self._held: list[AnyArray] = []
        self.memory = StepMemory(self._allocate)

    @property
    def held_bytes(self) -> int:
        """All that is in `memory`."""
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
        """Rubbish, so that what stays unwritten shows."""
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
    """The same with NumPy, in f32."""
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


def _load_products(driver: CudaDriver) -> CudaProducts | None:
    try:
        return CudaProducts(driver)
    except DeviceError as error:
        logger.warning("steps of many sequences are recorded by MLX: %s", error)
        return None


def _shape_of(product: Product) -> Shape:
    return Shape(product.tokens, product.outputs, product.inputs, product.kind, product.shares)


def open_launches(launches: Sequence[Launch | Product]) -> Sequence[Launch | Product]:
    """Where threadgroups of two launches fit beside each other, because some declare so: launches that let them."""
    if not any(isinstance(launch, Launch) and launch.room_bytes for launch in launches):
        return launches
    return [replace(each, variant=each.variant.opening()) if isinstance(each, Launch) else each for each in launches]


class CudaMachine:
    """NVIDIA's driver; `launcher` is MLX's way, by which addresses of MLX's arrays are found."""

    def __init__(self, mx: Any, launcher: Launcher, driver: CudaDriver, code: CudaCode) -> None:
        self._mx, self._launcher, self._driver, self._code = mx, launcher, driver, code
        self._functions: dict[tuple[Kernel, Variant], int] = {}
        self._products = _load_products(self._driver)
        self.multiplies = self._products is not None
        self.has_boxes = driver.has_boxes
        self.processors, self.room_bytes = driver.processors, driver.room_bytes
        self.memory = StepMemory(self._allocate)
        self._staging: dict[int, list[tuple[int, int]]] = {}  # pinned memory and its event by bytes, free again
        self._written: list[tuple[int, int, int]] = []

    @property
    def held_bytes(self) -> int:
        """`memory`, and what the library of products works in."""
        return self._driver.held_bytes

    def drop(self, prepared: Mapping[str, int]) -> None:
        """Let go of graphs, once nothing runs any more."""
        self.synchronize()
        for graph in prepared.values():
            self._driver.drop(graph)

    def prepare(self, launches: Sequence[Launch | Product]) -> int:
        """Capture the launches as a CUDA graph and return its handle."""
        self._driver.enter()
        if self._driver.starts_early:
            launches = open_launches(launches)
        self._compile(launches)
        found = self._find_arrays([array for launch in launches for array in launch.arrays])
        addresses = [
            [array if isinstance(array, int) else found[id(array)] for array in launch.arrays] for launch in launches
        ]
        shapes = [_shape_of(launch) if isinstance(launch, Product) else None for launch in launches]
        runs: dict[Shape, list[list[int]]] = {}
        for shape, arrays in zip(shapes, addresses, strict=True):
            if shape is not None:
                runs.setdefault(shape, []).append(arrays)
        for shape, alike in runs.items():
            if self._products is not None:
                self._products.prepare(shape, alike)

        def launch_all() -> None:
            for number, (launch, shape, arrays) in enumerate(zip(launches, shapes, addresses, strict=True)):
                if isinstance(launch, Launch):
                    self._driver.launch(
                        self._functions[launch.kernel, launch.variant],
                        launch.groups,
                        launch.threads,
                        [*map(self._driver.make_box, arrays, launch.boxes), *arrays[len(launch.boxes) :]],
                        early=self._driver.starts_early and number > 0,
                        room_bytes=launch.room_bytes,
                    )
                elif shape is not None and self._products is not None:
                    self._products.multiply(shape, *arrays)

        return self._driver.capture(launch_all)

    def start(self, prepared: int) -> None:
        """Launch a captured graph, to run after what the stream has."""
        self._driver.start(prepared)

    def write(self, address: int, values: AnyArray) -> None:
        """By way of pinned memory, which is used again when the copy has happened."""
        self._driver.enter()
        place, event = self._borrow(values.nbytes)
        ctypes.memmove(place, values.ctypes.data, values.nbytes)
        self._driver.copy_in(address, place, values.nbytes)
        self._driver.record(event)
        self._written.append((values.nbytes, place, event))
        if len(self._written) > 8:  # by now the oldest one has long happened
            nbytes, place, event = self._written.pop(0)
            self._driver.wait(event)
            self._staging[nbytes].append((place, event))

    def read(self, address: int, size: int, dtype: npt.DTypeLike) -> _Under:
        """By way of pinned memory."""
        self._driver.enter()
        nbytes = size * np.dtype(dtype).itemsize
        place, event = self._borrow(nbytes)
        self._driver.copy_out(place, address, nbytes)
        self._driver.record(event)
        return _Under(self, place, event, size, np.dtype(dtype))

    def synchronize(self) -> None:
        """Wait until the stream has done all its work."""
        self._driver.enter()
        self._driver.synchronize()

    def collect(self, place: int, event: int, size: int, dtype: np.dtype[Any]) -> AnyArray:
        """What has come into pinned memory."""
        self._driver.wait(event)
        values = np.empty(size, dtype)
        ctypes.memmove(values.ctypes.data, place, values.nbytes)
        self._staging[values.nbytes].append((place, event))
        return values

    def _borrow(self, nbytes: int) -> tuple[int, int]:
        free = self._staging.setdefault(nbytes, [])
        return free.pop() if free else (self._driver.allocate_host(nbytes), self._driver.make_event())

    def _allocate(self, size_bytes: int) -> int:
        self._driver.enter()
        return self._driver.allocate(size_bytes)

    def _compile(self, launches: Sequence[Launch | Product]) -> None:
        rooms = {(each.kernel, each.variant): each.room_bytes for each in launches if isinstance(each, Launch)}
        missing = list(rooms.keys() - self._functions.keys())
        for key, (name, code) in zip(missing, self._code.find_all(missing), strict=True):
            self._functions[key] = self._driver.load(code, name)
            if rooms[key] or OPENS in dict(key[1].constants):
                self._driver.give_room(self._functions[key], rooms[key])

    def _find_arrays(self, arrays: Sequence[Any]) -> dict[int, int]:
        """The address of each of MLX's arrays, by identity."""
        mx, found = self._mx, {id(array): array for array in arrays if not isinstance(array, int)}
        told = [
            self._launcher.launch(ADDRESS, [array], groups=(1, 1, 1), threads=32, outputs=[((8,), mx.int64)])[0]
            for array in found.values()
        ]
        mx.eval(told)
        return {key: int(out[0].item()) for key, out in zip(found, told, strict=True)}


class _Under:
    def __init__(self, machine: CudaMachine, *place: Any) -> None:
        self._machine, self._place = machine, place

    def wait(self) -> AnyArray:
        return self._machine.collect(*self._place)
