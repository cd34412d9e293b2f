"""Which implementation of an operator runs on which device.

An operator's folder holds `reference.py` and, where they exist, `cpu.py` and `gpu.py`, each with functions of the same
names and arguments. The table of an operator is made from the files that are there; a missing `cpu.py` means the
reference runs, which a GPU's arrays cannot go to. An implementation is imported when a device first needs it, so that
the kernels of a GPU cost nothing where there is none.

Native kernels and launches of a GPU count themselves in the ledger; an operator counts calls of its reference.
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
    """The implementations of one operator by device; those of devices that were asked for are imported."""

    __slots__ = ("_by_device", "_package")

    def __init__(self, package: str) -> None:
        self._package = package
        self._by_device: dict[str, tuple[str, ModuleType]] = {}

    def pick(self, device: str) -> tuple[str, ModuleType]:
        """The name of the implementation that runs on `device`, and its module; DeviceError when there is none."""
        found = self._by_device.get(device)
        if found is None:
            found = self._by_device[device] = self._load(device)
        return found

    def _load(self, device: str) -> tuple[str, ModuleType]:
        name = IMPLEMENTATIONS.get(device)
        if name == "cpu" and find_spec(f"{self._package}.cpu") is None:
            name = REFERENCE
        if name is None or find_spec(f"{self._package}.{name}") is None:
            operator = self._package.rpartition(".")[2]
            raise DeviceError(f"operator {operator} has no implementation for device {device!r}")
        return name, importlib.import_module(f"{self._package}.{name}")
