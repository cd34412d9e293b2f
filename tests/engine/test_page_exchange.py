"""Two engines with one model: the other takes over what one has computed, between the steps of both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache

import pytest
from fake_model import FULL, STATE, FakeConfig, FakeModel, expect_greedy, make_engine
from token_stream import TokenStream

from mlxr.cache.shapes import CacheShape, LayerCache
from mlxr.cache.store import prove_entry
from mlxr.cluster.page_exchange import PageExchange
from mlxr.core.types import SamplingParams
from mlxr.engine.engine_thread import EngineThread
from mlxr.engine.request import EngineRequest

KINDS: dict[str, tuple[LayerCache, ...]] = {
    "full": (FULL, FULL),
    "hybrid": (STATE, FULL, STATE),
    "states": (STATE,),
    "window": (CacheShape(2, 4, window=6), STATE, FULL),
}
PROMPT = [index * 7 % 50 for index in range(41)]  # ten pages and a token


def open_async(kind: str) -> EngineThread:
    """Open an engine with room for all requests of the tests."""
    return EngineThread(make_engine(FakeModel(FakeConfig(KINDS[kind])), pages=256))


async def answer(engine: EngineThread, prompt: Sequence[int]) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of the prompt were cached."""
    events = [event async for event in TokenStream(engine, EngineRequest(prompt, SamplingParams(max_tokens=5)))]
    await engine.check()
    tokens = [event.token_id for event in events if event.token_id is not None]
    return tokens, events[-1].usage.cached_tokens


@cache
def pages_of(engine: EngineThread) -> PageExchange:
    return PageExchange(engine, 2**20)


async def bring(giver: EngineThread, taker: EngineThread, names: Sequence[bytes]) -> int:
    there, here = pages_of(giver), pages_of(taker)
    lack = await here.seek(names)
    delivery = here.open_delivery(2**20)
    async with there.lend(names, lack, delivery.limit_bytes) as loan:
        for lent in loan.pages:
            read = await there.read(lent)
            assert read is not None
            prove_entry(*read)
            assert delivery.put(lent.name, read[1])
            await giver.check()
    delivery.settle()
    await giver.check()
    return len(loan.pages)


def name_pages(tokens: Sequence[int], kind: str) -> list[bytes]:
    engine = make_engine(FakeModel(FakeConfig(KINDS[kind])))
    return engine.start_keys().cover(tokens, len(tokens) // 4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_goes_on_from_pages_of_another_engine(kind: str) -> None:
    async def run() -> None:
        names = name_pages(PROMPT, kind)
        async with open_async(kind) as giver, open_async(kind) as taker:
            expected = expect_greedy(PROMPT, 5)
            assert await answer(giver, PROMPT) == (expected, 0)
            assert await bring(giver, taker, names) > 0
            assert await answer(taker, PROMPT) == (expected, 40)
            assert await bring(giver, taker, names) == 0

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_pages_are_lent_while_the_engine_works(kind: str) -> None:
    async def run() -> None:
        names = name_pages(PROMPT, kind)
        async with open_async(kind) as giver, open_async(kind) as taker:
            await answer(giver, PROMPT)
            others = [[*PROMPT[: 3 * number], *range(30)] for number in range(8)]
            working = [asyncio.create_task(answer(giver, other)) for other in others]
            await bring(giver, taker, names)
            assert await answer(taker, PROMPT) == (expect_greedy(PROMPT, 5), 40)
            for other, task in zip(others, working, strict=True):
                assert (await task)[0] == expect_greedy(other, 5)

    asyncio.run(run())


def test_who_gives_up_asking_leaves_no_loan() -> None:
    async def run() -> None:
        names = name_pages(PROMPT, "full")
        async with open_async("full") as giver:
            await answer(giver, PROMPT)

            async def borrow() -> None:
                lack = await pages_of(giver).seek([])
                empty = type(lack)(0, [[False] * len(names)])
                async with pages_of(giver).lend(names, empty, 2**20):
                    await asyncio.Event().wait()

            for turns in range(12):
                task = asyncio.create_task(borrow())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await giver.check()
            assert not await giver.run_between_steps(lambda engine: engine.cache.peers.list_lent(0))

    asyncio.run(run())
