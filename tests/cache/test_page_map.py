"""A watch over the cache: which pages it names, and how far each is on its way to disk."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from cache_world import PAGE_SIZE, World, page_files

from mlxr.cache import page_table
from mlxr.cache.page_map import CacheMap, describe_page
from mlxr.cache.page_table import PageNotes, Pager
from mlxr.core.stats import Holder, StorePlace, make_code

FREE, PRIVATE, SHARED, CACHED = (make_code(holder, StorePlace.NONE) for holder in Holder)
ON_DISK = make_code(Holder.CACHED, StorePlace.ON_DISK)
WAITING = make_code(Holder.CACHED, StorePlace.WAITING)
TEXT = list(range(2 * PAGE_SIZE))


def read_codes(watch: CacheMap) -> list[int]:
    """The codes as they are read, which must be right."""
    (pages,) = watch.read()
    watch.check()
    return list(pages.codes)


@pytest.mark.parametrize("seed", range(20))
def test_every_move_of_the_pager_names_the_pages_whose_holders_change(seed: int) -> None:
    draw, pager = random.Random(seed), Pager(8, 4)
    held: list[int] = []
    for _ in range(300):
        before = list(pager.list_holders())
        assert before == [pager.find_holder(page) for page in range(8)]
        pager.notes = PageNotes()
        cached = [page for page in range(8) if pager.find_holder(page) is Holder.CACHED]
        match draw.choice(["allocate", "retain", "release", "keep", "drop"]):
            case "allocate" if pager.free_pages:
                held += pager.allocate(1)
            case "retain" if held or cached:
                held.append(draw.choice(held + cached))
                pager.retain(held[-1:])
            case "release" if held:
                pager.release([held.pop(draw.randrange(len(held)))])
            case "keep" if held:
                pager.keep(draw.choice(held))
            case "drop" if cached:
                pager.drop(draw.choice(cached))
        pager.check([held])
        after = pager.list_holders()
        assert {page for page in range(8) if before[page] != after[page]} <= pager.notes.touched


def test_pages_on_their_way_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(folder=tmp_path)
    watch = CacheMap(world.cache)
    assert world.store is not None
    gate, write = threading.Event(), world.store.write

    def wait_and_write(*arguments: object) -> bool:
        gate.wait(30)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(world.store, "write", wait_and_write)
    world.serve(TEXT)
    assert read_codes(watch)[:3] == [WAITING, WAITING, FREE]
    gate.set()
    world.flush()
    assert read_codes(watch)[:3] == [ON_DISK, ON_DISK, FREE]
    (before,), (now,) = watch.read(), watch.read()
    assert now.codes is before.codes
    assert (now.evicted, now.copied) == ([], [])


def test_pages_that_leave_the_disk(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    world.serve(TEXT)
    world.flush()
    watch = CacheMap(world.cache)
    assert read_codes(watch)[:2] == [ON_DISK, ON_DISK]
    store = world.store
    assert store is not None
    store._adopt([])  # as when others have removed the files
    assert read_codes(watch)[:2] == [CACHED, CACHED]


def test_a_damaged_page_is_on_disk_no_longer(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    world.serve(TEXT)
    world.flush()
    watch = CacheMap(world.cache)
    for file in page_files(tmp_path):
        file.write_bytes(b"x" * file.stat().st_size)
    for key in list(world.cache.start_keys().cover(TEXT, 2)):
        assert world.store is not None
        assert world.store.read((0, key)) is None
    assert read_codes(watch)[:2] == [CACHED, CACHED]


def test_pages_that_cannot_be_written_wait_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(folder=tmp_path)
    watch = CacheMap(world.cache)
    assert world.store is not None
    monkeypatch.setattr(world.store, "write", lambda *_: False)
    world.serve(TEXT)
    read_codes(watch)
    world.flush()
    assert read_codes(watch)[:2] == [CACHED, CACHED]


def test_pages_that_waited_when_the_cache_was_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(folder=tmp_path)
    watch = CacheMap(world.cache)
    assert world.store is not None
    gate = threading.Event()
    monkeypatch.setattr(world.store, "write", lambda *_: gate.wait(30))
    world.serve(TEXT)
    read_codes(watch)
    threading.Timer(0.2, gate.set).start()
    world.cache.close(0.0)
    world.flush()
    assert read_codes(watch)[:2] == [CACHED, CACHED]


def test_a_page_that_is_computed_again_is_on_disk_already(tmp_path: Path) -> None:
    earlier = World(folder=tmp_path)
    earlier.serve(TEXT)
    earlier.flush()
    world = World(folder=tmp_path)
    watch = CacheMap(world.cache)
    assert world.store is not None
    world.store._writable = False  # so that nothing is offered to the writer
    table = world.cache.open_table([], world.cache.start_keys(), limit_tokens=0)
    world.prepare(table, len(TEXT))
    assert read_codes(watch)[:2] == [PRIVATE, PRIVATE]
    world.fill(table, TEXT, len(TEXT))
    codes = read_codes(watch)[:2]
    assert codes == [make_code(Holder.PRIVATE, StorePlace.ON_DISK)] * 2


def test_evictions_and_copies_are_named_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_table, "MAX_NOTES", 3)
    world = World(pages=4)
    watch = CacheMap(world.cache)
    for start in range(0, 100, 10):
        world.serve([start + token for token in TEXT])
    (change,) = watch.read()
    assert len(change.evicted) == 3
    table = world.open([7])
    world.write(table, [7, 8])
    twin = world.cache.fork(table)
    assert read_codes(watch).count(SHARED) == 1
    world.write(twin, [7, 8, 9])
    (change,) = watch.read()
    assert change.copied == [(table.groups[0].pages[0], twin.groups[0].pages[0])]


def test_nothing_is_noted_before_and_after(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    world.serve(TEXT)
    watch = CacheMap(world.cache)
    watch.close()
    world.serve([token + 50 for token in TEXT])
    world.flush()
    assert world.store is not None
    assert world.store.touched is None
    assert world.pager.notes is None
    watch.close()


def test_a_page_in_full() -> None:
    world = World()
    world.serve(TEXT)
    world.serve([*TEXT, 99])
    table = world.open([*TEXT, 99])
    first, second, other = (describe_page(world.cache, 0, page) for page in (*table.groups[0].pages, 5))
    assert first is not None
    assert second is not None
    assert other is not None
    assert (first.holder, first.references, first.place, first.followers) == ("private", 1, 0, 1)
    assert (second.place, second.followers, second.reuses, second.age_pages) == (1, 0, 2, 0)
    assert (other.holder, other.store, other.place, other.age_pages) == ("free", "none", None, None)
    assert [describe_page(world.cache, *place) for place in ((0, 16), (0, -1), (1, 0))] == [None] * 3
