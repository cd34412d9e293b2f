"""Watchers that read slowly or not at all, engines that are slow or fail, late arrivals: over engines that count."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from live_view import LiveView

from mlxr.core.errors import EngineStopped
from mlxr.core.stats import Counters, Dispatch, LiveReading, MachineLimits, WatchedModel
from mlxr.server import live
from mlxr.server.errors import ServerError
from mlxr.server.live import MAX_FRAMES, Hub, Watcher


class CountingSession:
    """An engine whose only news is that it makes a step before each reading."""

    def __init__(self) -> None:
        self.base, self.steps, self.readings, self.stops = self, 0, 0, 0
        self.is_recording = False
        self.wait: Callable[[], Awaitable[None]] | None = None
        self.error: Exception | None = None
        self.processor_s = 0.0

    async def read_live(self) -> LiveReading:
        if self.wait is not None:
            await self.wait()
        if self.error is not None:
            raise self.error
        self.readings += 1
        self.steps += 1
        is_first, self.is_recording = not self.is_recording, True
        counters = Counters(steps=self.steps)
        return LiveReading(is_first=is_first, counters=counters, processor_s=self.processor_s)

    async def stop_live(self) -> None:
        self.is_recording = False
        self.stops += 1

    async def find_limits(self) -> None:
        return None

    def explain_missing_limits(self) -> str:
        return "measure it"

    def count_kernels(self) -> list[Dispatch]:
        return []

    def describe(self, name: str) -> WatchedModel:
        return WatchedModel(name, "llama", "cpu", "avx2", 2, 128, "paged", 1000)


class CountingPool:
    """Models by name, the one used last first."""

    def __init__(self, *names: str) -> None:
        self.models = {name: SimpleNamespace(name=name, session=CountingSession()) for name in names}

    def running(self) -> list[Any]:
        return list(self.models.values())


async def read_until(watcher: Watcher, view: LiveView, is_done: Callable[[LiveView], bool]) -> None:
    """Apply events until `is_done`."""
    async with asyncio.timeout(20):
        while not is_done(view):
            frames = await watcher.take()
            assert frames is not None, "the stream ended before that happened"
            for frame in frames.decode().split("\n\n")[:-1]:
                event, data = frame.split("\n")
                view.apply(event.removeprefix("event: "), json.loads(data.removeprefix("data: ")))


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not happened():
            await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as often as can be."""
    monkeypatch.setattr(live, "INTERVAL_S", 0.002)
    monkeypatch.setattr(live, "MAX_INTERVAL_S", 0.002)


def run(pool: CountingPool, talk: Callable[[Hub], Awaitable[None]], max_watchers: int = 8) -> None:
    async def main() -> None:
        hub = Hub(pool, max_watchers, lambda: False)
        try:
            await talk(hub)
        finally:
            await hub.stop()

    asyncio.run(main())


def is_right(session: CountingSession) -> Callable[[LiveView], bool]:
    """Return a check that a view has counted as many steps as the session, which must have made more than ten."""
    return lambda view: view.counters["steps"] == session.steps > 10


def test_who_comes_later_knows_as_much() -> None:
    pool = CountingPool("a")
    session = pool.models["a"].session

    async def talk(hub: Hub) -> None:
        first, one = hub.enter(None), LiveView()
        await read_until(first, one, lambda view: view.counters["steps"] > 20)
        second, other = hub.enter("a"), LiveView()
        await read_until(second, other, is_right(session))
        await read_until(first, one, is_right(session))
        assert one.snapshot["counters"]["steps"] == 1
        assert other.snapshot["counters"]["steps"] > 20
        assert session.readings == session.steps, "one reading serves both"

    run(pool, talk)


def test_who_comes_while_the_machine_is_measured_is_told_the_limits() -> None:
    pool = CountingPool("a")
    session = pool.models["a"].session
    limits = MachineLimits(1e9, 2e9, 3.0)

    async def talk(hub: Hub) -> None:
        first, one = hub.enter(None), LiveView()
        await read_until(first, one, lambda view: view.counters["steps"] > 5)

        async def measure() -> None:
            if second.session is session and second.is_new:
                hub.note_limits(session, limits)

        second, other = hub.enter("a"), LiveView()
        session.wait = measure
        await read_until(second, other, lambda view: bool(view.counters))
        assert other.snapshot["limits"] == asdict(limits)
        assert other.snapshot["limits_hint"] is None

    run(pool, talk)


def test_a_watcher_that_does_not_read_is_bounded_and_begins_again() -> None:
    pool = CountingPool("a")
    session = pool.models["a"].session

    async def talk(hub: Hub) -> None:
        slow, quick, view = hub.enter(None), hub.enter(None), LiveView()
        await read_until(quick, view, lambda view: view.counters["steps"] > 3 * MAX_FRAMES)
        assert len(slow._frames) == MAX_FRAMES
        assert slow.is_new
        assert not slow.wants_snapshot
        old = LiveView()
        await read_until(slow, old, lambda view: bool(view.counters))
        assert old.counters["steps"] <= MAX_FRAMES
        await read_until(slow, old, is_right(session))
        assert old.snapshot["counters"]["steps"] > 3 * MAX_FRAMES

    run(pool, talk)


