"""Sessions on an event loop, over the demo model: the same answers as alone, however they are read."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuts import fold_stream

from mlxr.core.errors import EngineStopped, InvalidRequest, OutOfPages, QueueFull, TemplateError
from mlxr.core.settings import Settings
from mlxr.core.stats import EvictionCause
from mlxr.core.types import (
    Event,
    Finish,
    FinishReason,
    Grammar,
    ReasoningDelta,
    SamplingParams,
    TextDelta,
    ToolCallDelta,
)
from mlxr.service.opening import open_model
from mlxr.service.requests import ChatRequest, NamedTool, TextRequest, Tool
from mlxr.service.session import FEW_TEXTS, GROUP_CHARACTERS, Session, map_ahead
from mlxr.service.streams import AsyncStream, Completion, fold_events
from mlxr.tokenizers import ChatTemplate

SETTINGS = Settings(arena_bytes=48 * 2**20, max_sequences=32)
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
TOOLS = [
    Tool("weather", "", {"properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}),
    Tool("now", "", {"additionalProperties": False}),
]
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{# </think> #}"
)


def run(test: Callable[[Session], Awaitable[None]], settings: Settings = SETTINGS, template: str = "") -> None:
    """Run `test` with a session of its own, which must have given all pages back at its end."""

    async def with_session() -> None:
        async with open_session(settings, template) as session:
            await test(session)
            assert (await session.stats()).engine.used_pages == 0
            await session._engine.check()

    asyncio.run(with_session())


@asynccontextmanager
async def open_session(settings: Settings = SETTINGS, template: str = "") -> AsyncIterator[Session]:
    loaded = open_model("demo", settings)
    own = loaded.chat_template
    assert own is not None
    changed = ChatTemplate(template, name="test", **own.tokens) if template else None  # type: ignore[arg-type]
    session = Session(loaded, settings, template=changed)
    try:
        yield session
    finally:
        await session.stop()


async def answer(session: Session, request: TextRequest | ChatRequest) -> Completion:
    async with await session.start(request) as stream:
        return await fold_stream(stream)


async def wait_for_pages(session: Session, pages: int = 0) -> None:
    """Wait until the pages are back, which takes no longer than the step that runs."""
    for _ in range(3):
        if (await session.stats()).engine.used_pages == pages:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("pages are missing")


def test_who_waits_gets_the_same_answers() -> None:
    requests = [
        ChatRequest(QUESTION, SamplingParams(max_tokens=30)),
        ChatRequest(QUESTION, SamplingParams(max_tokens=30, temperature=1, seed=5, n=3, stop=("as",), logprobs=2)),
        TextRequest("import os", SamplingParams(max_tokens=20, temperature=1, seed=1)),
        TextRequest([1, 2, 3], SamplingParams(max_tokens=5), grammar=Grammar("regex", "[a-f]{3}")),
        ChatRequest(QUESTION, SamplingParams(max_tokens=60, seed=2, temperature=1), TOOLS, "required"),
    ]

    async def test(session: Session) -> None:
        def wait() -> list[Completion]:
            return [fold_events(stream) for stream in session.ask_all(requests)]

        expected = await asyncio.to_thread(wait)
        found = await asyncio.gather(*(answer(session, request) for request in requests))
        assert [forget_ids(one) for one in found] == [forget_ids(one) for one in expected]
        assert all(choice.timings is not None for one in found for choice in one.choices)
        assert expected[0].text.startswith("`os.path.join`: Join two or more")
        assert expected[1].choices[0].stop == "as"
        assert len(expected[3].text) == 3

    run(test)


def forget_ids(completion: Completion) -> Completion:
    calls = tuple(replace(call, id="") for call in completion.tool_calls)
    others, usage = tuple(map(forget_ids, completion.others)), replace(completion.usage, cached_tokens=0)
    return replace(completion, tool_calls=calls, others=others, usage=usage)


def test_a_stop_string_ends_an_answer_that_nobody_reads() -> None:
    async def test(session: Session) -> None:
        request = TextRequest("import os", SamplingParams(max_tokens=1500, stop=("\n",), ignore_eos=True))
        stream = await session.start(request)
        while not any(isinstance(event, Finish) for event in stream._events):
            await asyncio.sleep(0.01)
        await wait_for_pages(session)
        completion = fold_events([event async for event in stream])
        assert completion.stop == "\n"
        assert completion.usage.completion_tokens < 100
        assert completion.timings is not None

    run(test)


def test_cancelling_gives_the_pages_back_and_ends_the_events() -> None:
    async def test(session: Session) -> None:
        request = TextRequest("import os", SamplingParams(max_tokens=1500, ignore_eos=True, n=2))
        stream = await session.start(request)
        assert len(stream.prompt_ids) == 3
        events = [await anext(stream)]
        stream.cancel()
        stream.cancel()
        events += [event async for event in stream]
        completion = fold_events(events)
        assert [choice.finish_reason for choice in completion.choices] == [FinishReason.CANCELLED] * 2
        assert completion.usage.completion_tokens == len(completion.token_ids)
        await wait_for_pages(session)
        assert await stream.take() == []

    run(test)


@pytest.mark.slow
def test_leaving_a_stream_early_cancels_it() -> None:
    async def test(session: Session) -> None:
        request = TextRequest("import os", SamplingParams(max_tokens=1500, ignore_eos=True))
        async with await session.start(request) as stream:
            await anext(stream)
        assert [event async for event in stream] == []
        await wait_for_pages(session)
        forgotten = await session.start(request)
        await anext(forgotten)
        del forgotten
        gc.collect()
        await wait_for_pages(session)
        task = asyncio.create_task(session.start(request))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_for_pages(session)

    run(test)


def test_a_slow_reader_holds_up_nobody_and_loses_nothing() -> None:
    async def test(session: Session) -> None:
        slow_request = TextRequest("import os", SamplingParams(max_tokens=200, ignore_eos=True))
        slow = await session.start(slow_request)
        await answer(session, TextRequest("import re", SamplingParams(max_tokens=200, ignore_eos=True)))
        events: list[Event] = []
        while batch := await slow.take():
            events += batch
            await asyncio.sleep(0.01)
        assert fold_events(events).usage.completion_tokens == 200
        assert fold_events(events).text == (await answer(session, slow_request)).text

    run(test)


@pytest.mark.slow
def test_many_streams_at_once_answer_as_if_alone() -> None:
    async def test(session: Session) -> None:
        requests = [
            ChatRequest(
                [{"role": "user", "content": f"What does os.path.{name} do?"}],
                SamplingParams(max_tokens=24, temperature=1, seed=seed, n=1 + seed % 2),
            )
            for seed, name in enumerate(["join", "split", "exists", "isdir"] * 10)
        ]
        alone = [(await answer(session, request)).choices for request in requests]
        chooser = random.Random(7)

        async def read(request: ChatRequest) -> tuple[Completion, ...] | None:
            await asyncio.sleep(chooser.random() / 50)
            async with await session.start(request) as stream:
                if chooser.random() < 0.25:
                    await anext(stream)
                    return None
                return (await fold_stream(stream)).choices

        together = await asyncio.gather(*map(read, requests))
        assert None in together
        for own, other in zip(alone, together, strict=True):
            assert other is None or [choice.token_ids for choice in own] == [choice.token_ids for choice in other]
        await wait_for_pages(session)

    run(test)


def test_refusals_come_at_the_start() -> None:
    async def test(session: Session) -> None:
        params = SamplingParams(max_tokens=5)
        cases: list[tuple[Any, type[Exception]]] = [
            (TextRequest([9999999], params), InvalidRequest),
            (TextRequest("import os " * 3000, params), InvalidRequest),
            (TextRequest("x", SamplingParams(max_tokens=2000)), OutOfPages),
            (ChatRequest([], params), InvalidRequest),
            (ChatRequest(QUESTION, params, think=True), InvalidRequest),
            (TextRequest("x", params, grammar=Grammar("regex", "(")), InvalidRequest),
            (TextRequest("x", params, priority=1000), InvalidRequest),
        ]
        for request, kind in cases:
            with pytest.raises(kind):
                await session.start(request)

    run(test, replace(SETTINGS, arena_bytes=2 * 2**20))


def test_a_full_queue_says_when_to_come_back() -> None:
    async def test(session: Session) -> None:
        request = TextRequest("import os", SamplingParams(max_tokens=300, ignore_eos=True))
        started = await asyncio.gather(*(session.start(request) for _ in range(10)), return_exceptions=True)
        refusals = [one for one in started if isinstance(one, QueueFull)]
        assert 1 <= len(refusals) <= 9
        assert all(refusal.retry_after_s > 0 for refusal in refusals)
        for stream in started:
            if isinstance(stream, AsyncStream):
                stream.close()
        await wait_for_pages(session)

    run(test, replace(SETTINGS, max_sequences=1, max_waiting=1))


def test_stopping_ends_every_stream() -> None:
    async def test() -> None:
        async with open_session() as session:
            request = TextRequest("import os", SamplingParams(max_tokens=1500, ignore_eos=True, n=8))
            short = TextRequest("import os", SamplingParams(max_tokens=3))
            streams = [await session.start(request), await session.start(short)]
            reading = [asyncio.create_task(fold_stream(stream)) for stream in streams]
            await session.stop(drain_s=0.5)  # too short for the first, long for the second
            long, quick = await asyncio.gather(*reading)
            assert long.finish_reason is FinishReason.CANCELLED
            assert quick.finish_reason is FinishReason.LENGTH
            with pytest.raises(EngineStopped):
                await session.start(short)
            await session.stop()

    asyncio.run(test())


def test_a_deadline_ends_an_answer() -> None:
    async def test(session: Session) -> None:
        request = TextRequest("import os", SamplingParams(max_tokens=1900, ignore_eos=True), deadline_s=0.05)
        completion = await answer(session, request)
        assert completion.finish_reason is FinishReason.DEADLINE
        assert "deadline" in str(completion.error)

    run(test)


def test_an_answer_that_fails_takes_no_other_along(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(session: Session) -> None:
        request = TextRequest("import os", SamplingParams(max_tokens=30))
        good, bad = await session.start(request), await session.start(request)

        def fail(text: str) -> list[Event]:
            raise ValueError("broken on purpose")

        monkeypatch.setattr(bad._answers[0], "_read", fail)
        first, second = await asyncio.gather(fold_stream(good), fold_stream(bad))
        assert first.finish_reason is FinishReason.LENGTH
        assert (second.finish_reason, second.error) == (FinishReason.ERROR, "ValueError: broken on purpose")
        await wait_for_pages(session)

    run(test)


def test_embeddings_do_not_depend_on_company() -> None:
    async def test(session: Session) -> None:
        texts = ["import os", "What does os.path.join do?", "x" * 3000]
        alone = [await session.embed(text, "mean") for text in texts]
        request = TextRequest("import os", SamplingParams(max_tokens=50))
        together = await asyncio.gather(*(session.embed(text, "mean") for text in texts), answer(session, request))
        assert all(np.array_equal(own, other) for own, other in zip(alone, together[:3], strict=True))
        assert alone[0].shape == (session.config.hidden,)
        assert not np.array_equal(alone[0], await session.embed("import os", "last"))
        with pytest.raises(InvalidRequest):
            await session.embed([], "mean")

    run(test)


def test_many_texts_become_tokens_in_their_order() -> None:
    """A refused text is named by its number, after the results of those before it."""

    async def test(session: Session) -> None:
        texts = [f"import os  # {number} " + "x " * (number % 7) for number in range(200)]
        alone = [session.encode_prompt(text, parse_special=False) for text in texts]
        assert list(session.encode_each(texts, "texts")) == alone
        given: list[list[int]] = []
        with pytest.raises(InvalidRequest, match="text 150: "):
            given.extend(session.encode_each([*texts[:150], [-1], *texts[150:]], "texts"))
        assert given == alone[:150]

    run(test)


@pytest.mark.parametrize("threads", [1, 3])
def test_groups_of_texts_keep_their_order_on_threads(threads: int) -> None:
    """Long texts have groups of their own; a reader that stops leaves no thread behind."""
    texts = [str(number) for number in range(100)] + ["x" * GROUP_CHARACTERS, "y" * GROUP_CHARACTERS, "z"]
    groups = list(map_ahead(list, texts, threads))
    assert [text for group in groups for text in group] == texts
    assert [len(group) for group in groups] == [FEW_TEXTS] * 6 + [5, 1, 1]
    some = map_ahead(list, iter(texts), threads)
    assert next(some) == groups[0]
    some.close()
    for thread in threading.enumerate():
        if thread.name.startswith("mlxr-encode"):
            thread.join(10)
            assert not thread.is_alive()


def test_what_a_session_tells_of_itself() -> None:
    async def test(session: Session) -> None:
        assert session.capabilities == {"completion", "embedding", "tools"}
        ids = session.encode_chat(ChatRequest(QUESTION, SamplingParams()))
        assert session.tokenizer.decode(ids, skip_special=False) == session.render_chat(
            ChatRequest(QUESTION, SamplingParams())
        )
        assert session.decode(session.encode_prompt("import os")) == "import os"
        assert session.encode_prompt("<|im_end|>x", add_special=False, parse_special=False)[0] != 3
        assert session.encode_prompt("<|im_end|>x", add_special=False)[0] == 3
        assert 20 * 2**20 < session.weight_bytes <= session.size_bytes < session.least_bytes
        assert session.context_tokens == session.config.context_length == 2048

    run(test)


def test_a_cache_gives_back_what_it_may_not_keep() -> None:
    async def test(session: Session) -> None:
        requests = [TextRequest(f"import {name}\n" * 40, SamplingParams(max_tokens=2)) for name in ("os", "re", "sys")]
        before = [(await answer(session, request)).token_ids for request in requests]
        await session.limit_cache(0)
        engine = (await session.stats()).engine
        assert engine.cache.evictions[EvictionCause.SHRINK] > 0
        assert 0 < engine.cached_pages <= 128 // session.page_size  # what a whole context needs
        assert session.measure_cache().in_use_bytes == engine.cache_in_use_bytes <= engine.arena_bytes
        assert [(await answer(session, request)).token_ids for request in requests] == before

    run(test, replace(SETTINGS, arena_bytes=None, arena_percent=1, context_tokens=128))


def test_without_a_template_there_is_no_chat() -> None:
    async def test() -> None:
        loaded = replace(open_model("demo", SETTINGS), chat_template=None)
        session = Session(loaded, SETTINGS)
        assert session.capabilities == {"completion", "embedding"}
        with pytest.raises(TemplateError, match="no chat template"):
            await session.start(ChatRequest(QUESTION, SamplingParams()))
        await session.stop()

    asyncio.run(test())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("choice", ["required", NamedTool("weather")], ids=["required", "named"])
def test_calls_that_must_be_are(choice: Any, seed: int) -> None:
    async def test(session: Session) -> None:
        params = SamplingParams(max_tokens=200, temperature=1, seed=seed, n=3)
        completion = await answer(session, ChatRequest(QUESTION, params, TOOLS, choice))
        for one in completion.choices:
            assert one.text == ""
            assert one.tool_calls
            for call in one.tool_calls:
                arguments = json.loads(call.arguments)
                assert call.name in ("weather", "now")
                assert isinstance(arguments.get("city", ""), str) if call.name == "weather" else arguments == {}
            if choice != "required":
                assert [call.name for call in one.tool_calls] == ["weather"]
            assert one.finish_reason is FinishReason.TOOL_CALLS
            assert one.usage.completion_tokens == len(one.token_ids)
        ids = [call.id for one in completion.choices for call in one.tool_calls]
        assert len(set(ids)) == len(ids)

    run(test)


def test_without_parallel_calls_there_is_one() -> None:
    async def test(session: Session) -> None:
        for seed in range(4):
            params = SamplingParams(max_tokens=200, temperature=1, seed=seed)
            request = ChatRequest(QUESTION, params, TOOLS, "required", parallel_tool_calls=False)
            assert len((await answer(session, request)).tool_calls) == 1

    run(test)


def test_reasoning_comes_first_and_the_grammar_after_it() -> None:
    async def test(session: Session) -> None:
        assert "thinking" in session.capabilities
        # The toy never closes a tag by itself: it is made likely enough, and its thoughts short.
        close = session.encode_prompt("</think>", add_special=False)
        params = SamplingParams(max_tokens=400, temperature=1, seed=4, logit_bias=dict.fromkeys(close, 9.0), logprobs=0)
        request = ChatRequest(QUESTION, params, grammar=Grammar("regex", "[xyz]{4}"), think=True)
        async with await session.start(request) as stream:
            events = [event async for event in stream]
        completion = fold_events(events)
        assert completion.reasoning
        assert set(completion.text) <= set("xyz")
        assert len(completion.text) == 4
        kinds = [type(event) for event in events]
        assert kinds.index(TextDelta) > max(place for place, kind in enumerate(kinds) if kind is ReasoningDelta)
        assert ToolCallDelta not in kinds
        assert len(completion.token_ids) == completion.usage.completion_tokens == len(completion.tokens)

    run(test, template=THINKING)


def test_what_comes_while_a_reader_waits_is_poured_but_no_end() -> None:
    async def test(session: Session) -> None:
        request = TextRequest("import os", SamplingParams(max_tokens=60, ignore_eos=True))
        expected = await answer(session, request)
        async with await session.start(request) as stream:
            poured: list[Event] = []
            turn = 0

            def take(events: Sequence[Event]) -> bool:
                nonlocal turn
                turn += 1
                if turn % 4 == 0:
                    return False
                poured.extend(events)
                return True

            stream.pour(take)
            told: list[Event] = []
            while batch := await stream.take():  # in the order of the answer: both lists are one
                poured.extend(batch)
                told.extend(batch)
        assert fold_events(poured).text == expected.text
        assert isinstance(told[-1], Finish)
        assert 1 < len(told) < len(poured)

    run(test)


def test_who_pours_and_fails_is_told_by_the_reader() -> None:
    async def test(session: Session) -> None:
        def fail(events: Sequence[Event]) -> bool:
            raise RuntimeError(f"cannot take {len(events)}")

        request = TextRequest("import os", SamplingParams(max_tokens=1500, ignore_eos=True))
        async with await session.start(request) as stream:
            stream.pour(fail)
            with pytest.raises(RuntimeError, match="cannot take 1"):
                await stream.take()
        await wait_for_pages(session)

    run(test)
