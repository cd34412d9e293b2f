"""Layers whose caches differ: each group has its own pages, and sequences go on at a boundary that all groups have."""

from __future__ import annotations

from pathlib import Path

import pytest
from cache_world import FULL, PAGE_SIZE, World

from mlxr.cache.prefix import find_boundary
from mlxr.cache.shapes import CachePlace, CacheShape, SharedWith, form_groups
from mlxr.core.errors import ModelError, OutOfPages

WINDOW = CacheShape(1, 2, window=2 * PAGE_SIZE)  # of which two whole pages are needed at a boundary
MIXED = (WINDOW, FULL, WINDOW)
TEXT = list(range(1, 8 * PAGE_SIZE + 2))  # eight full pages and a token


def hold(world: World) -> tuple[list[int], list[int]]:
    """Pages held in the group with the window, and in the one without."""
    window, full = world.cache.stats().groups
    return [window.held_pages, window.cached_pages], [full.held_pages, full.cached_pages]


def drop_from_window(world: World, *places: int) -> None:
    """Give up pages of TEXT in the group with the window, as if room had been needed there."""
    group, keys = world.groups[0], world.cache.start_keys()
    keys.cover(TEXT, 8)
    for place in places:
        entry = group.index.get(keys.chain[place + 1])
        assert entry is not None
        group.index.remove(entry)
        group.pager.drop(entry.page)


def test_layers_that_look_alike_form_a_group() -> None:
    groups = form_groups([WINDOW, FULL, None, WINDOW, SharedWith(1), SharedWith(3), CacheShape(2, 2)])
    assert groups.shapes == (WINDOW, FULL, CacheShape(2, 2))
    assert groups.pools == (2, 1, 1)
    one, other, last = CachePlace(0, 0), CachePlace(1, 0), CachePlace(0, 1)
    assert groups.places == (one, other, None, last, other, last, CachePlace(2, 0))


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([FULL, SharedWith(1)], "layer 1 shares the keys and values of layer 1, which has none"),
        ([FULL, None, SharedWith(1)], "layer 2 shares .* of layer 1"),
        ([None, None], "no layer that keeps"),
    ],
)
def test_layers_that_cannot_be_kept_are_refused(layers, reason) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelError, match=reason):
        form_groups(layers)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
