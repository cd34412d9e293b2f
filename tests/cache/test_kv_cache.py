"""The KV cache as the engine uses it: sharing, copy on write, room, and books that can be checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from cache_world import PAGE_SIZE, World, page_files

from mlxr.cache.kv_cache import KVCache
from mlxr.core.errors import OutOfPages

PROMPT = list(range(1, 4 * PAGE_SIZE + 2))  # four full pages and a token


def test_second_request_takes_the_full_pages_of_the_first() -> None:
    world = World()
    assert world.serve(PROMPT) == 0
    assert world.serve(PROMPT) == 4 * PAGE_SIZE
    assert world.serve([*PROMPT[: 2 * PAGE_SIZE], 99, 98]) == 2 * PAGE_SIZE
    stats = world.cache.stats()
    assert (stats.memory_hit_tokens, stats.disk_hit_tokens) == (6 * PAGE_SIZE, 0)
    assert stats.missed_tokens == len(PROMPT) - 1 + 0 + 1
    assert stats.hit_tokens == 6 * PAGE_SIZE


def test_one_token_is_left_to_compute() -> None:
    world = World()
    world.serve(PROMPT[: 2 * PAGE_SIZE])
    assert world.serve(PROMPT[: 2 * PAGE_SIZE]) == PAGE_SIZE


def test_requests_in_flight_share_physical_pages() -> None:
    world = World()
    first = world.open(PROMPT)
    world.write(first, PROMPT)
    second = world.open(PROMPT)
    assert second.groups[0].pages == first.groups[0].pages[:4]
    world.write(second, PROMPT)
    world.cache.check([first, second])
    stats = world.cache.stats()
    assert (stats.shared_pages, stats.used_pages, stats.free_pages, stats.cached_pages) == (4, 6, 10, 0)


def test_requests_that_compute_the_same_side_by_side_end_up_on_one_page() -> None:
    world = World()
    tables = [world.open(PROMPT) for _ in range(3)]
    for stop in range(3, len(PROMPT) + 3, 3):
        for table in tables:
            world.write(table, PROMPT[:stop])
            world.cache.check(tables)
    assert tables[0].groups[0].pages[:4] == tables[1].groups[0].pages[:4] == tables[2].groups[0].pages[:4]
    assert world.cache.stats().used_pages == 4 + 3
    for table in tables:
        world.read(table, PROMPT)


def test_eight_answers_use_the_prompt_pages_once() -> None:
    world = World(pages=64)
    first = world.open(PROMPT)
    world.write(first, PROMPT)
    tables = [first, *(world.cache.fork(first) for _ in range(7))]
    assert world.cache.stats().used_pages == 5
    answers = [[*PROMPT, 50 + index, 60 + index] for index in range(8)]
    for table, answer in zip(tables, answers, strict=True):
        world.write(table, answer)
        world.cache.check(tables)
    stats = world.cache.stats()
    assert (stats.used_pages, stats.shared_pages) == (4 + 8, 4)
    for table, answer in zip(tables, answers, strict=True):
        world.read(table, answer)
        world.cache.release(table)
    assert world.cache.stats().used_pages == 0


def test_fork_between_prepare_and_commit_cannot_write_into_an_indexed_page() -> None:
    """The twin shares a page that its sibling fills and indexes; it must go on in a copy, even when it is alone."""
    world = World()
    tokens = list(range(PAGE_SIZE - 1))
    first = world.open(tokens)
    world.write(first, tokens)
    world.prepare(first, 1)
    twin = world.cache.fork(first)
    world.fill(first, [*tokens, 50], PAGE_SIZE)
    assert first.groups[0].pages == twin.groups[0].pages
    world.cache.check([first, twin])
    world.cache.release(first)
    world.write(twin, [*tokens, 60])
    world.read(twin, [*tokens, 60])
    world.cache.check([twin])
    world.cache.release(twin)
    for last in (50, 60):
        assert world.serve([*tokens, last, 1]) == PAGE_SIZE


def test_namespaces_do_not_mix() -> None:
    world = World()
    world.serve(PROMPT, b"adapter")
    assert world.serve(PROMPT) == 0
    assert world.serve(PROMPT, b"adapter") == 4 * PAGE_SIZE
    assert world.lookup(PROMPT, 99) == world.lookup(PROMPT, 99, b"adapter") == 4 * PAGE_SIZE
    assert world.lookup(PROMPT, 99, b"other") == 0


def test_lookup_changes_nothing() -> None:
    world = World()
    world.serve(PROMPT)
    before = world.cache.stats()
    assert world.lookup(PROMPT, 2 * PAGE_SIZE + 1) == 2 * PAGE_SIZE
    assert world.lookup(PROMPT, 10**6) == 4 * PAGE_SIZE
    assert world.lookup([5, *PROMPT], 10**6) == 0
    assert world.cache.stats() == before


def test_prepare_refuses_with_nothing_changed() -> None:
    world = World(pages=6)
    world.serve(PROMPT)
    held = world.open([9] * PAGE_SIZE)
    world.write(held, [9] * PAGE_SIZE)
    table = world.open(PROMPT)
    before = (world.cache.stats(), list(table.groups[0].pages))
    with pytest.raises(OutOfPages, match=r"2 cache pages .* the arena has 1"):
        world.prepare(table, PAGE_SIZE + 1)
    assert (world.cache.stats(), table.groups[0].pages) == before
    world.cache.check([held, table])
    world.prepare(table, PAGE_SIZE)


def test_pages_of_an_interrupted_step_return_to_the_free_ones() -> None:
    world = World()
    table = world.open(PROMPT)
    world.prepare(table, len(PROMPT))
    world.cache.check([table])
    world.cache.release(table)
    assert world.cache.stats().free_pages == 16
    assert world.lookup(PROMPT, 99) == 0


def test_released_table_can_be_filled_again() -> None:
    world = World()
    table = world.open(PROMPT)
    world.write(table, PROMPT)
    world.cache.release(table)
    longer = [*PROMPT, *[7] * PAGE_SIZE]
    world.write(table, longer)
    world.read(table, longer)
    world.cache.check([table])
    world.cache.release(table)
    assert world.serve([*longer, 8]) == 5 * PAGE_SIZE


def test_commit_wants_the_tokens_from_the_start() -> None:
    world = World()
    table = world.open(PROMPT)
    world.prepare(table, 3)
    with pytest.raises(ValueError, match="3 tokens are written, 2 are given"):
        world.cache.commit(table, [1, 2], 3)
    assert table.length_tokens == 0


def test_without_sharing_nothing_is_found_and_everything_returns() -> None:
    world = World(pages=2, page_size=64, sharing=False)
    assert world.serve(PROMPT) == world.serve(PROMPT) == world.lookup(PROMPT, 99) == 0
    table = world.open(PROMPT)
    world.write(table, PROMPT)
    twin = world.cache.fork(table)
    world.write(twin, [*PROMPT, 5])
    world.write(table, [*PROMPT, 6])
    world.read(twin, [*PROMPT, 5])
    world.read(table, [*PROMPT, 6])
    world.cache.check([table, twin])
    world.cache.release(table)
    world.cache.release(twin)
    stats = world.cache.stats()
    assert (stats.free_pages, stats.cached_pages, stats.store) == (2, 0, None)


def test_without_sharing_there_can_be_no_store(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot have a store"):
        World(sharing=False, folder=tmp_path)


def test_groups_must_fit_together() -> None:
    one, other = World(), World(page_size=8)
    other.groups[0].number = 1
    with pytest.raises(ValueError, match="same page size"):
        KVCache([one.groups[0], other.groups[0]], fingerprint=b"")
    with pytest.raises(ValueError, match=r"numbered from 0, got \[1\]"):
        KVCache([other.groups[0]], fingerprint=b"")


@pytest.mark.parametrize(
    "break_books",
    [
        lambda world, table: world.pager.retain([table.groups[0].pages[0]]),
        lambda world, table: world.pager.drop(table.groups[0].pages[1]),
        lambda world, table: world.pager.keep(table.groups[0].pages[4]),
        lambda world, table: table.groups[0].pages.reverse(),
        lambda world, table: table.keys.chain.__delitem__(slice(4, None)),
        lambda world, table: table.keys.chain.__setitem__(2, b"x" * 32),
        lambda world, table: table.groups[0].pages.__setitem__(0, table.groups[0].pages[1]),
        lambda world, table: setattr(table.groups[0], "length_tokens", 99),
        lambda world, table: world.groups[0].index.remove(world.groups[0].index.at(table.groups[0].pages[3])),
        lambda world, table: setattr(world.pager, "cached_pages", 1),
    ],
)
def test_check_notices_wrong_books(break_books) -> None:  # type: ignore[no-untyped-def]
    world = World()
    table = world.open(PROMPT)
    world.write(table, PROMPT)
    world.cache.check([table])
    break_books(world, table)
    with pytest.raises(AssertionError):
        world.cache.check([table])


def test_check_notices_a_cached_page_that_would_never_go() -> None:
    world = World()
    world.serve(PROMPT)
    world.groups[0]._queue.pop()
    with pytest.raises(AssertionError, match="queued"):
        world.cache.check([])


def test_check_notices_a_table_that_holds_indexed_pages_without_keys() -> None:
    world = World()
    table = world.open(PROMPT)
    world.write(table, PROMPT)
    stranger = world.cache.open_private_table()
    stranger.groups[0].pages = list(table.groups[0].pages)
    stranger.groups[0].length_tokens = table.length_tokens
    world.pager.retain(stranger.groups[0].pages)
    with pytest.raises(AssertionError, match="without keys"):
        world.cache.check([table, stranger])


def test_evicted_pages_come_back_from_disk(tmp_path: Path) -> None:
    world = World(pages=6, folder=tmp_path)
    world.serve(PROMPT)
    world.serve([9] * (6 * PAGE_SIZE))  # takes the whole arena
    world.flush()
    assert world.serve(PROMPT) == 4 * PAGE_SIZE
    stats = world.cache.stats()
    assert stats.disk_hit_tokens == 4 * PAGE_SIZE
    assert stats.evictions == {"grow": 4 + 1, "restore": 4, "shrink": 0}
    assert len(page_files(tmp_path)) == 4 + 6
    world.cache.close()


def test_run_from_memory_goes_on_from_disk(tmp_path: Path) -> None:
    world = World(pages=6, folder=tmp_path)
    world.serve(PROMPT)
    world.flush()
    world.serve([9] * (3 * PAGE_SIZE))  # evicts two leaves
    assert world.lookup(PROMPT, 99) == 4 * PAGE_SIZE
    table = world.open(PROMPT)
    assert table.length_tokens == 4 * PAGE_SIZE
    assert 0 < world.cache.stats().disk_hit_tokens < 4 * PAGE_SIZE
    world.cache.check([table])
    world.cache.release(table)
    world.cache.close()


def test_restoring_stops_where_nothing_can_be_evicted(tmp_path: Path) -> None:
    world = World(pages=8, folder=tmp_path)
    world.serve(PROMPT)
    world.flush()
    held = world.open([9] * (6 * PAGE_SIZE))
    world.write(held, [9] * (6 * PAGE_SIZE))
    table = world.open(PROMPT)
    assert table.length_tokens == 2 * PAGE_SIZE
    world.cache.check([held, table])
    world.cache.close()
