"""Vectors of several texts for one request, computed together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.requests import Request

from mlxr.server.activity import in_flight
from mlxr.server.generation import note_prompts
from mlxr.server.streaming import until_disconnected
from mlxr.service.embedding import Pooling, Vector
from mlxr.service.model_pool import ModelLease

POOLING_HEADER = "x-mlxr-pooling"
MAX_AT_ONCE = 64  # so that one request with many texts does not fill the queue


async def embed_all(
    request: Request, lease: ModelLease, prompts: Sequence[Sequence[int]], asked: Pooling | None, field: str = "input"
) -> tuple[list[Vector], dict[str, str]]:
    """One vector (hidden,) for each prompt, not normalised, and the headers of the reply, which say how it was made.

    ClientGone when the client goes before. Raises InvalidRequest, naming `field`, for a model that pools in a way that
    mlxr has not, and what `AsyncSession.embed` raises, for the first prompt that fails; the others are given up then.
    """
    pooling = lease.session.choose_pooling(asked, field)
    note_prompts(request, lease, prompts)
    deadline_s: float | None = request.app.state.settings.request_deadline_s
    peer = in_flight(request).peer
    embed = partial(lease.session.embed, pooling=pooling, client=peer, deadline_s=deadline_s, adapter=lease.adapter)
    vectors = await until_disconnected(request, _gather(embed, prompts))
    return vectors, {POOLING_HEADER: lease.session.describe_pooling(pooling)}


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
