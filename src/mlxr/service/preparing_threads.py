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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from mlxr.core.errors import EngineStopped
from mlxr.core.memory import return_free_memory
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
        self._long = LongWorkThreads(LONG_THREADS, "mlxr-prepare-long")

    async def run(self, work: Callable[..., T], *arguments: object, reads: object = None) -> T:
        """Do `work(*arguments)` and return what it returns. `reads` is the request, or the texts, that it reads."""
        loop = asyncio.get_running_loop()
        if weigh(reads) <= LONG_CHARACTERS:
            return await loop.run_in_executor(self._quick, work, *arguments)
        try:
            return await asyncio.wrap_future(self._long.submit(work, *arguments))
        finally:
            self._long.submit(return_free_memory)

    def stop(self) -> None:
        """Begin nothing more; what is being done is not waited for."""
        self._quick.shutdown(wait=False, cancel_futures=True)
        self._long.stop()


class LongWorkThreads:
    """Threads of the lowest priority, started when first needed.

    They are daemons: unlike those of an executor, they keep no process from ending that has megabytes left to read.
    """

    def __init__(self, count: int, name: str) -> None:
        self._waiting: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}_{index}", daemon=True) for index in range(count)
        ]
        self._lock = threading.Lock()
        self._is_started = self._is_stopped = False

    def submit(self, work: Callable[..., T], *arguments: object) -> Future[T]:
        """Return the future of what `work(*arguments)` returns; after `stop` it fails with EngineStopped."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_stopped:
                future.set_exception(EngineStopped())
                return future
            if not self._is_started:
                self._is_started = True
                for thread in self._threads:
                    thread.start()
            self._waiting.put(_Work(future, partial(work, *arguments)))
        return future

    def stop(self) -> None:
        """Refuse what waits and let the threads end; what is being done is not waited for."""
        with self._lock:
            self._is_stopped = True
            with contextlib.suppress(Empty):
                while (work := self._waiting.get_nowait()) is not None:
                    work.refuse()
            for _ in self._threads:
                self._waiting.put(None)

    def _serve(self) -> None:
        _give_way()
        while (work := self._waiting.get()) is not None:
            work.run()
            del work  # and with it what it returned, before the next one is waited for


@dataclass(frozen=True, slots=True)
class _Work:
    future: Future[Any]
    do: Callable[[], object]

    def refuse(self) -> None:
        """Let it fail with EngineStopped."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(EngineStopped())

    def run(self) -> None:
        """Do it and settle the future; nothing happens where nobody waits for it any more."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.do())
        except BaseException as error:
            self.future.set_exception(error)


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