def test_what_is_needed_and_held_follows_from_what_is_seen(window: int) -> None:
    """Against the definition: position p sees p - window + 1 to p."""
    shape = CacheShape(1, 1, window)
    for boundary in range(9):
        seen = [place for place in range(9) if place * 4 + 3 >= boundary * 4 - window + 1]
        assert shape.first_needed(boundary, 4) == min(seen[0], boundary)
    for chunk in (1, 2, 5, 8):
        held = [(n + chunk - 1) // 4 - shape.first_needed(n // 4, 4) + 1 for n in range(60)]
        assert shape.count_peak(10**6, chunk, 4) == max(held)
    assert shape.count_resting(10**6, 4) == shape.count_peak(10**6, 1, 4)
    assert shape.count_resting(3, 4) == shape.count_peak(4, 99, 4) == 1


def test_a_window_holds_its_last_pages_and_the_rest_stays_cached() -> None:
    world = World(layers=MIXED)
    table = world.open(TEXT)
    for count in (5, 3, 8, 1, 16):
        world.write(table, TEXT, count)
        world.read(table, TEXT)
        world.cache.check([table])
    assert hold(world) == ([3, 6], [9, 0])
    assert table.groups[0].first == 6
    world.cache.release(table)
    assert hold(world) == ([0, 8], [0, 8])
    assert world.serve(TEXT) == 8 * PAGE_SIZE
    assert world.cache.stats().short_tokens == {str(WINDOW): 0, str(FULL): 0}


def test_private_pages_that_left_the_window_are_free_at_once() -> None:
    world = World(layers=MIXED)
    table = world.cache.open_private_table()
    world.write(table, TEXT)
    assert hold(world) == ([3, 0], [9, 0])
    world.cache.check([table])


def test_a_text_much_longer_than_the_arena_of_its_window_is_computed() -> None:
    world = World(layers=(WINDOW,), pages=4)
    tokens = [index % 7 for index in range(50 * PAGE_SIZE)]
    table = world.open(tokens)
    for _ in range(50):
        world.write(table, tokens, PAGE_SIZE)
        world.read(table, tokens)
        world.cache.check([table])
    world.cache.release(table)
    assert world.serve([*tokens, 1]) == 50 * PAGE_SIZE


@pytest.mark.parametrize(
    ("dropped", "found", "short"),
    [
        ([0, 1, 2, 3, 4, 5], 8, 0),  # the last two are enough
        ([7], 7, 1),
        ([6], 6, 2),
        ([2, 6], 6, 2),
        ([5, 7], 5, 3),
        ([1, 3, 5, 7], 1, 7),
        ([0, 2, 4, 6], 0, 8),
    ],
)
def test_a_hit_is_the_longest_boundary_at_which_every_group_can_go_on(
    dropped: list[int], found: int, short: int
) -> None:
    world = World(layers=MIXED)
    world.serve(TEXT)
    drop_from_window(world, *dropped)
    assert world.lookup(TEXT) == found * PAGE_SIZE
    assert world.serve(TEXT) == found * PAGE_SIZE
    stats = world.cache.stats()
    assert stats.short_tokens == {str(WINDOW): short * PAGE_SIZE, str(FULL): 0}
    assert stats.memory_hit_tokens == found * PAGE_SIZE
    assert world.serve(TEXT) == 8 * PAGE_SIZE


def test_the_group_that_ends_first_is_named_as_the_reason() -> None:
    class Pages:
        is_linked = True

        def first_needed(self, boundary: int) -> int:
            return 0

    has = {0: 5, 1: 3}
    boundary = find_boundary([Pages(), Pages()], lambda group, place: place < has[group], 9)
    assert (boundary.pages, boundary.sought_pages, boundary.short_group) == (3, 5, 1)
    boundary = find_boundary([Pages()], lambda group, place: place < 5, 4)
    assert (boundary.pages, boundary.sought_pages, boundary.short_group) == (4, 4, None)


def test_where_texts_part_the_window_is_kept_for_the_next_one() -> None:
    """The first text to go on from a junction finds no window there; the pages it computes count as found once."""
    world = World(layers=MIXED, pages=24)
    world.serve(TEXT)
    drop_from_window(world, *range(8))
    parted = [*TEXT[: 5 * PAGE_SIZE], *[99] * (3 * PAGE_SIZE + 1)]
    assert world.serve(parted) == 0
    entries = {entry.depth: entry.reuses for entry in world.groups[0].index}
    assert [entries[place] for place in range(8)] == [0, 0, 0, 1, 1, 0, 0, 0]
    last = [*TEXT[: 5 * PAGE_SIZE], *[77] * PAGE_SIZE]
    assert world.serve(last) == 5 * PAGE_SIZE


def test_pages_in_the_middle_of_a_text_go_before_the_end_of_an_older_one() -> None:
    world = World(layers=(WINDOW,), pages=12)
    old = [50 + token for token in TEXT]
    world.serve(old)  # eight pages are cached, the last two of them as the end of a text
    long = [*TEXT[:-1], *TEXT[:-1]]
    table = world.open(long)
    for _ in range(16):
        world.write(table, long, PAGE_SIZE)
    assert world.lookup(old) == 8 * PAGE_SIZE
    world.cache.release(table)
    world.cache.check([])
    assert world.lookup(long) == 16 * PAGE_SIZE


def test_room_is_refused_by_the_group_that_has_none() -> None:
    world = World(layers=MIXED, pages=6)
    table = world.cache.open_private_table()
    world.write(table, TEXT, 4 * PAGE_SIZE)
    before = world.cache.stats()
    with pytest.raises(OutOfPages) as caught:
        world.prepare(table, 3 * PAGE_SIZE)
    assert (caught.value.needed_pages, caught.value.available_pages) == (3, 2)
    assert world.cache.stats() == before


def test_forks_share_the_pages_of_every_group_and_go_on_apart() -> None:
    world = World(layers=MIXED, pages=24)
    table = world.open(TEXT)
    world.write(table, TEXT, 6 * PAGE_SIZE + 2)
    twin = world.cache.fork(table)
    assert hold(world)[0][0] == 3
    world.write(table, TEXT)
    other = [*TEXT[: 6 * PAGE_SIZE + 2], *[88] * (4 * PAGE_SIZE)]
    world.write(twin, other)
    for one, tokens in ((table, TEXT), (twin, other)):
        world.read(one, tokens)
    world.cache.check([table, twin])


def test_a_boundary_comes_back_from_disk_with_the_parts_of_all_groups(tmp_path: Path) -> None:
    first = World(layers=MIXED, folder=tmp_path)
    first.serve(TEXT)
    first.cache.close()
    second = World(layers=MIXED, folder=tmp_path)
    assert second.lookup(TEXT) == 8 * PAGE_SIZE
    assert second.serve(TEXT) == 8 * PAGE_SIZE
    stats = second.cache.stats()
    assert stats.disk_hit_tokens == 8 * PAGE_SIZE
    assert second.store_stats.read_pages == 8 + 2  # of the window only what is needed
    second.cache.close()


@pytest.mark.parametrize(("group", "place", "found"), [(0, 7, 7), (0, 6, 6), (0, 2, 8), (1, 4, 4), (1, 0, 0)])
@pytest.mark.parametrize("damaged", [True, False], ids=["damaged", "missing"])
def test_a_boundary_without_all_its_parts_does_not_count(
    tmp_path: Path, group: int, place: int, found: int, damaged: bool
) -> None:
    first = World(layers=MIXED, folder=tmp_path)
    first.serve(TEXT)
    first.cache.close()
    keys = first.cache.start_keys()
    keys.cover(TEXT, 8)
    (path,) = tmp_path.rglob(f"{keys.chain[place + 1].hex()}{'-1' if group else ''}.page")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    if damaged:
        path.write_bytes(content)
    else:
        path.unlink()
    second = World(layers=MIXED, folder=tmp_path)
    assert second.serve(TEXT) == found * PAGE_SIZE
    second.flush()
    assert second.serve(TEXT) == 8 * PAGE_SIZE
    second.cache.close()


def test_a_page_of_one_group_under_the_name_of_another_is_not_served(tmp_path: Path) -> None:
    first = World(layers=MIXED[:2], folder=tmp_path)
    first.serve(TEXT)
    first.cache.close()
    for path in tmp_path.rglob("*-1.page"):
        path.replace(path.with_name(path.name.replace("-1", "")))
    second = World(layers=MIXED[:2], folder=tmp_path)
    assert second.serve(TEXT) == 0
    second.cache.close()


def test_the_bound_of_the_store_holds_for_all_groups_together(tmp_path: Path) -> None:
    world = World(layers=(CacheShape(1, 64, window=4), FULL), folder=tmp_path, max_bytes=20_000)
    for start in range(6):
        world.serve([start, *TEXT])
        world.flush()
        world.cache.check([])
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.page")) == world.store_stats.bytes <= 20_000
    world.cache.close()
