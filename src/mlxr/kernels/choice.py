"""Which implementation of an operator runs on which device.

An operator's folder holds `reference.py` and, where they exist, `cpu.py` and `gpu.py`, each with functions of the same
names and arguments. The table of an operator is made from the files that are there; a missing `cpu.py` means the
reference runs, which a GPU's arrays cannot go to. Importing them must need neither the native module nor `mlx`: they
reach these through the context.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

from mlxr.core.errors import DeviceError
from mlxr.kernels.context import DEVICES

REFERENCE = "reference"
IMPLEMENTATIONS = {"cpu": "cpu", "reference": "reference"} | {
    device: "gpu" for device in DEVICES if device not in ("cpu", "reference")
}


class Choice:
    """The implementations of one operator by device."""

    __slots__ = ("_by_device", "_package", "implementations")

    def __init__(self, package: str) -> None:
        self._package = package
        kinds = dict.fromkeys(IMPLEMENTATIONS.values())
        names = [name for name in kinds if find_spec(f"{package}.{name}") is not None]
        self.implementations: dict[str, ModuleType] = {
            name: importlib.import_module(f"{package}.{name}") for name in names
        }
        fallback = (REFERENCE, self.implementations[REFERENCE])
        self._by_device = {
            device: (name, self.implementations[name]) if name in self.implementations else fallback
            for device, name in IMPLEMENTATIONS.items()
            if name != "gpu" or name in self.implementations
        }

    def pick(self, device: str) -> tuple[str, ModuleType]:
        """The name of the implementation that runs on `device`, and its module; DeviceError when there is none."""
        found = self._by_device.get(device)
        if found is None:
            operator = self._package.rpartition(".")[2]
            raise DeviceError(f"operator {operator} has no implementation for device {device!r}")
        return found
