"""MLX, if it is installed: its module, the GPU that it finds here, and the memory of that GPU.

The workspace is all memory except weights and arena: the arrays of a step of many tokens, which are bounded since the
host is at most a few layers ahead of the device (`Gpu.start`); what is held for good (memory of recorded steps,
expanded weights); and OTHER_BYTES. MLX keeps freed arrays for reuse, at most as many bytes as the workspace. This
module knows no kernels.
"""

# ruff: noqa: D102 -- functions of `mlx.core` are described there
from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import DeviceError, name_install
from mlxr.kernels.tensor import DeviceArray, NumberType


# fmt: off
class FastMlx(Protocol):
    """The part of `mlx.core.fast` that is used here."""

    metal_kernel: Callable[..., Any]
    cuda_kernel: Callable[..., Any]
    precompiled_cuda_kernel: Callable[..., Any]

    def rms_norm(self, x: DeviceArray, weight: DeviceArray | None, eps: float) -> DeviceArray: ...
    def layer_norm(
        self, x: DeviceArray, weight: DeviceArray | None, bias: DeviceArray | None, eps: float
    ) -> DeviceArray: ...
    def scaled_dot_product_attention(
        self, q: DeviceArray, k: DeviceArray, v: DeviceArray, *, scale: float, mask: DeviceArray | str | None,
        sinks: DeviceArray | None
    ) -> DeviceArray: ...


class Mlx(Protocol):
    """The part of the module `mlx.core` that is used here."""

    fast: FastMlx
    float32: NumberType
    float16: NumberType
    bfloat16: NumberType
    int32: NumberType
    int64: NumberType
    uint8: NumberType
    uint16: NumberType
    inf: float
    cpu: object
    gpu: object

    # devices, evaluation and memory
    def set_default_device(self, device: object) -> None: ...
    def device_info(self) -> Mapping[str, Any]: ...
    def get_active_memory(self) -> int: ...
    def get_cache_memory(self) -> int: ...
    def get_memory_limit(self) -> int: ...
    def set_cache_limit(self, nbytes: int) -> int: ...
    def set_wired_limit(self, nbytes: int) -> int: ...
    def clear_cache(self) -> None: ...
    def eval(self, *arrays: object) -> None: ...
    def async_eval(self, *arrays: object) -> None: ...
    def synchronize(self) -> None: ...
    def compile(self, function: Callable[..., Any], inputs: object = None, outputs: object = None) -> Any: ...

    # arrays
    def array(self, values: object, dtype: NumberType | None = None) -> DeviceArray: ...
    def arange(self, start: int, stop: int | None = None, *, dtype: NumberType | None = None) -> DeviceArray: ...
    def zeros(self, shape: Sequence[int], dtype: NumberType) -> DeviceArray: ...
    def full(self, shape: Sequence[int], value: float, dtype: NumberType | None = None) -> DeviceArray: ...
    def broadcast_to(self, x: DeviceArray, shape: Sequence[int]) -> DeviceArray: ...
    def concatenate(self, arrays: Sequence[DeviceArray], axis: int = 0) -> DeviceArray: ...
    def stack(self, arrays: Sequence[DeviceArray], axis: int = 0) -> DeviceArray: ...
    def flatten(self, x: DeviceArray) -> DeviceArray: ...
    def pad(self, x: DeviceArray, width: Sequence[tuple[int, int]]) -> DeviceArray: ...
    def repeat(self, x: DeviceArray, repeats: int, axis: int) -> DeviceArray: ...
    def tile(self, x: DeviceArray, reps: int) -> DeviceArray: ...
    def take(self, x: DeviceArray, indices: DeviceArray, axis: int | None = None) -> DeviceArray: ...
    def take_along_axis(self, x: DeviceArray, indices: DeviceArray, axis: int) -> DeviceArray: ...
    def sort(self, x: DeviceArray, axis: int = -1) -> DeviceArray: ...
    def argsort(self, x: DeviceArray, axis: int = -1) -> DeviceArray: ...
    def argmax(self, x: DeviceArray, axis: int | None = None) -> DeviceArray: ...
    def where(
        self, condition: DeviceArray, x: float | DeviceArray, y: float | DeviceArray
    ) -> DeviceArray: ...

    # numbers
    def abs(self, x: DeviceArray) -> DeviceArray: ...
    def clip(self, x: DeviceArray, low: float | None, high: float | None) -> DeviceArray: ...
    def erf(self, x: DeviceArray) -> DeviceArray: ...
    def exp(self, x: DeviceArray) -> DeviceArray: ...
    def expm1(self, x: DeviceArray) -> DeviceArray: ...
    def sigmoid(self, x: DeviceArray) -> DeviceArray: ...
    def square(self, x: DeviceArray) -> DeviceArray: ...
    def tanh(self, x: DeviceArray) -> DeviceArray: ...
    def max(self, x: DeviceArray, axis: int, keepdims: bool = False) -> DeviceArray: ...
    def maximum(self, x: DeviceArray, y: float | DeviceArray) -> DeviceArray: ...
    def minimum(self, x: DeviceArray, y: float | DeviceArray) -> DeviceArray: ...
    def logsumexp(self, x: DeviceArray, axis: int, keepdims: bool = False) -> DeviceArray: ...
    def softmax(self, x: DeviceArray, axis: int, precise: bool = False) -> DeviceArray: ...
    def addmm(self, c: DeviceArray, a: DeviceArray, b: DeviceArray) -> DeviceArray: ...
    def gather_mm(self, a: DeviceArray, b: DeviceArray, *, rhs_indices: DeviceArray) -> DeviceArray: ...
