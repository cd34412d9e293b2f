"""How many seconds a replica would need until a request's first token: the one cost by which replicas are compared.

A replica computes prompts one after another, in chunks, and each chunk shares its step with all answers that are being
decoded. So a token of a prompt costs its share of the prefill and, while answers run, its share of a decode step.
Knows no pages and no replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica has to do when it reports.

    `waiting_tokens` are prompt tokens still to compute, of requests that wait and of those under way, less what the
    cache has; `running` are answers being decoded; `tokens_per_second_prefill` and `step_s` are how fast it lately
    computed prompts and how long a decode step took, 0 where it cannot tell yet.
    """

    waiting_tokens: int
    running: int
    tokens_per_second_prefill: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What is assumed of a replica that has not measured itself.

    `chunk_tokens` are the prompt tokens of one step. A request that was sent less than `flight_s` seconds before a
    report may not have been there when the report was made.
    """

    prefill_tokens_per_s: float = 2000.0
    step_s: float = 0.02
    chunk_tokens: int = 512
    flight_s: float = 0.05

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


def first_token_s(backlog_tokens: float, compute_tokens: int, token_s: float, step_s: float) -> float:
    """Seconds until the first token: all tokens before it, its own, and half of the step that is under way."""
    return (backlog_tokens + compute_tokens) * token_s + 0.5 * step_s
