"""`completion_probabilities`: how likely each token was, before or after the rules that narrow the choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlxr.core.events import TokenInfo
from mlxr.core.types import SamplingParams, TokenLogprob
from mlxr.server.json_models import JsonObject
from mlxr.server.openai.replies import TokenBytes, possible


@dataclass(frozen=True, slots=True)
class Probabilities:
    """Describes tokens with the `count` likeliest in their places.

    With `is_final` the shares are those that the token was drawn with: after temperature, top_k, top_p and min_p of
    `params`, whose top_k must not exceed the number of reported tokens.
    """

    token_bytes: TokenBytes
    count: int
    params: SamplingParams
    is_final: bool

    def describe(self, token: TokenInfo) -> JsonObject:
        """One token of an answer."""
        if not self.is_final:
            top = [self._spell(one, {"logprob": one.logprob}) for one in possible(token.top[: self.count])]
            return {**self._spell(token.chosen, {"logprob": token.chosen.logprob}), "top_logprobs": top}
        shares = find_shares(token.top, self.params)
        top = [
            self._spell(one, {"prob": share})
            for one, share in zip(token.top[: self.count], shares, strict=False)
            if share > 0
        ]
        chosen = next((share for one, share in zip(token.top, shares, strict=False) if self._is(one, token)), 0.0)
        return {**self._spell(token.chosen, {"prob": chosen}), "top_probs": top}

    def _is(self, one: TokenLogprob, token: TokenInfo) -> bool:
        return one.token_id == token.chosen.token_id

    def _spell(self, token: TokenLogprob, measure: JsonObject) -> JsonObject:
        spelt = self.token_bytes(token.token_id)
        return {
            "id": token.token_id,
            "token": spelt.decode("utf-8", "replace"),
            "bytes": list(spelt),
            **measure,
        }


def find_shares(top: Sequence[TokenLogprob], params: SamplingParams) -> list[float]:
    """The probabilities of the best tokens, best first, that one of them is drawn with; they add up to 1.

    `top` must hold the params.top_k best tokens at least, so what is cut off is not needed.
    """
    logprobs = [one.logprob for one in top[: params.top_k]]
    if not logprobs or logprobs[0] == -math.inf:
        return []
    if params.temperature == 0:
        return [1.0]
    distances = np.array(logprobs) - logprobs[0]
    seen = np.exp(distances / (1.0 if params.temperature_last else params.temperature))  # by top_p and min_p
    if params.top_p < 1:
        reached = np.cumsum(seen) >= params.top_p * seen.sum()
        seen = seen[: int(np.argmax(reached)) + 1]
    kept = np.count_nonzero(seen >= params.min_p)
    weights = np.exp(distances[:kept] / params.temperature)
    shares: list[float] = (weights / weights.sum()).tolist()
    return shares
