"""The threads on which one model's requests are prepared: templates, tokens, grammars.

Each model has its own, so that what one of them has to do holds up no other. Long work has threads of the lowest
priority, because a core that reads megabytes of text would be missing in every step of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mlxr.service.requests import ChatRequest, TextRequest
from mlxr.service.size_bound import count_characters

T = TypeVar("T")

QUICK_THREADS, LONG_THREADS = 4, 2
LONG_CHARACTERS = 1 << 16
GRAMMAR_WEIGHT = 8  # a character of a grammar takes as long as so many of a text
LOWEST_PRIORITY = 19


class PreparingThreads:
    """Two groups of threads that prepare requests: one for short prompts and one for long ones."""

    def __init__(self) -> None:
        self._quick = ThreadPoolExecutor(QUICK_THREADS, "mlxr-prepare")
        self._long = ThreadPoolExecutor(LONG_THREADS, "mlxr-prepare-long", initializer=_give_way)

    async def run(self, work: Callable[..., T], *arguments: object, reads: object = None) -> T:
        """Do `work(*arguments)` and return what it returns. `reads` is the request, or the texts, that it reads."""
        threads = self._long if weigh(reads) > LONG_CHARACTERS else self._quick
        return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)

    def stop(self) -> None:
        """Begin nothing more; what is being done is not waited for."""
        for threads in (self._quick, self._long):
            threads.shutdown(wait=False, cancel_futures=True)


def weigh(value: object) -> int:
    """Characters in a request or a JSON-like value; once it is certain that they are many, no more are counted."""
    if not isinstance(value, TextRequest | ChatRequest):
        return count_characters(value, LONG_CHARACTERS)
    grammar = 0 if value.grammar is None else GRAMMAR_WEIGHT * len(value.grammar.text)
    if isinstance(value, TextRequest):
        return grammar + weigh(value.prompt)
    tools = sum(weigh(tool.parameters) for tool in value.tools)
    return grammar + GRAMMAR_WEIGHT * tools + weigh(value.messages)


def _give_way() -> None:
    """Let this thread have only the time that nobody else wants; where threads share a priority, change nothing."""
    if os.uname().sysname == "Linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
