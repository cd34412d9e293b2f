"""NVIDIA's matrix products (cuBLASLt) through ctypes: what a recorded step takes for more rows than our kernels like.

For each shape the library names some algorithms; which one is taken is measured once, over weights that come from the
GPU's memory as they do in a step. Knows only addresses. The API is that of cuBLASLt 12 and later
(docs.nvidia.com/cuda/cublas).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from mlxr.core.errors import DeviceError
from mlxr.kernels.gpu.cuda.driver import CudaDriver, load_library

_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType_t
_FLOAT, _COMPUTE_FLOAT = 0, 68
_TRANSPOSE_FIRST, _TRANSPOSED = 3, 1
_WORKSPACE_ATTRIBUTE, _WORKSPACE_BYTES = 1, 32 << 20
_BATCHES, _DISTANCE = 5, 6  # cublasLtMatrixLayoutAttribute_t
_CANDIDATES, _REPEATS = 32, 3
_COLD_BYTES = 256 << 20  # of weights in turns: more than a GPU's cache keeps
_ALIKE = 1.02  # times that are taken for the same


class _Candidate(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """x (tokens, inputs) times a weight (outputs, inputs), both of type `kind`, the result too.

    With `shares`, that many results in f32, each of its own share of the inputs.
    """

    tokens: int
    outputs: int
    inputs: int
    kind: str
    shares: int

    @property
    def weight_bytes(self) -> int:
        """Size of the weight in bytes."""
        return self.outputs * self.inputs * (4 if self.kind == "float32" else 2)


@dataclass(frozen=True, slots=True)
class _Plan:
    description: c_void_p
    weight: c_void_p
    x: c_void_p
    out: c_void_p
    candidate: _Candidate


class CudaProducts:
    """Products on the driver's stream. Raises DeviceError where the library is missing."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver, self._library = driver, load_library(_NAMES)
        driver.enter()
        self._handle = c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        self._workspace = driver.allocate(_WORKSPACE_BYTES)
        self._plans: dict[Shape, _Plan] = {}

    def prepare(self, shape: Shape, runs: Sequence[Sequence[int]]) -> None:
        """Choose the algorithm for a shape, by runs over such addresses of x, a weight and the result.

        The results hold anything afterwards; nothing may be captured now.
        """
        if shape in self._plans:
            return
        runs = runs[: -(-_COLD_BYTES // shape.weight_bytes)]
        plans = self._list_plans(shape)
        self._plans[shape] = plans[choose_first([self._time(plan, runs) for plan in plans])]

    def multiply(self, shape: Shape, x: int, weight: int, out: int) -> None:
        """out (tokens, outputs), or (shares, tokens, outputs); `prepare` knows the shape."""
        self._run(self._plans[shape], x, weight, out)

    def _list_plans(self, shape: Shape) -> list[_Plan]:
        """In the library's words, whose matrices stand by columns: out = weight transposed times x."""
        kind, made = _TYPES[shape.kind], _TYPES["float32" if shape.shares else shape.kind]
        shares, tokens, outputs, inputs = max(1, shape.shares), shape.tokens, shape.outputs, shape.inputs
        each = inputs // shares
        description, preference = c_void_p(), c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(description), c_int(_COMPUTE_FLOAT), c_int(_FLOAT))
        transposed, workspace = c_int(_TRANSPOSED), c_size_t(_WORKSPACE_BYTES)
        self._call(
            "cublasLtMatmulDescSetAttribute", description, c_int(_TRANSPOSE_FIRST), byref(transposed), c_size_t(4)
        )
        weight = self._make_layout(kind, (each, outputs), inputs, shares, each)
        x = self._make_layout(kind, (each, tokens), inputs, shares, each)
        out = self._make_layout(made, (outputs, tokens), outputs, shares, outputs * tokens)
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        self._call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            c_int(_WORKSPACE_ATTRIBUTE),
            byref(workspace),
            c_size_t(ctypes.sizeof(workspace)),
        )
        candidates, count = (_Candidate * _CANDIDATES)(), c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            description,
            weight,
            x,
            out,
            out,
            preference,
            c_int(_CANDIDATES),
            candidates,
            byref(count),
        )
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        found = [candidate for candidate in candidates[: count.value] if candidate.state == 0]
        if not found:
            raise DeviceError(f"CUDA: cuBLASLt has no algorithm for {shape}")
        return [_Plan(description, weight, x, out, candidate) for candidate in found]

    def _make_layout(self, kind: int, shape: tuple[int, int], leading: int, shares: int, distance: int) -> c_void_p:
        """`shares` matrices of rows and columns, each column `leading` numbers behind the one before."""
        layout, rows, columns = c_void_p(), *map(c_uint64, shape)
        self._call("cublasLtMatrixLayoutCreate", byref(layout), c_int(kind), rows, columns, c_int64(leading))
        for attribute, value in ((_BATCHES, c_int(shares)), (_DISTANCE, c_int64(distance))):
            size = c_size_t(ctypes.sizeof(value))
            self._call("cublasLtMatrixLayoutSetAttribute", layout, c_int(attribute), byref(value), size)
        return layout

    def _time(self, plan: _Plan, runs: Sequence[Sequence[int]]) -> float:
        """Seconds of all runs, one after another; infinite where the algorithm does not run."""

        def run_all() -> None:
            for x, weight, out in runs:
                self._run(plan, x, weight, out)

        try:
            graph = self._driver.capture(run_all)
        except DeviceError:
            return math.inf
        try:
            return min(self._driver.time(graph) for _ in range(_REPEATS))
        finally:
            self._driver.drop(graph)

    def _run(self, plan: _Plan, x: int, weight: int, out: int) -> None:
        one, zero = c_float(1), c_float(0)
        self._call(
            "cublasLtMatmul",
            self._handle,
            plan.description,
            byref(one),
            c_void_p(weight),
            plan.weight,
            c_void_p(x),
            plan.x,
            byref(zero),
            c_void_p(out),
            plan.out,
            c_void_p(out),
            plan.out,
            byref(plan.candidate),
            c_void_p(self._workspace),
            c_size_t(_WORKSPACE_BYTES),
            self._driver.stream,
        )

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise DeviceError(f"CUDA: {name} failed with error {code}")


def choose_first(times_s: Sequence[float]) -> int:
    """The first that takes about as long as the fastest, so that noise seldom changes what is chosen."""
    least = min(times_s)
    return next(index for index, time_s in enumerate(times_s) if time_s <= _ALIKE * least)
