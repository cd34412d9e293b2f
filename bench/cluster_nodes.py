"""Simulated replicas for `cluster_sim.py`: a cache of pages, a queue, and the time that prompts and answers take.

A node computes one prompt after another. A prompt takes its tokens that are not in the cache, at the rate of prefill,
and for each chunk the decode step of the answers that run meanwhile. An answer takes its tokens times the decode step
as it was when the answer began. Whatever is finer than a request is not simulated: chunks of two prompts in one step,
decode steps that prefill makes longer, pages that a running answer keeps from eviction.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from cluster_traces import PAGE_TOKENS, Request
from mlxr.cluster.router import Load, PageDelta


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast a node is, and how much it holds."""

    prefill_tokens_per_s: float
    step_s: float
    sequence_s: float
    chunk_tokens: int
    max_sequences: int
    cache_pages: int

    def decode_step_s(self, running: int) -> float:
        """Seconds of a step with so many answers."""
        return self.step_s + running * self.sequence_s if running else 0.0

    def prompt_s(self, tokens: int, running: int) -> float:
        """Seconds for `tokens` of a prompt."""
        return tokens / self.prefill_tokens_per_s + math.ceil(tokens / self.chunk_tokens) * self.decode_step_s(running)


class Cache:
    """Pages, the least recently used first. A page is used whenever one after it is, so leaves go before roots."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self.pages: OrderedDict[bytes, None] = OrderedDict()
        self.added: set[bytes] = set()
        self.dropped: set[bytes] = set()

    def count(self, keys: Sequence[bytes], at_most: int) -> int:
        """How many of the first `at_most` pages are there; by bisection, since a page is there with those before it."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if keys[middle - 1] in self.pages else (low, middle - 1)
        return low

    def use(self, keys: Sequence[bytes]) -> None:
        """All of `keys` are there and used last; others go."""
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
        """What came and what went since the last call."""
        changes = list(self.added), list(self.dropped)
        self.added, self.dropped = set(), set()
        return changes


class Node:
    """A replica. Times are the caller's; each method says when something happens next."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.name, self.machine = name, machine
        self.cache = Cache(machine.cache_pages)
        self.queue: deque[tuple[Request, int]] = deque()  # with the tokens it had to compute when it came
        self.queued_tokens = 0
        self.running = 0
        self.under_way: Request | None = None
        self.until_s = 0.0
        self.computed_tokens = 0
        self.sequence = 0

    def take(self, request: Request) -> None:
        """A request comes."""
        compute = self.count_to_compute(request)
        self.queue.append((request, compute))
        self.queued_tokens += compute

    def count_to_compute(self, request: Request) -> int:
        """Tokens of the prompt that are not in the cache; the last one never is."""
        return max(1, request.tokens - PAGE_TOKENS * self.cache.count(request.keys, request.pages))

    def begin(self, now_s: float) -> int | None:
        """Begin the next prompt, if the node is free; returns how many tokens it computes. It ends at `until_s`."""
        if self.under_way is not None or not self.queue or self.running >= self.machine.max_sequences:
            return None
        request, counted = self.queue.popleft()
        self.queued_tokens -= counted
        compute = self.count_to_compute(request)
        self.under_way, self.until_s = request, now_s + self.machine.prompt_s(compute, self.running)
        self.computed_tokens += compute
        return compute

    def finish_prompt(self, now_s: float) -> tuple[Request, float]:
        """The prompt is computed: its request, and when its answer ends."""
        request = self.under_way
        assert request is not None
        self.under_way = None
        self.running += 1
        self.cache.use(request.keys[: request.pages])
        return request, now_s + request.answer_tokens * self.machine.decode_step_s(self.running)

    def finish_answer(self, request: Request) -> None:
        """The answer has ended, and its pages are cached."""
        self.running -= 1
        self.cache.use(request.keys)

    def load(self, now_s: float) -> Load:
        """What it has to do."""
        left_s = max(0.0, self.until_s - now_s) if self.under_way is not None else 0.0
        waiting = self.queued_tokens + int(left_s * self.machine.prefill_tokens_per_s)
        return Load(waiting, self.running, self.machine.prefill_tokens_per_s, self.machine.decode_step_s(self.running))

    def report_pages(self) -> PageDelta | None:
        """What changed in the cache, if anything did."""
        added, dropped = self.cache.take_changes()
        if not added and not dropped:
            return None
        self.sequence += 1
        return PageDelta(self.sequence - 1, added, dropped)
