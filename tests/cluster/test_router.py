"""The router sends requests to their pages, away from work, never to the dead, and counts between reports."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mlxr.cache.prefix import PageKeys
from mlxr.cluster.router import Link, Load, NoReplica, PageDelta, RandomRouter, Rates, Router

PAGE = 32
RATES = Rates(prefill_tokens_per_s=1000.0, step_s=0.05, chunk_tokens=512, flight_s=0.05)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_keys(pages: int, text: int = 0) -> list[bytes]:
    return PageKeys(b"model", PAGE).cover([text] * (pages * PAGE), pages)


def make_router(*replicas: str, clock: Clock | None = None) -> Router:
    router = Router(PAGE, RATES, clock=clock or Clock())
    for replica in replicas:
        router.add(replica)
    return router


def test_a_request_goes_where_most_of_its_pages_are() -> None:
    router = make_router("a", "b", "c")
    keys = make_keys(10)
    router.note_pages("a", PageDelta(0, keys[:4]))
    router.note_pages("b", PageDelta(0, keys[:9]))
    choice = router.choose(keys, 10 * PAGE + 5)
    assert (choice.replica, choice.cached_tokens, choice.reason) == ("b", 9 * PAGE, "longest_prefix")
    router.check()


def test_the_last_token_is_always_computed() -> None:
    router = make_router("a")
    keys = make_keys(3)
    router.note_pages("a", PageDelta(0, keys))
    assert router.choose(keys, 3 * PAGE).cached_tokens == 3 * PAGE - 1


def test_work_outweighs_pages_when_it_takes_longer_than_computing_them() -> None:
    keys = make_keys(10)
    for waiting, replica, reason in ((300, "a", "longest_prefix"), (340, "b", "less_work")):
        router = make_router("a", "b")
        router.note_pages("a", PageDelta(0, keys))
        router.note_load("a", Load(waiting, 0, 1000.0, 0.0))
        choice = router.choose(keys, 10 * PAGE + 1)
        assert (choice.replica, choice.reason) == (replica, reason)


def test_running_answers_and_slow_replicas_count() -> None:
    router = make_router("a", "b")
    router.note_load("a", Load(0, 8, 1000.0, 0.05))
    assert router.choose([], 500).replica == "b"
    router = make_router("a", "b")
    router.note_load("a", Load(0, 0, 5000.0, 0.0))
    assert [router.choose([], 500).replica for _ in range(4)] == ["a"] * 4  # 4 x 0.1 s is less than 0.5 s


@pytest.mark.parametrize("rate", [0.0, -5.0, math.nan, math.inf])
def test_a_rate_that_is_none_is_replaced(rate: float) -> None:
    router = make_router("a", "b")
    router.note_load("a", Load(10, 1, rate, rate))
    router.check()
    assert router.choose([], 100).replica == "b"


def test_a_burst_is_spread_before_any_report() -> None:
    router = make_router(*"abcd")
    replicas = [router.choose(make_keys(8, text), 8 * PAGE).replica for text in range(40)]
    assert {replicas.count(name) for name in "abcd"} == {10}


def test_a_burst_of_one_prompt_stays_where_the_first_went_until_that_costs_more() -> None:
    router = make_router(*"abcd")
    keys = make_keys(100)
    choices = [router.choose(keys, 101 * PAGE) for _ in range(20)]
    assert choices[0].reason == "no_prefix"
    moved = next(number for number, choice in enumerate(choices) if choice.replica != choices[0].replica)
    assert moved > 1 or choices[1].reason == "less_work"
    assert {choice.cached_tokens for choice in choices if choice.reason == "longest_prefix"} == {100 * PAGE}
    router.check()


def test_work_is_done_as_time_passes_without_a_report() -> None:
    clock = Clock()
    router = make_router("a", "b", clock=clock)
    keys = make_keys(4)
    router.note_pages("a", PageDelta(0, keys))
    router.note_load("a", Load(1000, 0, 1000.0, 0.0))
    assert router.choose(keys, 4 * PAGE).replica == "b"
    clock.now_s += 1.0
    router.note_pages("b", PageDelta(0, [], keys, whole=True))
    assert router.choose(keys, 4 * PAGE).replica == "a"


def test_a_report_replaces_what_was_sent_before_it_and_keeps_what_is_on_its_way() -> None:
    clock = Clock()
    router = make_router("a", "b", clock=clock)
    router.note_load("b", Load(900, 0, 1000.0, 0.0))
    assert router.choose([], 1000).replica == "a"
    clock.now_s += 0.01
    router.note_load("a", Load(0, 0, 1000.0, 0.0))  # made before the request came
    assert router.choose([], 1000).replica == "b"
    clock.now_s += 0.1
    router.note_load("a", Load(0, 0, 1000.0, 0.0))
    assert router.choose([], 1000).replica == "a"


def test_the_dead_and_the_excluded_get_nothing() -> None:
    router = make_router("a", "b", "c")
    keys = make_keys(5)
    for name in "abc":
        router.note_pages(name, PageDelta(0, keys))
    router.remove("a")
    router.remove("a")
    router.check()
    assert router.choose(keys, 200, without={"b"}).replica == "c"
    with pytest.raises(NoReplica, match="none of 2 replicas"):
        router.choose(keys, 200, without=["b", "c"])
    router.remove("b")
    router.remove("c")
    with pytest.raises(NoReplica):
        router.choose(keys, 200)
    assert len(router) == 0


def test_one_of_many_is_found_when_all_others_are_excluded() -> None:
    names = [f"r{number}" for number in range(200)]
    router = make_router(*names)
    assert router.choose(make_keys(2), 80, without=set(names) - {"r77"}).replica == "r77"


def test_a_replica_that_returns_begins_anew() -> None:
    router = make_router("a", "b")
    keys = make_keys(5)
    router.note_pages("a", PageDelta(0, keys))
    router.note_load("a", Load(10**6, 0, 1000.0, 0.0))
    router.add("a")
    router.check()
    assert router.choose(keys, 200).reason == "no_prefix"
    router.note_pages("gone", PageDelta(0, keys))
    router.note_load("gone", Load(0, 0, 0.0, 0.0))
    assert "gone" not in router
    assert not router.wants_whole("gone")


def test_a_gap_makes_the_router_ask_for_the_whole() -> None:
    router = make_router("a")
    keys = make_keys(6)
    router.note_pages("a", PageDelta(0, keys[:2]))
    assert not router.wants_whole("a")
    router.note_pages("a", PageDelta(2, keys[3:5]))
    assert router.wants_whole("a")
    router.note_pages("a", PageDelta(3, keys[:6], whole=True))
    assert not router.wants_whole("a")
    router.note_pages("a", PageDelta(2, [], keys))  # late
    router.note_pages("a", PageDelta(3, [], whole=True))  # doubled, and not what was sent
    assert router.choose(keys, 7 * PAGE).cached_tokens == 6 * PAGE
    router.note_pages("a", PageDelta(0, [], whole=True))  # begun anew
    assert router.choose(make_keys(6, 1), 7 * PAGE).cached_tokens == 0
    router.note_pages("a", PageDelta(1, make_keys(3, 2)))
    assert not router.wants_whole("a")
    router.check()


def test_pages_that_do_not_come_are_forgotten() -> None:
    clock = Clock()
    router = make_router("a", clock=clock)
    keys = make_keys(4)
    router.choose(keys, 5 * PAGE)
    assert router.choose(keys, 5 * PAGE).cached_tokens == 4 * PAGE
    router.note_pages("a", PageDelta(0, keys[:2]))
    clock.now_s += 60.0
    router.note_load("a", Load(0, 0, 1000.0, 0.0))
    router.check()
    assert router.choose(keys, 5 * PAGE).cached_tokens == 2 * PAGE


def test_a_choice_costs_the_same_with_many_replicas() -> None:
    names = [f"r{number}" for number in range(1000)]
    router = make_router(*names)
    keys = make_keys(64)
    for name in names:
        router.note_pages(name, PageDelta(0, keys))
    looked_at = 0
    for _ in range(50):
        candidates = router._find_candidates(keys, ())
        looked_at = max(looked_at, len(candidates))
    assert 8 <= looked_at <= 12


def test_popular_pages_are_served_by_all_that_hold_them() -> None:
    names = [f"r{number}" for number in range(200)]
    router = make_router(*names)
    keys = make_keys(64)
    for name in names[:100]:
        router.note_pages(name, PageDelta(0, keys))
    chosen = {router.choose(keys, 65 * PAGE).replica for _ in range(400)}
    assert chosen == set(names[:100])


FAST = Link(page_bytes=1000, boundary_bytes=0, max_bytes=10**6, timeout_s=10.0, bytes_per_s=10**6)


def make_moving(link: Link | None, waiting: int = 1000, pages: int = 20) -> tuple[Router, list[bytes]]:
    """Make a router with two replicas: "a" holds the pages and has much to do, "b" has neither pages nor work."""
    router, keys = make_router("a", "b"), make_keys(20)
    router.note_pages("a", PageDelta(0, keys[:pages]))
    router.note_load("a", Load(waiting, 0, 1000.0, 0.0, link))
    router.note_load("b", Load(0, 0, 1000.0, 0.0, link))
    return router, keys


def test_a_request_takes_its_pages_along_where_that_is_quicker() -> None:
    router, keys = make_moving(FAST)
    choice = router.choose(keys, 20 * PAGE + 8)
    assert (choice.replica, choice.peer, choice.reason) == ("b", "a", "fetched")
    assert choice.cached_tokens == 20 * PAGE
    router.check()
    assert router.choose(keys, 20 * PAGE + 8).replica == "b"  # where the pages are expected now


def test_a_slow_link_is_not_used() -> None:
    for link in (None, replace(FAST, bytes_per_s=1.0), replace(FAST, max_bytes=500), replace(FAST, timeout_s=0.0)):
        choice = make_moving(link)[0].choose(make_keys(20), 20 * PAGE + 8)
        assert (choice.replica, choice.peer) == ("b", None)


def test_only_as_many_pages_are_fetched_as_the_bounds_allow() -> None:
    router, keys = make_moving(replace(FAST, max_bytes=5500, boundary_bytes=500))
    choice = router.choose(keys, 20 * PAGE + 8)
    assert (choice.peer, choice.cached_tokens) == ("a", 5 * PAGE)


def test_pages_that_are_only_expected_are_fetched_from_nobody() -> None:
    router, keys = make_moving(FAST, waiting=0, pages=0)
    first = router.choose(keys, 20 * PAGE)
    router.note_load(first.replica, Load(5000, 0, 1000.0, 0.0, FAST))
    second = router.choose(keys, 20 * PAGE)
    assert second.replica != first.replica
    assert second.peer is None


def test_nobody_fetches_from_one_that_has_failed() -> None:
    router, keys = make_moving(FAST)
    assert router.choose(keys, 20 * PAGE, without={"a"}).peer is None


@pytest.mark.parametrize("speed", [0.0, -1.0, math.nan, math.inf])
def test_a_speed_that_is_none_is_replaced(speed: float) -> None:
    router, keys = make_moving(replace(FAST, bytes_per_s=speed))
    assert router.choose(keys, 20 * PAGE + 8).peer == "a"


def test_random_routing_looks_at_nothing() -> None:
    router = RandomRouter(PAGE, RATES, clock=Clock())
    for replica in "abc":
        router.add(replica)
    keys = make_keys(10)
    router.note_pages("a", PageDelta(0, keys))
    router.note_load("b", Load(10_000, 8, 1000.0, 0.05))
    choices = [router.choose(keys, 10 * PAGE) for _ in range(300)]
    counts = [[choice.replica for choice in choices].count(replica) for replica in "abc"]
    assert min(counts) > 70
    assert {(choice.cached_tokens, choice.reason, choice.peer) for choice in choices} == {(0, "drawn", None)}
    assert {router.choose(keys, 5, "ac").replica for _ in range(20)} == {"b"}
    with pytest.raises(NoReplica):
        router.choose(keys, 5, "abc")
    router.check()
