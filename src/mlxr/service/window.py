"""The part of the context that one request may take, and what becomes of a prompt that is too long for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlxr.core.errors import ContextFull
from mlxr.core.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Window:
    """Prompt and answer may have `tokens` tokens together.

    A prompt that leaves no room for an answer is refused, or cut where `kept_tokens` is given: so many tokens of its
    beginning stay, and of its end as many as leave half the window for the answer, or what the answer may have at most.
    """

    tokens: int
    kept_tokens: int | None = None


def fit_window(
    token_ids: Sequence[int], params: SamplingParams, window: Window
) -> tuple[Sequence[int], SamplingParams]:
    """The prompt and the parameters so that both fit; raises ContextFull for a prompt that may not be cut."""
    if len(token_ids) >= window.tokens:
        token_ids = _cut(token_ids, params, window)
    left = window.tokens - len(token_ids)
    return token_ids, replace(params, max_tokens=left if params.max_tokens is None else min(params.max_tokens, left))


def _cut(token_ids: Sequence[int], params: SamplingParams, window: Window) -> Sequence[int]:
    answer_tokens = min(params.max_tokens or window.tokens, window.tokens // 2)
    room = window.tokens - answer_tokens
    if window.kept_tokens is None or not 0 < room < window.tokens:
        raise ContextFull.of("prompt", len(token_ids), window.tokens)
    kept = min(window.kept_tokens, room - 1)
    return [*token_ids[:kept], *token_ids[len(token_ids) - room + kept :]]
