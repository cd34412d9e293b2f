"""The surroundings of a comparison: the device's name and copy rate, versions, and the missing peers."""

from __future__ import annotations

import importlib.util
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from gpu_comparison.cases import LLAMA_CPP, MLX_LM, TRANSFORMERS, VLLM

MODULES = {MLX_LM: ("mlx_lm",), TRANSFORMERS: ("torch", "transformers"), VLLM: ("vllm",)}
COPY_NUMBERS = 1 << 30


def find_missing(without: list[str], tools: str = "") -> dict[str, str]:
    """The reasons why peers are left out, by name."""
    skipped = {} if tools else {LLAMA_CPP: "not asked for"}
    for name, modules in MODULES.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if name in without:
            skipped[name] = "not asked for"
        elif missing:
            skipped[name] = f"{' and '.join(missing)} not installed"
    return skipped


def measure_copy() -> float:
    """The bytes per second that a large copy on the GPU reads and writes. The process stays on the GPU from then on."""
    import mlx.core as mx

    mx.set_default_device(mx.gpu)
    array = mx.random.normal((COPY_NUMBERS,)).astype(mx.bfloat16)
    mx.eval(array)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        mx.eval(mx.abs(array))
        mx.synchronize()
        times.append(time.perf_counter() - start)
    del array
    mx.clear_cache()
    return 2 * 2 * COPY_NUMBERS / min(times)


def name_device(device: str) -> str:
    """The GPU's own name, and the driver's version if it can be asked."""
    if device == "cuda":
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        except (OSError, subprocess.SubprocessError):
            return "an NVIDIA GPU"
        name, _, driver = said.splitlines()[0].partition(", ")
        return f"{name} (driver {driver})"
    if device == "metal":
        import mlx.core as mx

        return str(mx.device_info().get("device_name", "an Apple GPU"))
    return device


def read_versions(skipped: Mapping[str, str]) -> dict[str, str]:
    """The versions of the engines that take part."""
    packages = {"mlxr": "mlxr", "MLX": "mlx"}
    if MLX_LM not in skipped:
        packages["mlx-lm"] = "mlx-lm"
    if TRANSFORMERS not in skipped:
        packages |= {"transformers": "transformers", "PyTorch": "torch"}
    if VLLM not in skipped:
        packages |= {"vLLM": "vllm", "PyTorch": "torch"}
    found = {}
    for name, package in packages.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = "from source"
    return found
