"""The emulator over the host's memory, as what runs recorded launches, in the order given."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxr.kernels.gpu.emulated.emulator import Emulator
from mlxr.kernels.gpu.launcher import view_host
from mlxr.kernels.gpu.recording import Launch, Product, StepMemory

AnyArray = npt.NDArray[Any]


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
