"""Loaded models: waiting, sharing, keeping, evicting, refusing, stopping; over sessions that only count."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cuts import fold_stream

from mlxr.core.errors import DoesNotFit, EngineStopped, MlxrError, ModelError, NotFound, SettingError
from mlxr.core.settings import Settings
from mlxr.core.types import FinishReason, SamplingParams
from mlxr.engine.stats import CacheMemory
from mlxr.loading import ASSETS
from mlxr.registry.record import AdapterRef, ModelRecord
from mlxr.service import model_pool
from mlxr.service.model_pool import MIN_ARENA_BYTES, ModelPool
from mlxr.service.requests import ChatRequest, TextRequest
from mlxr.service.streams import fold_events

MIB = 2**20


def make_record(name: str, size_bytes: int = 100 * MIB, **changes: Any) -> ModelRecord:
    values: dict[str, Any] = {
        "name": f"{name}:latest",
        "digest": f"digest of {name}",
        "path": Path("/models") / name,
        "size_bytes": size_bytes,
        "format": "gguf",
        "architecture": "llama",
        "parameters_count": 1,
        "quantization": "Q8_0",
        "context_tokens": 2048,
        "embedding_length": 512,
        "modified_at": datetime.now(UTC),
        "last_used_at": None,
        "is_owned": False,
        "own_template": "",
        "capabilities": frozenset(),
        "files": (),
    }
    return ModelRecord(**{**values, **changes})


class Shelf:
    """A registry of records; `touched` names those that were used."""

    def __init__(self, *records: ModelRecord) -> None:
        self.records = {record.short_name: record for record in records}
        self.touched: list[str] = []

    def find(self, name: str) -> ModelRecord:
        if name.removesuffix(":latest") not in self.records:
            raise NotFound(f"{name}: no such model")
        return self.records[name.removesuffix(":latest")]

    def find_default(self) -> str:
        return "demo"

    def touch(self, name: str) -> None:
        self.touched.append(name)


class Sessions:
    """Opens sessions that keep their arguments; `opened` and `stopped` name them in order."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.stopped: list[str] = []
        self.rooms: list[int] = []
        self.limits: dict[str, int] = {}
        self.may_open = threading.Event()
        self.may_open.set()
        self.error: Exception | None = None
        self.cache_bytes = MIN_ARENA_BYTES
        self._opening = 0
        self.is_held = False  # a load waits for `may_open`

    def open(self, record: ModelRecord, settings: Settings, memory_bytes: int) -> Any:
        self._opening += 1
        assert self._opening == 1, "two loads at once"
        self.rooms.append(memory_bytes)
        self.is_held = not self.may_open.is_set()
        assert self.may_open.wait(60)
        self.is_held = False
        self._opening -= 1
        if self.error is not None:
            raise self.error
        self.opened.append(record.short_name)

        async def stop(drain_s: float = 0.0) -> None:
            await asyncio.sleep(0)
            self.stopped.append(record.short_name)

        async def limit_cache(nbytes: int) -> None:
            self.limits[record.short_name] = nbytes

        size_bytes = record.size_bytes + self.cache_bytes
        memory = CacheMemory(in_use_bytes=self.cache_bytes, held_bytes=0, max_bytes=memory_bytes)
        return SimpleNamespace(
            size_bytes=size_bytes,
            least_bytes=size_bytes,
            weight_bytes=record.size_bytes,
            context_tokens=2048,
            measure_cache=lambda: memory,
            limit_cache=limit_cache,
            leave=lambda: None,
            stop=stop,
            failure=None,
        )


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(
    test: Callable[[ModelPool, Sessions, Shelf], Awaitable[None]],
    *records: ModelRecord,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> None:
    async def with_pool() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # one, so that `settle` knows the order
        sessions, shelf = Sessions(), Shelf(*records or (make_record("a"), make_record("b"), make_record("c")))
        values = {"models_memory_bytes": 350 * MIB, "default_model": "a", **settings}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_pool, "LOOK_THREADS", 1)  # so that `settle` comes after each look
            pool = ModelPool(Settings(**values), shelf, clock=clock, open_session=sessions.open)
        try:
            await test(pool, sessions, shelf)
        finally:
            await pool.stop()
        assert sorted(sessions.opened) == sorted(sessions.stopped)
        assert pool.running() == []

    asyncio.run(with_pool())


