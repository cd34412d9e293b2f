"""The thread that writes pages: it keeps few of them waiting, and no failure stops it or the engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread, current_thread

import pytest
from cache_world import FLUSH_S, PAGE_SIZE, World, page_files

from mlxr.cache.store import PageStore
from mlxr.cache.store_writer import StoreWriter
from mlxr.core.stats import StoreDrop
from mlxr.kernels.tensor import ByteArray

PROMPT = list(range(1, 8 * PAGE_SIZE + 1))


class SlowDisk:
    """Lets the writer's calls begin, and ends none of them before `open`."""

    def __init__(self, store: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gate, self.is_reached = Event(), Event()
        write = store.write

        def wait_and_write(*args: object) -> bool:
            self.is_reached.set()
            assert self._gate.wait(FLUSH_S)
            return write(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(store, "write", wait_and_write)

    def open(self) -> None:
        self._gate.set()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(pages=8, folder=tmp_path)
    yield world
    world.cache.close()


def limit_writer(world: World, **limits: int) -> StoreWriter:
    """Give the world's cache a writer with other bounds."""
    assert world.store is not None
    writer = StoreWriter(world.store, [world.arena], **limits)
    world.cache.writer = writer
    return writer


def hold_up(world: World, monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    """Keep the disk busy with a page that belongs to no sequence."""
    assert world.store is not None
    assert world.cache.writer is not None
    disk = SlowDisk(world.store, monkeypatch)
    world.cache.writer.offer([((0, bytes(32)), 0, 0)], 0, released=True)
    assert disk.is_reached.wait(FLUSH_S)
    return disk


def test_pages_evicted_before_their_turn_are_written_nonetheless(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = hold_up(world, monkeypatch)
    world.serve(PROMPT[: 6 * PAGE_SIZE])
    world.serve([9] * (8 * PAGE_SIZE))  # overwrites the whole arena
    assert world.cache.stats().cached_pages == 8
    assert world.store_stats.queued_pages == 1 + 6 + 8
    disk.open()
    world.flush()
    assert world.store_stats.written_pages == 1 + 6 + 8
    assert sum(world.store_stats.drops.values()) == 0
    assert World(folder=tmp_path).serve([*PROMPT[: 6 * PAGE_SIZE], 1]) == 6 * PAGE_SIZE


def test_only_the_eviction_of_a_page_waits_for_its_copy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world.cache.writer is not None
    gate, is_reached, export = Event(), Event(), world.arena.export_page

    def export_late(page: int, target: ByteArray) -> None:
        is_reached.set()
        assert gate.wait(FLUSH_S)
        export(page, target)

    monkeypatch.setattr(world.arena, "export_page", export_late)
    table = world.open(PROMPT)
    world.write(table, PROMPT, PAGE_SIZE)
    assert is_reached.wait(FLUSH_S)
    world.write(table, PROMPT, PAGE_SIZE)  # offers another page, and does not wait
    world.cache.release(table)
    waits = Thread(target=world.serve, args=([9] * (8 * PAGE_SIZE),))  # overwrites the whole arena
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    gate.set()
    waits.join(FLUSH_S)
    world.flush()
    assert world.store_stats.written_pages == 2 + 8
    assert sum(world.store_stats.drops.values()) == 0


def test_pages_are_written_as_they_fill(world: World, tmp_path: Path) -> None:
    table = world.open(PROMPT)
    for count in (PAGE_SIZE - 1, 1, 2 * PAGE_SIZE, 1, PAGE_SIZE):
        world.write(table, PROMPT, count)
        world.flush()
        assert len(page_files(tmp_path)) == table.length_tokens // PAGE_SIZE
    assert World(folder=tmp_path).serve(PROMPT) == 4 * PAGE_SIZE
    world.cache.release(table)
    world.flush()
    assert world.store_stats.written_pages == 4, "each once"


def test_a_page_that_found_no_room_when_it_filled_is_offered_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_writer(world, max_queued_pages=3)
    disk = hold_up(world, monkeypatch)
    first, second = PROMPT[: 3 * PAGE_SIZE], [9] * (2 * PAGE_SIZE)
    tables = [world.open(first), world.open(second)]
    for table, tokens in zip(tables, (first, second), strict=True):
        world.write(table, tokens)
    assert world.store_stats.queued_pages == 1 + 3
    assert world.store_stats.drops[StoreDrop.QUEUE_FULL] == 0, "those without room have another chance"
    disk.open()
    world.flush()
    assert len(page_files(tmp_path)) == 1 + 3
    world.cache.release(tables[1])
    world.flush()
    assert len(page_files(tmp_path)) == 1 + 3 + 2


def test_copies_aside_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_writer(world, max_aside_bytes=2 * world.arena.page_bytes + 1)
    disk = hold_up(world, monkeypatch)
    world.serve(PROMPT[: 6 * PAGE_SIZE])
    world.serve([9] * (8 * PAGE_SIZE))
    assert world.store_stats.drops[StoreDrop.EVICTED] == 6 - 2
    disk.open()
    world.flush()
    assert world.store_stats.written_pages == 1 + 2 + 8


def test_queue_is_bounded_and_a_last_chance_is_given_when_a_page_leaves(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_writer(world, max_queued_pages=3)
    disk = hold_up(world, monkeypatch)
    world.serve(PROMPT[: 6 * PAGE_SIZE])
    assert world.store_stats.drops[StoreDrop.QUEUE_FULL] == 3
    disk.open()
    world.flush()
    assert world.lookup(PROMPT, 99) == 6 * PAGE_SIZE  # in memory
    assert world.store_stats.entries == 1 + 3
    world.serve([9] * (5 * PAGE_SIZE))  # evicts, and the queue has room again
    world.flush()
    assert world.store_stats.entries >= 1 + 3 + 3
    assert World(folder=tmp_path).lookup(PROMPT, 99) == 6 * PAGE_SIZE


def test_closing_does_not_wait_for_a_stuck_disk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = hold_up(world, monkeypatch)
    world.serve(PROMPT[: 6 * PAGE_SIZE])
    assert not world.cache.flush(0.01)
    world.cache.close(0.01)
    assert world.store_stats.drops[StoreDrop.CLOSED] == 6
    assert world.serve(PROMPT[: 6 * PAGE_SIZE]) == 5 * PAGE_SIZE  # the cache works on, without the store
    assert world.store_stats.drops[StoreDrop.CLOSED] == 12
    disk.open()
    world.flush()


def test_a_page_is_queued_once_however_often_it_is_let_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = hold_up(world, monkeypatch)
    for _ in range(5):
        world.serve(PROMPT[: 4 * PAGE_SIZE])
    assert world.store_stats.queued_pages == 1 + 4
    disk.open()
    world.flush()
    assert world.store_stats.written_pages == 1 + 4


def test_the_thread_outlives_bugs(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> bool:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "write", fail)
        world.serve(PROMPT[:PAGE_SIZE])
        world.flush()
    attempts = world.store_stats.drops[StoreDrop.UNWRITABLE]
    assert attempts in (1, 2), "when the page was full, and once more when it was let go if that had failed by then"
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * attempts
    world.serve([9] * PAGE_SIZE)
    world.flush()
    assert len(page_files(tmp_path)) == 1


def test_check_notices_a_page_that_changed_while_it_waited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = hold_up(world, monkeypatch)
    world.serve(PROMPT[:PAGE_SIZE])
    world.cache.check([])
    writer = world.cache.writer
    assert writer is not None
    with pytest.raises(AssertionError, match="holds something else now"):
        writer.check({})
    disk.open()


def test_pages_of_a_device_take_little_of_the_engines_time_while_it_works(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying one takes a second here: the next is copied when twenty more have passed, or when the sequence ends."""
    now_s = 0.0
    copied: list[float] = []

    def copy(*_: object) -> None:
        nonlocal now_s
        now_s += 1
        copied.append(now_s)

    monkeypatch.setattr(type(world.arena), "is_on_host", False)
    monkeypatch.setattr(world.arena, "export_page", copy)
    table = world.open(PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr("mlxr.cache.store_writer.time.monotonic", lambda: now_s)
        for _ in range(6 * PAGE_SIZE):
            now_s += 2
            world.write(table, PROMPT, 1)
        assert len(copied) == 3
        assert all(later - earlier >= 20 for earlier, later in pairwise(copied))
        world.cache.release(table)
    assert len(copied) == 6
    world.flush()
    assert len(page_files(tmp_path)) == 6


def test_pages_of_a_device_are_copied_by_the_engine(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's thread reads none of them; those that find no room wait for the engine's next visits."""
    readers = []
    export = world.arena.export_page

    def note_and_export(*args: object) -> None:
        readers.append(current_thread())
        export(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(type(world.arena), "is_on_host", False)
    monkeypatch.setattr(world.arena, "export_page", note_and_export)
    limit_writer(world, max_aside_bytes=2 * world.arena.page_bytes)
    disk = hold_up(world, monkeypatch)
    world.serve(PROMPT[: 6 * PAGE_SIZE])
    assert world.store_stats.queued_pages == 1 + 6
    assert len(readers) == 1 + 2
    disk.open()
    world.flush()
    assert world.store_stats.written_pages == 1 + 6
    assert set(readers) == {current_thread()}
    assert World(folder=tmp_path).serve([*PROMPT[: 6 * PAGE_SIZE], 1]) == 6 * PAGE_SIZE
