"""What a replica has still to do, and how many seconds that takes it: the one cost by which replicas are compared.

A replica computes prompts one after another, in chunks, and each chunk shares its step with all answers that are being
decoded. So a token of a prompt costs its share of the prefill and, while answers run, its share of a decode step.

A replica reports its load a few times a second. `Backlog` adds what was sent to it since: each prompt is an entry, from
`send` to `settle`, and its tokens leave with it: once, whatever reports come before, between or after. A report tells
one number, so it is shared out. The prompts that it must have counted get
their parts of it, the last one first, as replicas compute the first one first; if it tells more than they should take,
they have found less in the cache, or have not looked yet. Prompts sent so lately that it may have been made without
them keep what they have, and those settled lately may be in it still. What none of them explains is of others, whom
another router has sent. In the same way a report may still count an answer that has ended.

Knows no pages and no network.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

TIME_SHARE = 0.5  # of the time that a fetch may take is planned for
MANY_PAGES = 2**31  # of models that keep states alone, which are fetched with a boundary


@dataclass(frozen=True, slots=True)
class Link:
    """Sizes and speed with which a replica fetches pages from another one.

    A page of a text takes `page_bytes`, and a boundary to go on from `boundary_bytes` besides. At most `max_bytes` are
    fetched at a time, for `timeout_s` seconds. `bytes_per_s` is what the last fetches had, 0 where that is not known.
    """

    page_bytes: int
    boundary_bytes: int
    max_bytes: int
    timeout_s: float
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fetching:
    """At most `most_pages` pages can be fetched; n of them are here after `first_s` + n × `page_s` seconds."""

    first_s: float
    page_s: float
    most_pages: int

    def seconds(self, pages: int) -> float:
        """Seconds until so many pages are here."""
        return self.first_s + pages * self.page_s


NO_FETCHING = Fetching(0.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica has to do when it reports.

    `waiting_tokens` are prompt tokens still to compute, of requests that wait and of those under way, less what the
    cache has; `running` are answers being decoded; `tokens_per_second_prefill` and `step_s` are how fast it lately
    computed prompts and how long a decode step took, 0 where it cannot tell yet. `link` is None where it cannot fetch
    pages.
    """

    waiting_tokens: int
    running: int
    tokens_per_second_prefill: float
    step_s: float
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """What is assumed of a replica that has not measured itself.

    `chunk_tokens` are the prompt tokens of one step. A request that was sent less than `flight_s` seconds before a
    report may not have been there when the report was made. Before the first of the pages that are fetched comes,
    `ask_s` seconds pass.
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
    """`tokens` are to be computed as far as was known when it was sent, and `most` if it finds nothing in the cache.

    Of these, `left` are left.
    """

    number: int
    at_s: float
    tokens: int
    most: int
    left: float


def _get_time(prompt: _Prompt) -> float:
    return prompt.at_s


class Backlog:
    """`tokens` are to be computed: `others`, which come first, and those of the prompts that were sent.

    Of the answers that were reported as `running`, those count no more that are known to have ended.
    """

    def __init__(self) -> None:
        self.tokens = self.others = 0.0
        self.running = self._other_answers = 0
        self._answers: set[int] = set()  # to requests that have not ended
        self._ended: deque[float] = deque()  # when those ended that a report may still count
        self._prompts: dict[int, _Prompt] = {}
        self._waiting: deque[_Prompt] = deque()  # those with tokens left, by time
        self._settled: deque[tuple[float, int]] = deque()  # when, and how many tokens a report may still count

    def __len__(self) -> int:
        """How many prompts that were sent have tokens left."""
        return len(self._waiting)

    def __contains__(self, number: int) -> bool:
        """Whether a prompt is not settled."""
        return number in self._prompts

    def __iter__(self) -> Iterator[int]:
        """Go through the numbers of all requests that have not ended."""
        return iter(self._answers)

    def send(self, number: int, tokens: int, most: int, at_s: float) -> None:
        """A prompt is there from `at_s` on, with `tokens` to compute of `most`."""
        prompt = self._prompts[number] = _Prompt(number, at_s, tokens, most, tokens)
        insort(self._waiting, prompt, key=_get_time)
        self._answers.add(number)
        self.tokens += tokens

    def settle(self, number: int, now_s: float) -> None:
        """A prompt is computed, or never will be there: what is left of it waits no more, if it did."""
        prompt = self._prompts.pop(number, None)
        if prompt is None:
            return
        self._settled.append((now_s, prompt.most))
        if prompt.left:
            self._waiting.remove(prompt)
            self._take_off(prompt.left)

    def end(self, number: int, now_s: float) -> None:
        """A request has ended: its prompt waits no more, and no answer to it runs."""
        self.settle(number, now_s)
        self._answers.remove(number)
        self._ended.append(now_s)
        self.running = min(self.running, self._other_answers + len(self._answers))

    def work(self, tokens: float) -> None:
        """So many tokens have been computed by now, the first ones first."""
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
        """The replica had so many tokens waiting, and answers running, when it made a report after `since_s`."""
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
        """Prove that all that is kept agrees; raises AssertionError."""
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
