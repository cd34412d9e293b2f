"""A text completion: its JSON, whole and in chunks. A chunk is a completion whose choice holds the next piece."""

from __future__ import annotations

import codecs
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mlxr.core.events import Event, Finish, PromptProgress, TextDelta, TokenInfo
from mlxr.core.types import FinishReason
from mlxr.server.json_models import JsonObject, ReplyModel, optional
from mlxr.server.openai.replies import (
    RunningTimings,
    Tally,
    TimingsReply,
    TokenBytes,
    UsageReply,
    describe_progress,
    possible,
)

TextFinish = Literal["stop", "length"]


class TextLogprobs(ReplyModel):
    """Log-probabilities by token, in four lists of the same length; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(ReplyModel):
    """One answer to one prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: TextFinish


class TextCompletion(ReplyModel):
    """All answers to all prompts; those to prompt i have the indices from i * n on."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageReply
    system_fingerprint: str | None
    timings: TimingsReply | None = optional()


def name_text_finish(reason: FinishReason) -> TextFinish:
    """OpenAI's word for how an answer ended."""
    return "stop" if reason is FinishReason.STOP else "length"


@dataclass(slots=True)
class TokenOffsets:
    """Where in the text each token begins, in characters; a character that is cut counts with its last token."""

    offset: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def describe(self, tokens: Sequence[TokenInfo], token_bytes: TokenBytes) -> TextLogprobs:
        """The next tokens in the dialect's four lists."""
        described = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token in tokens:
            spelt = token_bytes(token.chosen.token_id)
            described.tokens.append(spelt.decode("utf-8", "replace"))
            described.text_offset.append(self.offset)
            is_known = not math.isnan(token.chosen.logprob)
            described.token_logprobs.append(token.chosen.logprob if is_known else None)
            described.top_logprobs.append(_spell_top(token, token_bytes) if is_known else None)
            self.offset += len(self._decoder.decode(spelt))
        return described


def _spell_top(token: TokenInfo, token_bytes: TokenBytes) -> dict[str, float]:
    """Log-probabilities by text; of tokens that read alike, as parts of characters do, the likeliest counts."""
    spelt: dict[str, float] = {}
    for other in (*possible(token.top), token.chosen):
        text = token_bytes(other.token_id).decode("utf-8", "replace")
        spelt[text] = max(other.logprob, spelt.get(text, other.logprob))
    return spelt


class CompletionFold:
    """Adds up the events of all `choices`, `answers` to each prompt."""

    def __init__(self, prompt_tokens: int, answers: int, choices: int, token_bytes: TokenBytes | None) -> None:
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._tokens: list[list[TokenInfo]] = [[] for _ in range(choices)]
        self._finishes: list[FinishReason | None] = [None] * choices
        self._tally = Tally(prompt_tokens, answers)
        self._token_bytes = token_bytes

    def add(self, event: Event) -> None:
        """Take the next event."""
        self._tally.add(event)
        if isinstance(event, TextDelta):
            self._texts[event.index].append(event.text)
            self._tokens[event.index].extend(event.tokens)
        elif isinstance(event, Finish):
            self._finishes[event.index] = event.reason

    def to_reply(self, reply_id: str, created: int, model: str, fingerprint: str | None) -> TextCompletion:
        """The reply, after the last event."""
        return TextCompletion(
            id=reply_id,
            created=created,
            model=model,
            choices=[self._make_choice(index) for index in range(len(self._texts))],
            usage=self._tally.usage(),
            system_fingerprint=fingerprint,
            timings=self._tally.timings(),
        )

    def _make_choice(self, index: int) -> TextChoice:
        reason = self._finishes[index]
        if reason is None:
            raise ValueError(f"the events of answer {index} end without a Finish")
        logprobs = None
        if self._token_bytes is not None:
            logprobs = TokenOffsets().describe(self._tokens[index], self._token_bytes)
        text = "".join(self._texts[index])
        return TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=name_text_finish(reason))


class CompletionChunks:
    """Makes the chunks of one reply; chunks are plain dictionaries, since there is one for every token."""

    def __init__(
        self,
        head: JsonObject,
        *,
        prompt_tokens: int,
        answers: int,
        includes_usage: bool,
        token_bytes: TokenBytes | None,
        running: RunningTimings | None = None,
    ) -> None:
        """`head` is what all chunks begin with: id, object, created, model, system_fingerprint.

        `running` gives every token its timings.
        """
        self._head = {**head, "usage": None} if includes_usage else head
        self._tally = Tally(prompt_tokens, answers)
        self._includes_usage, self._running = includes_usage, running
        self._token_bytes = token_bytes
        self._offsets: defaultdict[int, TokenOffsets] = defaultdict(TokenOffsets)

    def push(self, event: Event) -> Iterator[JsonObject]:
        """The chunks of one event."""
        self._tally.add(event)
        if self._running is not None:
            self._running.add(event)
        if isinstance(event, PromptProgress):
            yield {**self._make_chunk(event.index, ""), **describe_progress(event)}
        elif isinstance(event, TextDelta):
            logprobs = None
            if self._token_bytes is not None and event.tokens:
                logprobs = self._offsets[event.index].describe(event.tokens, self._token_bytes).model_dump()
            yield self._make_chunk(event.index, event.text, logprobs)
        elif isinstance(event, Finish):
            chunk = self._make_chunk(event.index, "", finish_reason=name_text_finish(event.reason))
            yield chunk if self._includes_usage else {**chunk, **self._tally.last_timings()}

    def end(self) -> Iterator[JsonObject]:
        """The chunk of token counts, where it was asked for."""
        if self._includes_usage:
            usage = self._tally.usage().model_dump()
            yield {**self._head, "choices": [], "usage": usage, **self._tally.last_timings()}

    def _make_chunk(
        self, index: int, text: str, logprobs: JsonObject | None = None, finish_reason: str | None = None
    ) -> JsonObject:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        timings = {} if self._running is None or finish_reason is not None else self._running.read()
        return {**self._head, "choices": [choice], **timings}
