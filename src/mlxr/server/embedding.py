"""Vectors of several texts for one request, computed together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal

from starlette.requests import Request

from mlxr.server.activity import in_flight
from mlxr.server.generation import note_prompts
from mlxr.server.streaming import until_disconnected
from mlxr.service.embedding import Vector
from mlxr.service.model_pool import ModelLease

MAX_AT_ONCE = 64  # so that one request with many texts does not fill the queue


async def embed_all(
    request: Request, lease: ModelLease, prompts: Sequence[Sequence[int]], pooling: Literal["mean", "last"]
) -> list[Vector]:
    """One vector (hidden,) for each prompt, not normalised; ClientGone when the client goes before.

    Raises what `AsyncSession.embed` raises, for the first prompt that fails; the others are given up then.
    """
    note_prompts(request, lease, prompts)
    deadline_s: float | None = request.app.state.settings.request_deadline_s
    peer = in_flight(request).peer
    embed = partial(lease.session.embed, pooling=pooling, client=peer, deadline_s=deadline_s, adapter=lease.adapter)
    return await until_disconnected(request, _gather(embed, prompts))


async def _gather(
    embed: Callable[[Sequence[int]], Awaitable[Vector]], prompts: Sequence[Sequence[int]]
) -> list[Vector]:
    room = asyncio.Semaphore(MAX_AT_ONCE)

    async def embed_in_turn(prompt: Sequence[int]) -> Vector:
        async with room:
            return await embed(prompt)

    tasks = [asyncio.ensure_future(embed_in_turn(prompt)) for prompt in prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
