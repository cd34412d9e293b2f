"""What replies of the OpenAI dialect have in common: token counts, durations, log-probabilities, the small print."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from mlxr.core.events import Event, Finish, PromptProgress, ReasoningDelta, TokenInfo
from mlxr.core.types import Timings, TokenLogprob
from mlxr.server.json_models import ReplyModel

TokenBytes = Callable[[int], bytes]


class PromptTokensDetails(ReplyModel):
    """Of the prompt's tokens, those that came from the cache."""

    cached_tokens: int


class CompletionTokensDetails(ReplyModel):
    """Of the answer's tokens, those of its reasoning, and those that the request's `prediction` expected; and how many
    of the prediction's tokens were not in the answer.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageReply(ReplyModel):
    """Tokens of a reply, all answers together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TimingsReply(ReplyModel):
    """Where the time went (an addition to the dialect). Prompt tokens that came from the cache are `cache_n`.

    Of `draft_n` tokens that were guessed and computed, `draft_n_accepted` were right.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    queue_ms: float
    draft_n: int
    draft_n_accepted: int


class TopLogprob(ReplyModel):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobReply(TopLogprob):
    """A token of the answer, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


class LogprobsReply(ReplyModel):
    """Log-probabilities of the answer's text."""

    content: list[TokenLogprobReply] | None
    refusal: None = None


@dataclass(slots=True)
class Tally:
    """Counts over all answers of a reply, `answers` to each prompt.

    `prompt_tokens` counts each prompt once, however many answers it got.
    """

    prompt_tokens: int
    answers: int = 1
    reasoning_tokens: int = 0
    finishes: list[Finish] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Take what one event adds to the usage: its tokens of reasoning, or how an answer ended."""
        if isinstance(event, ReasoningDelta):
            self.reasoning_tokens += len(event.token_ids)
        elif isinstance(event, Finish):
            self.finishes.append(event)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers that have ended."""
        return sum(finish.usage.completion_tokens for finish in self.finishes)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the cache; of a prompt's answers, the one that found the most counts."""
        best: dict[int, int] = {}
        for finish in self.finishes:
            prompt = finish.index // self.answers
            best[prompt] = max(best.get(prompt, 0), finish.usage.cached_tokens)
        return sum(best.values())

    @property
    def _measured(self) -> list[Timings]:
        return [finish.timings for finish in self.finishes if finish.timings is not None]

    def usage(self) -> UsageReply:
        """The counts so far."""
        return UsageReply(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=self.reasoning_tokens,
                accepted_prediction_tokens=sum(timings.expected_tokens for timings in self._measured),
                rejected_prediction_tokens=sum(timings.missed_tokens for timings in self._measured),
            ),
        )

    def last_timings(self) -> dict[str, object]:
        """The field `timings` of a chunk that ends an answer, over all that have ended; none if none was measured."""
        timings = self.timings()
        return {} if timings is None else {"timings": timings.model_dump()}

    def timings(self) -> TimingsReply | None:
        """Durations of the slowest answer, drafts of all; None where the engine measured none."""
        measured = self._measured
        if not measured:
            return None
        slowest = Timings(
            queue_s=max(timings.queue_s for timings in measured),
            prompt_s=max(timings.prompt_s for timings in measured),
            generate_s=max(timings.generate_s for timings in measured),
            drafted_tokens=sum(timings.drafted_tokens for timings in measured),
            accepted_tokens=sum(timings.accepted_tokens for timings in measured),
        )
        cached = self.cached_tokens
        return describe_timings(slowest, cached, self.prompt_tokens - cached, self.completion_tokens)


@dataclass(slots=True)
class RunningTimings:
    """Durations while answers grow, as this server's clock has them since the object was made."""

    prompt_tokens: int
    started_s: float = field(default_factory=monotonic)
    first_s: float | None = None
    cached_tokens: int = 0
    tokens: int = 0

    def add(self, event: Event) -> None:
        """Count the tokens of an event."""
        if isinstance(event, PromptProgress):
            self.cached_tokens = event.cached_tokens
        elif not isinstance(event, Finish):
            self.first_s = monotonic() if self.first_s is None else self.first_s
            self.tokens += len(event.token_ids)

    def read(self) -> dict[str, object]:
        """The field `timings` of a chunk."""
        now = monotonic()
        first_s = now if self.first_s is None else self.first_s
        timings = Timings(0.0, first_s - self.started_s, now - first_s)
        computed = self.prompt_tokens - self.cached_tokens
        return {"timings": describe_timings(timings, self.cached_tokens, computed, self.tokens).model_dump()}


def describe_progress(event: PromptProgress) -> dict[str, object]:
    """The field `prompt_progress` of a chunk, as llama.cpp's server has it."""
    return {
        "prompt_progress": {
            "total": event.prompt_tokens,
            "cache": event.cached_tokens,
            "processed": event.read_tokens,
            "time_ms": round(event.seconds * 1000),
        }
    }


def describe_timings(timings: Timings, cache_n: int, prompt_n: int, predicted_n: int) -> TimingsReply:
    """Durations with what they were spent on: `prompt_n` computed tokens of the prompt, `predicted_n` of the answer."""
    return TimingsReply(
        cache_n=cache_n,
        prompt_n=prompt_n,
        prompt_ms=timings.prompt_s * 1000,
        prompt_per_token_ms=timings.prompt_s * 1000 / prompt_n if prompt_n else None,
        prompt_per_second=prompt_n / timings.prompt_s if timings.prompt_s else None,
        predicted_n=predicted_n,
        predicted_ms=timings.generate_s * 1000,
        predicted_per_token_ms=timings.generate_s * 1000 / predicted_n if predicted_n else None,
        predicted_per_second=predicted_n / timings.generate_s if timings.generate_s else None,
        queue_ms=timings.queue_s * 1000,
        draft_n=timings.drafted_tokens,
        draft_n_accepted=timings.accepted_tokens,
    )


def describe_tokens(tokens: Sequence[TokenInfo], token_bytes: TokenBytes) -> list[TokenLogprobReply]:
    """Log-probabilities as chat completions and Responses spell them."""
    replies = []
    for token in tokens:
        own = _describe_token(token.chosen, token_bytes)
        top = [_describe_token(other, token_bytes) for other in possible(token.top)]
        replies.append(TokenLogprobReply(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
    return replies


def possible(tokens: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """Without those that a grammar rules out: JSON has no number for their log-probability."""
    return [token for token in tokens if token.logprob > -math.inf]


def _describe_token(token: TokenLogprob, token_bytes: TokenBytes) -> TopLogprob:
    spelt = token_bytes(token.token_id)
    return TopLogprob(token=spelt.decode("utf-8", "replace"), logprob=token.logprob, bytes=list(spelt))
