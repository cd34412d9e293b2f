"""Simulated replicas for `cluster_sim.py`: a cache of pages, a queue, and the time that prompts, answers and fetched
pages take.

A node computes one prompt after another. A prompt takes its tokens that are not in the cache, at the rate of prefill,
and for each chunk the decode step of the answers that run meanwhile. An answer takes its tokens times the decode step
at its beginning. Nothing finer than a request is simulated: chunks of two prompts in one step, decode steps that
prefill makes longer, pages that a running answer keeps from eviction.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from cluster_traces import PAGE_TOKENS, Request
from mlxr.cluster.router import Link, Load, PageDelta

ASK_S = 0.005  # before the first page comes


@dataclass(frozen=True, slots=True)
class Machine:
    """The speeds and capacities of a node."""

    prefill_tokens_per_s: float
    step_s: float
    sequence_s: float
    chunk_tokens: int
    max_sequences: int
    cache_pages: int
    page_bytes: int
    link_bytes_per_s: float
    fetch_bytes: int = 512 * 2**20
    fetch_timeout_s: float = 3.0

    @property
    def link(self) -> Link | None:
        """The link that a node reports; None if it fetches nothing."""
        if not self.link_bytes_per_s:
            return None
        return Link(self.page_bytes, 0, self.fetch_bytes, self.fetch_timeout_s, self.link_bytes_per_s)

    def decode_step_s(self, running: int) -> float:
        """The seconds of a step with so many answers."""
        return self.step_s + running * self.sequence_s if running else 0.0

    def prompt_s(self, tokens: int, running: int) -> float:
        """The seconds for `tokens` of a prompt."""
        return tokens / self.prefill_tokens_per_s + math.ceil(tokens / self.chunk_tokens) * self.decode_step_s(running)


class Cache:
    """Pages, the least recently used first. A page is used whenever one after it is, so leaves go before roots."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self.pages: OrderedDict[bytes, None] = OrderedDict()
        self.added: set[bytes] = set()
        self.dropped: set[bytes] = set()

    def count(self, keys: Sequence[bytes], at_most: int) -> int:
        """Count by bisection the pages there of the first `at_most`: a page is there only with those before it."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if keys[middle - 1] in self.pages else (low, middle - 1)
        return low

    def use(self, keys: Sequence[bytes]) -> None:
        """Put all of `keys` there as used last; others are evicted."""
        pages = self.pages
        for key in reversed(keys):
            if key in pages:
                pages.move_to_end(key)
            else:
                pages[key] = None
                self._change(key, self.added, self.dropped)
        while len(pages) > self._budget:
            self._change(pages.popitem(last=False)[0], self.dropped, self.added)

    def _change(self, key: bytes, to: set[bytes], other: set[bytes]) -> None:
        if key in other:
            other.remove(key)
        else:
            to.add(key)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the pages added and dropped since the last call."""
        changes = list(self.added), list(self.dropped)
        self.added, self.dropped = set(), set()
        return changes


class Node:
    """A replica. The caller keeps the time; methods return when something happens next."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.name, self.machine = name, machine
        self.cache = Cache(machine.cache_pages)
        self.queue: deque[tuple[Request, int]] = deque()  # with the tokens to compute at its arrival
        self.queued_tokens = 0
        self.running = 0
        self.under_way: Request | None = None
        self.until_s = 0.0
        self.computed_tokens = 0
        self.coming_tokens = 0  # to compute once their pages have come
        self.link_free_s = 0.0  # the link carries one fetch after the other
        self.sequence = 0

    def fetch(self, request: Request, peer: Node, now_s: float) -> tuple[float, int]:
        """Fetch missing pages from `peer`; returns the time when they have come, and the number of pages here then.

        Both links are busy meanwhile, so fetches from a popular node wait. As many pages come as the bounds allow.
        """
        have = self.cache.count(request.keys, request.pages)
        has = peer.cache.count(request.keys, request.pages)
        if self.machine.link is None or has <= have:
            return now_s, have
        start_s = max(now_s, self.link_free_s, peer.link_free_s) + ASK_S
        rate = self.machine.link_bytes_per_s
        room_bytes = min(self.machine.fetch_bytes, (now_s + self.machine.fetch_timeout_s - start_s) * rate)
        pages = min(has - have, int(room_bytes / self.machine.page_bytes))
        if pages <= 0:
            return now_s + self.machine.fetch_timeout_s, have
        self.link_free_s = peer.link_free_s = start_s + pages * self.machine.page_bytes / rate
        return self.link_free_s, have + pages

    def take(self, request: Request) -> None:
        """Take a request into the queue."""
        compute = self.count_to_compute(request)
        self.queue.append((request, compute))
        self.queued_tokens += compute

    def count_to_compute(self, request: Request) -> int:
        """The tokens of the prompt that are not in the cache; the last one never is."""
        return max(1, request.tokens - PAGE_TOKENS * self.cache.count(request.keys, request.pages))

    def begin(self, now_s: float) -> int | None:
        """Begin the next prompt if the node is free; returns the tokens it computes. It ends at `until_s`."""
        if self.under_way is not None or not self.queue or self.running >= self.machine.max_sequences:
            return None
        request, counted = self.queue.popleft()
        self.queued_tokens -= counted
        compute = self.count_to_compute(request)
        self.under_way, self.until_s = request, now_s + self.machine.prompt_s(compute, self.running)
        self.computed_tokens += compute
        return compute

    def finish_prompt(self, now_s: float) -> tuple[Request, float]:
        """End the prompt; returns its request, and the time when its answer ends."""
        request = self.under_way
        assert request is not None
        self.under_way = None
        self.running += 1
        self.cache.use(request.keys[: request.pages])
        return request, now_s + request.answer_tokens * self.machine.decode_step_s(self.running)

    def finish_answer(self, request: Request) -> None:
        """End an answer, and cache its pages."""
        self.running -= 1
        self.cache.use(request.keys)

    def load(self, now_s: float, *, knows_all: bool = False) -> Load:
        """The load; if `knows_all`, with the requests whose pages are on their way."""
        left_s = max(0.0, self.until_s - now_s) if self.under_way is not None else 0.0
        waiting = (
            self.queued_tokens
            + (self.coming_tokens if knows_all else 0)
            + int(left_s * self.machine.prefill_tokens_per_s)
        )
        step_s = self.machine.decode_step_s(self.running)
        return Load(waiting, self.running, self.machine.prefill_tokens_per_s, step_s, self.machine.link)

    def report_pages(self) -> PageDelta | None:
        """The changes in the cache, None if there are none."""
        added, dropped = self.cache.take_changes()
        if not added and not dropped:
            return None
        self.sequence += 1
        return PageDelta(self.sequence - 1, added, dropped)
