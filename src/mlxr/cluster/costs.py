"""How many seconds a replica would need until a request's first token: the one cost by which replicas are compared.

A replica computes prompts one after another, in chunks, and each chunk shares its step with all answers that are being
decoded. So a token of a prompt costs its share of the prefill and, while answers run, its share of a decode step.
Knows no pages and no replicas.
"""

from __future__ import annotations

import math
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
