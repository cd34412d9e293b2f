"""The native runtime: threads that come and go, processes that fork, and the interpreter's lock."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("mlxr._native", reason="the native module is not built")

COLUMNS = 256
TASKS = Path("/proc/self/task")  # where Linux has a process's threads


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
    gc.collect()  # other tests' runtimes
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


@pytest.mark.skipif(not TASKS.is_dir(), reason="only Linux tells what each thread used")
def test_idle_threads_use_no_processor() -> None:
    """Threads sleep when there has been no work for a while."""
    others = {task.name for task in TASKS.iterdir()}
    runtime = native.Runtime(4, native.best_isa())
    make_product(runtime)()
    own = [task for task in TASKS.iterdir() if task.name not in others]
    assert len(own) >= 3

    def read_used_s() -> float:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in own) / 1e9

    time.sleep(0.05)  # threads that still wait are awake for this long
    before_s, start_s = read_used_s(), time.perf_counter()
    time.sleep(0.4)
    assert read_used_s() - before_s < 0.01 * (time.perf_counter() - start_s)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no processor affinity on this system")
@pytest.mark.parametrize("processors", [1, 2])
def test_more_threads_than_processors_make_progress(processors: int) -> None:
    """Two runtimes of four threads each compute at once on one or two processors: waiting threads give way."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(allowed)[:processors]))  # of this thread, and so of those it starts
    try:
        products = [make_product(native.Runtime(4, native.best_isa())) for _ in range(2)]
        firsts = [product() for product in products]
        same: list[bool] = []

        def work(index: int) -> None:
            same.extend(products[index]() == firsts[index] for _ in range(100))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert same == [True] * 200
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no processor affinity on this system")
def test_no_thread_leaves_the_processors_allowed() -> None:
    """Moving threads apart respects the affinity of the moment, which stays as it was set."""
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    os.sched_setaffinity(0, one)
    try:
        others = set(os.listdir("/proc/self/task"))
        multiply = make_product(native.Runtime(3, native.best_isa()))
        for pause_s in (0.0, 0.002, 0.01):
            multiply()
            time.sleep(pause_s)
        assert native.default_threads() == 1
        own = set(os.listdir("/proc/self/task")) - others
        assert len(own) == 2
        assert all(os.sched_getaffinity(int(task)) == one for task in own)
    finally:
        os.sched_setaffinity(0, allowed)


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
    assert ticks > 40  # if the lock were held, there would be one per product
