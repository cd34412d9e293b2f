"""Answers as Ollama's replies: pieces while they grow, counts and times at the end.

A reply that is not streamed is the sum of the pieces. Pieces are plain dictionaries, since there is one for every
token. Times are in nanoseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic

from mlxr.core.events import Event, Finish, ReasoningDelta, TextDelta, TokenInfo, ToolCallDelta
from mlxr.core.types import FinishReason, TokenLogprob
from mlxr.server.json_models import JsonObject, ReplyModel, optional
from mlxr.server.ollama.route import now

TokenBytes = Callable[[int], bytes]


class TokenReply(ReplyModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class LogprobReply(TokenReply):
    """The token that was chosen, and the likeliest ones."""

    top_logprobs: list[TokenReply] | None = optional()


class FunctionCall(ReplyModel):
    """Which function to call, and with what."""

    index: int
    name: str
    arguments: JsonObject


class ToolCallReply(ReplyModel):
    """A call of a tool."""

    id: str
    function: FunctionCall


class AnswerMessage(ReplyModel):
    """The assistant's message, or a piece of it in a stream."""

    role: str
    content: str
    thinking: str | None = optional()
    tool_calls: list[ToolCallReply] | None = optional()


class Ended(ReplyModel):
    """What the last piece of an answer, or the whole of it, says of itself. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = optional()
    total_duration: int | None = optional()
    load_duration: int | None = optional()
    prompt_eval_count: int | None = optional()
    prompt_eval_duration: int | None = optional()
    eval_count: int | None = optional()
    eval_duration: int | None = optional()
    thinking_count: int | None = optional()  # of eval_count
    logprobs: list[LogprobReply] | None = optional()


class ChatReply(Ended):
    """An answer to a conversation."""

    message: AnswerMessage


class GenerateReply(Ended):
    """A continued text. `context` stands for the conversation so far."""

    response: str
    thinking: str | None = optional()
    context: list[int] | None = optional()


@dataclass(slots=True)
class Part:
    """What one event adds to the answer."""

    text: str = ""
    thinking: str = ""
    calls: list[JsonObject] = field(default_factory=list)
    logprobs: list[JsonObject] = field(default_factory=list)
    end: JsonObject | None = None


class Parts:
    """Turns the events of one answer into parts; calls of tools come whole.

    `token_bytes` spells tokens, where log-probabilities were asked for. `token_ids` are all that were generated.
    """

    def __init__(
        self, prompt_ids: Sequence[int], token_bytes: TokenBytes | None, *, arrived_s: float, load_s: float
    ) -> None:
        """`arrived_s` is when the request came, by the monotonic clock; `load_s` how long the model was loaded."""
        self.prompt_ids, self.token_ids = list(prompt_ids), list[int]()
        self._token_bytes, self._arrived_s, self._load_s = token_bytes, arrived_s, load_s
        self._call: dict[str, str] = {}
        self._calls = 0

    def push(self, event: Event) -> Iterator[Part]:
        """The parts that follow from one event."""
        if isinstance(event, Finish):
            yield Part(calls=self._end_call(event), end=self._describe_end(event))
            return
        self.token_ids.extend(event.token_ids)
        logprobs = self._describe_tokens(event.tokens)
        match event:
            case TextDelta() if event.text or logprobs:
                yield Part(text=event.text, logprobs=logprobs)
            case ReasoningDelta() if event.text or logprobs:
                yield Part(thinking=event.text, logprobs=logprobs)
            case ToolCallDelta():
                ended = self._end_call() if event.id is not None else []
                self._add_to_call(event)
                if ended or logprobs:
                    yield Part(calls=ended, logprobs=logprobs)

    def _add_to_call(self, event: ToolCallDelta) -> None:
        if event.id is not None:
            self._call = {"id": event.id, "name": event.name or "", "arguments": ""}
        self._call["arguments"] += event.arguments

    def _end_call(self, finish: Finish | None = None) -> list[JsonObject]:
        """The call that is complete now; none of one that the end of the answer has cut."""
        call, self._call = self._call, {}
        if not call:
            return []
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except ValueError:
            if finish is None or finish.reason is FinishReason.TOOL_CALLS:
                raise
            return []
        function = {"index": self._calls, "name": call["name"], "arguments": arguments}
        self._calls += 1
        return [{"id": call["id"], "function": function}]

    def _describe_end(self, event: Finish) -> JsonObject:
        timings = event.timings
        return {
            "done_reason": "length" if event.reason is FinishReason.LENGTH else "stop",
            "total_duration": to_ns(monotonic() - self._arrived_s),
            "load_duration": to_ns(self._load_s),
            "prompt_eval_count": event.usage.prompt_tokens,
            "prompt_eval_duration": to_ns(timings.prompt_s if timings is not None else 0.0),
            "eval_count": event.usage.completion_tokens,
            **({"thinking_count": event.usage.reasoning_tokens} if event.usage.reasoning_tokens else {}),
            "eval_duration": to_ns(timings.generate_s if timings is not None else 0.0),
        }

    def _describe_tokens(self, tokens: Sequence[TokenInfo]) -> list[JsonObject]:
        spell = self._token_bytes
        if spell is None:
            return []
        return [
            _describe_token(token.chosen, spell)
            | ({"top_logprobs": [_describe_token(other, spell) for other in _possible(token.top)]} if token.top else {})
            for token in tokens
        ]


def merge(parts: Sequence[Part]) -> Part:
    """All parts of an answer as one."""
    return Part(
        text="".join(part.text for part in parts),
        thinking="".join(part.thinking for part in parts),
        calls=[call for part in parts for call in part.calls],
        logprobs=[token for part in parts for token in part.logprobs],
        end=parts[-1].end if parts else None,
    )


def make_piece(model: str, part: Part, body: JsonObject) -> JsonObject:
    """A reply or a piece of one: `body` is what the route has of its own."""
    piece: JsonObject = {"model": model, "created_at": now(), **body, "done": part.end is not None}
    if part.logprobs:
        piece["logprobs"] = part.logprobs
    return piece if part.end is None else piece | part.end


def to_ns(seconds: float) -> int:
    """Seconds as whole nanoseconds."""
    return round(seconds * 1e9)


def _describe_token(token: TokenLogprob, spell: TokenBytes) -> JsonObject:
    spelt = spell(token.token_id)
    return {"token": spelt.decode("utf-8", "replace"), "logprob": token.logprob, "bytes": list(spelt)}


def _possible(tokens: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """Without those that a grammar rules out: JSON has no number for their log-probability."""
    return [token for token in tokens if token.logprob > -math.inf]
