"""The native runtime: threads that come and go, processes that fork, and the interpreter's lock."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("mlxr._native", reason="the native module is not built")

COLUMNS = 256


def make_product(runtime: Any) -> Any:
    """A product large enough to use all threads, as a function without arguments."""
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (512, COLUMNS // 32, 34), dtype=np.uint8)
    raw[:, :, :2] = np.array([0.01], np.float16).view(np.uint8)
    weight = native.LinearWeight(COLUMNS)
    weight.append(runtime, "q8_0", 512, raw.reshape(-1), None)
    x = rng.standard_normal((64, COLUMNS)).astype(np.float32)

    def multiply() -> bytes:
        out = np.empty((64, 512), np.float32)
        native.linear(runtime, x, weight, out)
        return out.tobytes()

    return multiply


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_threads_end_with_their_runtime() -> None:
    before = count_threads()
    runtime = native.Runtime(5, "portable")
    assert count_threads() == before + 4
    make_product(runtime)()
    del runtime
    gc.collect()
    assert count_threads() == before


def test_work_after_a_long_sleep() -> None:
    """Threads sleep when there is nothing to do, and wake for the next call."""
    multiply = make_product(native.Runtime(3, native.best_isa()))
    first = multiply()
    for pause_s in (0.0, 0.001, 0.05):
        time.sleep(pause_s)
        assert multiply() == first


def test_many_short_sections() -> None:
    multiply = make_product(native.Runtime(4, native.best_isa()))
    first = multiply()
    assert all(multiply() == first for _ in range(300))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_works_alone_with_the_same_results() -> None:
    """The child has lost the threads: it computes on its own, and ends without waiting for them."""
    multiply = make_product(native.Runtime(3, native.best_isa()))
    first = multiply()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if multiply() == first else 2
            del multiply
            gc.collect()
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert multiply() == first


def test_the_interpreter_runs_while_kernels_do() -> None:
    """The lock of the interpreter is given back during a product."""
    multiply = make_product(native.Runtime(1, "portable"))
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0)

    thread = threading.Thread(target=tick)
    thread.start()
    for _ in range(20):
        multiply()
    stop.set()
    thread.join()
    assert ticks > 40  # with the lock held there would be one per product
