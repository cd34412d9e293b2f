"""Which replica serves a request: the one where its first token will come soonest.

That is where its pages are, unless that replica has too much to do. The candidates are a few replicas that hold the
longest known prefixes of the request, and a few drawn from all; the cost of each is an estimate in seconds (`costs`).
A replica that lacks pages can fetch them from one that has them, if that takes less time than to compute them. So where
there is too much to do, a request goes elsewhere and takes its pages along. A choice costs some look-ups and an
estimate per candidate, however many replicas there are.

Replicas report what they have to do and which pages they hold (`note_load`, `note_pages`). Between two reports the
router counts on: what it sends is work that waits (`backlog`) and pages that will be there, and work is done as time
passes, or when it is told so (`settle`, `end`). So a burst spreads, and requests with one prefix that come together go
to one place. The router knows neither network nor processes, and it is not safe for several threads.

`Routing` names the ways there are: by prefixes, and at random, which that is compared with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count, islice
from random import Random
from typing import Literal, NamedTuple

from mlxr.cluster.load import NO_FETCHING, Backlog, Fetching, Link, Load, Rates, first_token_s
from mlxr.cluster.prefix_table import PageDelta, PrefixTable
from mlxr.core.errors import NoReplica

__all__ = ["Choice", "Link", "Load", "NoReplica", "PageDelta", "Rates", "Reason", "Router"]

HOLDERS = 8  # candidates because of their pages
DRAWN = 4  # candidates drawn from all replicas
PEERS = 2  # holders of the longest prefixes that are looked at as those to fetch from
FETCH_PRICE = 2.0  # so many times a fetch counts beside the wait for it: it takes the network's time and memory, too
BALANCE = 0.2  # how much of the work that a replica was lately sent counts as a wait
LATELY_S = 60.0  # work of that age counts 1/e
EXPECTED_EXTRA_S = 5.0  # how much longer than twice its estimate a request may take to leave its pages
UNKNOWN = Load(0, 0, 0.0, 0.0)

Reason = Literal["longest_prefix", "fetched", "less_work", "no_prefix", "drawn"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes.

    `cached_tokens` are expected in the cache there, or come from the replica `peer`, which has them. `reason` is
    `longest_prefix` when no candidate holds more of it, `fetched` and `less_work` when one does but would take longer,
    with and without a peer, and `no_prefix` when nobody holds any of it. `drawn` looks at nothing (`routing`). The
    request counts as work there by its `number`; 0 is none that counts.
    """

    replica: str
    cached_tokens: int
    reason: Reason
    peer: str | None = None
    number: int = 0


@dataclass(slots=True, eq=False)
class _Replica:
    """`backlog` is what waits there at `at_s`, `lately_tokens` what it was sent to compute, the older the less."""

    name: str
    place: int
    load: Load = UNKNOWN
    token_s: float = 0.0
    step_s: float = 0.0
    fetching: Fetching = NO_FETCHING
    backlog: Backlog = field(default_factory=Backlog)
    at_s: float = 0.0
    lately_tokens: float = 0.0

    def pass_time(self, now_s: float) -> None:
        """Take off what has been computed since."""
        if now_s > self.at_s:
            passed_s = now_s - self.at_s
            self.backlog.work(passed_s / self.token_s)
            self.lately_tokens *= math.exp(-passed_s / LATELY_S)
            self.at_s = now_s


class _Offer(NamedTuple):
    """A request in one place: `pages` are there, others come in `fetch_s`, `compute` tokens are left, for `cost`."""

    replica: _Replica
    pages: int
    fetch_s: float
    compute: int
    cost: tuple[float, int]


