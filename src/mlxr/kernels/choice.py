"""Chooses which implementation of an operator runs on which device.

A large operator has a folder with `reference.py` and, where they exist, `cpu.py` and `gpu.py`, each with functions of
the same names and arguments: `Choice`. A small one is a few functions in one file, which it may share with its like;
only what a GPU runs stands in a `gpu.py` of its own: `FunctionChoice`. Where nothing was written for the CPU the
reference runs, which a GPU's arrays cannot go to. What a device needs is imported when it first asks, so that the
kernels of a GPU cost nothing where there is none.

Native kernels and launches of a GPU count themselves in the ledger; an operator counts calls of its reference.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Generic, NoReturn, TypeVar

from mlxr.core.errors import DeviceError
from mlxr.kernels.context import DEVICES

REFERENCE = "reference"
IMPLEMENTATIONS = {"cpu": "cpu", "reference": "reference"} | {
    device: "gpu" for device in DEVICES if device not in ("cpu", "reference")
}
_Function = TypeVar("_Function", bound=Callable[..., object])


class Choice:
    """The implementations of one operator by device; those of devices that were asked for are imported."""

    __slots__ = ("_by_device", "_package", "operator")

    def __init__(self, package: str) -> None:
        self.operator = package.rpartition(".")[2]
        self._package = package
        self._by_device: dict[str, tuple[str, ModuleType]] = {}

    def pick(self, device: str) -> tuple[str, ModuleType]:
        """The name of the implementation that runs on `device`, and its module; DeviceError when there is none."""
        found = self._by_device.get(device)
        if found is None:
            found = self._by_device[device] = self._load(device)
        return found

    def has(self, implementation: str) -> bool:
        """Return whether there is a file "reference", "cpu" or "gpu"."""
        return find_spec(f"{self._package}.{implementation}") is not None

    def _load(self, device: str) -> tuple[str, ModuleType]:
        name = IMPLEMENTATIONS.get(device)
        if name == "cpu" and not self.has(name):
            name = REFERENCE
        if name is None or not self.has(name):
            _refuse(self.operator, device)
        return name, importlib.import_module(f"{self._package}.{name}")


class FunctionChoice(Generic[_Function]):
    """The functions of one small operator by device; that of a GPU is given, or has the operator's name in a module."""

    __slots__ = ("_by_device", "_functions", "_gpu", "operator")

    def __init__(
        self, operator: str, reference: _Function, cpu: _Function | None = None, gpu: str | _Function | None = None
    ) -> None:
        self.operator = operator
        self._gpu = gpu
        self._functions = {REFERENCE: reference} if cpu is None else {REFERENCE: reference, "cpu": cpu}
        self._by_device: dict[str, tuple[str, _Function]] = {}

    def pick(self, device: str) -> tuple[str, _Function]:
        """Return the name of the implementation that runs on `device`, and it; DeviceError when there is none."""
        found = self._by_device.get(device)
        if found is None:
            found = self._by_device[device] = self._load(device)
        return found

    def has(self, implementation: str) -> bool:
        """Return whether there is a function for "reference", "cpu" or "gpu"."""
        return implementation in self._functions or (implementation == "gpu" and self._gpu is not None)

    def _load(self, device: str) -> tuple[str, _Function]:
        name = IMPLEMENTATIONS.get(device)
        if name == "cpu" and name not in self._functions:
            name = REFERENCE
        if name is None or not self.has(name):
            _refuse(self.operator, device)
        if name == "gpu":
            assert self._gpu is not None
            gpu = self._gpu
            self._functions[name] = (
                getattr(importlib.import_module(gpu), self.operator) if isinstance(gpu, str) else gpu
            )
        return name, self._functions[name]


def _refuse(operator: str, device: str) -> NoReturn:
    raise DeviceError(f"operator {operator} has no implementation for device {device!r}")
