"""A stand-in for `mlx.core` on a Mac: it records launched kernels as MLX would compile them, and returns zeros. So the
whole path of a Mac, `mx.compile` included, runs on other machines.

MLX writes the code around a body in its backend/common/metal_kernel.cpp (`write_signature`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from mlxr.kernels.gpu.recording import count_bytes

MOST_CONSTANT = 7  # numbers of an input that MLX puts into the constant address space
MEMORY_BYTES = 24 << 30
_TYPES = {
    "float16": "float16_t", "float32": "float", "bfloat16": "bfloat16_t", "bool": "bool",
    **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip
# The place of a thread: MLX declares the names that the source uses.
_PLACES = {
    "dispatch_quadgroups_per_threadgroup": "uint", "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3", "grid_origin": "uint3", "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint", "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint", "simdgroups_per_threadgroup": "uint", "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint", "thread_index_in_simdgroup": "uint", "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3", "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3", "threadgroups_per_grid": "uint3", "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint", "threads_per_threadgroup": "uint3",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """A source for MLX: `header`, then `signature` as a template of `constants` (kind, name, value), and `body`.

    `name` is the function's, `kernel` ours. `buffers` and `threads` are what it is launched with.
    """

    kernel: str
    name: str
    header: str
    constants: tuple[tuple[str, str, str], ...]
    signature: str
    body: str
    buffers: int
    threads: int

    @property
    def text(self) -> str:
        """The whole source, the way MLX writes it."""
        values = ", ".join(value for _, _, value in self.constants)
        head = ", ".join(f"{kind} {name}" for kind, name, _ in self.constants)
        made = f"{self.name}<{values}>"
        return (
            f"{self.header}\ntemplate <{head}>\n{self.signature}{self.body}\n}}\n\n"
            f'template [[host_name("{self.name}")]] [[kernel]] decltype({made}) {made};\n'
        )


class StandIn(ModuleType):
    """`mlx.core` whose GPU is the CPU. `sources` are the variants that were launched, by name, `launches` their names
    in order, `moved` the bytes of their inputs but for pages, and of their outputs, `threads` the names of those that
    launched, `waits` counts calls of `synchronize`, `wired` is the last limit of memory that stays, and `architecture`
    what MLX would call the GPU."""

    def __init__(self, real: Any) -> None:
        super().__init__("mlx.core")
        self._real = real
        self.sources: dict[str, Source] = {}
        self.launches: list[str] = []
        self.moved: list[tuple[int, int]] = []
        self.threads: set[str] = set()
        self.waits = self.wired = 0
        self.architecture = "applegpu_g16g"
        self.gpu = real.cpu
        self.metal = SimpleNamespace(is_available=lambda: True)
        names = [name for name in dir(real.fast) if not name.startswith("_")]
        self.fast = SimpleNamespace(**{name: getattr(real.fast, name) for name in names})
        self.fast.metal_kernel = lambda **given: _Kernel(self, **given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def device_info(self, *_: Any) -> dict[str, Any]:
        return {
            "device_name": "Apple M4",
            "architecture": self.architecture,
            "memory_size": MEMORY_BYTES,
            "max_buffer_length": MEMORY_BYTES,
            "max_recommended_working_set_size": MEMORY_BYTES * 2 // 3,
        }

    def set_wired_limit(self, nbytes: int) -> None:
        self.wired = nbytes

    def synchronize(self, *_: Any) -> None:
        self.waits += 1
        self._real.synchronize()


class _Kernel:
    """A stand-in for what `mx.fast.metal_kernel` returns."""

    def __init__(
        self,
        mx: StandIn,
        *,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
    ) -> None:
        self._mx, self._name, self._header, self._body = mx, name, header, source
        self._inputs, self._outputs = input_names, output_names

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[Any],
    ) -> list[Any]:
        assert len(inputs) == len(self._inputs), self._name
        assert len(output_shapes) == len(output_dtypes) == len(self._outputs), self._name
        assert min(grid) > 0, self._name
        source = self._write(inputs, output_dtypes, template, threadgroup[0] * threadgroup[1] * threadgroup[2])
        known = self._mx.sources.setdefault(source.name, source)
        assert (known.header, known.body) == (source.header, source.body), "MLX tells variants apart by their names"
        self._mx.launches.append(source.name)
        self._mx.threads.add(threading.current_thread().name)
        made = [self._mx.zeros(shape, kind) for shape, kind in zip(output_shapes, output_dtypes, strict=True)]
        self._mx.moved.append((count_bytes(self._inputs, inputs), sum(array.nbytes for array in made)))
        return made

    def _write(
        self, inputs: Sequence[Any], kinds: Sequence[Any], template: Sequence[tuple[str, Any]], threads: int
    ) -> Source:
        constants = tuple(_write_constant(name, value) for name, value in template)
        name = "_".join(["custom_kernel", self._name, *(value for _, _, value in constants)])
        arguments: list[str] = []
        for own, array in zip(self._inputs, inputs, strict=True):
            is_constant = array.size <= MOST_CONSTANT
            space, form = "constant" if is_constant else "device", "*" if array.ndim else "&"
            name += f"_{_name_type(array.dtype)}{'s' if not array.ndim else 'c' if is_constant else ''}"
            arguments.append(f"const {space} {_name_type(array.dtype)}{form} {own}")
            told = {"shape": "constant int*", "strides": "constant int64_t*", "ndim": "constant int&"}
            arguments += [
                f"const {kind} {own}_{what}"
                for what, kind in told.items()
                if array.ndim and f"{own}_{what}" in self._body
            ]
        for own, kind in zip(self._outputs, kinds, strict=True):
            arguments.append(f"device {_name_type(kind)}* {own}")
            name += f"_{_name_type(kind)}"
        numbered = [f"{argument} [[buffer({index})]]" for index, argument in enumerate(arguments)]
        places = [f"{kind} {place} [[{place}]]" for place, kind in _PLACES.items() if place in self._body]
        signature = f"[[kernel]] void {name}(\n  " + ",\n  ".join([*numbered, *places]) + ") {\n"
        kernel = self._name.removeprefix("mlxr_")
        return Source(kernel, name, self._header, constants, signature, self._body, len(arguments), threads)


def _name_type(kind: Any) -> str:
    return _TYPES[str(kind).rpartition(".")[2]]


def _write_constant(name: str, value: Any) -> tuple[str, str, str]:
    if isinstance(value, bool):
        return "bool", name, str(int(value))
    return ("int", name, str(value)) if isinstance(value, int) else ("typename", name, _name_type(value))


@contextmanager
def stand_in() -> Iterator[StandIn]:
    """Put a stand-in in the place of `mlx.core`; afterwards it is MLX again, on the device that it had."""
    import mlx
    import mlx.core as real

    made, device = StandIn(real), real.default_device()
    with mock.patch.dict(sys.modules, {"mlx.core": made}), mock.patch.object(mlx, "core", made):
        yield made
    real.set_default_device(device)
