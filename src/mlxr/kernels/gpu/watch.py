"""What runs on a GPU, told to the ledger where it is launched, and timed while somebody profiles.

A launch goes by the name of its kernel: `linear_tiles` of a q4_k weight with a gate is operator linear, variant "tiles
q4_k+gate". While profiling every launch is waited for, so that its time is its own; what would overlap does not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mlxr.kernels.gpu.kernel import Kernel, name_type
from mlxr.kernels.gpu.recording import Launch, Machine, Product, count_bytes
from mlxr.kernels.ledger import EXPERT_ROWS, MLX, Ledger, Part
from mlxr.kernels.tensor import DeviceArray

_Made = TypeVar("_Made")
GPU = "gpu"
WEIGHT_TYPES = ("TYPE_A", "TYPE_B")  # constants: numbers of types, which `Kernel.type_names` names
NUMBERS = "K"  # the type of weights or pages that are plain numbers
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


@dataclass(frozen=True, slots=True)
class Watched:
    """One timed launch, from `start_ns` to `end_ns` of the monotonic clock; bytes and multiply-adds where known."""

    part: Part
    start_ns: int
    end_ns: int
    nbytes: int = 0
    macs: int = 0
    grid: tuple[int, int, int] | None = None
    threads: int = 0


class Watch:
    """Counts launches in a ledger; `watched` has those that were timed, None while nobody profiles."""

    def __init__(self, mx: Any, ledger: Ledger) -> None:
        self._mx, self.ledger = mx, ledger
        self.watched: list[Watched] | None = None
        self._names: dict[Hashable, Part] = {}

    def run(
        self,
        kernel: Kernel,
        constants: Mapping[str, int],
        types: Mapping[str, Any],
        launch: Callable[[], Any],
        inputs: Sequence[Any],
        groups: tuple[int, int, int],
        threads: int,
        rows: int = 0,
    ) -> Any:
        """Launch, and count it, and the rows of experts that it multiplies."""
        key = kernel, tuple(constants.items()), types.get(NUMBERS)
        part = self._names.get(key)
        if part is None:
            part = self._names[key] = name_launch(kernel, constants, types)
        self.ledger.count(*part)
        if rows:
            self.ledger.count(*name_rows(part), rows)
        if self.watched is None:
            return launch()
        return self._time(part, launch, inputs, count_bytes(kernel.inputs, inputs), groups, threads)

    def run_mlx(self, operator: str, variant: str, compute: Callable[[], _Made], *inputs: DeviceArray) -> _Made:
        """Compute by MLX's own operations, and count that."""
        part = operator, MLX, variant
        self.ledger.count(*part)
        if self.watched is None:
            return compute()
        return self._time(part, compute, inputs, sum(array.nbytes for array in inputs), None, 0)

    def run_recorded(self, machine: Machine, launches: Sequence[Launch | Product], prepared: Sequence[Any]) -> None:
        """Run recorded launches one by one, waiting for each; they were prepared by themselves."""
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


def name_launch(kernel: Kernel, constants: Mapping[str, int], types: Mapping[str, Any]) -> Part:
    """What the ledger calls a launch."""
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
    """Count what one run of these launches adds to the ledger: each launch, and rows of experts."""
    counts = Counter(map(name_recorded, launches))
    for launch in launches:
        if isinstance(launch, Launch) and launch.rows:
            counts[name_rows(name_recorded(launch))] += launch.rows
    return counts


def name_recorded(launch: Launch | Product) -> Part:
    """What the ledger calls a launch of a recorded step."""
    if isinstance(launch, Product):
        return "linear", GPU, f"library {SHORT_NAMES.get(launch.weight_kind, launch.weight_kind)}"
    return name_launch(launch.kernel, dict(launch.variant.constants), dict(launch.variant.types))