async def use(pool: ModelPool, name: str | None = None, **options: Any) -> str:
    async with await pool.acquire(name, **options) as lease:
        return lease.name


def names(pool: ModelPool) -> list[str]:
    return [model.record.short_name for model in pool.running()]


async def settle(pool: ModelPool, sessions: Sessions) -> None:
    """Let the loop and the pool's threads go on until they wait for the test."""
    for _ in range(5):
        for threads in (pool._looks, pool._notes):
            await threads.run(int)  # comes after whatever waits for that thread
        while pool._loader.busy and not sessions.is_held:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(int)
        for _ in range(20):
            await asyncio.sleep(0)


def test_a_model_is_loaded_once_and_shared() -> None:
    async def test(pool: ModelPool, sessions: Sessions, shelf: Shelf) -> None:
        sessions.may_open.clear()
        waiting = [asyncio.create_task(pool.acquire(name)) for name in (None, "a", "a:latest")]
        await settle(pool, sessions)
        assert not any(task.done() for task in waiting)
        assert pool.running() == []
        sessions.may_open.set()
        leases = await asyncio.gather(*waiting)
        assert sessions.opened == ["a"]
        assert len({id(lease.session) for lease in leases}) == 1
        assert all(lease.load_s > 0 for lease in leases)
        assert (await pool.acquire("a")).load_s == 0
        assert shelf.touched == ["a:latest"]
        for lease in leases:
            lease.release()
            lease.release()

    run(test)


def test_others_go_on_during_a_load() -> None:
    async def test(pool: ModelPool, sessions: Sessions, _: Shelf) -> None:
        await use(pool, "a")
        sessions.may_open.clear()
        load = asyncio.create_task(use(pool, "b"))
        await settle(pool, sessions)
        assert await use(pool, "a") == "a:latest"
        assert not load.done()
        sessions.may_open.set()
        await load

    run(test)


def test_a_load_goes_on_when_whoever_asked_has_left() -> None:
    async def test(pool: ModelPool, sessions: Sessions, _: Shelf) -> None:
        sessions.may_open.clear()
        task = asyncio.create_task(use(pool, "a"))
        await settle(pool, sessions)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        sessions.may_open.set()
        assert (await pool.acquire("a")).name == "a:latest"
        assert sessions.opened == ["a"]

    run(test)


def test_failures_reach_everybody_and_are_not_remembered() -> None:
    async def test(pool: ModelPool, sessions: Sessions, _: Shelf) -> None:
        sessions.error = ModelError("broken")
        results = await asyncio.gather(*(use(pool, "a") for _ in range(3)), return_exceptions=True)
        assert [str(result) for result in results] == ["broken"] * 3
        assert pool.running() == []
        sessions.error = None
        await use(pool, "a")
        with pytest.raises(NotFound):
            await use(pool, "z")

    run(test)


def test_a_record_with_a_problem_is_not_loaded() -> None:
    async def test(pool: ModelPool, sessions: Sessions, _: Shelf) -> None:
        with pytest.raises(ModelError, match="a: its file is gone"):
            await use(pool, "a")
        assert sessions.opened == []

    run(test, make_record("a", problem="its file is gone"))


def test_the_model_that_was_used_longest_ago_makes_room() -> None:
    async def test(pool: ModelPool, sessions: Sessions, _: Shelf) -> None:
        await use(pool, "a")
        await use(pool, "b")
        await use(pool, "a")
        assert names(pool) == ["a", "b"]
        await use(pool, "c")
        assert sessions.stopped == ["b"]
        assert names(pool) == ["c", "a"]
        assert sum(model.size_bytes for model in pool.running()) <= 350 * MIB
        assert sessions.rooms == [250 * MIB, 350 * MIB - 164 * MIB - 100 * MIB, 86 * MIB]

    run(test)


