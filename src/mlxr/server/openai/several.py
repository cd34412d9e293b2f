"""Answers to several prompts of one request, as one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from starlette.requests import Request

from mlxr.core.events import Event
from mlxr.server.finishes import take_batches
from mlxr.server.generation import Generation, start
from mlxr.service.model_pool import ModelLease
from mlxr.service.requests import TextRequest


async def start_all(request: Request, lease: ModelLease, wanted: Sequence[TextRequest]) -> list[Generation]:
    """Start the answers to all prompts at once; raises what `start` raises for the first that is refused."""
    if len(wanted) == 1:
        return [await start(request, lease, wanted[0])]
    started = await asyncio.gather(*(start(request, lease, one) for one in wanted), return_exceptions=True)
    for one in started:
        if isinstance(one, BaseException):
            raise one
    return [one for one in started if isinstance(one, Generation)]


def shift(event: Event, offset: int) -> Event:
    """The event of an answer whose prompt has others before it."""
    return replace(event, index=event.index + offset) if offset else event


async def read_in_turn(generations: Sequence[Generation], answers: int) -> list[Event]:
    """All events; answers are numbered through, `answers` to a prompt. All prompts grow at the same time."""
    return [
        shift(event, number * answers)
        for number, generation in enumerate(generations)
        for event in await generation.read_all()
    ]


async def merge(generations: Sequence[Generation], answers: int) -> AsyncGenerator[Sequence[Event], None]:
    """Batches of events as they come, numbered as by `read_in_turn`."""
    if len(generations) == 1:
        async for events in take_batches(generations[0]):
            yield events
        return
    queue: asyncio.Queue[Sequence[Event] | BaseException] = asyncio.Queue()

    async def pump(generation: Generation, offset: int) -> None:
        try:
            async for events in take_batches(generation):
                queue.put_nowait([shift(event, offset) for event in events])
            queue.put_nowait(())
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(generation, number * answers)) for number, generation in enumerate(generations)]
    try:
        growing = len(tasks)
        while growing:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            growing -= not item
            if item:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
