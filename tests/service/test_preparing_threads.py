"""Long preparations have threads of their own, which get only time that no other thread wants."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import threading

import pytest

from mlxr.core.memory import _find, return_free_memory
from mlxr.core.types import Grammar, SamplingParams
from mlxr.core.work_threads import LEAST_URGENT
from mlxr.service.preparation import GRAMMAR_WEIGHT, LONG_CHARACTERS, QUICK_NICENESS, PreparingThreads, weigh
from mlxr.service.requests import ChatRequest, TextRequest, Tool


def test_requests_weigh_what_has_to_be_read() -> None:
    params, grammar = SamplingParams(), Grammar("regex", "a" * 10)
    assert weigh(TextRequest("abc", params)) == 3
    assert weigh(TextRequest([1, 2, 3], params, grammar=grammar)) == 10 * GRAMMAR_WEIGHT
    messages = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
    many = list(range(LONG_CHARACTERS + 1))
    assert weigh(TextRequest(many, params)) > LONG_CHARACTERS, "and none of them is looked at"
    assert weigh({"context": many[1:]}) == 0
    tool = Tool("t", parameters={"type": "object"})
    assert weigh(ChatRequest(messages, params, tools=[tool])) == len("usertextabc") + GRAMMAR_WEIGHT * len("object")


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")
def test_preparing_gives_way_to_computing() -> None:
    def look() -> tuple[str, int]:
        return threading.current_thread().name, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def run() -> None:
        threads = PreparingThreads()
        name, priority = await threads.run(look, reads="x" * LONG_CHARACTERS)
        own_priority = os.getpriority(os.PRIO_PROCESS, 0)
        assert priority == min(own_priority + QUICK_NICENESS, LEAST_URGENT)
        assert "long" not in name
        long_name, long_priority = await threads.run(look, reads=["x" * LONG_CHARACTERS, "x"])
        assert "long" in long_name
        assert long_priority == LEAST_URGENT
        threads.stop()

    asyncio.run(run())


def test_memory_goes_back_to_the_system() -> None:
    return_free_memory()  # must not fail where the C library has no such call
    assert (_find("malloc_trim") is not None) == (platform.libc_ver()[0] == "glibc")
    assert _find("no_such_function") is None
