"""The GPU kernels on every way of running them here: emulated on the host, and on a GPU where there is one."""

from __future__ import annotations

from functools import cache

import pytest

from mlxr.core.errors import DeviceError
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.device import find_gpu, load_mlx
from mlxr.kernels.gpu.emulator import Emulator, find_compiler


def _devices() -> list[str]:
    found = find_gpu()
    return ["emulated"] if found is None else ["emulated", found]


@cache
def _make_context(device: str) -> Context:
    return Context(device)  # type: ignore[arg-type]


def skip_unless_emulated() -> None:
    """Skip with the reason where kernels cannot be emulated."""
    try:
        load_mlx("emulated")
        find_compiler()
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture(params=_devices())
def gpu(request: pytest.FixtureRequest) -> Context:
    """A context that runs our kernels."""
    if request.param == "emulated":
        skip_unless_emulated()
    return _make_context(request.param)


@pytest.fixture
def sanitized() -> Context:
    """A context that runs every kernel in a process of its own under the address sanitizer."""
    skip_unless_emulated()
    return Context("emulated", emulator=Emulator(sanitize=True))
