"""An answer as llama.cpp's `/completion` writes it: whole, or as chunks of which the last one holds all counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mlxr.core.events import Event, Finish, PromptProgress
from mlxr.core.types import FinishReason
from mlxr.server.json_models import JsonObject
from mlxr.server.llamacpp.probabilities import Probabilities
from mlxr.server.openai.replies import RunningTimings, describe_progress, describe_timings


@dataclass(frozen=True, slots=True)
class Frame:
    """Holds what all answers of a request share. `prompts` are the texts that the model read, one for each answer.

    `fields` are the wanted fields of a whole reply, all where there are none; with `is_silent` no token was wanted.
    """

    model: str
    prompts: Sequence[str]
    prompt_tokens: Sequence[int]
    settings: JsonObject
    most_tokens: int | None
    probabilities: Probabilities | None = None
    returns_tokens: bool = False
    times_tokens: bool = False
    is_silent: bool = False
    fields: Sequence[str] = ()


@dataclass(slots=True)
class Growing:
    """One answer while it grows."""

    frame: Frame
    index: int
    running: RunningTimings
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    described: list[JsonObject] = field(default_factory=list)

    def push(self, event: Event) -> Iterator[JsonObject]:
        """The chunks of one event. Where probabilities were asked for, each token has a chunk of its own."""
        self.running.add(event)
        if isinstance(event, Finish):
            yield self._end(event, is_streamed=True)
            return
        if isinstance(event, PromptProgress):
            yield {**self._make_chunk("", (), ()), **describe_progress(event)}
            return
        if self.frame.is_silent:
            return
        text = self._take(event)
        described = [] if self.frame.probabilities is None else [*map(self.frame.probabilities.describe, event.tokens)]
        if len(described) != len(event.token_ids):
            yield self._make_chunk(text, event.token_ids, described)
            return
        for place, token_id in enumerate(event.token_ids, 1):
            part = text if place == len(event.token_ids) else ""
            yield self._make_chunk(part, [token_id], described[place - 1 : place])

    def add(self, event: Event) -> JsonObject | None:
        """The whole reply, with the last event."""
        if isinstance(event, Finish):
            return pick_fields(self._end(event, is_streamed=False), self.frame.fields)
        if not self.frame.is_silent:
            self._take(event)
            if self.frame.probabilities is not None:
                self.described.extend(map(self.frame.probabilities.describe, event.tokens))
        return None

    def _take(self, event: Event) -> str:
        text: str = getattr(event, "text", "")
        self.texts.append(text)
        self.token_ids.extend(getattr(event, "token_ids", ()))
        return text

    def _make_chunk(self, text: str, token_ids: Sequence[int], described: Sequence[JsonObject]) -> JsonObject:
        chunk: JsonObject = {
            "index": self.index,
            "content": text,
            "tokens": list(token_ids),
            "stop": False,
            "id_slot": self.index,
            "tokens_predicted": len(self.token_ids),
            "tokens_evaluated": self.frame.prompt_tokens[self.index],
        }
        if self.frame.times_tokens:
            chunk |= self.running.read()
        if described:
            chunk["completion_probabilities"] = list(described)
        return chunk

    def _end(self, finish: Finish, *, is_streamed: bool) -> JsonObject:
        frame, text = self.frame, "".join(self.texts)
        predicted = 0 if frame.is_silent else finish.usage.completion_tokens
        cut = finish.reason is FinishReason.LENGTH
        reply: JsonObject = {
            "index": self.index,
            "content": "" if is_streamed else text,
            "tokens": [] if is_streamed or not frame.returns_tokens else self.token_ids,
            "id_slot": self.index,
            "stop": True,
            "model": frame.model,
            "tokens_predicted": predicted,
            "tokens_evaluated": finish.usage.prompt_tokens,
            "generation_settings": frame.settings,
            "prompt": frame.prompts[self.index],
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
        if self.described:
            reply["completion_probabilities"] = self.described
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
