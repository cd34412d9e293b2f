"""The GPU kernels on every way of running them here: emulated on the host, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from gpu_cases import list_group_devices, skip_unless_emulated

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.emulator import Emulator
from mlxr.kernels.gpu.mlx import find_gpu, load_mlx


def _devices() -> list[str]:
    found = find_gpu()
    return ["emulated"] if found is None else ["emulated", found]


@cache
def _make_context(device: str) -> Context:
    return Context(device)  # type: ignore[arg-type]


def pytest_configure(config: pytest.Config) -> None:
    Emulator.usual_words = "apple" if config.getoption("--apple") else "emulated"
    wanted = config.getoption("--gpus")
    if wanted and "cuda" not in list_group_devices(wanted):
        raise pytest.UsageError(f"--gpus {wanted}: this machine shows fewer GPUs")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """With --apple, skip what only NVIDIA's GPUs launch."""
    try:
        return (yield)
    except TypeError as error:
        if Emulator.usual_words == "apple" and "is only launched on CUDA" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(autouse=True)
def _default_device(request: pytest.FixtureRequest) -> None:
    """Give each test MLX's default device, of which a process has one, as its context left it."""
    found = find_gpu()
    if found is not None:
        mx = load_mlx(found)
        params = getattr(request.node, "callspec", None)
        on_gpu = params is not None and any(isinstance(one, str) and one == found for one in params.params.values())
        mx.set_default_device(mx.gpu if on_gpu else mx.cpu)


@pytest.fixture(params=_devices())
def gpu(request: pytest.FixtureRequest) -> Context:
    """A context that runs our kernels, in the types of a new one, as a model that was opened on it had its own."""
    if request.param == "emulated":
        skip_unless_emulated()
    context = _make_context(request.param)
    context.gpu.activations = context.gpu.operands = context.gpu.mx.float32
    return context


@pytest.fixture
def sanitized() -> Context:
    """A context that runs every kernel in a process of its own under the address sanitizer."""
    skip_unless_emulated()
    return Context("emulated", emulator=Emulator(sanitize=True))
