"""The launcher, which launches GPU kernels on every target, counts them in the ledger, and times them for a profile.

Metal and CUDA go through `mx.fast.metal_kernel` and `mx.fast.cuda_kernel`, which compile at the first launch of each
variant, or on CUDA through `mx.fast.precompiled_cuda_kernel` with code of `cuda.driver`. The emulated target computes
at once. A grid is given in threadgroups of one dimension of threads.

The ledger names a launch by its kernel: `linear_tiles` of a q4_k weight with a gate is operator linear, variant "tiles
q4_k+gate". A profile waits for every launch, so that each time is that of one launch; launches do not overlap then.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from mlxr.core.frozen import frozen
from mlxr.kernels.gpu.cuda.driver import CudaCode
from mlxr.kernels.gpu.emulator import Emulator
from mlxr.kernels.gpu.kernel import Kernel, Target, name_type, read_body, read_header, write_metal
from mlxr.kernels.gpu.mlx import Mlx, view_host, view_in_order
from mlxr.kernels.gpu.recording import Call, Launch, Launches, Machine, Product, count_bytes
from mlxr.kernels.ledger import EXPERT_ROWS, MLX, Ledger, Part
from mlxr.kernels.tensor import DeviceArray, NumberType

_Made = TypeVar("_Made")
GPU = "gpu"
WEIGHT_TYPES = ("TYPE_A", "TYPE_B")  # constants: numbers of types, which `Kernel.type_names` names
NUMBERS = "K"  # name of the type of weights or pages of plain numbers
FLAGS = {
    "NORM": "norm",
    "GATE": "gate",
    "CENTRED": "centred",
    "RESIDUAL": "residual",
    "CAPPED": "softcap",
    "SINKS": "sinks",
    "RANDOM": "random",
}
SHORT_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@frozen
class Watched:
    """One timed launch, from `start_ns` to `end_ns` of the monotonic clock; bytes and multiply-adds, 0 if unknown."""

    part: Part
    start_ns: int
    end_ns: int
    nbytes: int = 0
    macs: int = 0
    grid: tuple[int, int, int] | None = None
    threads: int = 0


class Watch:
    """The counter of launches in a ledger; `watched` has the timed launches of a profile, None without one."""

    def __init__(self, mx: Mlx, ledger: Ledger) -> None:
        self._mx, self.ledger = mx, ledger
        self.watched: list[Watched] | None = None
        self._names: dict[Hashable, Part] = {}

    def run(self, call: Call, launch: Callable[[Call], list[DeviceArray]]) -> list[DeviceArray]:
        """Launch, and count the launch and the rows of experts that it multiplies."""
        kernel = call.kernel
        key = kernel, *call.constants.items(), call.types.get(NUMBERS)
        part = self._names.get(key)
        if part is None:
            part = self._names[key] = name_launch(kernel, call.constants, call.types)
        self.ledger.count(*part)
        if kernel.counts_rows:
            self.ledger.count(*name_rows(part), call.rows)
        if self.watched is None:
            return launch(call)
        nbytes = count_bytes(kernel.inputs, call.inputs)
        return self._time(part, lambda: launch(call), call.inputs, nbytes, call.groups, call.threads)

    def run_mlx(self, operator: str, variant: str, compute: Callable[[], _Made], *inputs: DeviceArray) -> _Made:
        """Compute by MLX's own operations, and count that."""
        part = operator, MLX, variant
        self.ledger.count(*part)
        if self.watched is None:
            return compute()
        return self._time(part, compute, inputs, sum(array.nbytes for array in inputs), None, 0)

    def run_recorded(self, machine: Machine, launches: Sequence[Launch | Product], prepared: Sequence[Any]) -> None:
        """Run recorded launches one by one, waiting for each; each was prepared separately."""
        assert self.watched is not None
        for launch, single in zip(launches, prepared, strict=True):
            machine.synchronize()
            start_ns = time.perf_counter_ns()
            machine.start(single)
            machine.synchronize()
            end_ns = time.perf_counter_ns()
            part = name_recorded(launch)
            if isinstance(launch, Product):
                macs = launch.tokens * launch.outputs * launch.inputs
                self.watched.append(Watched(part, start_ns, end_ns, launch.nbytes, macs))
            else:
                self.watched.append(Watched(part, start_ns, end_ns, launch.nbytes, 0, launch.groups, launch.threads))

    def _time(
        self,
        part: Part,
        compute: Callable[[], _Made],
        inputs: Sequence[DeviceArray],
        nbytes: int,
        groups: tuple[int, int, int] | None,
        threads: int,
    ) -> _Made:
        assert self.watched is not None
        self._mx.eval(*inputs)
        self._mx.synchronize()
        start_ns = time.perf_counter_ns()
        results = compute()
        self._mx.eval(results)
        self._mx.synchronize()
        end_ns = time.perf_counter_ns()
        made: Sequence[Any] = results if isinstance(results, list | tuple) else [results]
        nbytes += sum(array.nbytes for array in made)
        self.watched.append(Watched(part, start_ns, end_ns, nbytes, 0, groups, threads))
        return results


