"""Replies of OpenAI's Responses: the JSON of a response, and the typed events of its stream while it grows.

The plain reply is the response that the last event carries, so both are made by one path. The sections of an answer (a
thought, then text, then calls) become items; each is opened, grows and is closed before the next.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from mlxr.core.types import (
    Event,
    Finish,
    FinishReason,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    TokenInfo,
    ToolCallDelta,
)
from mlxr.server.openai.replies import (
    TimingsReply,
    TokenBytes,
    TokenLogprobReply,
    count_usage,
    describe_end,
    describe_progress,
    describe_tokens,
    spell_tokens,
    time_end,
    time_growth,
)
from mlxr.server.openai.response_request import Callee, CallKind, read_arguments, read_command, read_text
from mlxr.server.routes import JsonObject, ReplyModel, make_id, optional
from mlxr.service.streams import ReplyFold, Section

Status = Literal["in_progress", "completed", "incomplete", "failed"]
Phase = Literal["commentary", "final_answer"]  # of a message: before a call or a thought, or at the end


class OutputText(ReplyModel):
    """A text that the model wrote."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[JsonObject] = Field(max_length=0, default_factory=list)
    logprobs: list[TokenLogprobReply] | None = optional()


class OutputMessage(ReplyModel):
    """A message of the model to the user."""

    type: Literal["message"] = "message"
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]
    phase: Phase | None = optional()


class OutputThought(ReplyModel):
    """The text of a thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(ReplyModel):
    """The model's thoughts before its answer."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    status: Status
    summary: list[OutputThought] = Field(max_length=0, default_factory=list)
    content: list[OutputThought]


class OutputCall(ReplyModel):
    """A call of a function."""

    type: Literal["function_call"] = "function_call"
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | None = optional()


class OutputCustomCall(ReplyModel):
    """A call of a tool that takes a text."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str
    status: Status
    call_id: str
    name: str
    input: str
    namespace: str | None = optional()


class OutputShellCall(ReplyModel):
    """A command for the client to run."""

    type: Literal["local_shell_call"] = "local_shell_call"
    id: str
    status: Status
    call_id: str
    action: JsonObject


class OutputSearchCall(ReplyModel):
    """A search for tools for the client to run."""

    type: Literal["tool_search_call"] = "tool_search_call"
    id: str
    status: Status
    call_id: str
    execution: Literal["client"] = "client"
    arguments: JsonObject


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall | OutputShellCall | OutputSearchCall


class InputTokensDetails(ReplyModel):
    """The number of the input's tokens that came from the cache; those written to it are not counted."""

    cached_tokens: int
    cache_write_tokens: Literal[0] = 0


