"""MLX, where it is installed: its module, and the GPU that it finds here. Knows neither kernels nor arrays."""

from __future__ import annotations

import importlib
import os
import re
from importlib.metadata import version
from typing import Any

from mlxr.core.errors import DeviceError, name_install

# MLX makes CUDA graphs of the operations it is given, which the shapes of prompts make anew: that took longer than the
# kernels of a prompt (docs/gpu.md). Our own steps are graphs without it.
CUDA_GRAPHS, OFF = "MLX_USE_CUDA_GRAPHS", "0"
OLDEST_ON_METAL = (0, 32, 1)  # before, it found compiled kernels by names that ours share


def _remedy(device: str) -> str:
    if device == "metal":
        return f"pip install 'mlx>={'.'.join(map(str, OLDEST_ON_METAL))}' (on a Mac with Apple silicon)"
    if device == "cuda":
        return f"{name_install('cuda')} (needs an NVIDIA driver)"
    return name_install("mlx-cpu")


def load_mlx(device: str) -> Any:
    """`mlx.core` for `device`; DeviceError with the remedy where it is missing or lacks the device.

    On CUDA, MLX then launches its kernels one by one, unless the environment sets CUDA_GRAPHS.
    """
    if device == "cuda":
        os.environ.setdefault(CUDA_GRAPHS, OFF)
    try:
        mx = importlib.import_module("mlx.core")
    except ImportError as error:
        raise DeviceError(f"device {device!r} needs mlx, which did not load ({error}); {_remedy(device)}") from error
    if device in ("metal", "cuda") and not getattr(mx, device).is_available():
        raise DeviceError(f"device {device!r}: the mlx installed here finds no such device; {_remedy(device)}")
    if device == "metal" and (found := version("mlx")) and _read_version(found) < OLDEST_ON_METAL:
        raise DeviceError(f"device {device!r}: mlx {found} is too old; {_remedy(device)}")
    return mx


def _read_version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[: len(OLDEST_ON_METAL)])


def find_gpu() -> str | None:
    """The GPU device that an installed mlx can use here, if there is one."""
    try:
        mx = importlib.import_module("mlx.core")
    except ImportError:
        return None
    return next((name for name in ("metal", "cuda") if getattr(mx, name).is_available()), None)
