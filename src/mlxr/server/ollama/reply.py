"""Replies of the Ollama dialect: errors, times, and answers in pieces while they grow, counts at the end.

A whole reply and its pieces are rendered from one fold of the answer's events. Pieces are plain dictionaries, since
there is one for every token. Durations are in nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING

from starlette.requests import Request

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import Event, Finish, FinishReason, TokenInfo, TokenLogprob
from mlxr.registry import ModelRecord
from mlxr.server.errors import ServerError
from mlxr.server.parts import parts_of
from mlxr.server.routes import JsonObject, ReplyModel, RequestModel, Text, describe_errors, describe_stream, optional
from mlxr.server.streaming import ndjson
from mlxr.server.work import look
from mlxr.service.streams import AnswerFold, Section

if TYPE_CHECKING:
    pass


class ErrorReply(ReplyModel):
    """The body of every error on Ollama's routes."""

    error: str


ERRORS = describe_errors(ErrorReply, "the text begins with")
STREAMED = describe_stream(
    "One JSON object on each line; with `stream` false a single one.", "application/x-ndjson", ERRORS
)


class NamedRequest(RequestModel):
    """A request about one model. Older clients say `name` for `model`."""

    model: Text | None = None
    name: Text | None = None

    @property
    def wanted(self) -> str:
        """The model's name; raises InvalidRequest if there is none."""
        found = self.model or self.name
        if found is None:
            raise InvalidRequest("model", "is missing")
        return found


def render_error(error: ServerError, _request_id: str = "") -> JsonObject:
    """Return the body of an error."""
    if error.code == "context_length_exceeded":  # clients look for these words
        return {"error": f"{error.message}: the input length exceeds the context length"}
    return {"error": error.message}


def error_frame(error: ServerError) -> bytes:
    """Return the last line of a stream that fails."""
    return ndjson(render_error(error))


def format_time(moment: datetime) -> str:
    """Return a time as Ollama writes it."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def now() -> str:
    """Return the time of a reply."""
    return format_time(datetime.now(UTC))


async def find_model(request: Request, name: str) -> ModelRecord:
    """Return the record of a model, or of the model that an adapter is for; raises NotFound."""
    served = parts_of(request).served
    return await look(request, served.find_base, name)


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
    """The function of a call, and its arguments."""

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
    """The end of an answer, in its last piece or in a whole reply. Durations are in nanoseconds."""

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
    """A piece of an answer, or all of it."""

    text: str = ""
    thinking: str = ""
    calls: list[JsonObject] = field(default_factory=list)
    logprobs: list[JsonObject] = field(default_factory=list)
    end: JsonObject | None = None


class Parts:
    """Makes the parts of one answer while it grows; calls of tools come whole.

    `token_bytes` spells tokens, if log-probabilities were asked for. `fold` is the answer so far.
    """

    def __init__(
        self, prompt_ids: Sequence[int], token_bytes: TokenBytes | None, *, arrived_s: float, load_s: float
    ) -> None:
        """`arrived_s` is the request's arrival, by the monotonic clock; `load_s` the time spent loading the model."""
        self.prompt_ids = list(prompt_ids)
        self.fold = AnswerFold(len(prompt_ids))
        self._token_bytes, self._arrived_s, self._load_s = token_bytes, arrived_s, load_s

    def push(self, event: Event) -> Iterator[Part]:
        """Put an event into the fold; make the parts that follow from it."""
        change = self.fold.add(event)
        calls = [] if change.closed is None else self._list_calls([change.closed])
        if isinstance(event, Finish):
            yield Part(calls=calls, end=self._describe_end(event))
        elif change.grown is not None:
            part = Part(calls=calls, logprobs=self._describe_tokens(event.tokens))
            if change.grown.kind == "text":
                part.text = change.text
            elif change.grown.kind == "thought":
                part.thinking = change.text
            if part.text or part.thinking or part.calls or part.logprobs:
                yield part

    def make_whole(self) -> Part:
        """Return the whole answer, after the last event."""
        return Part(
            self.fold.text,
            self.fold.thought,
            self._list_calls(self.fold.calls),
            self._describe_tokens(self.fold.tokens),
            self._describe_end(self.fold.ended),
        )

    def _list_calls(self, sections: Sequence[Section]) -> list[JsonObject]:
        """Return the calls among sections that have ended, without one that the answer's end has cut."""
        calls: list[JsonObject] = []
        for section in sections:
            if section.kind != "call":
                continue
            try:
                arguments = json.loads(section.text or "{}")
            except ValueError:
                finish = self.fold.finish
                if finish is None or finish.reason is FinishReason.TOOL_CALLS:
                    raise
                continue
            function = {"index": section.call, "name": section.name, "arguments": arguments}
            calls.append({"id": section.id, "function": function})
        return calls

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
            | ({"top_logprobs": [_describe_token(other, spell) for other in token.possible]} if token.top else {})
            for token in tokens
        ]


def make_piece(model: str, part: Part, body: JsonObject) -> JsonObject:
    """Make a reply or a piece of one; `body` has the route's own fields."""
    piece: JsonObject = {"model": model, "created_at": now(), **body, "done": part.end is not None}
    if part.logprobs:
        piece["logprobs"] = part.logprobs
    return piece if part.end is None else piece | part.end


def to_ns(seconds: float) -> int:
    """Return seconds as whole nanoseconds."""
    return round(seconds * 1e9)


def _describe_token(token: TokenLogprob, spell: TokenBytes) -> JsonObject:
    spelt = spell(token.token_id)
    return {"token": spelt.decode("utf-8", "replace"), "logprob": token.logprob, "bytes": list(spelt)}
