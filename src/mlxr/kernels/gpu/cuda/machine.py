"""NVIDIA's driver as what runs recorded launches: one stream, in which everything happens in the order given."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import DeviceError
from mlxr.kernels.gpu.cuda.driver import CudaCode, CudaDriver
from mlxr.kernels.gpu.cuda.products import CudaProducts, Shape
from mlxr.kernels.gpu.kernel import OPENS, Kernel, Variant
from mlxr.kernels.gpu.launcher import Launcher
from mlxr.kernels.gpu.recording import Launch, Product, StepMemory

logger = logging.getLogger(__name__)
AnyArray = npt.NDArray[Any]
ADDRESS = Kernel("address", Path(__file__).parent, "address.body", ("source",), ("out",), operator="address")


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
        told: list[Any] = [
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
