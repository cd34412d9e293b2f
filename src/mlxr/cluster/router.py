"""Choice of the replica that serves a request: the one where its first token will come soonest.

That is where its pages are, unless that replica has too much to do. The candidates are a few replicas that hold the
longest known prefixes of the request, and a few drawn from all; the cost of each is an estimate in seconds. A replica
that lacks pages can fetch them from one that has them, if that takes less time than computing them. So if a replica is
overloaded, a request goes elsewhere and takes its pages along. A choice costs a few look-ups and an estimate per
candidate, however many replicas there are. `Routing` names the ways to choose: by prefixes and, for comparison, at
random.

A replica computes prompts one after another, in chunks, and each chunk shares its step with all answers that are being
decoded. So a token of a prompt costs its share of the prefill and, while answers run, its share of a decode step.
Replicas report their load and their pages a few times a second (`note_load`, `note_pages`). Between two reports the
router keeps counting: each request it sends adds work and expected pages, and work is taken off as time passes or when
the front says so (`settle`, `end`). So a burst spreads, and requests with one prefix that come together go to one
replica.

`Backlog` adds the prompts sent to a replica since its report: each prompt is an entry, from `send` to `settle`, and its
tokens leave with it exactly once, whatever reports come before, between or after. A report has a single number of
waiting tokens, which is divided. The prompts that the report must include get their shares, the last prompt first, as
replicas compute the first one first; if the number is larger than expected, they found less in the cache, or have not
looked yet. Prompts sent so lately that the report may not include them keep their tokens, and those settled lately may
still be included. Tokens that none of them explains belong to requests of other routers. In the same way a report may
still count an answer that has ended. Uses neither network nor processes; not safe for several threads.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count, islice
from random import Random
from typing import Literal, NamedTuple

from mlxr.cluster.prefix_table import PageDelta, PrefixTable
from mlxr.core.errors import NoReplica
from mlxr.core.frozen import frozen

TIME_SHARE = 0.5  # the share of the allowed time that a planned fetch may take
MANY_PAGES = 2**31  # no limit: models that keep only states fetch these with a boundary


@frozen
class Link:
    """Sizes and speed with which a replica fetches pages from another one.

    A page of a text takes `page_bytes`, and the boundary to continue from another `boundary_bytes`. A fetch brings at
    most `max_bytes` and takes at most `timeout_s` seconds. `bytes_per_s` is the speed of the last ones, 0 if unknown.
    """

    page_bytes: int
    boundary_bytes: int
    max_bytes: int
    timeout_s: float
    bytes_per_s: float = 0.0


@frozen
class Fetching:
    """At most `most_pages` pages can be fetched; n of them are here after `first_s` + n × `page_s` seconds."""

    first_s: float
    page_s: float
    most_pages: int

    def seconds(self, pages: int) -> float:
        """Return the seconds until so many pages are here."""
        return self.first_s + pages * self.page_s


NO_FETCHING = Fetching(0.0, 0.0, 0)


@frozen
class Load:
    """The load of a replica when it reports.

    `waiting_tokens` are prompt tokens still to compute, of waiting and running requests, without those in the cache;
    `running` are answers being decoded; `tokens_per_second_prefill` is its recent speed of computing prompts and
    `step_s` the seconds of a decode step, 0 if not measured yet. `link` is None if it cannot fetch pages.
    """

    waiting_tokens: int
    running: int
    tokens_per_second_prefill: float
    step_s: float
    link: Link | None = None


@frozen
class Rates:
    """Assumed speeds of a replica that has not measured its own.

    `chunk_tokens` are the prompt tokens of one step. A request that was sent less than `flight_s` seconds before a
    report may have arrived after the report was made. The first fetched page comes after `ask_s` seconds.
    """

    prefill_tokens_per_s: float = 2000.0
    step_s: float = 0.02
    chunk_tokens: int = 512
    flight_s: float = 0.05
    link_bytes_per_s: float = 100e6
    ask_s: float = 0.01

    def plan_fetches(self, link: Link | None) -> Fetching:
        """Plan fetches over `link`: the seconds of one, those of each page, and how many pages fit its bounds."""
        if link is None:
            return NO_FETCHING
        speed = link.bytes_per_s if link.bytes_per_s > 0 and math.isfinite(link.bytes_per_s) else self.link_bytes_per_s
        room_bytes = min(link.max_bytes, TIME_SHARE * link.timeout_s * speed) - link.boundary_bytes
        if room_bytes < 0:
            return NO_FETCHING
        pages = int(room_bytes / link.page_bytes) if link.page_bytes else MANY_PAGES
        return Fetching(self.ask_s + link.boundary_bytes / speed, link.page_bytes / speed, pages)

    def token_s(self, load: Load) -> float:
        """Seconds per prompt token: its part of the prefill and, while answers run, of the decode steps meanwhile."""
        rate = load.tokens_per_second_prefill
        if not (rate > 0 and math.isfinite(rate)):
            rate = self.prefill_tokens_per_s
        return 1.0 / rate + self.decode_step_s(load) / self.chunk_tokens

    def decode_step_s(self, load: Load) -> float:
        """Seconds of a decode step there, 0 when no answer runs."""
        if load.running <= 0:
            return 0.0
        return load.step_s if load.step_s > 0 and math.isfinite(load.step_s) else self.step_s


def first_token_s(
    backlog_tokens: float, compute_tokens: int, token_s: float, step_s: float, fetch_s: float = 0.0
) -> float:
    """Seconds until the first token: all tokens before it, its own, and half of the step that is under way.

    Pages are fetched while the tokens before it are computed.
    """
    return max(backlog_tokens * token_s, fetch_s) + compute_tokens * token_s + 0.5 * step_s


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that was sent: `tokens` are expected to be computed, `most` if the cache has nothing, `left` remain."""

    number: int
    at_s: float
    tokens: int
    most: int
    left: float


