"""The one way in which a GPU kernel is launched, whatever the target.

Metal and CUDA go through `mx.fast.metal_kernel` and `mx.fast.cuda_kernel`, which compile at the first launch of each
variant, or on CUDA through `mx.fast.precompiled_cuda_kernel` with what `cuda.code` compiled. The emulated target
computes at once. A grid is given in threadgroups of one dimension of threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlxr.kernels.gpu.cuda.code import CudaCode
from mlxr.kernels.gpu.emulated.emulator import Emulator
from mlxr.kernels.gpu.kernel import Box, Kernel, Target, Variant, name_type, read_body, read_header
from mlxr.kernels.gpu.watch import Watch
from mlxr.kernels.ledger import Ledger

MIN_ARRAY = 8  # smaller arrays lie in another address space on Metal
# MLX writes the head of the function itself, behind our header
BOUNDS = "\n#undef __global__\n#define __global__ __attribute__((global)) __launch_bounds__({}, {})\n"


class Launcher:
    """Launches kernels on one target; `mx` is `mlx.core`. With `code` MLX launches that, and compiles nothing."""

    def __init__(
        self,
        mx: Any,
        target: Target,
        emulator: Emulator | None = None,
        code: CudaCode | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._watch = watch or Watch(mx, Ledger())
        self._mx, self._target, self._code = mx, target, code
        self.emulator = (emulator or Emulator()) if target == "emulated" else None
        self._compiled: dict[tuple[Kernel, tuple[str, ...], tuple[str, ...], tuple[int, int] | None, int], Any] = {}
        self._numbers: dict[tuple[Any, tuple[float, ...]], Any] = {}

    @property
    def is_lazy(self) -> bool:
        """Whether a launch is a node of MLX's graph, computed when its results are."""
        return self.emulator is None

    def numbers(self, *values: float) -> Any:
        """Sizes or other numbers that a body reads at run time, as an array on the device, made once."""
        kind = self._mx.float32 if isinstance(values[0], float) else self._mx.int32
        held = self._numbers.get((kind, values))
        if held is None:
            held = self._mx.array([*values, *[0] * max(0, MIN_ARRAY - len(values))], kind)
            self._mx.eval(held)
            self._numbers[kind, values] = held
        return held

    def launch(
        self,
        kernel: Kernel,
        inputs: Sequence[Any],
        *,
        groups: tuple[int, int, int],
        threads: int,
        outputs: Sequence[tuple[tuple[int, ...], Any]],
        constants: Mapping[str, int] | None = None,
        types: Mapping[str, Any] | None = None,
        room_bytes: int = 0,
        boxes: Sequence[Box] = (),
    ) -> list[Any]:
        """One launch of `groups` threadgroups; `outputs` are the shape and type of each array it makes.

        A constant RESIDENT says on CUDA how many must fit on a multiprocessor, which bounds the registers of a thread.
        `room_bytes` is what a ROOM of the body takes of a threadgroup's memory. `boxes` are what the first inputs are
        brought in, which MLX cannot launch: TypeError, as for a kernel that is `cuda_only` on Metal.
        """
        if boxes and self.emulator is None:
            raise TypeError(f"{kernel.name} is only launched in recorded steps")
        if kernel.cuda_only and self._target == "metal":
            raise TypeError(f"{kernel.name} is only launched on CUDA")
        template, kinds = {"THREADS": threads, **(constants or {})}, types or {}
        result: list[Any] = self._watch.run(
            kernel,
            template,
            kinds,
            lambda: self._launch(kernel, inputs, groups, threads, outputs, template, kinds, room_bytes),
            inputs,
            groups,
            threads,
            kernel.count_rows(outputs[0][0]),
        )
        return result

    def _launch(
        self,
        kernel: Kernel,
        inputs: Sequence[Any],
        groups: tuple[int, int, int],
        threads: int,
        outputs: Sequence[tuple[tuple[int, ...], Any]],
        template: Mapping[str, int],
        types: Mapping[str, Any],
        room_bytes: int,
    ) -> list[Any]:
        if self.emulator is not None:
            return self._emulate(kernel, inputs, groups, threads, outputs, template, types)
        if self._code is not None:
            return self._launch_code(self._code, kernel, inputs, groups, threads, outputs, template, types, room_bytes)
        input_types = tuple(name_type(array.dtype) for array in inputs)
        output_types = tuple(name_type(kind) for _, kind in outputs)
        bounds = (threads, template["RESIDENT"]) if self._target == "cuda" and "RESIDENT" in template else None
        key = kernel, input_types, output_types, bounds, room_bytes
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._make(kernel, input_types + output_types, bounds, room_bytes)
        result: list[Any] = compiled(
            inputs=list(inputs),
            template=[*template.items(), *types.items()],
            grid=(groups[0] * threads, groups[1], groups[2]),
            threadgroup=(threads, 1, 1),
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[kind for _, kind in outputs],
        )
        return result

    def _launch_code(
        self,
        code: CudaCode,
        kernel: Kernel,
        inputs: Sequence[Any],
        groups: tuple[int, int, int],
        threads: int,
        outputs: Sequence[tuple[tuple[int, ...], Any]],
        constants: Mapping[str, int],
        types: Mapping[str, Any],
        room_bytes: int,
    ) -> list[Any]:
        kinds = [kind for _, kind in outputs]
        name, compiled = code.find(kernel, Variant.of(constants, types, (array.dtype for array in inputs), kinds))
        result: list[Any] = self._mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=compiled,
            inputs=list(inputs),
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=kinds,
            scalars=[],
            grid=(groups[0] * threads, groups[1], groups[2]),
            threadgroup=(threads, 1, 1),
            shared_memory=room_bytes,
            ensure_row_contiguous=True,
        )
        return result

    def _make(self, kernel: Kernel, kinds: tuple[str, ...], bounds: tuple[int, int] | None, room_bytes: int) -> Any:
        # MLX tells variants apart by name and template arguments alone, so all else must be part of the name
        make = self._mx.fast.cuda_kernel if self._target == "cuda" else self._mx.fast.metal_kernel
        header, suffix = read_header(kernel, self._target), "_".join(kinds)
        if bounds is not None:
            header += BOUNDS.format(*bounds)
            suffix += "_{}_{}".format(*bounds)
        return make(
            name=f"mlxr_{kernel.name}_{suffix}",
            input_names=list(kernel.inputs),
            output_names=list(kernel.outputs),
            source=read_body(kernel, self._target),
            header=header,
            **({"shared_memory": room_bytes} if room_bytes and self._target == "cuda" else {}),
        )

    def _emulate(
        self,
        kernel: Kernel,
        inputs: Sequence[Any],
        groups: tuple[int, int, int],
        threads: int,
        outputs: Sequence[tuple[tuple[int, ...], Any]],
        constants: Mapping[str, int],
        types: Mapping[str, Any],
    ) -> list[Any]:
        assert self.emulator is not None
        mx = self._mx
        variant = Variant.of(constants, types, (array.dtype for array in inputs), (kind for _, kind in outputs))
        made = [mx.full(shape, float("nan")).astype(kind) for shape, kind in outputs]  # what stays unwritten shows
        mx.eval(*inputs, made)
        views = [*(view_in_order(mx, array) for array in inputs), *(view_host(mx, array) for array in made)]
        self.emulator.run(kernel, variant, views, groups, threads)
        return made


def view_in_order(mx: Any, array: Any) -> np.typing.NDArray[Any]:
    """`view_host` where the numbers lie in order, so that kernels may write there; else a copy in order.

    MLX's own `contiguous` may copy what is in order, if it lies in memory that is larger than it needs.
    """
    view = view_host(mx, array)
    return view if view.flags.c_contiguous else np.ascontiguousarray(view)


def view_host(mx: Any, array: Any) -> np.typing.NDArray[Any]:
    """The memory of an evaluated array on the CPU, without a copy; bf16 as uint16."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.asarray(array)
