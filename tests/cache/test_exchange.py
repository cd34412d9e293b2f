"""Pages go from one cache to another: the missing ones are lent, up to whole boundaries, in bounded bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from cache_world import FULL, PAGE_SIZE, STATE, World

from mlxr.cache.shapes import CacheShape, LayerCache
from mlxr.cache.store import allocate_payload
from mlxr.cluster.page_exchange import Exchange, Lack, Loan

WINDOW = CacheShape(1, 2, window=6)
KINDS: dict[str, tuple[LayerCache, ...]] = {
    "full": (FULL, FULL),
    "window": (WINDOW, FULL),
    "windows": (WINDOW, WINDOW),
    "hybrid": (STATE, FULL),
    "states": (STATE, STATE),
    "all": (FULL, WINDOW, STATE),
}
TEXT = list(range(1, 10 * PAGE_SIZE + 2))  # ten full pages and a token


def exchange_of(world: World, inbox_bytes: int = 2**20) -> Exchange:
    """The exchange of a world's cache, made when it is first asked for."""
    if world.cache.peers is None:
        Exchange(world.cache, inbox_bytes)
    assert isinstance(world.cache.peers, Exchange)
    return world.cache.peers


def name_pages(world: World, tokens: Sequence[int]) -> list[bytes]:
    return world.cache.start_keys().cover(tokens, len(tokens) // PAGE_SIZE)


def bring(giver: World, taker: World, tokens: Sequence[int], max_bytes: int = 2**20) -> tuple[int, int]:
    """Bring pages from one world to the other; return the boundary that they reach, and their bytes."""
    names, here, there = name_pages(taker, tokens), exchange_of(taker), exchange_of(giver)
    loan = there.lend(names, here.seek(names), max_bytes)
    giver.cache.check([])
    brought_bytes = deliver(there, here, loan, max_bytes)
    there.give_back(loan)
    giver.cache.check([])
    taker.cache.check([])
    return loan.boundary, brought_bytes


def names_lent(world: World, tokens: Sequence[int]) -> list[tuple[int, bytes]]:
    """Return the names of the pages that a replica without any would get."""
    exchange, names = exchange_of(world), name_pages(world, tokens)
    loan = exchange.lend(names, Lack(0, [[False] * len(names) for _ in world.groups]), 2**20)
    exchange.give_back(loan)
    return [lent.name for lent in loan.pages]


def deliver(there: Exchange, here: Exchange, loan: Loan, max_bytes: int) -> int:
    delivery, brought_bytes = here.inbox.open(max_bytes), 0
    for lent in loan.pages:
        payload = allocate_payload(there.page_bytes[lent.name[0]])
        assert there.export(lent, payload)
        assert delivery.put(lent.name, payload)
        brought_bytes += payload.nbytes
    delivery.settle()
    return brought_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_has_computed_the_other_has_cached(kind: str) -> None:
    giver, taker = World(layers=KINDS[kind]), World(layers=KINDS[kind])
    giver.serve(TEXT)
    assert bring(giver, taker, TEXT)[0] == 10
    assert taker.lookup(TEXT) == 10 * PAGE_SIZE
    assert taker.serve(TEXT) == 10 * PAGE_SIZE  # which proves what each page holds
    stats = taker.cache.stats()
    assert (stats.hit_tokens, stats.missed_tokens) == (10 * PAGE_SIZE, 0)
    assert stats.peer_hit_tokens == len({name[1] for name in names_lent(giver, TEXT)}) * PAGE_SIZE
    assert exchange_of(taker).inbox.reserved_bytes == 0
    assert taker.serve([*TEXT, 7, 8]) == 10 * PAGE_SIZE


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_lacking_is_lent(kind: str) -> None:
    giver, taker = World(layers=KINDS[kind]), World(layers=KINDS[kind])
    giver.serve(TEXT)
    taker.serve(TEXT[: 6 * PAGE_SIZE])
    exchange = exchange_of(giver)
    sent_bytes = bring(giver, taker, TEXT)[1]
    assert sent_bytes <= 4 * exchange.linked_bytes + exchange.boundary_bytes
    assert taker.serve(TEXT) == 10 * PAGE_SIZE
    assert bring(giver, taker, TEXT) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_bounded_and_boundaries_stay_whole(kind: str) -> None:
    giver = World(layers=KINDS[kind])
    giver.serve(TEXT[: 5 * PAGE_SIZE])
    giver.serve(TEXT)
    everything = bring(giver, World(layers=KINDS[kind]), TEXT)[1]
    for max_bytes in range(0, everything, 40):
        taker = World(layers=KINDS[kind])
        boundary, sent_bytes = bring(giver, taker, TEXT, max_bytes)
        assert sent_bytes <= max_bytes
        assert taker.serve(TEXT) == boundary * PAGE_SIZE


def test_pages_on_disk_are_lent_too(tmp_path: Path) -> None:
    giver, taker = World(pages=12, folder=tmp_path), World()
    giver.serve(TEXT)
    giver.cache.flush()
    giver.serve([-token for token in TEXT])  # evicts most of the first text
    names = name_pages(giver, TEXT)
    in_memory = sum(giver.groups[0].index.get(name) is not None for name in names)
    assert in_memory < 10
    assert bring(giver, taker, TEXT)[0] == 10
    assert taker.serve(TEXT) == 10 * PAGE_SIZE
    giver.cache.close()


def test_a_page_that_has_left_the_disk_is_not_sent(tmp_path: Path) -> None:
    World(folder=tmp_path).serve(TEXT)
    giver, taker = World(folder=tmp_path), World()
    exchange, names = exchange_of(giver), name_pages(taker, TEXT)
    loan = exchange.lend(names, exchange_of(taker).seek(names), 2**20)
    for path in tmp_path.rglob("*.page"):
        path.unlink()
    assert not any(exchange.export(lent, allocate_payload(exchange.page_bytes[0])) for lent in loan.pages)
    exchange.give_back(loan)


def test_lent_pages_stay_while_others_go() -> None:
    giver, taker = World(pages=12), World()
    giver.serve(TEXT)
    exchange, names = exchange_of(giver), name_pages(taker, TEXT)
    loan = exchange.lend(names, exchange_of(taker).seek(names), 2**20)
    assert [group.available_pages for group in giver.groups] == [12 - 10]
    assert giver.serve([-1, -2, -3, -4, -5]) == 0
    deliver(exchange, exchange_of(taker), loan, 2**20)
    exchange.give_back(loan)
    assert taker.serve(TEXT) == 10 * PAGE_SIZE
    assert giver.serve([-token for token in TEXT]) == PAGE_SIZE
    assert giver.groups[0].available_pages == 12


def test_parts_of_a_boundary_are_of_no_use_without_the_rest() -> None:
    giver = World(layers=KINDS["hybrid"])
    giver.serve(TEXT)
    exchange = exchange_of(giver)
    for dropped in range(11):
        taker = World(layers=KINDS["hybrid"])
        names = name_pages(taker, TEXT)
        loan = exchange.lend(names, exchange_of(taker).seek(names), 2**20)
        del loan.pages[dropped]
        deliver(exchange, exchange_of(taker), loan, 2**20)
        exchange.give_back(loan)
        assert taker.serve(TEXT) == 0


def test_an_inbox_never_holds_more_than_was_reserved() -> None:
    taker = World()
    exchange_of(taker, inbox_bytes=100)
    inbox = exchange_of(taker).inbox
    first, second = inbox.open(80), inbox.open(80)
    assert (first.limit_bytes, second.limit_bytes) == (80, 20)
    assert first.put((0, b"a"), np.zeros(50, np.uint8))
    assert not first.put((0, b"b"), np.zeros(40, np.uint8))
    assert second.put((0, b"a"), np.zeros(10, np.uint8))  # from the first one
    assert not second.names
    assert not second.put((0, b"c"), np.zeros(30, np.uint8))
    assert inbox.open(1).limit_bytes == 0
    first.settle()
    assert inbox.reserved_bytes == 70
    taker.cache.check([])
    assert inbox.take((0, b"a")) is not None
    assert inbox.reserved_bytes == 20
    first.close()
    second.close()
    second.close()
    assert inbox.reserved_bytes == 0
    taker.cache.check([])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["full", "all"])
def test_random_texts_between_two_caches(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    worlds = [World(pages=30, layers=KINDS[kind]) for _ in range(2)]
    stems = [[chance.randrange(100) for _ in range(6 * PAGE_SIZE)] for _ in range(4)]
    found = 0
    for _ in range(60):
        one, other = chance.sample(worlds, 2)
        tokens = chance.choice(stems)[: chance.randrange(1, 6 * PAGE_SIZE)]
        tokens = [*tokens, *(chance.randrange(100) for _ in range(chance.randrange(1, 9)))]
        if chance.random() < 0.5:
            bring(one, other, tokens, chance.choice([200, 2**20]))
        found += other.serve(tokens)
        for delivery in {id(held[1]): held[1] for held in exchange_of(other).inbox._pages.values()}.values():
            delivery.close()
        other.cache.check([])
    assert found > 0
    assert sum(world.cache.stats().peer_hit_tokens for world in worlds) > 0


def test_caches_that_share_nothing_exchange_nothing() -> None:
    assert World().cache.is_shared
    assert not World(sharing=False).cache.is_shared
    assert not World(fingerprint=b"").cache.is_shared
