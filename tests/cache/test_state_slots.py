"""States in the cache: one group for all recurrent layers, slots that exchange places, snapshots, and their sizes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cache_world import FULL, PAGE_SIZE, STATE, World

from mlxr.cache.arena import StateArena
from mlxr.cache.group import POPULATED_AHEAD, Snapshot
from mlxr.cache.shapes import (
    CachePlace,
    CacheShape,
    PageNeeds,
    PagesAndState,
    SharedWith,
    StateShape,
    StatesShape,
    choose_pages,
    form_groups,
    space_snapshots,
)
from mlxr.core.errors import ModelError, OutOfPages, SettingError
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import FloatArray

HYBRID = (STATE, FULL, STATE)
TEXT = list(range(1, 6 * PAGE_SIZE + 2))
QWEN = (CacheShape(4, 256), StatesShape((StateShape(1000),) * 24))  # a page, and a state of fifty times its bytes
QWEN_BYTES = (100, 5000)


def test_all_recurrent_layers_are_one_group_and_the_last() -> None:
    groups = form_groups([StateShape(5), FULL, None, StateShape(7), CacheShape(1, 2, window=3), SharedWith(1)])
    states = StatesShape((StateShape(5), StateShape(7)))
    assert groups.shapes == (FULL, CacheShape(1, 2, window=3), states)
    assert groups.paged == groups.shapes[:2]
    assert groups.pools == (1, 1, 2)
    first, other = CachePlace(2, 0), CachePlace(2, 1)
    assert groups.states == (first, None, None, other, None, None)
    assert groups.places == (None, CachePlace(0, 0), None, None, CachePlace(1, 0), CachePlace(0, 0))


def test_a_layer_may_keep_pages_and_a_state() -> None:
    other = PagesAndState(SharedWith(0), StateShape(7))
    groups = form_groups([PagesAndState(FULL, StateShape(5)), None, other, FULL])
    assert (groups.shapes, groups.pools) == ((FULL, StatesShape((StateShape(5), StateShape(7)))), (2, 2))
    assert groups.places == (CachePlace(0, 0), None, CachePlace(0, 0), CachePlace(0, 1))
    assert groups.states == (CachePlace(1, 0), None, CachePlace(1, 1), None)


def test_a_state_is_not_shared_between_layers() -> None:
    with pytest.raises(ModelError, match="layer 1 shares the keys and values of layer 0, which has none"):
        form_groups([STATE, SharedWith(0)])


def test_pools_have_the_floats_of_their_layers_and_mean_them() -> None:
    arena = StateArena(Context("reference"), StatesShape((StateShape(5), StateShape(7))), slots=3, page_size=4)
    assert [pool.shape for pool in arena.states] == [(3, 5), (3, 7)]
    assert (arena.page_bytes, arena.nbytes, arena.layers) == (48, 144, 2)
    arena.states[0][1], arena.states[1][1] = 2.5, -1
    payload = np.empty(48, np.uint8)
    arena.export_page(1, payload)
    arena.import_page(2, payload)
    assert (arena.states[0][2] == 2.5).all()
    assert (arena.states[1][2] == -1).all()
    other = StateArena(Context("reference"), StatesShape((StateShape(7), StateShape(5))), slots=3, page_size=4)
    assert arena.layout != other.layout


def test_a_step_reads_one_slot_and_writes_another() -> None:
    world = World(layers=HYBRID)
    table = world.cache.open_private_table()
    own = table.states
    assert own is not None
    seen = []
    for count in (3, 1, 6, 2):
        world.prepare(table, count)
        world.prepare(table, count)  # asking twice is the same as asking once
        read, write = own.state, own.spare
        assert read != write
        seen.append((read, write))
        world.fill(table, TEXT, table.length_tokens + count)
        assert own.state == write
        world.read(table, TEXT)
        world.cache.check([table])
    first, second = seen[0][1], seen[1][1]
    assert seen == [(-1, first), (first, second), (second, first), (first, second)]
    assert table.held_pages[1] == 2
    world.cache.release(table)
    assert world.cache.stats().used_pages == world.cache.stats().cached_pages == 0


def test_memory_of_the_next_slots_is_taken_when_a_sequence_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(StateArena, "populate", lambda _, slots: taken.extend(slots))
    world = World(layers=HYBRID)
    group = world.cache.groups[-1]
    world.serve(TEXT)
    assert not taken  # these states are small
    monkeypatch.setattr(StateArena, "is_slow_to_populate", True)
    for first in range(1, 4):
        world.serve([token + 100 * first for token in TEXT])
        assert group.pager.free_pages - (group.pager.pages - group.pager.written_pages) == POPULATED_AHEAD
        world.cache.check([])
    assert taken == sorted(set(taken))
    group.limit(0, None)  # gives everything back
    assert group.pager.written_pages == 0
    before = len(taken)
    group.populate_ahead()
    assert not taken[before:]


def test_slots_are_taken_in_the_background_with_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = StateArena(Context("reference"), StatesShape((StateShape(5), StateShape(7))), slots=3, page_size=4)
    asked, stopped = [], threading.Event()

    def populate(pool: FloatArray, start: int, stop: int) -> None:
        asked.append((pool.shape, start, stop))
        if len(asked) == 2:
            stopped.wait(60)

    arena.states[0][1], arena.states[1][2] = 2.5, -1
    arena.populate([0, 1, 2])
    arena.populate([2])
    arena._populating.join(60)
    assert [pool.sum() for pool in arena.states] == [12.5, -7]
    monkeypatch.setattr("mlxr.cache.arena.populate_pages", populate)
    arena.populate([1, 2])
    while len(asked) < 2:
        time.sleep(0.001)
    threading.Timer(0.05, stopped.set).start()
    arena.discard([1, 2])  # waits for what is being taken, and nothing is taken after it
    assert asked == [((3, 5), 1, 2), ((3, 7), 1, 2)]
    assert not arena._populating.is_alive()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    arena.populate([0])  # a step takes it then
    arena.discard([0])


def test_the_slot_after_the_next_one_is_told_where_it_is_known() -> None:
    """It is the slot that is read now, unless there is none, a twin has it too, or its state may become a snapshot."""
    world = World(layers=HYBRID)
    table = world.open(TEXT)
    own = table.states
    assert own is not None
    known = []
    for _ in range(2 * PAGE_SIZE + 1):
        world.prepare(table, 1)
        told, read = own.find_next(), own.state
        assert told in (-1, read)
        world.fill(table, TEXT, table.length_tokens + 1)
        if told >= 0:
            assert own.spare == told
            known.append(table.length_tokens - 1)
    assert known == [place for place in range(2 * PAGE_SIZE + 1) if place % PAGE_SIZE]
    world.write(table, TEXT, 1)
    assert own.find_next() == own.state
    twin = world.cache.fork(table)
    assert own.find_next() == -1
    world.cache.check([table, twin])


def test_what_a_failed_step_wrote_is_read_by_nobody() -> None:
    world = World(layers=HYBRID)
    table = world.open(TEXT)
    world.write(table, TEXT, 6)
    twin = world.cache.fork(table)
    assert table.states is not None
    world.prepare(table, 4)
    for states in world.state_pools:
        states[table.states.spare] = np.nan
    for one in (table, twin):
        world.read(one, TEXT)
        world.write(one, TEXT, 5)
        world.read(one, TEXT)
    world.cache.check([table, twin])


def test_a_snapshot_is_never_written_and_goes_when_room_is_needed() -> None:
    world = World(layers=HYBRID, pages=8)
    for stem in range(4):
        text = [stem, *TEXT[: PAGE_SIZE + 2]]
        assert world.serve(text) == 0
        assert world.serve(text) == PAGE_SIZE
    tables = [world.open([stem, 9, 9]) for stem in range(4)]
    for table in tables:
        world.write(table, [0, 9, 9], 2)
        world.write(table, [0, 9, 9])
    world.cache.check(tables)
    assert world.cache.stats().groups[1].cached_pages == 0
    extra = world.open([7, 7])
    with pytest.raises(OutOfPages):
        world.prepare(extra, 1)
    for table in (*tables, extra):
        world.cache.release(table)


@pytest.mark.parametrize("snapshot", list(Snapshot))
def test_what_is_wanted_is_kept(snapshot: Snapshot) -> None:
    world = World(layers=HYBRID)
    table = world.open(TEXT)
    world.prepare(table, 2 * PAGE_SIZE)
    world.fill(table, TEXT, 2 * PAGE_SIZE, snapshot)
    world.write(table, TEXT, 2)
    wanted = snapshot is not Snapshot.NONE
    assert world.lookup(TEXT) == 2 * PAGE_SIZE * wanted
    (entry,) = world.groups[1].index if wanted else (None,)
    assert entry is None or entry.passed is (snapshot is not Snapshot.LASTING)
    world.cache.release(table)
    if wanted:
        assert world.open(TEXT).length_tokens == 2 * PAGE_SIZE
        assert entry is not None
        assert not entry.passed  # found again
    else:
        assert world.cache.stats().groups[1].cached_pages == 0


def test_a_hit_needs_the_state_and_the_pages_and_says_what_it_lacks() -> None:
    world = World(layers=HYBRID, pages=32)
    world.serve(TEXT[: 2 * PAGE_SIZE + 1])
    world.serve(TEXT)
    other = [*TEXT[: 4 * PAGE_SIZE], 99]
    assert world.open(other).length_tokens == 2 * PAGE_SIZE
    stats = world.cache.stats()
    assert stats.short_tokens == {str(FULL): 0, "state, 2 layers": 2 * PAGE_SIZE}


def test_two_who_compute_the_same_have_one_state() -> None:
    world = World(layers=HYBRID)
    one, other = world.open(TEXT), world.open(TEXT)
    for table in (one, other):
        world.write(table, TEXT, 2 * PAGE_SIZE)
    assert one.states is not None
    assert other.states is not None
    assert one.states.state == other.states.state
    assert world.cache.stats().groups[1].shared_pages == 1
    world.cache.check([one, other])


def test_a_trailing_snapshot_trails_both_of_a_fork(tmp_path: Path) -> None:
    """It is not stored once one sequence has gone on: it goes when the other does, too, and is stored if that ends."""
    for ends in (False, True):
        world = World(folder=tmp_path / str(ends), layers=(STATE, FULL))
        table, tokens = world.open([1]), list(range(1, PAGE_SIZE + 1))
        world.prepare(table, PAGE_SIZE)
        world.fill(table, tokens, PAGE_SIZE, Snapshot.TRAILING)
        twin = world.cache.fork(table)
        states = world.groups[-1]
        entry = states.index.at(twin.groups[-1].held_pages[0])
        assert entry is not None
        world.write(table, [*tokens, *range(50, 50 + PAGE_SIZE)])
        assert states.list_lasting(twin.groups[-1], 0) == []
        if ends:
            world.cache.release(twin)
            world.flush()
            assert world.store is not None
            assert world.store.contains((1, entry.key))
        else:
            world.write(twin, [*tokens, *range(90, 90 + PAGE_SIZE)])
            assert states.index.get(entry.key) is None
            world.cache.release(twin)
        world.cache.release(table)
        world.cache.check([])
        world.cache.close()


def test_slots_are_two_for_each_that_runs_and_those_for_snapshots() -> None:
    needs = PageNeeds(QWEN, 32, sequences=8, context_tokens=8192, step_tokens=512)
    spacing = space_snapshots(QWEN_BYTES, needs, 33)
    assert spacing == 102  # 5,000 bytes are a third of them and 102 pages
    assert choose_pages(QWEN_BYTES, needs, available_bytes=10**9) == (2048, 16)
    needs = PageNeeds(QWEN, 32, sequences=8, context_tokens=8192, step_tokens=512, snapshot_pages=spacing)
    assert choose_pages(QWEN_BYTES, needs, available_bytes=10**9) == (2048, 16 + 21)
    assert choose_pages(QWEN_BYTES, needs, pages=64, available_bytes=None) == (64, 2 * 2 + 1)
    for size in (20_000, 10**5, 3 * 10**5):
        pages, slots = choose_pages(QWEN_BYTES, needs, arena_bytes=size, available_bytes=None)
        assert 0.75 * size < pages * 100 + slots * 5000 <= size
        assert slots == 2 * min(8, -(-pages // 32)) + -(-pages // 102)
    with pytest.raises(SettingError, match=r"arena_bytes: 9000 bytes hold no page.*15100 bytes"):
        choose_pages(QWEN_BYTES, needs, arena_bytes=9000, available_bytes=None)
    assert needs.compare_bytes(QWEN_BYTES) == (2048 * 100 + 37 * 5000,) * 2


def test_states_alone_have_their_snapshots_by_the_context() -> None:
    needs = PageNeeds(QWEN[1:], 32, sequences=2, context_tokens=8192, step_tokens=512)
    assert space_snapshots(QWEN_BYTES[1:], needs, 33) == 32
    assert space_snapshots(QWEN_BYTES[:1], PageNeeds(QWEN[:1], 32, 2, 8192, 512), 33) is None
    with pytest.raises(SettingError, match="snapshot_percent: must be from 1 to 90, got 91"):
        space_snapshots(QWEN_BYTES, needs, 91)


@pytest.mark.parametrize(
    ("reads", "writes", "reason"),
    [
        ([0], [2, 3], "length of state_reads"),
        ([0, -2], [2, 3], "state_reads"),
        ([0, 1], [2, 2], "state_writes"),
        ([0, 2], [2, 3], "state_writes"),
        ([0, 1], [2, -1], "state_writes"),
    ],
)
def test_a_batch_refuses_slots_that_two_would_write(reads: list[int], writes: list[int], reason: str) -> None:
    batch = RaggedBatch.of_single_tokens([1, 2], [0, 0], [-1, -1], np.empty((2, 0), np.int32))
    assert not batch.has_states
    with pytest.raises(ValueError, match=reason):
        batch.with_states(np.array(reads, np.int32), np.array(writes, np.int32))
    fine = batch.with_states(np.array([-1, 1], np.int32), np.array([2, 3], np.int32))
    assert fine.has_states
    assert fine.state_reads.tolist() == [-1, 1]
    assert fine.state_nexts.tolist() == [-1, -1]
    padded = np.array([9, 9], np.int32)
    with pytest.raises(ValueError, match="state_writes"):
        batch.with_states(padded, padded)
    assert batch.with_states(fine.state_reads, padded, spare=9).state_writes.tolist() == [9, 9]