def name_launch(kernel: Kernel, constants: Mapping[str, int], types: Mapping[str, object]) -> Part:
    """Return the ledger's name of a launch."""
    operator = kernel.operator or kernel.folder.name
    short = kernel.name.removeprefix(operator).removeprefix("_")
    names = [kernel.type_names[constants[key]] for key in WEIGHT_TYPES if key in constants]
    if not names and NUMBERS in types:
        kind = name_type(types[NUMBERS])
        names = [SHORT_NAMES.get(kind, kind)]
    flags = [flag for key, flag in FLAGS.items() if constants.get(key)]
    form = "+".join([*dict.fromkeys(names), *flags])
    return operator, GPU, f"{short} {form}".strip()


def name_rows(part: Part) -> Part:
    """Return the ledger's key for the rows of experts that a launch with this key computes."""
    return EXPERT_ROWS, *part[1:]


def count_recorded(launches: Sequence[Launch | Product]) -> Counter[Part]:
    """Return what a run of these launches adds to the ledger: each launch, and rows of experts."""
    counts = Counter(map(name_recorded, launches))
    for launch in launches:
        if isinstance(launch, Launch) and launch.rows:
            counts[name_rows(name_recorded(launch))] += launch.rows
    return counts


def name_recorded(launch: Launch | Product) -> Part:
    """Return the ledger's name of a launch of a recorded step."""
    if isinstance(launch, Product):
        return "linear", GPU, f"library {SHORT_NAMES.get(launch.weight_kind, launch.weight_kind)}"
    return name_launch(launch.kernel, dict(launch.variant.constants), dict(launch.variant.types))


MIN_ARRAY = 8  # smaller arrays are in another address space on Metal
# MLX writes the head of the function itself, behind our header
BOUNDS = "\n#undef __global__\n#define __global__ __attribute__((global)) __launch_bounds__({}, {})\n"


