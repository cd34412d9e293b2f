"""Which implementation of an operator runs on which device.

An operator's folder holds `reference.py` and, where it exists, `cpu.py`, each with functions of the same names and
arguments. The table of an operator is made from the files that are there; a missing file means the reference runs.
Importing `cpu.py` must not need the native module: it reaches it through the context.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

from mlxr.kernels.context import DEVICES

REFERENCE = "reference"


class Choice:
    """The implementations of one operator by device."""

    __slots__ = ("_by_device", "implementations")

    def __init__(self, package: str) -> None:
        names = [name for name in DEVICES if find_spec(f"{package}.{name}") is not None]
        self.implementations: dict[str, ModuleType] = {
            name: importlib.import_module(f"{package}.{name}") for name in names
        }
        fallback = (REFERENCE, self.implementations[REFERENCE])
        self._by_device = {
            device: (device, self.implementations[device]) if device in self.implementations else fallback
            for device in DEVICES
        }

    def pick(self, device: str) -> tuple[str, ModuleType]:
        """The name of the implementation that runs on `device`, and its module."""
        return self._by_device[device]
