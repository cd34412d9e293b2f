"""Replies of llama.cpp's server: errors, and an answer whole or as chunks of which the last one holds all counts.

Errors have OpenAI's frame with the HTTP status as `code` and words of their own. `Probabilities` tell how likely each
token was, before or after the rules that narrow the choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlxr.core.events import Event, Finish, PromptProgress, TextDelta, TokenInfo
from mlxr.core.types import FinishReason, SamplingParams, TokenLogprob
from mlxr.server.errors import ServerError
from mlxr.server.json_models import JsonObject, ReplyModel
from mlxr.server.openai.replies import TokenBytes, describe_progress, describe_timings, time_growth
from mlxr.server.routes import describe_errors, describe_stream
from mlxr.server.streaming import sse
from mlxr.service.completion import AnswerFold

ErrorType = Literal[
    "invalid_request_error",
    "exceed_context_size_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "not_supported_error",
    "unavailable_error",
    "server_error",
]
_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ErrorDetail(ReplyModel):
    """Tells an error. `field` and `request_id` are additions: the part at fault, and the id that the log has."""

    code: int
    message: str
    type: ErrorType
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None
    field: str | None = None
    request_id: str | None = None


class ErrorReply(ReplyModel):
    """The body of every error on llama.cpp's routes."""

    error: ErrorDetail


ERRORS = describe_errors(ErrorReply, "`field` names")
STREAMED = describe_stream(
    "The whole answer, or, with `stream`, server-sent events that it is the sum of.", "text/event-stream", ERRORS
)


def render_error(error: ServerError, request_id: str = "") -> JsonObject:
    """The body of an error."""
    fallback: ErrorType = "server_error" if error.status >= 500 else "invalid_request_error"
    detail: JsonObject = {"code": error.status, "message": error.message, "type": _TYPES.get(error.status, fallback)}
    if error.code == "context_length_exceeded":
        detail["type"] = "exceed_context_size_error"
        detail["message"] = f"the request exceeds the available context size: {error.message}"
        detail |= error.counts
    if error.field is not None:
        detail["field"] = error.field
    if request_id:
        detail["request_id"] = request_id
    return {"error": detail}


def error_frame(error: ServerError) -> bytes:
    """The last event of a stream that fails."""
    return sse(render_error(error))


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
            top = [self._spell(one, {"logprob": one.logprob}) for one in token.possible[: self.count]]
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


@dataclass(frozen=True, slots=True)
class Frame:
    """Holds what all answers of a request share."""

    model: str
    prompts: Sequence[str]  # the texts that the model read, one for each answer
    settings: JsonObject  # how they were made, as the reply tells it
    most_tokens: int | None
    probabilities: Probabilities | None = None
    returns_tokens: bool = False
    times_tokens: bool = False
    is_silent: bool = False  # no token was wanted
    fields: Sequence[str] = ()  # of a whole reply, those that are wanted; all where there are none


class AnswerReply:
    """Renders one answer: as chunks while it grows, or whole."""

    def __init__(self, frame: Frame, index: int, fold: AnswerFold) -> None:
        self._frame, self._index, self._fold = frame, index, fold

    def push(self, event: Event) -> Iterator[JsonObject]:
        """Put an event into the fold; make its chunks. Where probabilities were asked for, each token has its own."""
        self._fold.add(event)
        if isinstance(event, Finish):
            yield {**self._describe_end(), "content": "", "tokens": []}
            return
        if isinstance(event, PromptProgress):
            yield {**self._make_chunk("", (), ()), **describe_progress(event)}
            return
        if self._frame.is_silent:
            return
        text = event.text if isinstance(event, TextDelta) else ""
        described = self._describe_tokens(event.tokens)
        if len(described) != len(event.token_ids):
            yield self._make_chunk(text, event.token_ids, described)
            return
        for place, token_id in enumerate(event.token_ids, 1):
            part = text if place == len(event.token_ids) else ""
            yield self._make_chunk(part, [token_id], described[place - 1 : place])

    def make_whole(self) -> JsonObject:
        """The whole reply, after the last event."""
        reply = self._describe_end()
        described = [] if self._frame.is_silent else self._describe_tokens(self._fold.tokens)
        if described:
            reply["completion_probabilities"] = described
        return pick_fields(reply, self._frame.fields)

    def _describe_tokens(self, tokens: Sequence[TokenInfo]) -> list[JsonObject]:
        probabilities = self._frame.probabilities
        return [] if probabilities is None else [*map(probabilities.describe, tokens)]

    def _make_chunk(self, text: str, token_ids: Sequence[int], described: Sequence[JsonObject]) -> JsonObject:
        chunk: JsonObject = {
            "index": self._index,
            "content": text,
            "tokens": list(token_ids),
            "stop": False,
            "id_slot": self._index,
            "tokens_predicted": self._fold.generated_tokens,
            "tokens_evaluated": self._fold.prompt_tokens,
        }
        if self._frame.times_tokens:
            chunk |= time_growth(self._fold)
        if described:
            chunk["completion_probabilities"] = list(described)
        return chunk

    def _describe_end(self) -> JsonObject:
        frame, finish = self._frame, self._fold.ended
        text = "" if frame.is_silent else self._fold.text
        predicted = 0 if frame.is_silent else finish.usage.completion_tokens
        cut = finish.reason is FinishReason.LENGTH
        reply: JsonObject = {
            "index": self._index,
            "content": text,
            "tokens": self._fold.token_ids if frame.returns_tokens and not frame.is_silent else [],
            "id_slot": self._index,
            "stop": True,
            "model": frame.model,
            "tokens_predicted": predicted,
            "tokens_evaluated": finish.usage.prompt_tokens,
            "generation_settings": frame.settings,
            "prompt": frame.prompts[self._index],
            "has_new_line": "\n" in text,
            "truncated": cut and (frame.most_tokens is None or finish.usage.completion_tokens < frame.most_tokens),
            "stop_type": "limit" if cut else "eos" if finish.stop is None else "word",
            "stopping_word": finish.stop or "",
            "tokens_cached": finish.usage.cached_tokens,
        }
        if finish.timings is not None:
            cached = finish.usage.cached_tokens
            computed = finish.usage.prompt_tokens - cached
            reply["timings"] = describe_timings(finish.timings, cached, computed, predicted).model_dump()
        return reply


def pick_fields(reply: JsonObject, fields: Sequence[str]) -> JsonObject:
    """The wanted fields of a reply, all where none are named; `a/b` takes `b` out of `a`. Unknown ones are left out."""
    if not fields:
        return reply
    picked: JsonObject = {}
    for name in fields:
        value: object = reply
        for part in name.split("/"):
            value = value[part] if isinstance(value, Mapping) and part in value else None
        if value is not None:
            picked[name] = value
    return picked
