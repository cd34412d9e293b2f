"""NVIDIA's matrix products (cuBLASLt) through ctypes: what a recorded step takes for more rows than our kernels like.

For each shape the library names some algorithms; the fastest on the machine is measured once. Knows only addresses. The
API is that of cuBLASLt 12 and later (docs.nvidia.com/cuda/cublas).
"""

from __future__ import annotations

import ctypes
import time
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from mlxr.core.errors import DeviceError
from mlxr.kernels.gpu.cuda_driver import CudaDriver, load_library

_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType_t
_FLOAT, _COMPUTE_FLOAT = 0, 68
_TRANSPOSE_FIRST, _TRANSPOSED = 3, 1
_WORKSPACE_ATTRIBUTE, _WORKSPACE_BYTES = 1, 32 << 20
_CANDIDATES, _REPEATS = 8, 8


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
    """x (tokens, inputs) times a weight (outputs, inputs), both of type `kind`."""

    tokens: int
    outputs: int
    inputs: int
    kind: str


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

    def prepare(self, shape: Shape, x: int, weight: int, out: int) -> None:
        """Choose the algorithm for a shape, by running it over these addresses; nothing may be captured now."""
        if shape in self._plans:
            return
        plans = self._list_plans(shape)
        self._plans[shape] = min(plans, key=lambda plan: self._time(plan, x, weight, out))

    def multiply(self, shape: Shape, x: int, weight: int, out: int) -> None:
        """out (tokens, outputs), in the type of both; `prepare` knows the shape."""
        self._run(self._plans[shape], x, weight, out)

    def _list_plans(self, shape: Shape) -> list[_Plan]:
        """In the library's words, whose matrices stand by columns: out = weight transposed times x."""
        kind = _TYPES[shape.kind]
        description, preference = c_void_p(), c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(description), c_int(_COMPUTE_FLOAT), c_int(_FLOAT))
        transposed, workspace = c_int(_TRANSPOSED), c_size_t(_WORKSPACE_BYTES)
        self._call(
            "cublasLtMatmulDescSetAttribute", description, c_int(_TRANSPOSE_FIRST), byref(transposed), c_size_t(4)
        )
        weight = self._make_layout(kind, shape.inputs, shape.outputs)
        x = self._make_layout(kind, shape.inputs, shape.tokens)
        out = self._make_layout(kind, shape.outputs, shape.tokens)
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

    def _make_layout(self, kind: int, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate", byref(layout), c_int(kind), c_uint64(rows), c_uint64(columns), c_int64(rows)
        )
        return layout

    def _time(self, plan: _Plan, x: int, weight: int, out: int) -> float:
        self._run(plan, x, weight, out)
        self._driver.synchronize()
        begun = time.perf_counter()
        for _ in range(_REPEATS):
            self._run(plan, x, weight, out)
        self._driver.synchronize()
        return time.perf_counter() - begun

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
