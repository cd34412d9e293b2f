"""The engine on its own thread: its events, loops that it never blocks, and the ends of requests and of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from fake_model import FakeModel, answer_of, expect_greedy, make_engine, run_all
from token_stream import TokenStream

from mlxr.core.errors import EngineStopped, InvalidRequest, QueueFull
from mlxr.core.types import FinishReason, SamplingParams
from mlxr.engine import engine_thread
from mlxr.engine.engine import Engine
from mlxr.engine.engine_thread import EngineThread
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent

PROMPT = [3, 1, 4, 1, 5]
PATIENCE_S = 60  # no measure of speed: a test that waits this long hangs


def params(max_tokens: int = 6, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def ask(server: EngineThread, prompt: Sequence[int], asked: SamplingParams) -> TokenStream:
    return TokenStream(server, EngineRequest(prompt, asked))


async def collect(stream: TokenStream) -> list[TokenEvent]:
    return [event async for event in stream]


def tokens_of(events: Sequence[TokenEvent], index: int = 0) -> list[int]:
    return [event.token_id for event in events if event.index == index and event.token_id is not None]


class Gate:
    """A fake model's `on_forward` that waits for each step to be let through."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Semaphore(0)
        self.is_open = False

    def __call__(self, batch: object) -> None:
        self.entered.release()
        if not self.is_open:
            assert self.opened.acquire(timeout=PATIENCE_S)

    async def wait_for_step(self) -> None:
        """Wait until the engine's thread is in the model, without blocking the loop."""
        while not self.entered.acquire(blocking=False):
            await asyncio.sleep(0.001)

    def let_pass(self) -> None:
        self.opened.release()

    def open(self) -> None:
        self.is_open = True
        self.opened.release()


def test_events_are_those_of_the_engine() -> None:
    engine = make_engine()
    wanted = {engine.submit(EngineRequest(PROMPT[:size], params(size + 2))): size for size in range(1, 6)}
    events = run_all(engine)

    async def test() -> None:
        async with EngineThread(make_engine()) as server:
            answers = await asyncio.gather(*(collect(ask(server, PROMPT[:s], params(s + 2))) for s in range(1, 6)))
        for sequence_id, size in wanted.items():
            assert tokens_of(answers[size - 1]) == answer_of(events, sequence_id)
            assert [event.finish_reason for event in answers[size - 1]][-1] is FinishReason.LENGTH
            assert answers[size - 1][-1].usage.completion_tokens == size + 2

    run(test)


def test_several_answers_to_one_prompt() -> None:
    async def test() -> None:
        async with EngineThread(make_engine()) as server:
            events = await collect(ask(server, PROMPT, params(n=3, temperature=1.0, seed=7)))
            alone = await collect(ask(server, PROMPT, params(temperature=1.0, seed=7)))
        assert sorted(event.index for event in events if event.finish_reason) == [0, 1, 2]
        assert tokens_of(events, 0) == tokens_of(alone)
        assert all(len(tokens_of(events, index)) == 6 for index in range(3))

    run(test)


