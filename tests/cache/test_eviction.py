"""The order in which cached pages go: the policy as numbers, and a working set that survives a flood."""

from __future__ import annotations

import random

import pytest
from cache_world import PAGE_SIZE, World

from mlxr.cache.group import EvictionQueue, rank_page
from mlxr.cache.prefix import PrefixEntry
from mlxr.core.stats import EvictionCause


def test_least_recently_used_goes_first() -> None:
    assert rank_page(10, 0, 0, 3, 100) < rank_page(11, 0, 0, 1, 100)


def test_leaves_go_before_roots_of_the_same_moment() -> None:
    assert rank_page(10, 0, 5, 3, 100) < rank_page(10, 0, 4, 1, 100)


def test_a_reused_page_outlives_an_arena_of_pages_touched_once() -> None:
    assert rank_page(10, 1, 0, 0, 100) > rank_page(109, 0, 0, 1, 100)
    assert rank_page(10, 1, 0, 0, 100) < rank_page(111, 0, 0, 1, 100)


def test_reuses_long_ago_do_not_count_for_ever() -> None:
    assert rank_page(10, 10**6, 0, 0, 100) < rank_page(10 + 301, 0, 0, 1, 100)


def test_a_passed_page_goes_before_an_arena_of_older_ones() -> None:
    assert rank_page(109, 0, 0, 0, 100, passed=True) < rank_page(10, 0, 0, 1, 100)
    assert rank_page(111, 0, 0, 0, 100, passed=True) > rank_page(10, 0, 0, 1, 100)
    assert rank_page(10, 1, 0, 0, 100, passed=True) > rank_page(9, 0, 0, 1, 100)


def test_queue_passes_over_pages_that_are_in_use_again() -> None:
    usable = {1, 2, 3}
    queue = EvictionQueue(8, lambda entry: entry.page in usable)
    entries = {page: PrefixEntry(bytes([page]), page, None, 0, last_used=page) for page in usable}
    for page in (3, 1, 2):
        queue.push(entries[page])
    usable.remove(1)
    queue.check([entries[2], entries[3]])
    assert [entry.page for entry in iter(queue.pop, None)] == [2, 3]


def test_queue_uses_the_rank_of_now() -> None:
    queue = EvictionQueue(8, lambda entry: True)
    entries = [PrefixEntry(bytes([page]), page, None, 0, last_used=1 + page) for page in range(3)]
    for entry in entries:
        queue.push(entry)
    entries[0].last_used = 9
    with pytest.raises(AssertionError, match="2 are queued"):
        queue.check(entries)
    queue.push(entries[0])
    queue.check(entries)
    assert [entry.page for entry in iter(queue.pop, None)] == [1, 2, 0]


def test_queue_does_not_grow_with_use() -> None:
    queue = EvictionQueue(4, lambda entry: True)
    entry = PrefixEntry(b"", 0, None, 0)
    for clock in range(10_000):
        entry.last_used = clock
        queue.push(entry)
    assert len(queue._heap) <= 4 * 4 + 64
    queue.check([entry])


def test_working_set_survives_a_flood_of_single_visits() -> None:
    world = World(pages=12)
    shared = list(range(100, 100 + 4 * PAGE_SIZE))  # a system prompt of four pages
    for question in range(2):
        world.serve([*shared, question, 0, 0])
    for flood in range(40):  # each 2 pages; three can pass between two visits of the system prompt
        world.serve([1000 + flood] * (2 * PAGE_SIZE))
        if flood % 4 == 3:
            assert world.serve([*shared, 50 + flood, 0, 0]) == len(shared)
    assert world.cache.stats().evictions[EvictionCause.GROW] > 40


def test_working_set_changes_when_nobody_comes_back() -> None:
    world = World(pages=8)
    old = [7] * (3 * PAGE_SIZE)
    for _ in range(6):
        world.serve([*old, 1])
    for flood in range(5 * 8):
        world.serve([1000 + flood] * PAGE_SIZE)
    assert world.lookup(old, len(old)) == 0


def test_any_held_set_leaves_all_cached_pages_available() -> None:
    """Whichever pages are held, all cached ones can be given up: leaves first, until none is left."""
    rng = random.Random(3)
    for _ in range(30):
        world = World(pages=24)
        prompts = [[rng.randrange(2) for _ in range(rng.randrange(2, 20))] for _ in range(12)]
        for prompt in prompts:
            world.serve(prompt)
        held = [world.open(rng.choice(prompts)) for _ in range(2)]
        available_pages = world.groups[0].available_pages
        table = world.open([0])
        world.write(table, [9] * (available_pages * PAGE_SIZE))
        world.cache.check([*held, table])
        assert world.cache.stats().cached_pages == world.groups[0].available_pages == 0
