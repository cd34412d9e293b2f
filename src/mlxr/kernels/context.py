"""The context that every operator gets first: the device, its threads and instruction set, and the ledger.

Devices: "cpu" runs the native kernels (`mlxr._native`), "reference" runs NumPy float32. "metal" and "cuda" run our
kernels through MLX on an Apple or NVIDIA GPU; "mlx-cpu" runs the same Python with MLX's own operations on the CPU, and
"emulated" with our GPU kernels compiled for the host: both are for tests. An operator without a native implementation
runs the reference, and the ledger says so.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast, get_args

from mlxr.core.errors import DeviceError
from mlxr.kernels.ledger import Ledger, Probe, Profiler
from mlxr.kernels.native import Native, NativeRuntime

if TYPE_CHECKING:
    from mlxr.kernels.gpu.device import Gpu
    from mlxr.kernels.gpu.emulator import Emulator
    from mlxr.kernels.ragged import RaggedBatch

logger = logging.getLogger(__name__)
Device = Literal["cpu", "reference", "metal", "cuda", "mlx-cpu", "emulated"]
DEVICES: tuple[str, ...] = get_args(Device)
ISAS = ("portable", "avx2", "avx512", "avx512bf16", "neon", "amx")
MAX_THREADS = 256
SOURCES = Path(__file__).parents[3] / "csrc"  # there in a checkout, not in a wheel
ROOM_BYTES = 60 * 2**30
BUILD_ALL = "`make tiers` in the sources builds the kernels of all processors"


class Context:
    """The device on which operators run, and everything that they need there.

    `native` is the runtime of the native module (thread pool, scratch, kernel table) and `module` that module: a
    native operator is called as `ctx.module.rms_norm(ctx.native, ...)`. Both are None on the reference device.
    `gpu` is what GPU implementations work with, None on other devices. A GPU context also has the native runtime, if
    it is built, for work on the host. The types of these three omit None: an implementation runs only on devices that
    have what it needs, and code for all devices checks first. `threads` defaults to the physical cores that this
    process may use, `isa` to the best that this machine and build have.
    """

    __slots__ = ("device", "gpu", "isa", "ledger", "module", "native", "threads")

    def __init__(
        self,
        device: Device = "cpu",
        threads: int | None = None,
        isa: str | None = None,
        emulator: Emulator | None = None,
    ) -> None:
        if device not in DEVICES:
            raise DeviceError(f"device {device!r} is not known; known are {', '.join(DEVICES)}")
        self.device: Device = device
        self.ledger = Ledger()
        self.module: Native = cast(Any, None)
        self.native: NativeRuntime = cast(Any, None)
        self.gpu: Gpu = cast(Any, None)
        self.threads = 1
        self.isa = "numpy"
        if device == "cpu":
            self._start_native(threads, isa)
        else:
            _refuse_cpu_options(device, threads, isa)
        if device not in ("cpu", "reference"):
            self._start_gpu(emulator)

    def _start_native(self, threads: int | None, isa: str | None) -> None:
        if threads is not None and not 1 <= threads <= MAX_THREADS:
            raise DeviceError(f"threads must be from 1 to {MAX_THREADS}, got {threads}")
        if isa is not None and isa not in ISAS:
            raise DeviceError(f"instruction set {isa!r} is not known; known are {', '.join(ISAS)}")
        self.module = load_native()
        if isa is not None and isa not in self.module.available_isas():
            _refuse_isa(isa, self.module)
        self.native = self.module.Runtime(threads or self.module.default_threads(), isa or self.module.best_isa())
        self.ledger.attach(self.native.list_ran, self.native.list_expert_rows)
        self.threads = self.native.threads
        self.isa = self.native.isa

    def _start_gpu(self, emulator: Emulator | None) -> None:
        from mlxr.kernels.gpu.device import Gpu

        self.gpu = Gpu(self.device, self.ledger, emulator)
        self.isa = self.device
        try:
            self.module = load_native()
        except DeviceError:
            return  # then NumPy does the host's work
        self.native = self.module.Runtime(self.module.default_threads(), self.module.best_isa())
        self.ledger.attach(self.native.list_ran, self.native.list_expert_rows)

    @property
    def uses_host_memory(self) -> bool:
        """True if arrays take the host's memory: on all devices but a GPU with memory of its own."""
        return self.device != "cuda"

    def read_free_bytes(self) -> int | None:
        """Return the GPU memory in bytes that arrays may still take; None without a GPU, or if that is unknown."""
        return None if self.gpu is None else self.gpu.read_free_bytes()

    @property
    def has_room(self) -> bool:
        """True if the device has enough memory of its own for larger steps beside a model."""
        return self.gpu is not None and self.gpu.total_bytes >= ROOM_BYTES

    def choose_activations(self, type_names: Iterable[str]) -> None:
        """Choose the type of results between operators, by the types of the weights that will be multiplied.

        On a GPU, that is the type of the weights if all have one 16-bit type; otherwise, and on other devices, it is
        f32, except that quantised products on matrix units read bf16.
        """
        if self.gpu is not None and self.gpu.narrow:
            names = set(type_names)
            kinds = {"bf16": self.gpu.mx.bfloat16, "f16": self.gpu.mx.float16}
            one = next(iter(names)) if len(names) == 1 else ""
            self.gpu.activations = self.gpu.operands = kinds.get(one, self.gpu.mx.float32)
            if self.gpu.has_tiles and one not in kinds and names.isdisjoint(("f32", "f16")):
                self.gpu.operands = self.gpu.mx.bfloat16

    @contextmanager
    def compute_wide(self) -> Iterator[None]:
        """Let GPU operators in the `with` block pass f32 to one another, whatever `choose_activations` chose."""
        if self.gpu is None:
            yield
            return
        kept = self.gpu.activations, self.gpu.operands
        self.gpu.activations = self.gpu.operands = self.gpu.mx.float32
        try:
            yield
        finally:
            self.gpu.activations, self.gpu.operands = kept

    def run_step(
        self,
        compute: Callable[[RaggedBatch], Any],
        batch: RaggedBatch,
        pools: Sequence[Any],
        key: object,
        states: Any = None,
        *,
        records: bool = True,
    ) -> Any:
        """Return `compute(batch)`, the logits; a GPU only starts on them. With `records` it records single-token steps.

        Recorded steps are found again by their shape and `key`, which must change with anything else that `compute`
        depends on. `pools` has one pool for each group of the batch that has pages; `states` is a pool of states, if
        sequences have any.
        """
        if self.gpu is None:
            return compute(batch)
        from mlxr.kernels.gpu.graph import run_step, takes_step
        from mlxr.kernels.gpu.steps import StepPools

        if self.gpu.launcher is not None and records and takes_step(batch):
            return run_step(self.gpu, compute, batch, StepPools(pools, states), key)
        from mlxr.kernels.gpu.deferred import settle

        logits = settle(compute(batch)).astype(self.gpu.mx.float32)
        self.gpu.submit(logits)
        return logits

    @property
    def compiles(self) -> bool:
        """True if kernels are compiled when a step first needs them."""
        return self.gpu is not None and self.gpu.launcher is not None

    @contextmanager
    def rehearse(self) -> Iterator[None]:
        """Run the `with` block on a GPU without counting calls of kernels, bytes or rows of experts."""
        before, copied_bytes = self.ledger.copy_counts(), self.ledger.copied_bytes
        self.gpu.rehearses = True
        try:
            yield
        finally:
            self.gpu.rehearses = False
            self.ledger.take_back(before, copied_bytes)

    def start_probe(self) -> Probe:
        """Return a probe that measures the machine with this context's threads. Raises DeviceError without kernels."""
        return Probe(self)

    def make_profiler(self) -> Profiler:
        """Return a profiler of this context's kernels. Raises DeviceError on the reference device."""
        return Profiler(self)

    def __repr__(self) -> str:
        return f"Context(device={self.device!r}, threads={self.threads}, isa={self.isa!r})"