def test_a_model_in_use_is_waited_for() -> None:
    async def test(pool: ModelPool, sessions: Sessions, _: Shelf) -> None:
        in_use = [await pool.acquire("a"), await pool.acquire("b")]
        third = asyncio.create_task(pool.acquire("c"))
        await settle(pool, sessions)
        again = asyncio.create_task(use(pool, "a"))  # comes after the one that waits already
        await settle(pool, sessions)
        assert not third.done()
        assert sessions.stopped == []
        in_use[0].release()
        lease = await third
        assert sessions.stopped == ["a"]
        assert not again.done()
        in_use[1].release()
        assert await again == "a:latest"
        assert sessions.stopped == ["a", "b"]
        lease.release()

    run(test)


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    async def test(pool: ModelPool, sessions: Sessions, _: Shelf) -> None:
        with pytest.raises(
            DoesNotFit, match=r"big: needs 464 MiB .* models may take 350 MiB; raise .*models_memory_bytes"
        ):
            await use(pool, "big")
        await use(pool, "a")
        with pytest.raises(
            DoesNotFit, match=r"b: needs 264 MiB .*350 MiB, of which pinned models take 164 MiB"
        ) as caught:
            await use(pool, "b")
        assert (caught.value.needed_bytes, caught.value.budget_bytes) == (264 * MIB, 350 * MIB)
        assert names(pool) == ["a"]
        assert sessions.stopped == []

    run(test, make_record("big", 400 * MIB), make_record("a"), make_record("b", 200 * MIB), pinned_models=("a:latest",))


def test_a_cache_larger_than_all_models_may_be_is_refused() -> None:
    with pytest.raises(SettingError, match=r"arena_bytes: 194560 MiB are more than the 23552 MiB .*models_memory"):
        ModelPool(Settings(arena_bytes=190 * 2**30, models_memory_bytes=23 * 2**30), Shelf())


def test_models_go_when_their_time_is_over() -> None:
    clock = Clock()

    async def test(pool: ModelPool, sessions: Sessions, _: Shelf) -> None:
        await use(pool, "a")
        [model] = pool.running()
        assert model.expires_at is not None
        assert 290 < (model.expires_at - datetime.now(UTC)).total_seconds() <= 300
        await use(pool, "a", keep_alive_s=0)
        await settle(pool, sessions)
        assert sessions.stopped == ["a"]
        await use(pool, "b", keep_alive_s=-1)
        assert pool.running()[0].expires_at is None
        lease = await pool.acquire("b", keep_alive_s=0.01)
        await settle(pool, sessions)
        assert names(pool) == ["b"]  # in use
        lease.release()
        clock.now += 0.02
        await asyncio.sleep(0.03)
        await settle(pool, sessions)
        assert sessions.stopped == ["a", "b"]
        await use(pool, "c", keep_alive_s=0.01)
        clock.now += 0.005
        await use(pool, "c")  # used again: from here on
        clock.now += 0.006
        await asyncio.sleep(0.02)
        assert names(pool) == ["c"]

    run(test, clock=clock)


def test_pinned_models_stay() -> None:
    async def test(pool: ModelPool, sessions: Sessions, _: Shelf) -> None:
        await use(pool, "a", keep_alive_s=0)
        await use(pool, "b")
        await use(pool, "c")
        await settle(pool, sessions)
        assert sessions.stopped == ["b"]
        assert [model.expires_at for model in pool.running() if model.record.short_name == "a"] == [None]
        await pool.unload("a")
        assert "a" in sessions.stopped

    run(test, pinned_models=("a",))


def test_unloading_waits_for_the_last_use() -> None:
    async def test(pool: ModelPool, sessions: Sessions, _: Shelf) -> None:
        await pool.unload("a")
        lease = await pool.acquire("a")
        task = asyncio.create_task(pool.unload("a"))
        await settle(pool, sessions)
        assert not task.done()
        assert pool.running() == []
        fresh = asyncio.create_task(use(pool, "a"))
        lease.release()
        await task
        assert await fresh == "a:latest"
        assert sessions.opened == ["a", "a"]

    run(test)