def _get_time(prompt: _Prompt) -> float:
    return prompt.at_s


class Backlog:
    """The work of a replica: `tokens` to compute, that is `others`, which come first, and those of the prompts sent.

    `running` counts the answers that were reported, without those that are known to have ended.
    """

    def __init__(self) -> None:
        self.tokens = self.others = 0.0
        self.running = self._other_answers = 0
        self._answers: set[int] = set()  # to requests that have not ended
        self._ended: deque[float] = deque()  # end times of the answers that a report may still count
        self._prompts: dict[int, _Prompt] = {}
        self._waiting: deque[_Prompt] = deque()  # prompts with tokens left, by time
        self._settled: deque[tuple[float, int]] = deque()  # time, and the tokens that a report may still count

    def __len__(self) -> int:
        """The number of sent prompts that have tokens left."""
        return len(self._waiting)

    def __contains__(self, number: int) -> bool:
        """Return True if the prompt is not settled."""
        return number in self._prompts

    def __iter__(self) -> Iterator[int]:
        """Go through the numbers of all requests that have not ended."""
        return iter(self._answers)

    def send(self, number: int, tokens: int, most: int, at_s: float) -> None:
        """Add a prompt that is there from `at_s` on, with `tokens` to compute of `most`."""
        prompt = self._prompts[number] = _Prompt(number, at_s, tokens, most, tokens)
        insort(self._waiting, prompt, key=_get_time)
        self._answers.add(number)
        self.tokens += tokens

    def settle(self, number: int, now_s: float) -> None:
        """Note that a prompt is computed, or will never arrive: the rest of it no longer waits."""
        prompt = self._prompts.pop(number, None)
        if prompt is None:
            return
        self._settled.append((now_s, prompt.most))
        if prompt.left:
            self._waiting.remove(prompt)
            self._take_off(prompt.left)

    def end(self, number: int, now_s: float) -> None:
        """Note that a request has ended: its prompt no longer waits, and no answer to it runs."""
        self.settle(number, now_s)
        self._answers.remove(number)
        self._ended.append(now_s)
        self.running = min(self.running, self._other_answers + len(self._answers))

    def work(self, tokens: float) -> None:
        """Take off so many computed tokens, the first ones first."""
        if not self.tokens:
            return
        rest = tokens - self.others
        self.others = max(0.0, -rest)
        waiting = self._waiting
        while rest > 0 and waiting:
            first = waiting[0]
            if first.left > rest:
                first.left -= rest
                break
            rest -= first.left
            first.left = 0.0
            waiting.popleft()
        self._take_off(tokens)

    def report(self, waiting_tokens: int, running: int, since_s: float) -> None:
        """Take in the tokens waiting and answers running in a report that the replica made after `since_s`."""
        while self._ended and self._ended[0] <= since_s:
            self._ended.popleft()
        self._other_answers = max(0, running - len(self._answers) - len(self._ended))
        self.running = max(0, min(running, self._other_answers + len(self._answers)))
        settled = self._settled
        while settled and settled[0][0] <= since_s:
            settled.popleft()
        prompts = sorted(self._prompts.values(), key=_get_time)
        counted = [prompt for prompt in reversed(prompts) if prompt.at_s <= since_s]
        rest = max(0, waiting_tokens)
        for prompt in counted:
            prompt.left = min(prompt.tokens, rest)
            rest -= prompt.left
        if rest:
            for prompt in counted:
                more = min(prompt.most - prompt.tokens, rest)
                prompt.left += more
                rest -= more
            rest -= sum(most for _, most in settled)
            rest -= sum(prompt.most for prompt in prompts if prompt.at_s > since_s)
        self.others = max(0, rest)
        self._waiting = deque(prompt for prompt in prompts if prompt.left)
        self.tokens = self.others + sum(prompt.left for prompt in self._waiting)

    def check(self) -> None:
        """Check the invariants; raises AssertionError."""
        waiting = sorted((prompt for prompt in self._prompts.values() if prompt.left), key=_get_time)
        if set(waiting) != set(self._waiting) or len(waiting) != len(self._waiting):
            raise AssertionError(f"{len(self._waiting)} prompts wait, {len(waiting)} have tokens left")
        if [prompt.at_s for prompt in self._waiting] != [prompt.at_s for prompt in waiting]:
            raise AssertionError("prompts are out of order")
        for number, prompt in self._prompts.items():
            if number != prompt.number or not 0 <= prompt.left <= prompt.most:
                raise AssertionError(f"prompt {number}: {prompt}")
        times = [at_s for at_s, _ in self._settled]
        if times != sorted(times) or list(self._ended) != sorted(self._ended):
            raise AssertionError("settled prompts or ended answers are out of order")
        if not self._prompts.keys() <= self._answers or self.running > self._other_answers + len(self._answers):
            raise AssertionError(f"{self.running} answers run, to {len(self._answers)} requests, and of others")
        tokens = self.others + sum(prompt.left for prompt in waiting)
        if self.others < 0 or not math.isclose(self.tokens, tokens, rel_tol=1e-9, abs_tol=1e-6):
            raise AssertionError(f"{self.tokens} tokens wait, those of others and of prompts are {tokens}")

    def _take_off(self, tokens: float) -> None:
        self.tokens = max(0.0, self.tokens - tokens) if self._waiting or self.others else 0.0