class Router:
    """Chooses the replica for a request: where its pages are, unless that replica has too much to do."""

    def __init__(
        self,
        page_tokens: int,
        rates: Rates | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
    ) -> None:
        """Pages have `page_tokens` tokens in all replicas. `clock` gives seconds that never go back."""
        if page_tokens < 1:
            raise ValueError(f"a page has at least one token, not {page_tokens}")
        self._page_tokens = page_tokens
        self._rates = rates or Rates()
        self._clock = clock
        self._random = Random(seed)
        self._table = PrefixTable(seed)
        self._replicas: dict[str, _Replica] = {}
        self._order: list[_Replica] = []  # for drawing; each knows its place
        self._numbers = count(1)
        self._sent: dict[int, _Replica] = {}  # where each request is that has not ended

    def __len__(self) -> int:
        """How many replicas there are."""
        return len(self._order)

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    def add(self, replica: str) -> None:
        """A replica with an empty cache and nothing to do. One that was known begins anew."""
        self.remove(replica)
        new = _Replica(replica, len(self._order), at_s=self._clock())
        self._weigh(new, UNKNOWN)
        self._replicas[replica] = new
        self._order.append(new)
        self._table.add(replica)

    def remove(self, replica: str) -> None:
        """A replica died or drains: it gets no more requests. Nothing happens if it is not known."""
        gone = self._replicas.pop(replica, None)
        if gone is None:
            return
        last = self._order.pop()
        if last is not gone:
            self._order[gone.place] = last
            last.place = gone.place
        self._table.remove(replica)
        for number in gone.backlog:
            del self._sent[number]

    def note_pages(self, replica: str, delta: PageDelta) -> None:
        """Take in a report of pages. One of a replica that is not known, since it has just gone, is passed over."""
        if replica in self._replicas:
            self._table.apply(replica, delta)

    def wants_whole(self, replica: str) -> bool:
        """Whether a report of the replica's pages is missing, so that it should send all of them (`whole`)."""
        return replica in self._replicas and self._table.wants_whole(replica)

    def note_load(self, replica: str, load: Load, age_s: float = 0.0) -> None:
        """Take in what a replica has to do, in a report that was made at most `age_s` seconds ago.

        Requests that were sent a moment before are added to it, as it cannot know them yet.
        """
        known = self._replicas.get(replica)
        if known is None:
            return
        now_s = self._clock()
        known.pass_time(now_s)
        known.backlog.report(load.waiting_tokens, load.running, now_s - age_s - self._rates.flight_s)
        self._weigh(known, load)
        self._table.expire(replica, now_s)

    def settle(self, number: int) -> None:
        """The first token to a request has come, so its prompt is no more work where it was sent.

        Nothing happens if that is known, if the request has ended, or if the replica has gone.
        """
        replica = self._sent.get(number)
        if replica is not None and number in replica.backlog:
            now_s = self._clock()
            replica.pass_time(now_s)
            replica.backlog.settle(number, now_s)

    def end(self, number: int) -> None:
        """A request has left its replica, in whatever way. Nothing happens if that is known or the replica has gone."""
        replica = self._sent.pop(number, None)
        if replica is not None:
            now_s = self._clock()
            replica.pass_time(now_s)
            replica.backlog.end(number, now_s)
            if replica.backlog.running < replica.load.running:
                self._weigh(replica, replica.load)

    def choose(self, keys: Sequence[bytes], tokens: int, without: Collection[str] = ()) -> Choice:
        """The replica for a request of `tokens` tokens, whose full pages are named `keys`, and not one of `without`.

        The request counts as sent there, until it ends. Raises NoReplica when no replica is left.
        """
        now_s = self._clock()
        candidates = self._find_candidates(keys, without)
        peer, most = self._find_peer(keys, candidates)
        best: _Offer | None = None
        for replica, pages in candidates.items():
            replica.pass_time(now_s)
            offer = self._estimate(replica, tokens, pages, most)
            if best is None or offer.cost < best.cost:
                best = offer
        if best is None:
            raise NoReplica(f"none of {len(self._order)} replicas can take the request")
        longest = max(candidates.values())
        number = self._send(best, tokens, now_s, keys[best.pages :])
        if best.fetch_s:
            return Choice(best.replica.name, tokens - best.compute, "fetched", peer, number)
        reason: Reason = "less_work" if best.pages < longest else "longest_prefix" if longest else "no_prefix"
        return Choice(best.replica.name, tokens - best.compute, reason, None, number)

    def _estimate(self, replica: _Replica, tokens: int, pages: int, most: int) -> _Offer:
        """What the request costs there, where so many `pages` are; up to `most` can be had elsewhere."""
        token_s, step_s, backlog = replica.token_s, replica.step_s, replica.backlog.tokens
        compute, fetch_s = self._count_to_compute(tokens, pages), 0.0
        seconds = first_token_s(backlog, compute, token_s, step_s)
        if pages < most and replica.fetching.most_pages:
            more = min(most - pages, replica.fetching.most_pages)
            less, wait_s = self._count_to_compute(tokens, pages + more), replica.fetching.seconds(more)
            with_fetch = first_token_s(backlog, less, token_s, step_s, wait_s) + FETCH_PRICE * wait_s
            if with_fetch < seconds:
                seconds, compute, fetch_s = with_fetch, less, wait_s
        seconds += BALANCE * replica.lately_tokens * token_s
        return _Offer(replica, pages, fetch_s, compute, (seconds, replica.backlog.running + len(replica.backlog)))

    def _find_peer(self, keys: Sequence[bytes], candidates: Mapping[_Replica, int]) -> tuple[str | None, int]:
        """Who has the most pages of the request for sure, and how many; others may fetch them there."""
        longest = max(candidates.values(), default=0)
        if not longest or min(candidates.values()) == longest:
            return None, 0
        peer, most = None, 0
        for replica, pages in islice(candidates.items(), PEERS):  # those that hold most come first
            has = self._table.count_pages(replica.name, keys, pages, is_reported=True)
            if has > most:
                peer, most = replica.name, has
        return peer, most

    def check(self) -> None:
        """Prove that all that is kept agrees; raises AssertionError."""
        self._table.check()
        if [replica.place for replica in self._order] != list(range(len(self._order))):
            raise AssertionError("replicas do not know their places")
        if {replica.name: replica for replica in self._order} != self._replicas:
            raise AssertionError(f"{len(self._order)} replicas are drawn from, {len(self._replicas)} are known")
        for replica in self._order:
            replica.backlog.check()
            if replica.token_s <= 0:
                raise AssertionError(f"{replica.name}: {replica}")
        sent = {number: replica for replica in self._order for number in replica.backlog}
        if sent != self._sent:
            raise AssertionError(f"{len(self._sent)} requests are known, {len(sent)} are with the replicas")

    def _find_candidates(self, keys: Sequence[bytes], without: Collection[str]) -> dict[_Replica, int]:
        """Replicas that may be best, with the pages of the request that each holds."""
        found = self._table.find(keys, HOLDERS + len(without))
        candidates = {self._replicas[name]: pages for name, pages in found.items() if name not in without}
        longest = max(found.values(), default=0)
        for drawn in self._draw():
            if drawn not in candidates and drawn.name not in without:
                candidates[drawn] = self._table.count_pages(drawn.name, keys, longest)
        if not candidates:  # all that were drawn are in `without`
            candidates = {replica: 0 for replica in self._order if replica.name not in without}
        return candidates

    def _draw(self) -> list[_Replica]:
        """Some of all replicas; all of them if they are as few."""
        if len(self._order) <= HOLDERS:
            return self._order
        return [self._order[int(self._random.random() * len(self._order))] for _ in range(DRAWN)]

    def _count_to_compute(self, tokens: int, pages: int) -> int:
        """Tokens not found in the cache; the last one never is, as its logits are wanted."""
        return max(1, tokens - pages * self._page_tokens)

    def _send(self, offer: _Offer, tokens: int, now_s: float, keys: Sequence[bytes]) -> int:
        """Count the request as sent; one whose pages are fetched is there when they will have come."""
        replica, number = offer.replica, next(self._numbers)
        replica.backlog.send(number, offer.compute, max(tokens, offer.compute), now_s + offer.fetch_s)
        replica.lately_tokens += offer.compute
        self._sent[number] = replica
        if keys:
            self._table.expect(replica.name, keys, now_s + 2 * offer.cost[0] + EXPECTED_EXTRA_S)
        return number

    def _weigh(self, replica: _Replica, load: Load) -> None:
        """Take over a load, without the answers that are known to have ended."""
        if load.running > replica.backlog.running:
            load = replace(load, running=replica.backlog.running)
        if load.link != replica.load.link:
            replica.fetching = self._rates.plan_fetches(load.link)
        replica.load = load
        replica.token_s, replica.step_s = self._rates.token_s(load), self._rates.decode_step_s(load)


class Routing(StrEnum):
    """How the front chooses a replica."""

    PREFIX = "prefix"
    RANDOM = "random"


class RandomRouter(Router):
    """Any replica for any request: neither pages nor work are looked at, and nothing is fetched."""

    def choose(self, keys: Sequence[bytes], tokens: int, without: Collection[str] = ()) -> Choice:  # noqa: ARG002
        """A replica that is drawn, and not one of `without`; raises NoReplica when none is left."""
        left = [replica.name for replica in self._order if replica.name not in without]
        if not left:
            raise NoReplica(f"none of {len(self._order)} replicas can take the request")
        return Choice(self._random.choice(left), 0, "drawn")


ROUTERS: dict[Routing, type[Router]] = {Routing.PREFIX: Router, Routing.RANDOM: RandomRouter}