class Launcher(Launches):
    """The launcher on one target; `mx` is `mlx.core`. With `code`, MLX launches compiled code and compiles nothing."""

    def __init__(
        self,
        mx: Mlx,
        target: Target,
        emulator: Emulator | None = None,
        code: CudaCode | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._watch = watch or Watch(mx, Ledger())
        self._mx, self._target, self._code = mx, target, code
        self.emulator = (emulator or Emulator()) if target == "emulated" else None
        self.is_lazy = self.emulator is None
        self._compiled: dict[tuple[object, ...], Any] = {}
        self._codes: dict[tuple[object, ...], tuple[str, bytes]] = {}
        self._held_numbers: dict[tuple[NumberType, tuple[float, ...]], DeviceArray] = {}

    def numbers(self, *values: float) -> DeviceArray:
        """Return sizes or other numbers that a body reads at run time, as an array on the device, made once."""
        kind = self._mx.float32 if isinstance(values[0], float) else self._mx.int32
        held = self._held_numbers.get((kind, values))
        if held is None:
            held = self._mx.array([*values, *[0] * max(0, MIN_ARRAY - len(values))], kind)
            self._mx.eval(held)
            self._held_numbers[kind, values] = held
        return held

    def _launch(self, call: Call) -> list[DeviceArray]:
        if call.boxes and self.emulator is None:
            raise TypeError(f"{call.kernel.name} is only launched in recorded steps")
        if call.kernel.cuda_only and self._target == "metal":
            raise TypeError(f"{call.kernel.name} is only launched on CUDA")
        if call.kernel.metal_only and self._target == "cuda":
            raise TypeError(f"{call.kernel.name} is only launched on Metal")
        return self._watch.run(call, self._compute)

    def _compute(self, call: Call) -> list[DeviceArray]:
        if self.emulator is not None:
            return self._emulate(self.emulator, call)
        (x, y, z), kinds = call.groups, [kind for _, kind in call.outputs]
        launched: dict[str, Any] = {
            "inputs": list(call.inputs),
            "grid": (x * call.threads, y, z),
            "threadgroup": (call.threads, 1, 1),
            "output_shapes": [shape for shape, _ in call.outputs],
            "output_dtypes": kinds,
        }
        result: list[DeviceArray]
        if self._code is not None:
            found = self._codes.get(kind := call.kind)
            if found is None:
                found = self._codes[kind] = self._code.find(call.kernel, call.variant)
            name, compiled = found
            result = self._mx.fast.precompiled_cuda_kernel(
                name=name,
                compiled_source=compiled,
                scalars=[],
                shared_memory=call.room_bytes,
                ensure_row_contiguous=True,
                **launched,
            )
            return result
        input_types = tuple(name_type(array.dtype) for array in call.inputs)
        output_types, constants = tuple(map(name_type, kinds)), call.constants
        bounds = (call.threads, constants["RESIDENT"]) if self._target == "cuda" and "RESIDENT" in constants else None
        weights = frozenset(constants[key] for key in WEIGHT_TYPES if key in constants)
        key = call.kernel, input_types, output_types, bounds, call.room_bytes, weights
        made = self._compiled.get(key)
        if made is None:
            made = self._make(call.kernel, input_types + output_types, bounds, call.room_bytes, weights)
            self._compiled[key] = made
        result = made(template=[*constants.items(), *call.types.items()], **launched)
        return result

    def _make(
        self,
        kernel: Kernel,
        kinds: tuple[str, ...],
        bounds: tuple[int, int] | None,
        room_bytes: int,
        weights: frozenset[int],
    ) -> Any:
        # MLX distinguishes variants only by name and template arguments, so everything else must be part of the name
        make = self._mx.fast.cuda_kernel if self._target == "cuda" else self._mx.fast.metal_kernel
        if self._target == "metal":
            header, body = write_metal(kernel, weights)
        else:
            header, body = read_header(kernel, self._target), read_body(kernel, self._target)
        suffix = "_".join(kinds)
        if bounds is not None:
            header += BOUNDS.format(*bounds)
            suffix += "_{}_{}".format(*bounds)
        return make(
            name=f"mlxr_{kernel.name}_{suffix}",
            input_names=list(kernel.inputs),
            output_names=list(kernel.outputs),
            source=body,
            header=header,
            **({"shared_memory": room_bytes} if room_bytes and self._target == "cuda" else {}),
        )

    def _emulate(self, emulator: Emulator, call: Call) -> list[DeviceArray]:
        mx = self._mx
        made = [mx.full(shape, float("nan")).astype(kind) for shape, kind in call.outputs]  # unwritten numbers show
        mx.eval(*call.inputs, made)
        views = [*(view_in_order(mx, array) for array in call.inputs), *(view_host(mx, array) for array in made)]
        emulator.run(call.kernel, call.variant, views, call.groups, call.threads)
        return made