__all__ = ["Choice", "Link", "Load", "NoReplica", "PageDelta", "Rates", "Reason", "Router"]

HOLDERS = 8  # candidates because of their pages
DRAWN = 4  # candidates drawn from all replicas
PEERS = 2  # holders of the longest prefixes that are considered as peers to fetch from
FETCH_PRICE = 2.0  # a fetch costs so many times its wait on top of the wait: it takes network and memory, too
BALANCE = 0.2  # the share of the work lately sent to a replica that counts as a wait
LATELY_S = 60.0  # work of that age counts 1/e
EXPECTED_EXTRA_S = 5.0  # how much longer than twice its estimate a request may take to leave its pages
UNKNOWN = Load(0, 0, 0.0, 0.0)

Reason = Literal["longest_prefix", "fetched", "less_work", "no_prefix", "drawn"]


@frozen
class Choice:
    """The choice of a replica for a request.

    `cached_tokens` are expected in the cache there, or come from the replica `peer`, which has them. `reason` is
    `longest_prefix` if no candidate holds more of it, `fetched` and `less_work` if one does but would take longer,
    with and without a peer, and `no_prefix` if no replica holds any of it. `drawn` means at random (`Routing`). The
    request counts as work there by its `number`; 0 means that it does not count.
    """

    replica: str
    cached_tokens: int
    reason: Reason
    peer: str | None = None
    number: int = 0


@dataclass(slots=True, eq=False)
class _Replica:
    """A replica: `backlog` is its work at `at_s`, `lately_tokens` are the tokens lately sent, the older the less."""

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
        """Take off the work that has been done since."""
        if now_s > self.at_s:
            passed_s = now_s - self.at_s
            self.backlog.work(passed_s / self.token_s)
            self.lately_tokens *= math.exp(-passed_s / LATELY_S)
            self.at_s = now_s