def test_a_name_that_means_another_model_now_is_loaded_anew() -> None:
    clock = Clock()

    async def test(pool: ModelPool, sessions: Sessions, shelf: Shelf) -> None:
        await use(pool, "a")
        shelf.records["a"] = make_record("a", digest="another")
        clock.now += 5
        async with await pool.acquire("a") as lease:
            assert lease.record.digest == "another"
        assert sessions.opened == ["a", "a"]

    run(test, clock=clock)


def test_stopping_refuses_waits_for_loads_and_ends_what_is_in_use() -> None:
    async def test(pool: ModelPool, sessions: Sessions, _: Shelf) -> None:
        await pool.acquire("a")
        sessions.may_open.clear()
        load = asyncio.create_task(use(pool, "b"))
        while len(sessions.rooms) < 2:  # so that "c" comes second: names are looked up on several threads
            await settle(pool, sessions)
        queued = asyncio.create_task(use(pool, "c"))
        await settle(pool, sessions)
        stop = asyncio.create_task(pool.stop())
        await settle(pool, sessions)
        with pytest.raises(EngineStopped):
            await use(pool, "a")
        sessions.may_open.set()
        await stop
        results = await asyncio.gather(load, queued, return_exceptions=True)
        assert isinstance(results[1], EngineStopped)
        assert sessions.opened == sessions.stopped or set(sessions.opened) == {"a", "b"}
        await pool.stop()

    run(test, models_memory_bytes=1000 * MIB)


def test_stopping_gives_up_a_load_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(pool: ModelPool, sessions: Sessions, _: Shelf) -> None:
        await use(pool, "a")
        sessions.may_open.clear()
        load = asyncio.create_task(use(pool, "b"))
        await settle(pool, sessions)
        await pool.stop()
        assert pool.has_given_up
        assert sessions.stopped == ["a"]
        load.cancel()
        sessions.may_open.set()

    monkeypatch.setattr(model_pool, "LOAD_END_S", 0.01)
    run(test, models_memory_bytes=1000 * MIB)


def open_demos(**settings: Any) -> ModelPool:
    records = [
        make_record(name, (path := ASSETS / f"{name}.gguf").stat().st_size, path=path)
        for name in ("demo", "demo-draft")
    ]
    records.append(make_record("pirate", records[0].size_bytes, path=records[0].path, system="Arr", template=PIRATE))
    return ModelPool(Settings(**{"arena_bytes": 16 * MIB, **settings}), Shelf(*records))


PIRATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}pirate:"


def test_real_models_come_and_go() -> None:
    async def test() -> None:
        pool = open_demos()
        request = TextRequest("import os", SamplingParams(max_tokens=10))
        texts = []
        for _ in range(2):
            for name in (None, "demo-draft"):
                async with await pool.acquire(name) as lease, await lease.session.start(request) as stream:
                    texts.append((await fold_stream(stream)).text)
        assert texts[:2] == texts[2:]
        assert len(pool.running()) == 2
        await pool.unload("demo")
        assert [model.record.short_name for model in pool.running()] == ["demo-draft"]
        async with await pool.acquire("pirate") as lease:
            prompt = lease.session.render_chat(ChatRequest([{"role": "user", "content": "x"}], SamplingParams()))
            assert prompt == "<|im_start|>system\nArr<|im_end|>\n<|im_start|>user\nx<|im_end|>\npirate:"
        await pool.stop()

    asyncio.run(test())


def test_stopping_with_requests_in_flight_ends_them() -> None:
    async def test() -> None:
        pool = open_demos()
        lease = await pool.acquire()
        request = TextRequest("import os", SamplingParams(max_tokens=1500, ignore_eos=True))
        stream = await lease.session.start(request)
        events = [await anext(stream)]
        await pool.stop(drain_s=0.01)
        completion = fold_events([*events, *[event async for event in stream]])
        assert completion.finish_reason is FinishReason.CANCELLED
        assert completion.usage.completion_tokens == len(completion.token_ids) > 0
        with pytest.raises(EngineStopped):
            await lease.session.start(request)
        lease.release()

    asyncio.run(test())


