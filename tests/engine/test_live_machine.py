"""The engine's random moves once more, with a watcher who looks now and then: the events add up to the true state.

The watcher knows events only, as JSON. After every look it must know each page's holder and place, each running
answer's pages, queue, store and counters, as they are computed here from the books of cache and scheduler.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from amounts import choose_amount
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from live_view import LiveView
from test_engine_machine import EngineMachine, MixedEngineMachine, StateEngineMachine

from mlxr.cache.shapes import form_groups
from mlxr.core.stats import Counters, LiveReading
from mlxr.engine.engine import Engine
from mlxr.engine.stats import FORGET_S, _describe
from mlxr.models.footprint import AttentionWork, StepWork
from mlxr.server.live import compare, make_snapshot, write_change, write_snapshot

WORK = StepWork(weight_bytes=1000, token_macs=10, output_macs=3, attention=(AttentionWork(2, None),))


def decode_frame(frame: bytes) -> tuple[str, dict[str, Any]]:
    head, data, _, _ = frame.decode().split("\n")
    return head.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def expect_codes(engine: Engine, number: int) -> list[int]:
    """The code of each page of a group, from tables, index and store."""
    cache, group = engine.cache, engine.cache.groups[number]
    tables = [sequence.table.groups[number] for sequence in engine._scheduler.running]
    holders = Counter(page for table in tables for page in table.held_pages)
    codes = [min(holders[page], 2) for page in range(group.pager.pages)]
    for entry in group.index:
        codes[entry.page] = codes[entry.page] or 3
        if cache.store is not None and cache.writer is not None:
            is_waiting = (number, entry.key) in cache.writer._waiting
            codes[entry.page] += 4 * (2 if (number, entry.key) in cache.store._names else is_waiting)
    return codes


class WatchedMachine(EngineMachine):
    """The same moves, and a watcher."""

    view: LiveView | None = None
    last: LiveReading | None = None
    has_looked = is_eager = False

    @initialize(eager=st.booleans())
    def begin_to_watch(self, eager: bool) -> None:
        self.is_eager = eager

    @rule(full=st.booleans())
    def look(self, full: bool) -> None:
        work = replace(WORK, attention=WORK.attention * len(form_groups(self.layers).paged))
        full = full or self.view is None
        reading = self.engine.live.read(work)
        if reading.is_first:
            self.view = None  # the record begins here
        elif self.view is not None and self.last is not None:
            self.view.apply(*decode_frame(write_change(compare(self.last, reading, 1.0, 1.0))))
        self.last = reading
        if full:
            fresh = LiveView.of(decode_frame(write_snapshot(make_snapshot(reading, 1.0, [])))[1])
            self.compare(fresh)
            self.view = self.view or fresh
        self.has_looked = True

    @precondition(lambda self: self.view is not None)
    @rule(often=st.integers(0, 4))
    def look_away(self, often: int) -> None:
        if not often:
            self.engine.live.stop()
            self.view = None

    @invariant()
    def an_eager_watcher_looks(self) -> None:
        if hasattr(self, "engine") and self.is_eager:
            self.look(full=False)

    @invariant()
    def the_view_is_right(self) -> None:
        if hasattr(self, "engine") and self.has_looked and self.view is not None:
            self.compare(self.view)
            assert self.engine.live.record is not None
            self.engine.live.record.map.check()
        self.has_looked = False

    @invariant()
    def nothing_is_noted_unwatched(self) -> None:
        if hasattr(self, "engine") and self.engine.live.record is None:
            cache = self.engine.cache
            assert all(group.pager.notes is None for group in cache.groups)
            assert self.engine._scheduler.preempted is None
            assert cache.store is None or cache.store.touched is None

    def compare(self, view: LiveView) -> None:
        """Assert that everything `view` knows is so."""
        scheduler, stats = self.engine._scheduler, self.engine.stats()
        for number, group in enumerate(stats.cache.groups):
            assert view.codes[number] == expect_codes(self.engine, number)
            assert view.short_tokens[number] == stats.cache.short_tokens[group.name]
        rows = {(sequence.id, sequence.index): sequence for sequence in scheduler.running}
        assert view.rows.keys() == rows.keys()
        for key, row in view.rows.items():
            assert {**row, "tables": None} == {**asdict(_describe(rows[key])), "tables": None}
            assert [part["pages"] for part in row["tables"]] == [own.pages for own in rows[key].table.groups]
            assert row["tokens"] == len(rows[key].tokens)
            assert row["written_tokens"] == rows[key].table.length_tokens
        assert view.queue["running"] == sum(sequence.width for sequence in scheduler.running)
        assert view.queue["waiting"] == sum(sequence.width for sequence in scheduler.waiting)
        assert view.queue == asdict(stats.queue)
        assert {row.name: view.counters[row.name] for row in fields(Counters)} == {
            row.name: getattr(stats, row.name) for row in fields(Counters)
        }
        for name in ("steps", "prefill_tokens", "decode_tokens"):
            assert view.snapshot["counters"][name] + sum(step[name] for step in view.steps) == view.counters[name]
        assert view.counters["evicted_pages"] == sum(stats.cache.evictions.values())
        assert (view.store is None) == (stats.cache.store is None)
        if view.store is not None and stats.cache.store is not None:
            assert view.store["entries"] == stats.cache.store.entries
            assert view.counters["dropped_pages"] == sum(stats.cache.store.drops.values())

    def take(self, events: list[Any]) -> None:
        super().take(events)
        if self.engine.live.record is None:
            self.view = None  # after some seconds without a look, or in a new engine


class WatchedWindowsMachine(WatchedMachine):
    """Two groups of pages; one of them gives pages back while its sequences grow."""

    layers = MixedEngineMachine.layers


class WatchedStatesMachine(WatchedMachine):
    """Recurrent layers, whose states change places with every step."""

    layers = StateEngineMachine.layers


test_watched_machine = WatchedMachine.TestCase
test_watched_machine_with_windows = WatchedWindowsMachine.TestCase
test_watched_machine_with_states = WatchedStatesMachine.TestCase
for machine in (WatchedMachine, WatchedWindowsMachine, WatchedStatesMachine):
    machine.TestCase.settings = settings(
        max_examples=choose_amount(50),
        stateful_step_count=80,
        deadline=None,
        derandomize=True,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


def test_the_record_ends_when_nobody_reads() -> None:
    machine = WatchedMachine()
    machine.begin(20, False, "paged", 8, None)
    machine.submit((1, 2, 3), 0.0, 12, 1, 0, None, None, True, None)
    machine.look(full=True)
    machine.step(1)
    assert machine.engine.live.record is not None
    machine.now += FORGET_S
    machine.step(1)
    assert machine.engine.live.record is None
    assert machine.engine.live.read(WORK).is_first
    machine.teardown()


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("start", [0, 3, 4, 40])
@pytest.mark.parametrize("tokens", [1, 2, 7, 50])
def test_pairs_and_positions_are_those_that_are_seen(window: int | None, start: int, tokens: int) -> None:
    seen = [
        range(max(0, position - window + 1) if window else 0, position + 1) for position in range(start, start + tokens)
    ]
    work = AttentionWork(1, window)
    positions = {position for row in seen for position in row}
    assert work.count(start, tokens) == (sum(map(len, seen)), len(positions))