class _Offer(NamedTuple):
    """A candidate: it has `pages`, fetches others in `fetch_s`, computes `compute` tokens, and costs `cost`."""

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
        self._sent: dict[int, _Replica] = {}  # the replica of each request that has not ended

    def __len__(self) -> int:
        """The number of replicas."""
        return len(self._order)

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    def add(self, replica: str) -> None:
        """Add a replica with an empty cache and nothing to do. A known one begins anew."""
        self.remove(replica)
        new = _Replica(replica, len(self._order), at_s=self._clock())
        self._weigh(new, UNKNOWN)
        self._replicas[replica] = new
        self._order.append(new)
        self._table.add(replica)

    def remove(self, replica: str) -> None:
        """Remove a replica that died or drains: it gets no more requests. Nothing happens if it is not known."""
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
        """Take in a report of pages. It is ignored if the replica is not known, since it has just gone."""
        if replica in self._replicas:
            self._table.apply(replica, delta)

    def wants_whole(self, replica: str) -> bool:
        """Return True if a report of pages is missing, so that the replica should send all of them (`whole`)."""
        return replica in self._replicas and self._table.wants_whole(replica)

    def note_load(self, replica: str, load: Load, age_s: float = 0.0) -> None:
        """Take in a replica's load, from a report that was made at most `age_s` seconds ago.

        Requests that were sent just before are added to it, as the report cannot include them yet.
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
        """Note that the first token of an answer has come, so the prompt is no longer work of its replica.

        Nothing happens if that is known, if the request has ended, or if the replica has gone.
        """
        replica = self._sent.get(number)
        if replica is not None and number in replica.backlog:
            now_s = self._clock()
            replica.pass_time(now_s)
            replica.backlog.settle(number, now_s)

    def end(self, number: int) -> None:
        """Note that a request has left its replica. Nothing happens if that is known or the replica has gone."""
        replica = self._sent.pop(number, None)
        if replica is not None:
            now_s = self._clock()
            replica.pass_time(now_s)
            replica.backlog.end(number, now_s)
            if replica.backlog.running < replica.load.running:
                self._weigh(replica, replica.load)

    def choose(self, keys: Sequence[bytes], tokens: int, without: Collection[str] = ()) -> Choice:
        """The replica for a request of `tokens` tokens, whose full pages are named `keys`, and not one of `without`.

        The request counts as sent there until it ends. Raises NoReplica if no replica is left.
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
        """Estimate the cost of the request at a replica that has `pages` pages; it may fetch more, up to `most`."""
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
        """Find the replica that reported most pages of the request, and their number; others may fetch them there."""
        longest = max(candidates.values(), default=0)
        if not longest or min(candidates.values()) == longest:
            return None, 0
        peer, most = None, 0
        for replica, pages in islice(candidates.items(), PEERS):  # the longest prefixes come first
            has = self._table.count_pages(replica.name, keys, pages, is_reported=True)
            if has > most:
                peer, most = replica.name, has
        return peer, most

    def check(self) -> None:
        """Check the invariants; raises AssertionError."""
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
        """A few random replicas; all of them if there are few."""
        if len(self._order) <= HOLDERS:
            return self._order
        return [self._order[int(self._random.random() * len(self._order))] for _ in range(DRAWN)]

    def _count_to_compute(self, tokens: int, pages: int) -> int:
        """The number of tokens not in the cache; the last one never is, as its logits are needed."""
        return max(1, tokens - pages * self._page_tokens)

    def _send(self, offer: _Offer, tokens: int, now_s: float, keys: Sequence[bytes]) -> int:
        """Count the request as sent; one that fetches pages arrives when these have come."""
        replica, number = offer.replica, next(self._numbers)
        replica.backlog.send(number, offer.compute, max(tokens, offer.compute), now_s + offer.fetch_s)
        replica.lately_tokens += offer.compute
        self._sent[number] = replica
        if keys:
            self._table.expect(replica.name, keys, now_s + 2 * offer.cost[0] + EXPECTED_EXTRA_S)
        return number

    def _weigh(self, replica: _Replica, load: Load) -> None:
        """Set the load, without the answers that are known to have ended."""
        if load.running > replica.backlog.running:
            load = replace(load, running=replica.backlog.running)
        if load.link != replica.load.link:
            replica.fetching = self._rates.plan_fetches(load.link)
        replica.load = load
        replica.token_s, replica.step_s = self._rates.token_s(load), self._rates.decode_step_s(load)


class Routing(StrEnum):
    """The front's way to choose a replica."""

    PREFIX = "prefix"
    RANDOM = "random"


class RandomRouter(Router):
    """Chooses any replica for any request: ignores pages and work, and fetches nothing."""

    def choose(self, keys: Sequence[bytes], tokens: int, without: Collection[str] = ()) -> Choice:  # noqa: ARG002
        """Choose a random replica that is not one of `without`; raises NoReplica if none is left."""
        left = [replica.name for replica in self._order if replica.name not in without]
        if not left:
            raise NoReplica(f"none of {len(self._order)} replicas can take the request")
        return Choice(self._random.choice(left), 0, "drawn")


ROUTERS: dict[Routing, type[Router]] = {Routing.PREFIX: Router, Routing.RANDOM: RandomRouter}
