"""The context every operator gets first: the device, its threads and instruction set, and the ledger.

Devices: "cpu" runs the native kernels (`mlxr._native`), "reference" runs NumPy float32. An operator without a native
implementation runs the reference, and the ledger says so.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal, get_args

from mlxr.core.errors import DeviceError
from mlxr.kernels.ledger import Ledger

if TYPE_CHECKING:
    from mlxr.kernels.probe import Probe

Device = Literal["cpu", "reference"]
DEVICES: tuple[str, ...] = get_args(Device)
ISAS = ("portable", "avx2", "avx512")
MAX_THREADS = 256


class Context:
    """Where operators run.

    `native` is the runtime of the native module (thread pool, scratch, kernel table) and `module` that module: a
    native operator is called as `ctx.module.rms_norm(ctx.native, ...)`. Both are None on the reference device.
    `threads` defaults to the physical cores this process may use, `isa` to the best this machine and build have.
    """

    __slots__ = ("device", "isa", "ledger", "module", "native", "threads")

    def __init__(self, device: Device = "cpu", threads: int | None = None, isa: str | None = None) -> None:
        if device not in DEVICES:
            raise DeviceError(f"device {device!r} is not known; known are {', '.join(DEVICES)}")
        self.device: Device = device
        self.ledger = Ledger()
        self.module: Any = None
        self.native: Any = None
        self.threads = 1
        self.isa = "numpy"
        if device == "reference":
            _refuse_reference_options(threads, isa)
        else:
            self._start_native(threads, isa)

    def _start_native(self, threads: int | None, isa: str | None) -> None:
        if threads is not None and not 1 <= threads <= MAX_THREADS:
            raise DeviceError(f"threads must be from 1 to {MAX_THREADS}, got {threads}")
        if isa is not None and isa not in ISAS:
            raise DeviceError(f"instruction set {isa!r} is not known; known are {', '.join(ISAS)}")
        self.module = load_native()
        if isa is not None and isa not in self.module.available_isas():
            raise DeviceError(
                f"this machine or build lacks instruction set {isa!r}; it has {', '.join(self.module.available_isas())}"
            )
        self.native = self.module.Runtime(threads or self.module.default_threads(), isa or self.module.best_isa())
        self.threads = self.native.threads
        self.isa = self.native.isa

    def start_probe(self) -> Probe:
        """What measures the machine with this context's threads. Raises DeviceError on the reference device."""
        from mlxr.kernels.probe import Probe

        return Probe(self)

    def __repr__(self) -> str:
        return f"Context(device={self.device!r}, threads={self.threads}, isa={self.isa!r})"


def load_native() -> Any:
    """The native module; `DeviceError` with the remedy when it is not built or does not load."""
    try:
        return importlib.import_module("mlxr._native")
    except ImportError as error:
        raise DeviceError(
            f"device 'cpu' needs the native kernels, which did not load ({error}); build them with "
            "`pip install .` (needs a C++20 compiler), or use device 'reference'"
        ) from error


def _refuse_reference_options(threads: int | None, isa: str | None) -> None:
    if threads is not None:
        raise DeviceError(f"device 'reference' runs NumPy and takes no threads, got {threads}; leave it out")
    if isa is not None:
        raise DeviceError(f"device 'reference' runs NumPy and takes no instruction set, got {isa!r}; leave it out")