def test_bytes_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_BYTES", 100)

    async def main() -> None:
        watcher = Watcher(None)
        watcher.is_new = False
        watcher.push(b"x" * 1000)  # one frame always passes, or a large cache could never be seen
        watcher.push(b"y")
        assert watcher.is_new
        assert await watcher.take() == b"x" * 1000
        watcher.push(b"z" * 60)
        watcher.push(b"z" * 60)
        assert await watcher.take() == b"z" * 60
        watcher.close()
        assert await watcher.take() is None

    asyncio.run(main())


def test_a_slow_engine_holds_up_no_other_and_is_asked_once() -> None:
    pool = CountingPool("slow", "quick")
    slow, quick = pool.models["slow"].session, pool.models["quick"].session

    async def talk(hub: Hub) -> None:
        gate, entered = asyncio.Event(), 0

        async def wait() -> None:
            nonlocal entered
            entered += 1
            await gate.wait()

        slow.wait = wait
        stuck, view = hub.enter("slow"), LiveView()
        await read_until(hub.enter("quick"), view, is_right(quick))
        assert entered == 1
        gate.set()
        slow.wait = None
        await read_until(stuck, LiveView(), is_right(slow))

    run(pool, talk)


def test_a_watcher_moves_to_the_model_that_is_left() -> None:
    pool = CountingPool("a", "b")

    async def talk(hub: Hub) -> None:
        anyone, only, view = hub.enter(None), hub.enter("a"), LiveView()
        await read_until(anyone, view, lambda view: view.snapshot["model"]["name"] == "a" if view.snapshot else False)
        pool.models = dict(reversed(pool.models.items()))  # b is used, but a watcher of a stays with a
        await read_until(anyone, view, lambda view: view.counters["steps"] > view.snapshot["counters"]["steps"] + 9)
        assert view.snapshot["model"]["name"] == "a"
        gone = pool.models.pop("a").session
        gone.error = EngineStopped()
        await read_until(anyone, view, lambda view: view.snapshot["model"]["name"] == "b")
        lonely = LiveView()
        await read_until(only, lonely, lambda view: bool(view.snapshot) and view.snapshot["model"] is None)
        assert lonely.snapshot["models"] == ["b"]
        await until(lambda: gone not in hub._channels)

    run(pool, talk)


def test_an_engine_that_stops_first_takes_no_watcher_along() -> None:
    pool = CountingPool("a")
    session = pool.models["a"].session

    async def talk(hub: Hub) -> None:
        watcher, view = hub.enter(None), LiveView()
        await read_until(watcher, view, is_right(session))
        session.error = EngineStopped()  # the pool lists it for a while nevertheless
        await asyncio.sleep(0.05)
        pool.models = CountingPool("a").models
        again = pool.models["a"].session
        await read_until(watcher, view, is_right(again))

    run(pool, talk)


def test_a_record_that_was_forgotten_begins_again() -> None:
    pool = CountingPool("a")
    session = pool.models["a"].session

    async def talk(hub: Hub) -> None:
        watcher, view = hub.enter(None), LiveView()
        await read_until(watcher, view, is_right(session))
        session.is_recording = False
        session.steps += 1000  # no change will report these
        await read_until(watcher, view, lambda view: view.counters["steps"] == session.steps > 1010)

    run(pool, talk)


def test_a_reading_that_fails_ends_the_streams_of_its_engine(caplog: pytest.LogCaptureFixture) -> None:
    pool = CountingPool("a", "b")

    async def talk(hub: Hub) -> None:
        broken, whole, view = hub.enter("a"), hub.enter("b"), LiveView()
        await read_until(whole, view, is_right(pool.models["b"].session))
        pool.models["a"].session.error = RuntimeError("broken")
        async with asyncio.timeout(20):
            while await broken.take() is not None:
                pass
        await read_until(whole, view, lambda view: view.counters["steps"] > 100)

    run(pool, talk)
    assert "cannot be watched" in caplog.text


def test_the_task_and_the_records_end_with_the_last_watcher() -> None:
    pool = CountingPool("a")
    session = pool.models["a"].session

    async def talk(hub: Hub) -> None:
        for round_ in range(1, 4):
            watcher, view = hub.enter(None), LiveView()
            await read_until(watcher, view, lambda view: bool(view.snapshot))
            hub.leave(watcher)
            await until(lambda: hub._task is None and not hub._ending)
            assert session.stops == round_
            assert not session.is_recording
            assert not hub._channels

    run(pool, talk)


def test_readings_that_take_long_come_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_INTERVAL_S", 1000.0)
    monkeypatch.setattr(live, "MAX_SHARE", 0.5)  # the wait for the test's own time stays short
    pool = CountingPool("a")
    session = pool.models["a"].session

    async def talk(hub: Hub) -> None:
        first, one = hub.enter(None), LiveView()
        await read_until(first, one, lambda view: view.counters["steps"] > 5)
        session.processor_s = 400.0  # the next reading may come after twice that time
        steps = session.steps
        await read_until(first, one, lambda view: view.counters["steps"] > steps)
        seen = session.steps
        for _ in range(20):
            await asyncio.sleep(0.002)
        assert session.steps == seen
        second, other = hub.enter(None), LiveView()  # a new watcher does not wait
        await read_until(second, other, lambda view: view.counters["steps"] > steps)
        assert session.steps == seen + 1

    run(pool, talk)


def test_too_many_are_refused() -> None:
    async def talk(hub: Hub) -> None:
        hub.enter(None)
        watcher = hub.enter(None)
        with pytest.raises(ServerError, match="live_watchers"):
            hub.enter(None)
        hub.leave(watcher)
        hub.enter(None)

    run(CountingPool(), talk, max_watchers=2)
