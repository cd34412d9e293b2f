"""Chooses which implementation of an operator runs on which device, and lists which there are.

An operator is a few functions of the same arguments in one file, which it may share with its like; only what a GPU runs
stands in a `gpu.py` of its own. Where nothing was written for the CPU the reference runs, which a GPU's arrays cannot
go to. What a GPU needs is imported when it first asks, so that its kernels cost nothing where there is none.

Native kernels and launches of a GPU count themselves in the ledger; an operator counts calls of its reference.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import mlxr.kernels
from mlxr.core.errors import DeviceError
from mlxr.kernels.context import DEVICES
from mlxr.kernels.gpu.kernel import Target, read_body, read_header

REFERENCE = "reference"
IMPLEMENTATIONS = {"cpu": "cpu", "reference": "reference"} | {
    device: "gpu" for device in DEVICES if device not in ("cpu", "reference")
}
_Function = TypeVar("_Function", bound=Callable[..., object])


class Choice(Generic[_Function]):
    """The functions of one operator by device; that of a GPU is given, or is called `name` in a module."""

    __slots__ = ("_by_device", "_functions", "_gpu", "_name", "operator")

    def __init__(
        self,
        operator: str,
        reference: _Function,
        cpu: _Function | None = None,
        gpu: str | _Function | None = None,
        name: str = "",  # that of the operator, if there is none
    ) -> None:
        self.operator, self._name = operator, name or operator
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
            raise DeviceError(f"operator {self.operator} has no implementation for device {device!r}")
        if name == "gpu":
            assert self._gpu is not None
            gpu = self._gpu
            self._functions[name] = getattr(importlib.import_module(gpu), self._name) if isinstance(gpu, str) else gpu
        return name, self._functions[name]


def list_native_operators(implementation: str = "cpu") -> frozenset[str]:
    """Names of the operators that have an implementation "cpu" or "gpu", as the ledger spells them."""
    return frozenset(
        choice.operator
        for name in _list_modules()
        if ".gpu" not in name
        for choice in vars(importlib.import_module(name)).values()
        if isinstance(choice, Choice) and choice.has(implementation)
    )


def list_kernel_sources(target: str) -> dict[str, str]:
    """The text of every GPU kernel that is launched on one of KERNEL_TARGETS, by name: prelude, headers and body."""
    kernels = [
        kernel
        for name in _list_modules()
        if name.endswith((".gpu", ".gpu.pool"))
        for kernel in getattr(importlib.import_module(name), "KERNELS", ())
        if not (kernel.cuda_only and target == "metal") and not (kernel.metal_only and target == "cuda")
    ]
    return {
        kernel.name: f"{read_header(kernel, cast(Target, target))}\n// arrays: {', '.join(kernel.inputs)} -> "
        f"{', '.join(kernel.outputs)}\n{{\n{read_body(kernel, cast(Target, target))}}}\n"
        for kernel in kernels
    }


def _list_modules() -> list[str]:
    """All modules of operators: those below this package, and in the folders of it."""
    return [module.name for module in pkgutil.walk_packages(mlxr.kernels.__path__, "mlxr.kernels.")]
