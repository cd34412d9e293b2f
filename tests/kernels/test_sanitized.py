"""Canaries: under `make sanitize` a wrong access, an overflow and a race end the process, on every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mlxr.kernels.context import ISAS, load_native

pytestmark = pytest.mark.skipif(
    not hasattr(load_native(), "read_stray"), reason="sanitizers do not watch this build; make sanitize does that"
)
SETUP = """
import sanitized_native
import numpy as np
from mlxr.kernels.context import Context
ctx = Context("cpu", threads=2, isa={isa!r})
native, runtime, array = ctx.module, ctx.native, np.zeros(256, np.uint8)
result = native.empty(runtime, 1, 64).reshape(-1).view(np.uint8)
{step}
"""
OUTSIDE, OVERFLOW, RACE = "heap-buffer-overflow", "signed integer overflow", "data race"
ADDRESS_STEPS = {
    "behind an array": ("native.read_stray(runtime, array, 256)", OUTSIDE),
    "before an array": ("native.read_stray(runtime, array, -8)", OUTSIDE),
    "behind a pool": ("native.read_stray(runtime, native.zeros(runtime, 256), 256)", OUTSIDE),
    "behind a result": ("native.read_stray(runtime, result, 253)", OUTSIDE),
    "an overflow": ("native.add_unchecked(runtime, 2**31 - 1, 1)", OVERFLOW),
}
THREAD_STEPS = {"a race": ("native.count_carelessly(runtime)", RACE)}
STEPS = THREAD_STEPS if os.environ.get("SANITIZED") == "thread" else ADDRESS_STEPS


def run(isa: str, step: str) -> subprocess.CompletedProcess[str]:
    if isa not in load_native().available_isas():
        pytest.skip(f"this machine or build lacks {isa}")
    return subprocess.run(
        [sys.executable, "-c", SETUP.format(isa=isa, step=step)], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("isa", ISAS)
def test_sound_steps_pass(isa: str) -> None:
    done = run(isa, "print(native.read_stray(runtime, array, 0), native.add_unchecked(runtime, 2, 3))")
    assert (done.returncode, done.stdout) == (0, "0 5\n"), done.stderr


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("isa", ISAS)
def test_a_canary_is_reported(isa: str, name: str) -> None:
    step, report = STEPS[name]
    done = run(isa, step)
    assert done.returncode != 0
    assert report in done.stderr