def test_the_cache_of_a_model_keeps_within_the_budget() -> None:
    async def test() -> None:
        pool = open_demos(arena_bytes=None, models_memory_bytes=200 * MIB)
        async with await pool.acquire():
            [model] = pool.running()
            memory = model.session.measure_cache()
            assert 60 * MIB < model.session.weight_bytes + memory.max_bytes <= 200 * MIB
            assert model.size_bytes == model.session.weight_bytes + memory.in_use_bytes < 60 * MIB
        await pool.stop()

    asyncio.run(test())


def test_caches_divide_what_weights_leave_and_no_more() -> None:
    async def test(pool: ModelPool, sessions: Sessions, _: Shelf) -> None:
        await use(pool, "a")
        assert sessions.limits == {"a": 900 * MIB}
        await use(pool, "b")
        assert sessions.limits == {"a": 400 * MIB, "b": 400 * MIB}
        await pool.unload("a")
        await settle(pool, sessions)
        assert sessions.limits["b"] == 900 * MIB

    run(test, models_memory_bytes=1000 * MIB)


def test_names_of_one_file_share_its_weights() -> None:
    async def test() -> None:
        pool = open_demos(arena_bytes=None, models_memory_bytes=300 * MIB)
        chat = ChatRequest([{"role": "user", "content": "import"}], SamplingParams(max_tokens=8, temperature=0))
        async with await pool.acquire("demo") as own, await pool.acquire("pirate") as other:
            assert own.session.base is other.session.base
            assert "pirate:" not in own.session.render_chat(chat)
            assert other.session.render_chat(chat).startswith("<|im_start|>system\nArr<|im_end|>")
            alone = own.session.size_bytes
            assert [(model.name, model.size_bytes, model.shared_with) for model in pool.running()] == [
                ("demo:latest", alone, ("pirate:latest",)),
                ("pirate:latest", alone, ("demo:latest",)),
            ]
            texts = []
            for lease in (own, other):
                async with await lease.session.start(chat) as stream:
                    texts.append((await fold_stream(stream)).text)
            assert texts[0] != texts[1]
        await pool.unload("demo")
        assert [(model.name, model.shared_with) for model in pool.running()] == [("pirate:latest", ())]
        async with await pool.acquire("pirate") as lease, await lease.session.start(chat) as stream:
            assert (await fold_stream(stream)).text == texts[1]
            base = lease.session.base
        async with await pool.acquire("demo") as lease:
            assert lease.session.base is base
            assert "pirate:" not in lease.session.render_chat(chat)
        await pool.unload("pirate")
        await pool.unload("demo")
        assert pool.running() == []
        async with await pool.acquire("demo") as lease:
            assert lease.session.base is not base
        await pool.stop()

    asyncio.run(test())


def test_a_name_whose_adapter_is_gone_leaves_the_others_alone(tmp_path: Path) -> None:
    async def test() -> None:
        path = ASSETS / "demo.gguf"
        size_bytes = path.stat().st_size
        broken = make_record("broken", size_bytes, path=path, adapter=AdapterRef("gone", "0" * 64))
        shelf = Shelf(make_record("demo", size_bytes, path=path), broken)
        pool = ModelPool(Settings(arena_bytes=16 * MIB, models_folder=str(tmp_path)), shelf)
        async with await pool.acquire("demo"):
            with pytest.raises(MlxrError, match="gone"):
                await pool.acquire("broken")
            assert names(pool) == ["demo"]
        await pool.unload("demo")
        with pytest.raises(MlxrError, match="gone"):
            await pool.acquire("broken")
        assert await use(pool, "demo") == "demo:latest"
        await pool.stop()

    asyncio.run(test())
