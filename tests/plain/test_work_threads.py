"""Threads for long work: their number, refused work, and an end that waits for none of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from mlxr.core.errors import Busy, EngineStopped, Unavailable
from mlxr.core.work_threads import Stop, WorkThreads


class Held:
    """Work that has begun and goes on until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        self.go_on.wait(60)
        return "done"


def test_work_ends_with_its_threads() -> None:
    """Running work ends with its thread and holds nobody up; waiting and later work is refused."""
    threads, work = WorkThreads("test", 1), Held()

    def fail() -> None:
        raise ValueError("wrong")

    failing, running = threads.submit(fail), threads.submit(work)
    assert work.begun.wait(10)
    waiting, unwanted = threads.submit(work), threads.submit(work)
    assert unwanted.cancel()
    threads.stop()
    late = threads.submit(work)
    work.go_on.set()
    assert running.result(10) == "done"
    assert str(failing.exception(10)) == "wrong"
    assert isinstance(waiting.exception(10), EngineStopped)
    assert isinstance(late.exception(10), EngineStopped)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("test-"))


def test_threads_are_started_as_work_comes_and_used_again() -> None:
    threads, held = WorkThreads("counted", 3), Held()
    for _ in range(5):
        threads.submit(lambda: None).result(10)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("counted")] == ["counted-1"]
    running = [threads.submit(held) for _ in range(7)]
    assert threads.busy <= 3
    assert sum(thread.name.startswith("counted") for thread in threading.enumerate()) == 3
    held.go_on.set()
    assert [future.result(10) for future in running] == ["done"] * 7
    threads.stop()


def test_more_than_may_wait_is_refused_with_what_helps() -> None:
    threads = WorkThreads("test", 1, max_waiting=1, what="pulls", remedy="wait for one")
    held = Held()
    first = threads.submit(held)
    assert held.begun.wait(10)
    second, third = threads.submit(held), threads.submit(held)
    with pytest.raises(Busy, match="1 pulls are under way and 1 wait, no more may be; wait for one"):
        third.result(10)
    held.go_on.set()
    assert (first.result(10), second.result(10)) == ("done", "done")
    assert threads.submit(lambda: 1).result(10) == 1
    threads.stop()


def test_who_waited_too_long_is_refused() -> None:
    now = [0.0]
    threads = WorkThreads(
        "test", 1, patience_s=4.0, remedy="the catalogue is held", refusal=Unavailable, clock=lambda: now[0]
    )
    held = Held()
    first = threads.submit(held)
    assert held.begun.wait(10)
    second = threads.submit(held)
    now[0] = 5.0
    third = threads.submit(held)
    held.go_on.set()
    assert (first.result(10), third.result(10)) == ("done", "done")
    with pytest.raises(Unavailable, match="the catalogue is held"):
        second.result(10)
    threads.stop()


def test_work_is_told_when_nobody_waits_any_more() -> None:
    begun, seen, cut = threading.Event(), threading.Event(), threading.Event()

    def work(stop: Stop) -> None:
        begun.set()
        with stop.cutting(cut.set):  # stands for a socket that is shut
            cut.wait(60)
        if stop.is_set():
            seen.set()

    async def run() -> None:
        threads = WorkThreads("test", 1)
        task = threads.start(work)
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.wait({task})
        threads.stop()

    asyncio.run(run())
    assert seen.wait(10)


def test_a_loop_and_a_process_end_without_work_that_hangs() -> None:
    """`asyncio.to_thread` on these threads keeps nothing alive, unlike on Python's own."""
    program = (
        "import asyncio, threading\n"
        "from mlxr.core.work_threads import QuickExecutor, WorkThreads\n"
        "async def main():\n"
        "    asyncio.get_running_loop().set_default_executor(QuickExecutor(WorkThreads('quick', 2)))\n"
        "    assert await asyncio.to_thread(lambda: 5) == 5\n"
        "    begun = threading.Event()\n"
        "    asyncio.ensure_future(asyncio.to_thread(lambda: (begun.set(), threading.Event().wait())))\n"
        "    while not begun.is_set():\n"
        "        await asyncio.sleep(0.001)\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