# fmt: on


# MLX makes CUDA graphs of its operations, new ones for each shape of a prompt, which took longer than the prompt's
# kernels (docs/gpu.md). Our own recorded steps are graphs without that.
CUDA_GRAPHS, OFF = "MLX_USE_CUDA_GRAPHS", "0"
# On Metal MLX ends a command buffer after 40 launches, or after inputs of 40 million numbers, which it takes for bytes:
# our weights are bytes, so that was after one or two products.
METAL_BUFFERS = {"MLX_MAX_OPS_PER_BUFFER": "100", "MLX_MAX_MB_PER_BUFFER": "400"}
OLDEST_ON_METAL = (0, 32, 1)  # older ones found compiled kernels by names that our kernels share


def _remedy(device: str) -> str:
    if device == "metal":
        return f"pip install 'mlx>={'.'.join(map(str, OLDEST_ON_METAL))}' (on a Mac with Apple silicon)"
    if device == "cuda":
        return f"{name_install('cuda')} (needs an NVIDIA driver)"
    return name_install("mlx-cpu")


def load_mlx(device: str) -> Mlx:
    """Return `mlx.core` for `device`. Raises DeviceError with the remedy if it is missing or lacks the device.

    On CUDA, MLX then launches its kernels one by one, and on Metal many in a buffer, unless environment variables are
    set.
    """
    for name, value in {"cuda": {CUDA_GRAPHS: OFF}, "metal": METAL_BUFFERS}.get(device, {}).items():
        os.environ.setdefault(name, value)
    try:
        mx = importlib.import_module("mlx.core")
    except ImportError as error:
        raise DeviceError(f"device {device!r} needs mlx, which did not load ({error}); {_remedy(device)}") from error
    if device in ("metal", "cuda") and not getattr(mx, device).is_available():
        raise DeviceError(f"device {device!r}: the mlx installed here finds no such device; {_remedy(device)}")
    if device == "metal" and (found := version("mlx")) and _read_version(found) < OLDEST_ON_METAL:
        raise DeviceError(f"device {device!r}: mlx {found} is too old; {_remedy(device)}")
    return cast(Mlx, mx)


def _read_version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[: len(OLDEST_ON_METAL)])


def find_gpu() -> str | None:
    """Return the GPU device, "metal" or "cuda", that an installed mlx can use here, if there is one."""
    try:
        mx = importlib.import_module("mlx.core")
    except ImportError:
        return None
    return next((name for name in ("metal", "cuda") if getattr(mx, name).is_available()), None)


OTHER_BYTES = 64 * 2**20  # logits of some rows, rotation tables, the arrays of a batch
LOADING_BYTES = 512 * 2**20  # most bytes of freed arrays that MLX may keep before the first step


def read_free_bytes(mx: Mlx, device: str) -> int | None:
    """Return the bytes that arrays on the GPU may still take, with those MLX keeps for reuse; None if unknown."""
    info = mx.device_info()
    if device == "cuda":
        free_bytes = info.get("free_memory")
        if free_bytes is None:
            return None
        rest_bytes = int(mx.get_memory_limit() - mx.get_active_memory())
        return max(0, min(int(free_bytes) + int(mx.get_cache_memory()), rest_bytes))
    limit_bytes = info.get("max_recommended_working_set_size")
    return None if limit_bytes is None else max(0, int(limit_bytes) - int(mx.get_active_memory()))


class Workspace:
    """The workspace of the largest step so far; `count_held` returns the bytes that are held for good."""

    def __init__(self, mx: Mlx, count_held: Callable[[], int]) -> None:
        self._mx, self._count_held = mx, count_held
        self._step_bytes = self._full_bytes = 0
        mx.set_cache_limit(LOADING_BYTES)

    @property
    def nbytes(self) -> int:
        """Bytes of the workspace."""
        return OTHER_BYTES + self._step_bytes + self._count_held()

    def cover(self, step_bytes: int, layer_bytes: int) -> None:
        """Begin a step, whose arrays take `step_bytes` with the last layer's `layer_bytes`, and make room for it."""
        self._full_bytes = self._mx.get_active_memory() + step_bytes - layer_bytes
        if step_bytes > self._step_bytes:
            self._step_bytes = step_bytes
            self._mx.set_cache_limit(self.nbytes)
            self._mx.clear_cache()  # loading has left arrays there, which may be in host memory

    @property
    def is_full(self) -> bool:
        """True if there is no room for another layer of the step, because used arrays have not been freed yet."""
        return bool(self._mx.get_active_memory() > self._full_bytes)


def view_in_order(mx: Mlx, array: DeviceArray) -> npt.NDArray[Any]:
    """Return `view_host` of a contiguous array, so that kernels may write there; otherwise a contiguous copy.

    MLX's own `contiguous` may copy even a contiguous array, if its memory is larger than it needs.
    """
    view = view_host(mx, array)
    return view if view.flags.c_contiguous else np.ascontiguousarray(view)


def view_host(mx: Mlx, array: DeviceArray) -> npt.NDArray[Any]:
    """Return the memory of an evaluated array on the CPU, without a copy; bf16 as uint16."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.asarray(array)
