"""Made-up requests for `cluster_sim.py`: their times, their sessions, and the keys of their pages.

Times of a session are drawn beforehand, so that every policy gets the same requests; with a slow policy a turn may come
before the answer to the turn before it has ended. Pages are random keys: pages that are shared have one key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

PAGE_TOKENS = 32
LONGEST_ANSWER = 1000


@dataclass(frozen=True, slots=True)
class Request:
    """A request: `keys` name the full pages of its prompt of `tokens` tokens, then those that the answer fills."""

    at_s: float
    session: int
    keys: list[bytes]
    tokens: int
    answer_tokens: int

    @property
    def pages(self) -> int:
        """The number of full pages of the prompt."""
        return self.tokens // PAGE_TOKENS


class Text:
    """A text that grows; its pages get keys as they fill."""

    def __init__(self, random: Random, keys: list[bytes], tokens: int) -> None:
        self._random, self._keys, self.tokens = random, keys, tokens

    def grow(self, tokens: int) -> None:
        """Append `tokens` tokens."""
        self.tokens += tokens
        full = self.tokens // PAGE_TOKENS
        self._keys = self._keys + [self._random.randbytes(8) for _ in range(full - len(self._keys))]

    def cut(self, tokens: int) -> None:
        """Remove `tokens` tokens from the end."""
        self.tokens -= tokens
        self._keys = self._keys[: self.tokens // PAGE_TOKENS]

    def ask(self, at_s: float, session: int, answer_tokens: int) -> Request:
        """Make a request with this text as its prompt, and append the answer to the text."""
        tokens = self.tokens
        self.grow(answer_tokens)
        return Request(at_s, session, self._keys, tokens, answer_tokens)


class Source:
    """Draws sessions, which share `count` beginnings; their popularity follows Zipf's law with `exponent`."""

    def __init__(self, random: Random, count: int, least: int, most: int, exponent: float) -> None:
        self.random = random
        self._shared = []
        for _ in range(count):
            tokens = random.randrange(least, most)
            self._shared.append((tokens, [random.randbytes(8) for _ in range(tokens // PAGE_TOKENS)]))
        self._weights = list(accumulate((rank + 1) ** -exponent for rank in range(count)))

    def begin(self) -> Text:
        """A text that begins with one of the shared beginnings."""
        tokens, keys = self.random.choices(self._shared, cum_weights=self._weights)[0]
        return Text(self.random, keys, tokens)

    def draw(self, mean: float, most: int = LONGEST_ANSWER) -> int:
        """Draw a number of tokens, log-normal around `mean`."""
        return max(1, min(most, int(self.random.lognormvariate(0.0, 0.7) * mean / 1.28)))


def draw_chat(source: Source, at_s: float, session: int, think_s: float) -> Iterator[Request]:
    """A conversation: some turns, with time to read and to write in between."""
    text = source.begin()
    for _ in range(1 + min(19, int(source.random.expovariate(1 / 5)))):
        text.grow(source.draw(150))
        yield text.ask(at_s, session, source.draw(200))
        at_s += source.random.expovariate(1 / think_s) + 1.0


def draw_agent(source: Source, at_s: float, session: int, think_s: float) -> Iterator[Request]:
    """An agent: a long shared beginning, then results of tools, the last part of which is rewritten."""
    text = source.begin()
    written = 0
    for _ in range(2 + min(18, int(source.random.expovariate(1 / 8)))):
        cut = int(written * 0.25)
        text.cut(cut)
        grown, answer = cut + source.draw(500, 4000), source.draw(80)
        text.grow(grown)
        yield text.ask(at_s, session, answer)
        written += grown - cut + answer
        at_s += source.random.expovariate(4 / think_s) + 0.5


def draw_rag(source: Source, at_s: float, session: int, think_s: float) -> Iterator[Request]:  # noqa: ARG001
    """One question about a document."""
    text = source.begin()
    text.grow(source.draw(60))
    yield text.ask(at_s, session, source.draw(120))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of sessions, and its shared beginnings: their number (and more per node), tokens, exponent."""

    draw: Callable[[Source, float, int, float], Iterator[Request]]
    shared: int
    shared_per_node: int
    least_tokens: int
    most_tokens: int
    exponent: float

    def make_source(self, random: Random, nodes: int) -> Source:
        """The shared beginnings for a cluster of so many nodes."""
        count = self.shared + self.shared_per_node * nodes
        return Source(random, count, self.least_tokens, self.most_tokens, self.exponent)


KINDS = {
    "chat": Kind(draw_chat, 20, 0, 200, 2000, 1.0),
    "agents": Kind(draw_agent, 50, 0, 3000, 8000, 1.0),
    "rag": Kind(draw_rag, 100, 10, 1000, 6000, 0.9),
}
TRACES = {"chat": ("chat",), "agents": ("agents",), "rag": ("rag",), "mix": ("chat", "agents", "rag")}


def make_trace(name: str, seed: int, nodes: int, requests: int, think_s: float) -> list[Request]:
    """At least `requests` requests session by session, each beginning at 0; `spread` gives them their times."""
    random = Random(seed)
    sources = [(KINDS[kind], KINDS[kind].make_source(random, nodes)) for kind in TRACES[name]]
    sessions: list[list[Request]] = []
    counts = [0] * len(sources)
    while sum(counts) < requests:
        place = counts.index(min(counts))  # kinds get equally many requests
        kind, source = sources[place]
        drawn = list(kind.draw(source, 0.0, len(sessions), think_s))
        counts[place] += len(drawn)
        sessions.append(drawn)
    return [request for session in sessions for request in session]


def spread(trace: list[Request], seed: int, requests_per_s: float, ramp: float) -> list[Request]:
    """Begin each session at a random time and sort by time.

    During the first `ramp` part of the time sessions begin ever more often, as caches are empty. Requests after the end
    are dropped.
    """
    random = Random(seed + 1)
    duration_s = len(trace) / requests_per_s / (1 - ramp / 2)
    begins: dict[int, float] = {}
    moved = []
    for request in trace:
        begin_s = begins.get(request.session)
        if begin_s is None:
            mass = random.random() * (1 - ramp / 2)
            part = math.sqrt(2 * ramp * mass) if mass < ramp / 2 else mass + ramp / 2
            begin_s = begins[request.session] = part * duration_s
        at_s = begin_s + request.at_s
        if at_s < duration_s:
            moved.append(Request(at_s, request.session, request.keys, request.tokens, request.answer_tokens))
    return sorted(moved, key=lambda request: request.at_s)