class OutputTokensDetails(ReplyModel):
    """The number of the output's tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(ReplyModel):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(ReplyModel):
    """The reason why a response failed."""

    code: str
    message: str


class IncompleteDetails(ReplyModel):
    """The reason why a response is cut short."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReply(ReplyModel):
    """A response. The fields after `usage` are those of the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: JsonObject
    store: bool
    background: Literal[False] = False
    service_tier: Literal["default"] = "default"
    temperature: float
    presence_penalty: float
    frequency_penalty: float
    text: JsonObject
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    timings: TimingsReply | None = optional()


Kind = Literal["message", "reasoning"] | CallKind
_ID_PREFIXES: dict[Kind, str] = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
    "local_shell_call": "lsh_",
    "tool_search_call": "tsc_",
}
_TEXT_EVENTS: dict[Kind, str] = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
_WHOLE: tuple[Kind, ...] = (
    "custom_tool_call",
    "local_shell_call",
    "tool_search_call",
)  # their contents are known only when they are closed


class ResponseEvents:
    """Makes the events of one response; afterwards `response` is the whole of it."""

    def __init__(
        self,
        response: ResponseReply,
        fold: ReplyFold,
        token_bytes: TokenBytes | None,
        callees: Mapping[str, Callee],
        *,
        times_tokens: bool = False,
    ) -> None:
        """`response` is the reply before the answer; `token_bytes` is given if logprobs were asked for; `callees` maps
        the model's functions to the client's tools; with `times_tokens` every delta has its timings.
        """
        self.response, self._fold, self._callees = response, fold, callees
        self._token_bytes, self._times_tokens = token_bytes, times_tokens
        self._items: list[OutputItem] = []
        self._ids: dict[int, str] = {}  # of items, by the place of their sections
        self._sequence_number = -1

    def start(self) -> Iterator[JsonObject]:
        """Write the events with which a stream begins."""
        yield self._make("response.created", response=self._dump())
        yield self._make("response.in_progress", response=self._dump())

    def push(self, event: Event) -> Iterator[JsonObject]:
        """Put an event of the service into the fold; make those that follow from it."""
        change = self._fold.add(event)
        if isinstance(event, PromptProgress):
            yield self._make("response.in_progress", response=self._dump(), **describe_progress(event))
        elif isinstance(event, Finish):
            yield from self._finish(change.closed, event)
        elif change.grown is not None:
            if change.closed is not None:
                yield from self._close(change.closed, "completed", "commentary")
            if change.opens:
                yield from self._open(change.grown)
            yield from self._grow(change.grown, event)

    def fail(self, code: str, message: str) -> JsonObject:
        """Return the last event of a response that cannot be finished."""
        self.response = self.response.model_copy(
            update={"status": "failed", "error": ResponseFailure(code=code, message=message), "output": self._items}
        )
        return self._make("response.failed", response=self._dump())

    def _make(self, kind: str, **values: object) -> JsonObject:
        self._sequence_number += 1
        return {"type": kind, "sequence_number": self._sequence_number, **values}

    def _dump(self) -> JsonObject:
        return self.response.model_dump()

    def _name_kind(self, section: Section) -> Kind:
        if section.kind != "call":
            return "message" if section.kind == "text" else "reasoning"
        called = self._callees.get(section.name)
        return "function_call" if called is None else called.kind

    def _place(self, section: Section) -> JsonObject:
        place: JsonObject = {"item_id": self._ids[section.place], "output_index": section.place}
        return place if section.kind == "call" else {**place, "content_index": 0}

    def _open(self, section: Section) -> Iterator[JsonObject]:
        """Make the events of an item that begins, still empty."""
        self._ids[section.place] = make_id(_ID_PREFIXES[self._name_kind(section)])
        empty = replace(section, texts=[], tokens=[])
        item = self._make_item(empty, "in_progress", None)
        yield self._make("response.output_item.added", output_index=section.place, item=item.model_dump())
        part = self._make_part(empty)
        if part is not None:
            yield self._make("response.content_part.added", **self._place(section), part=part.model_dump())

    def _grow(self, section: Section, event: TextDelta | ReasoningDelta | ToolCallDelta) -> Iterator[JsonObject]:
        kind = self._name_kind(section)
        text = event.arguments if isinstance(event, ToolCallDelta) else event.text
        if not text or kind in _WHOLE:
            return
        values = {**self._place(section), "delta": text}
        if kind == "message":
            values["logprobs"] = self._spell_tokens(event.tokens)
        if self._times_tokens:
            values |= time_growth(self._fold)
        yield self._make(f"{_TEXT_EVENTS[kind]}.delta", **values)

    def _close(self, section: Section, status: Status, phase: Phase | None) -> Iterator[JsonObject]:
        """Make the events of an item that ends: its whole text, its part, and the item itself."""
        place, part = self._place(section), self._make_part(section)
        if self._name_kind(section) in _TEXT_EVENTS:
            yield from self._end_text(section, place)
        if part is not None:
            yield self._make("response.content_part.done", **place, part=part.model_dump())
        item = self._make_item(section, status, part, phase)
        yield self._make("response.output_item.done", output_index=section.place, item=item.model_dump())
        self._items.append(item)

    def _end_text(self, section: Section, place: JsonObject) -> Iterator[JsonObject]:
        """Make the event with the whole text of an item, or the arguments or the input of a call."""
        kind = self._name_kind(section)
        event = _TEXT_EVENTS[kind]
        done: JsonObject = {"text": section.text}
        if kind == "message":
            done["logprobs"] = self._spell_tokens(section.tokens)
        elif kind == "function_call":
            done = {"arguments": section.text, "name": self._find_callee(section).name}
        elif kind == "custom_tool_call":
            done = {"input": read_text(section.text)}
            yield self._make(f"{event}.delta", **place, delta=done["input"])
        yield self._make(f"{event}.done", **place, **done)

    def _find_callee(self, section: Section) -> Callee:
        """Return the client's tool for a call."""
        return self._callees.get(section.name) or Callee("function_call", section.name, None)

    def _spell_tokens(self, tokens: Sequence[TokenInfo]) -> list[JsonObject]:
        return [] if self._token_bytes is None else spell_tokens(tokens, self._token_bytes)

    def _make_part(self, section: Section) -> OutputText | OutputThought | None:
        """Return the content of a message or a thought; a call has none."""
        if section.kind == "call":
            return None
        if section.kind == "thought":
            return OutputThought(text=section.text)
        token_bytes = self._token_bytes
        logprobs = None if token_bytes is None else describe_tokens(section.tokens, token_bytes)
        return OutputText(text=section.text, logprobs=logprobs)

    def _make_item(
        self, section: Section, status: Status, part: OutputText | OutputThought | None, phase: Phase | None = None
    ) -> OutputItem:
        item_id, kind = self._ids[section.place], self._name_kind(section)
        if kind == "reasoning":
            return OutputReasoning(id=item_id, status=status, content=[part] if isinstance(part, OutputThought) else [])
        if kind == "message":
            content = [part] if isinstance(part, OutputText) else []
            return OutputMessage(id=item_id, status=status, content=content, phase=phase)
        called: dict[str, Any] = {"id": item_id, "status": status, "call_id": section.id}
        if kind == "local_shell_call":
            return OutputShellCall(**called, action=read_command(section.text))
        if kind == "tool_search_call":
            return OutputSearchCall(**called, arguments=read_arguments(section.text))
        callee = self._find_callee(section)
        called |= {"name": callee.name, "namespace": callee.namespace}
        if kind == "custom_tool_call":
            return OutputCustomCall(**called, input=read_text(section.text))
        return OutputCall(**called, arguments=section.text)

    def _finish(self, last: Section | None, event: Finish) -> Iterator[JsonObject]:
        is_whole = event.reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
        status: Status = "completed" if is_whole else "incomplete"
        if last is None:  # a response has at least one item, even an empty one
            last = Section("text", 0)
            yield from self._open(last)
        yield from self._close(last, status, "final_answer" if is_whole else None)
        self.response = self.response.model_copy(
            update={
                "status": status,
                "completed_at": int(time.time()) if is_whole else None,
                "incomplete_details": None if is_whole else IncompleteDetails(),
                "output": self._items,
                "usage": count_response(self._fold),
                "timings": describe_end(self._fold),
            }
        )
        yield self._make(f"response.{status}", response=self._dump(), **time_end(self._fold))


def count_response(fold: ReplyFold) -> ResponseUsage:
    """Return the token counts of an answer that has ended."""
    counts = count_usage(fold)
    return ResponseUsage(
        input_tokens=counts.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=fold.cached_tokens),
        output_tokens=counts.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=fold.thought_tokens),
        total_tokens=counts.total_tokens,
    )