def test_figures_wait_for_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step hangs, figures are those from before it, with their age; otherwise they are current."""
    monkeypatch.setattr(engine_thread, "PATIENCE_S", 0.01)
    gate = Gate()
    server = EngineThread(make_engine(FakeModel(on_forward=gate)))
    figures = server.keep_figures(lambda engine: engine.stats())

    async def test() -> None:
        async with server:
            stream = asyncio.create_task(collect(ask(server, PROMPT, params())))
            await gate.wait_for_step()
            await asyncio.sleep(0.05)
            stats, age_s = await figures.get()
            assert (stats.prefill_tokens, stats.running_sequences, age_s >= 0.05) == (0, 0, True)
            monkeypatch.setattr(engine_thread, "KEEP_S", 0.0)  # the state before the next step is kept
            gate.let_pass()
            await gate.wait_for_step()
            stats, age_s = await figures.get()
            assert (stats.prefill_tokens, stats.running_sequences) == (len(PROMPT), 1)
            assert age_s > 0
            gate.open()
            await stream
            stats, age_s = await figures.get()
            assert (stats.decode_tokens, stats.running_sequences, age_s) == (5, 0, 0.0)
        with pytest.raises(EngineStopped):
            await figures.get()

    run(test)


def test_figures_that_cannot_be_read_end_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_thread, "KEEP_S", 0.0)
    server = EngineThread(make_engine())
    server.keep_figures(lambda engine: 1 // (engine.stats().steps == 0))

    async def test() -> None:
        async with server:
            assert tokens_of(await collect(ask(server, PROMPT, params()))) == expect_greedy(PROMPT, 6)

    run(test)
    assert "figures cannot be read" in caplog.text


def test_loops_in_several_threads_share_the_engine() -> None:
    server = EngineThread(make_engine())
    answers: dict[int, list[TokenEvent]] = {}

    def client(number: int) -> None:
        answers[number] = asyncio.run(collect(ask(server, [number, number + 1], params(9))))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(server.stop())
    assert {number: tokens_of(events) for number, events in answers.items()} == {
        number: expect_greedy([number, number + 1], 9) for number in range(6)
    }


def test_only_one_thread_touches_the_engine() -> None:
    users: set[int] = set()
    engine = make_engine(FakeModel(on_forward=lambda batch: users.add(threading.get_ident())))
    submit, cancel, close = engine.submit, engine.cancel, engine.close
    engine.submit = lambda *a, **k: (users.add(threading.get_ident()), submit(*a, **k))[1]  # type: ignore[method-assign]
    engine.cancel = lambda *a: (users.add(threading.get_ident()), cancel(*a))[1]  # type: ignore[method-assign]
    engine.close = lambda: (users.add(threading.get_ident()), close())[1]  # type: ignore[method-assign, func-returns-value]

    async def test() -> None:
        async with EngineThread(engine) as server:
            await collect(ask(server, PROMPT, params()))
            async for _ in ask(server, PROMPT, params()):
                break
            await server.stats()

    run(test)
    assert len(users) == 1
    assert threading.get_ident() not in users


def test_the_loop_goes_on_while_a_step_runs() -> None:
    gate = Gate()

    async def test() -> None:
        async with EngineThread(make_engine(FakeModel(on_forward=gate))) as server:
            first = asyncio.create_task(collect(ask(server, PROMPT, params())))
            await gate.wait_for_step()
            # The engine hangs in a step; each of these would hang with it if it waited for the engine in the loop.
            second = asyncio.create_task(collect(ask(server, PROMPT[:2], params())))
            stats = asyncio.create_task(server.stats())
            abandoned = ask(server, PROMPT, params())
            starting = asyncio.create_task(abandoned.start())
            await asyncio.sleep(0)
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            assert not any(task.done() for task in (first, second, stats))
            gate.open()
            assert tokens_of(await first) == expect_greedy(PROMPT, 6)
            assert tokens_of(await second) == expect_greedy(PROMPT[:2], 6)
            assert (await stats).running_sequences + (await stats).waiting_sequences <= 2
            assert (await server.stats()).used_pages == 0

    run(test)


def test_events_come_as_they_happen() -> None:
    gate = Gate()

    async def test() -> None:
        async with EngineThread(make_engine(FakeModel(on_forward=gate))) as server:
            stream = ask(server, PROMPT, params())
            for token_id in expect_greedy(PROMPT, 3):
                event = asyncio.create_task(anext(stream))
                await gate.wait_for_step()
                gate.let_pass()
                assert (await event).token_id == token_id
            gate.open()

    run(test)


@pytest.mark.parametrize("leave", ["break", "close", "forget", "cancel_task"])
def test_whoever_leaves_gives_the_pages_back_before_the_next_step(leave: str) -> None:
    gate, leaving = Gate(), asyncio.Event()
    model = FakeModel(on_forward=gate)

    async def read_one(server: EngineThread) -> None:
        stream = ask(server, PROMPT, params(60))
        if leave == "break":
            async for _ in stream:
                await gate.wait_for_step()  # the next step is under way already
                break
        else:
            await anext(stream)
            await gate.wait_for_step()
        if leave == "close":
            stream.close()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        if leave == "cancel_task":
            async with stream:
                leaving.set()
                await asyncio.Event().wait()

    async def test() -> None:
        async with EngineThread(make_engine(model)) as server:
            reader = asyncio.create_task(read_one(server))
            await gate.wait_for_step()
            gate.let_pass()
            if leave == "cancel_task":
                await leaving.wait()
                reader.cancel()
            await asyncio.wait([reader])
            assert reader.cancelled() or reader.result() is None
            del reader
            gc.collect()
            gate.let_pass()  # the step that was under way
            assert (await server.stats()).used_pages == 0
            assert len(model.batches) == 2
            await server.check()

    run(test)


def test_a_cancelled_stream_gives_its_last_events() -> None:
    gate = Gate()

    async def test() -> None:
        async with EngineThread(make_engine(FakeModel(on_forward=gate))) as server:
            stream = ask(server, PROMPT, params(60, n=2))
            reader = asyncio.create_task(collect(stream))
            await gate.wait_for_step()
            stream.cancel()
            stream.cancel()
            gate.open()
            events = await reader
            ends = [event for event in events if event.finish_reason is not None]
            assert sorted(event.index for event in ends) == [0, 1]
            assert {event.finish_reason for event in ends} == {FinishReason.CANCELLED}
            assert (await server.stats()).used_pages == 0

    run(test)


def test_refusals_come_from_the_start_and_from_the_first_event() -> None:
    async def test() -> None:
        async with EngineThread(make_engine()) as server:
            stream = ask(server, [], params())
            with pytest.raises(InvalidRequest, match="prompt"):
                await stream.start()
            assert await collect(stream) == []
            with pytest.raises(InvalidRequest, match="token 50"):
                await anext(ask(server, [50], params()))
            assert (await server.stats()).used_pages == 0

    run(test)


def test_a_full_queue_is_refused_with_a_hint() -> None:
    gate = Gate()

    async def test() -> None:
        engine = make_engine(FakeModel(on_forward=gate), max_sequences=1, max_waiting=2)
        async with EngineThread(engine) as server:
            streams = [ask(server, PROMPT, params()) for _ in range(4)]
            running = asyncio.create_task(collect(streams[0]))
            await gate.wait_for_step()
            gate.is_open = True
            starts = [asyncio.create_task(stream.start()) for stream in streams[1:]]
            await asyncio.sleep(0)
            gate.let_pass()
            results = await asyncio.gather(*starts, return_exceptions=True)
            assert [type(result) for result in results] == [type(None), type(None), QueueFull]
            answers = await asyncio.gather(running, *(collect(stream) for stream in streams[1:3]))
            assert all(tokens_of(events) == expect_greedy(PROMPT, 6) for events in answers)

    run(test)


def test_stopping_ends_what_is_in_flight() -> None:
    gate = Gate()

    async def test() -> None:
        engine = make_engine(FakeModel(on_forward=gate), max_sequences=2)
        server = EngineThread(engine)
        readers = [asyncio.create_task(collect(ask(server, PROMPT, params(60)))) for _ in range(4)]
        await gate.wait_for_step()
        stopping = [asyncio.create_task(server.stop()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(EngineStopped):
            await anext(ask(server, PROMPT, params()))
        gate.open()
        await asyncio.gather(*stopping)
        results = await asyncio.gather(*readers, return_exceptions=True)
        assert len(results) == 4
        for events in results:
            assert isinstance(events, list)
            assert events[-1].finish_reason is FinishReason.CANCELLED
        assert engine.stats().used_pages == 0
        engine.check()
        with pytest.raises(EngineStopped):
            await server.stats()
        await server.stop()

    run(test)


def test_stopping_can_wait_for_answers() -> None:
    async def test() -> None:
        server = EngineThread(make_engine())
        stream = ask(server, PROMPT, params(30))
        await stream.start()
        await server.stop(drain_s=PATIENCE_S)
        assert tokens_of(await collect(stream)) == expect_greedy(PROMPT, 30)

    run(test)


def test_a_failing_step_fails_its_requests_only() -> None:
    gate = Gate()
    failing = {2}

    def forward(batch: object) -> None:
        gate(batch)
        if len(model.batches) in failing:
            failing.clear()
            raise RuntimeError("broken step")

    model = FakeModel(on_forward=forward)

    async def test() -> None:
        engine = make_engine(model, max_sequences=1)
        async with EngineThread(engine) as server:
            first = asyncio.create_task(collect(ask(server, PROMPT, params())))
            second = asyncio.create_task(collect(ask(server, PROMPT[:3], params())))
            await gate.wait_for_step()
            gate.open()
            failed, well = await asyncio.gather(first, second)
            assert failed[-1].finish_reason is FinishReason.ERROR
            assert "RuntimeError: broken step" in (failed[-1].error or "")
            assert tokens_of(well) == expect_greedy(PROMPT[:3], 6)
            assert (await server.stats()).used_pages == 0

    run(test)


def break_step(engine: Engine, error: Exception, at_step: int) -> None:
    """Let step `at_step` of the engine itself fail once."""
    step, count = engine.step, 0

    def broken() -> list[TokenEvent]:
        nonlocal count
        count += 1
        if count == at_step:
            raise error
        return step()

    engine.step = broken  # type: ignore[method-assign]


def test_a_failing_engine_fails_all_requests_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        engine = make_engine()
        break_step(engine, ValueError("lost count"), at_step=3)
        async with EngineThread(engine) as server:
            events = await collect(ask(server, PROMPT, params(20, n=2)))
            ends = [event for event in events if event.finish_reason is not None]
            assert [(event.index, event.error) for event in ends] == [
                (index, "the engine failed: ValueError: lost count") for index in (0, 1)
            ]
            assert all(event.usage.prompt_tokens == len(PROMPT) for event in ends)
            assert tokens_of(await collect(ask(server, PROMPT, params()))) == expect_greedy(PROMPT, 6)
            assert (await server.stats()).used_pages == 0

    run(test)
    assert "lost count" in caplog.text


async def ask_until_refused(server: EngineThread) -> None:
    while True:  # the thread ends a moment after the last event
        await server.stats()


def test_an_engine_that_cannot_let_go_stops(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        engine = make_engine()
        break_step(engine, ValueError("lost count"), at_step=1)

        def cancel(*_: object) -> list[TokenEvent]:
            raise ValueError("lost count again")

        engine.cancel = cancel  # type: ignore[method-assign, assignment]
        server = EngineThread(engine)
        events = await collect(ask(server, PROMPT, params()))
        assert events[-1].finish_reason is FinishReason.ERROR
        with pytest.raises(EngineStopped):
            await ask_until_refused(server)
        await server.stop()

    run(test)
    assert "lost count again" in caplog.text


def test_a_cancel_that_fails_ends_the_engine_and_every_stream(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()

    async def test() -> None:
        engine = make_engine(FakeModel(on_forward=gate))

        def cancel(*_: object) -> list[TokenEvent]:
            raise ValueError("lost count again")

        engine.cancel = cancel  # type: ignore[method-assign, assignment]
        server = EngineThread(engine)
        streams = [ask(server, PROMPT, params(60)) for _ in range(3)]
        readers = [asyncio.create_task(collect(stream)) for stream in streams]
        await gate.wait_for_step()
        streams[0].cancel()
        gate.open()
        for events in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(events, EngineStopped) or (
                isinstance(events, list) and events[-1].finish_reason is FinishReason.ERROR
            )
        await server.stop()

    run(test)
    assert "cannot be cancelled" in caplog.text


def test_a_request_of_a_closed_loop_is_cancelled() -> None:
    gate = Gate()
    server = EngineThread(make_engine(FakeModel(on_forward=gate)))
    kept: list[TokenStream] = []

    async def begin() -> None:
        kept.append(ask(server, PROMPT, params(60)))
        await kept[0].start()

    asyncio.run(begin())
    gate.open()

    async def test() -> None:
        while (await server.stats()).running_sequences:
            await asyncio.sleep(0)
        assert (await server.stats()).used_pages == 0
        await server.stop()

    run(test)


def test_the_thread_ends_with_the_object() -> None:
    before = set(threading.enumerate())  # those of other tests' servers
    server = EngineThread(make_engine())
    (thread,) = (thread for thread in set(threading.enumerate()) - before if thread.name == "mlxr-engine")
    del server
    gc.collect()
    assert not thread.is_alive()
