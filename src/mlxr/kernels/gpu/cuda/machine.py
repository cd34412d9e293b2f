"""The machine that runs recorded launches on NVIDIA GPUs, in the order of one stream; and NVIDIA's matrix products
(cuBLASLt) through ctypes, which recorded steps use for more rows than our kernels take.

The library names some algorithms for each shape; the best one is measured once, over weights that come from the GPU's
memory as they do in a step. The API is that of cuBLASLt 12 and later (docs.nvidia.com/cuda/cublas).
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Mapping, Sequence
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import DeviceError
from mlxr.core.frozen import frozen
from mlxr.kernels.gpu.cuda.driver import CudaCode, CudaDriver, load_library
from mlxr.kernels.gpu.kernel import OPENS, Kernel, Variant
from mlxr.kernels.gpu.launcher import Launcher
from mlxr.kernels.gpu.mlx import Mlx
from mlxr.kernels.gpu.recording import Launch, Product, StepMemory

_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType_t
_FLOAT, _COMPUTE_FLOAT = 0, 68
_TRANSPOSE_FIRST, _TRANSPOSED = 3, 1
_WORKSPACE_ATTRIBUTE, _WORKSPACE_BYTES = 1, 32 << 20
_BATCHES, _DISTANCE = 5, 6  # cublasLtMatrixLayoutAttribute_t
_CANDIDATES, _REPEATS = 32, 3
_COLD_BYTES = 256 << 20  # bytes of different weights in a measurement: more than a GPU's cache keeps
_ALIKE = 1.02  # ratio of times that count as equal


class _Candidate(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@frozen
class Shape:
    """The shape of a product: x (tokens, inputs) times a weight (outputs, inputs), all of type `kind`.

    With `shares`, there are that many results in f32, each from its own share of the inputs.
    """

    tokens: int
    outputs: int
    inputs: int
    kind: str
    shares: int

    @property
    def weight_bytes(self) -> int:
        """The size of the weight in bytes."""
        return self.outputs * self.inputs * (4 if self.kind == "float32" else 2)


@frozen
class _Plan:
    description: c_void_p
    weight: c_void_p
    x: c_void_p
    out: c_void_p
    candidate: _Candidate


class CudaProducts:
    """The library's products on the driver's stream. Raises DeviceError if the library is missing."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver, self._library = driver, load_library(_NAMES)
        driver.enter()
        self._handle = c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        self._workspace = driver.allocate(_WORKSPACE_BYTES)
        self._plans: dict[Shape, _Plan] = {}

    def prepare(self, shape: Shape, runs: Sequence[Sequence[int]]) -> None:
        """Choose the algorithm for a shape by running it over these addresses of x, a weight and the result.

        The results are overwritten; the stream must not be captured meanwhile.
        """
        if shape in self._plans:
            return
        runs = runs[: -(-_COLD_BYTES // shape.weight_bytes)]
        plans = self._list_plans(shape)
        self._plans[shape] = plans[choose_first([self._time(plan, runs) for plan in plans])]

    def multiply(self, shape: Shape, x: int, weight: int, out: int) -> None:
        """Multiply into out (tokens, outputs), or (shares, tokens, outputs); the shape must be prepared."""
        self._run(self._plans[shape], x, weight, out)

    def _list_plans(self, shape: Shape) -> list[_Plan]:
        """Return the library's algorithms for a shape; as matrices are column-major, out = weight transposed * x."""
        kind, made = _TYPES[shape.kind], _TYPES["float32" if shape.shares else shape.kind]
        shares, tokens, outputs, inputs = max(1, shape.shares), shape.tokens, shape.outputs, shape.inputs
        each = inputs // shares
        description, preference = c_void_p(), c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(description), c_int(_COMPUTE_FLOAT), c_int(_FLOAT))
        transposed, workspace = c_int(_TRANSPOSED), c_size_t(_WORKSPACE_BYTES)
        self._call(
            "cublasLtMatmulDescSetAttribute", description, c_int(_TRANSPOSE_FIRST), byref(transposed), c_size_t(4)
        )
        weight = self._make_layout(kind, (each, outputs), inputs, shares, each)
        x = self._make_layout(kind, (each, tokens), inputs, shares, each)
        out = self._make_layout(made, (outputs, tokens), outputs, shares, outputs * tokens)
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        self._call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            c_int(_WORKSPACE_ATTRIBUTE),
            byref(workspace),
            c_size_t(ctypes.sizeof(workspace)),
        )
        candidates, count = (_Candidate * _CANDIDATES)(), c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            description,
            weight,
            x,
            out,
            out,
            preference,
            c_int(_CANDIDATES),
            candidates,
            byref(count),
        )
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        found = [candidate for candidate in candidates[: count.value] if candidate.state == 0]
        if not found:
            raise DeviceError(f"CUDA: cuBLASLt has no algorithm for {shape}")
        return [_Plan(description, weight, x, out, candidate) for candidate in found]

    def _make_layout(self, kind: int, shape: tuple[int, int], leading: int, shares: int, distance: int) -> c_void_p:
        """Return the layout of `shares` matrices `distance` numbers apart, with columns `leading` numbers apart."""
        layout, rows, columns = c_void_p(), *map(c_uint64, shape)
        self._call("cublasLtMatrixLayoutCreate", byref(layout), c_int(kind), rows, columns, c_int64(leading))
        for attribute, value in ((_BATCHES, c_int(shares)), (_DISTANCE, c_int64(distance))):
            size = c_size_t(ctypes.sizeof(value))
            self._call("cublasLtMatrixLayoutSetAttribute", layout, c_int(attribute), byref(value), size)
        return layout

    def _time(self, plan: _Plan, runs: Sequence[Sequence[int]]) -> float:
        """Return the seconds of all runs, one after another; infinite if the algorithm does not run."""

        def run_all() -> None:
            for x, weight, out in runs:
                self._run(plan, x, weight, out)

        try:
            graph = self._driver.capture(run_all)
        except DeviceError:
            return math.inf
        try:
            return min(self._driver.time(graph) for _ in range(_REPEATS))
        finally:
            self._driver.drop(graph)

    def _run(self, plan: _Plan, x: int, weight: int, out: int) -> None:
        one, zero = c_float(1), c_float(0)
        self._call(
            "cublasLtMatmul",
            self._handle,
            plan.description,
            byref(one),
            c_void_p(weight),
            plan.weight,
            c_void_p(x),
            plan.x,
            byref(zero),
            c_void_p(out),
            plan.out,
            c_void_p(out),
            plan.out,
            byref(plan.candidate),
            c_void_p(self._workspace),
            c_size_t(_WORKSPACE_BYTES),
            self._driver.stream,
        )

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise DeviceError(f"CUDA: {name} failed with error {code}")


