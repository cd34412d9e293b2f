"""The threads on which one model's requests are prepared: templates, tokens, grammars.

Each model has its own, so that what one of them has to do holds up no other. Long work has threads of the lowest
priority, because a core that reads megabytes of text would be missing in every step of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mlxr.core.memory import return_free_memory
from mlxr.core.work_threads import WorkThreads
from mlxr.service.requests import ChatRequest, TextRequest
from mlxr.service.size_bound import count_characters

T = TypeVar("T")

QUICK_THREADS, LONG_THREADS = 4, 2
LONG_CHARACTERS = 1 << 16
GRAMMAR_WEIGHT = 8  # a character of a grammar takes as long as so many of a text


class PreparingThreads:
    """Two groups of threads that prepare requests: one for short prompts and one for long ones."""

    def __init__(self) -> None:
        self._quick = WorkThreads("mlxr-prepare", QUICK_THREADS)
        self._long = WorkThreads("mlxr-prepare-long", LONG_THREADS, gives_way=True)

    async def run(self, work: Callable[..., T], *arguments: object, reads: object = None) -> T:
        """Do `work(*arguments)` and return what it returns. `reads` is the request, or the texts, that it reads."""
        if weigh(reads) <= LONG_CHARACTERS:
            return await self._quick.run(work, *arguments)
        try:
            return await self._long.run(work, *arguments)
        finally:
            self._long.submit(return_free_memory)

    def stop(self) -> None:
        """Begin nothing more; what is being done is not waited for."""
        self._quick.stop()
        self._long.stop()


def weigh(value: object) -> int:
    """Characters in a request or a JSON-like value; once it is certain that they are many, no more are counted."""
    if not isinstance(value, TextRequest | ChatRequest):
        return count_characters(value, LONG_CHARACTERS, LONG_CHARACTERS)
    grammar = 0 if value.grammar is None else GRAMMAR_WEIGHT * len(value.grammar.text)
    if isinstance(value, TextRequest):
        return grammar + weigh(value.prompt)
    tools = sum(weigh(tool.parameters) for tool in value.tools)
    return grammar + GRAMMAR_WEIGHT * tools + weigh(value.messages)