def load_native() -> Native:
    """Return the native module. Raises DeviceError with the remedy if it is not built, is outdated or does not load."""
    try:
        module = importlib.import_module("mlxr._native")
    except ImportError as error:
        moved = "built for another machine" in str(error)
        remedy = BUILD_ALL if moved else "build them with `pip install .` (needs a C++20 compiler)"
        raise DeviceError(
            f"device 'cpu' needs the native kernels, which did not load ({error}); {remedy}, or use device 'reference'"
        ) from error
    if SOURCES.is_dir() and getattr(module, "interface", None) != hash_interface():
        raise DeviceError("the native kernels were built from other sources than these; `make run` builds them anew")
    return cast(Native, module)


@cache
def hash_interface() -> str:
    """Return the hash of csrc/bindings and csrc/tables that CMakeLists.txt puts into a build of these sources."""
    patterns = ("bindings/*.cpp", "bindings/*.h", "tables/*.def")
    files = sorted(str(path) for pattern in patterns for path in SOURCES.glob(pattern))
    sums = "".join(hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in files)
    return hashlib.sha256(sums.encode()).hexdigest()


def choose_device(name: str) -> Device:
    """Return `name`; for "auto", "cuda" if an installed mlx finds an NVIDIA GPU here, else "cpu".

    If it finds an Apple GPU, a warning in the log says why the CPU is used.
    """
    if name != "auto":
        return cast(Device, name)
    from mlxr.kernels.gpu.mlx import find_gpu

    found = find_gpu()
    if found == "metal":
        _explain_cpu()
    return "cuda" if found == "cuda" else "cpu"


@cache
def _explain_cpu() -> None:
    """Log, once in a process, why the CPU is used beside an Apple GPU."""
    logger.warning(
        "models run on the CPU: the kernels for Apple GPUs have not been run on Apple hardware yet; "
        "device 'metal' (--device metal) tries them, and `mlxr check-gpu` checks them and writes a report to send"
    )


def _refuse_isa(isa: str, module: Native) -> NoReturn:
    available = ", ".join(module.available_isas())
    if isa in module.left_out_isas():
        raise DeviceError(
            f"instruction set {isa!r} is not in this build, which is for this machine alone and has {available}; "
            f"{BUILD_ALL}"
        )
    raise DeviceError(f"this machine or build lacks instruction set {isa!r}; it has {available}")


def _refuse_cpu_options(device: str, threads: int | None, isa: str | None) -> None:
    runs = "NumPy" if device == "reference" else "MLX"
    if threads is not None:
        raise DeviceError(f"device {device!r} runs {runs} and takes no threads, got {threads}; leave it out")
    if isa is not None:
        raise DeviceError(f"device {device!r} runs {runs} and takes no instruction set, got {isa!r}; leave it out")
