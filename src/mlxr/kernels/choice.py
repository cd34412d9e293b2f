"""The choice of an operator's implementation for a device, and lists of the implementations.

An operator is a few functions with the same arguments in one file, which similar operators may share; only the GPU
implementation is in a `gpu.py` of its own. An operator without CPU kernels runs its reference on the CPU; on a GPU it
cannot, as the reference does not take a GPU's arrays. A GPU's module is imported when it is first needed, so that its
kernels cost nothing on other devices.

Native kernels and GPU launches count themselves in the ledger; an operator counts calls of its reference.
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
    """The functions of one operator by device; the GPU's is a function, or a module that has one called `name`."""

    __slots__ = ("_by_device", "_functions", "_gpu", "_name", "operator")

    def __init__(
        self,
        operator: str,
        reference: _Function,
        cpu: _Function | None = None,
        gpu: str | _Function | None = None,
        name: str = "",  # by default the operator's
    ) -> None:
        self.operator, self._name = operator, name or operator
        self._gpu = gpu
        self._functions = {REFERENCE: reference} if cpu is None else {REFERENCE: reference, "cpu": cpu}
        self._by_device: dict[str, tuple[str, _Function]] = {}

    def pick(self, device: str) -> tuple[str, _Function]:
        """Return the name of the implementation for `device`, and its function; DeviceError if there is none."""
        found = self._by_device.get(device)
        if found is None:
            found = self._by_device[device] = self._load(device)
        return found

    def has(self, implementation: str) -> bool:
        """Return True if there is a function for `implementation`: "reference", "cpu" or "gpu"."""
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
    """Return the names, as in the ledger, of the operators that have an implementation "cpu" or "gpu"."""
    return frozenset(
        choice.operator
        for name in _list_modules()
        if ".gpu" not in name
        for choice in vars(importlib.import_module(name)).values()
        if isinstance(choice, Choice) and choice.has(implementation)
    )


def list_kernel_sources(target: str) -> dict[str, str]:
    """Return the text (prelude, headers and body) of every GPU kernel for one of KERNEL_TARGETS, by name."""
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
    """Return the names of all modules below this package."""
    return [module.name for module in pkgutil.walk_packages(mlxr.kernels.__path__, "mlxr.kernels.")]