def choose_first(times_s: Sequence[float]) -> int:
    """Return the index of the first time that is about the least, so that noise seldom changes the choice."""
    least = min(times_s)
    return next(index for index, time_s in enumerate(times_s) if time_s <= _ALIKE * least)


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
    """Return launches that let the next one start early, if some launch needs `room_bytes`; otherwise the same ones.

    Then threadgroups of two launches fit beside each other.
    """
    if not any(isinstance(launch, Launch) and launch.room_bytes for launch in launches):
        return launches
    return [replace(each, variant=each.variant.opening()) if isinstance(each, Launch) else each for each in launches]


class CudaMachine:
    """The machine of NVIDIA's driver; `launcher`, which is MLX's, finds the addresses of MLX's arrays."""

    def __init__(self, mx: Mlx, launcher: Launcher, driver: CudaDriver, code: CudaCode) -> None:
        self._mx, self._launcher, self._driver, self._code = mx, launcher, driver, code
        self._functions: dict[tuple[Kernel, Variant], int] = {}
        self._products = _load_products(self._driver)
        self.multiplies = self._products is not None
        self.has_boxes = driver.has_boxes
        self.processors, self.room_bytes = driver.processors, driver.room_bytes
        self.memory = StepMemory(self._allocate)
        self._staging: dict[int, list[tuple[int, int]]] = {}  # free pinned memory and its event, by bytes
        self._written: list[tuple[int, int, int]] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of `memory` and of the product library's workspace."""
        return self._driver.held_bytes

    def drop(self, prepared: Mapping[str, int]) -> None:
        """Free graphs, after waiting for the stream."""
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
        """Launch a captured graph, to run after all present work of the stream."""
        self._driver.start(prepared)

    def write(self, address: int, values: AnyArray) -> None:
        """Copy to the device through pinned memory, which is reused after the copy."""
        self._driver.enter()
        place, event = self._borrow(values.nbytes)
        ctypes.memmove(place, values.ctypes.data, values.nbytes)
        self._driver.copy_in(address, place, values.nbytes)
        self._driver.record(event)
        self._written.append((values.nbytes, place, event))
        if len(self._written) > 8:  # by now the oldest copy is long done
            nbytes, place, event = self._written.pop(0)
            self._driver.wait(event)
            self._staging[nbytes].append((place, event))

    def read(self, address: int, size: int, dtype: npt.DTypeLike) -> _Under:
        """Start copying to the host through pinned memory."""
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
        """Wait for a copy and return its numbers from pinned memory."""
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
        """Return the address of each of MLX's arrays, by identity."""
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
