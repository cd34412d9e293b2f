"""A response while it grows: the service's events become the typed events of a Responses stream.

The plain reply is the response that the last of them carries, so both are made by one path. Items follow one another:
a thought, then text, then calls; each is opened, grows and is closed before the next.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxr.core.events import Event, Finish, PromptProgress, ReasoningDelta, TextDelta, ToolCallDelta
from mlxr.core.types import FinishReason
from mlxr.server.json_models import JsonObject, make_id
from mlxr.server.openai.replies import (
    RunningTimings,
    Tally,
    TokenBytes,
    TokenLogprobReply,
    describe_progress,
    describe_tokens,
)
from mlxr.server.openai.response_reply import (
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputSearchCall,
    OutputShellCall,
    OutputText,
    OutputThought,
    OutputTokensDetails,
    ResponseFailure,
    ResponseReply,
    ResponseUsage,
    Status,
)
from mlxr.server.openai.response_tools import Callee, CallKind, read_arguments, read_command, read_text

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
)  # what is in them is known when they are closed


@dataclass(slots=True)
class _Growing:
    """The item that is open: `texts` are its text, its thought or its arguments."""

    kind: Kind
    call: int | None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobReply] = field(default_factory=list)
    id: str = ""

    def __post_init__(self) -> None:
        self.id = make_id(_ID_PREFIXES[self.kind])

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def make_part(self, has_logprobs: bool) -> OutputText | OutputThought:
        if self.kind == "reasoning":
            return OutputThought(text=self.text)
        return OutputText(text=self.text, logprobs=list(self.logprobs) if has_logprobs else None)

    def make_item(self, status: Status, part: OutputText | OutputThought | None) -> OutputItem:
        called: dict[str, Any] = {"id": self.id, "status": status, "call_id": self.call_id}
        if self.kind == "local_shell_call":
            return OutputShellCall(**called, action=read_command(self.text))
        if self.kind == "tool_search_call":
            return OutputSearchCall(**called, arguments=read_arguments(self.text))
        called |= {"name": self.name, "namespace": self.namespace}
        if self.kind == "custom_tool_call":
            return OutputCustomCall(**called, input=read_text(self.text))
        if self.kind == "function_call":
            return OutputCall(**called, arguments=self.text)
        if self.kind == "reasoning":
            thoughts = [part] if isinstance(part, OutputThought) else []
            return OutputReasoning(id=self.id, status=status, content=thoughts)
        return OutputMessage(id=self.id, status=status, content=[part] if isinstance(part, OutputText) else [])


class ResponseEvents:
    """Makes the events of one response; afterwards `response` is the whole of it."""

    def __init__(
        self,
        response: ResponseReply,
        prompt_tokens: int,
        token_bytes: TokenBytes | None,
        callees: Mapping[str, Callee],
        running: RunningTimings | None = None,
    ) -> None:
        """`response` is the reply as it is before the answer; `token_bytes` is given where logprobs were asked for;
        `callees` says what calls of the model's functions are to the client; `running` gives every delta its timings.
        """
        self.response, self._callees = response, callees
        self._token_bytes, self._running = token_bytes, running
        self._tally = Tally(prompt_tokens)
        self._items: list[OutputItem] = []
        self._growing: _Growing | None = None
        self._sequence_number = -1

    def start(self) -> Iterator[JsonObject]:
        """Write the events with which a stream begins."""
        yield self._make("response.created", response=self._dump())
        yield self._make("response.in_progress", response=self._dump())

    def push(self, event: Event) -> Iterator[JsonObject]:
        """The events that follow from one of the service."""
        self._tally.add(event)
        if self._running is not None:
            self._running.add(event)
        match event:
            case PromptProgress():
                yield self._make("response.in_progress", response=self._dump(), **describe_progress(event))
            case TextDelta():
                yield from self._open("message")
                yield from self._grow(event.text, event)
            case ReasoningDelta():
                yield from self._open("reasoning")
                yield from self._grow(event.text)
            case ToolCallDelta():
                yield from self._open(self._name_kind(event), event)
                yield from self._grow(event.arguments)
            case Finish():
                yield from self._finish(event)

    def fail(self, code: str, message: str) -> JsonObject:
        """The last event of a response that cannot be finished."""
        self.response = self.response.model_copy(
            update={"status": "failed", "error": ResponseFailure(code=code, message=message), "output": self._items}
        )
        return self._make("response.failed", response=self._dump())

    def _make(self, kind: str, **values: object) -> JsonObject:
        self._sequence_number += 1
        return {"type": kind, "sequence_number": self._sequence_number, **values}

    def _dump(self) -> JsonObject:
        return self.response.model_dump()

    def _place(self, growing: _Growing) -> JsonObject:
        place: JsonObject = {"item_id": growing.id, "output_index": len(self._items)}
        return {**place, "content_index": 0} if growing.kind in ("message", "reasoning") else place

    def _name_kind(self, event: ToolCallDelta) -> Kind:
        if event.name is None:
            assert self._growing is not None
            return self._growing.kind
        called = self._callees.get(event.name)
        return "function_call" if called is None else called.kind

    def _open(self, kind: Kind, event: ToolCallDelta | None = None) -> Iterator[JsonObject]:
        """Open an item of this kind, and close the one before, unless it is open already."""
        call = None if event is None else event.call
        if self._growing is not None and (self._growing.kind, self._growing.call) == (kind, call):
            return
        yield from self._close("completed")
        growing = _Growing(kind, call)
        if event is not None:
            growing.call_id, growing.name = event.id or "", event.name or ""
            called = self._callees.get(growing.name)
            if called is not None:
                growing.name, growing.namespace = called.name, called.namespace
        self._growing = growing
        item = growing.make_item("in_progress", None).model_dump()
        yield self._make("response.output_item.added", output_index=len(self._items), item=item)
        if kind in ("message", "reasoning"):
            part = growing.make_part(self._token_bytes is not None).model_dump()
            yield self._make("response.content_part.added", **self._place(growing), part=part)

    def _grow(self, text: str, event: TextDelta | None = None) -> Iterator[JsonObject]:
        growing = self._growing
        assert growing is not None
        growing.texts.append(text)
        values = {**self._place(growing), "delta": text}
        if event is not None:
            new = describe_tokens(event.tokens, self._token_bytes) if self._token_bytes is not None else []
            growing.logprobs.extend(new)
            values["logprobs"] = [token.model_dump() for token in new]
        if self._running is not None:
            values |= self._running.read()
        if text and growing.kind not in _WHOLE:
            yield self._make(f"{_TEXT_EVENTS[growing.kind]}.delta", **values)

    def _close(self, status: Status) -> Iterator[JsonObject]:
        """Close the item that is open, if any."""
        growing, self._growing = self._growing, None
        if growing is None:
            return
        place = self._place(growing)
        is_call = growing.kind not in ("message", "reasoning")
        part = None if is_call else growing.make_part(self._token_bytes is not None)
        if growing.kind in _TEXT_EVENTS:
            yield from self._end_text(growing, place)
        if part is not None:
            yield self._make("response.content_part.done", **place, part=part.model_dump())
        item = growing.make_item(status, part)
        yield self._make("response.output_item.done", output_index=len(self._items), item=item.model_dump())
        self._items.append(item)

    def _end_text(self, growing: _Growing, place: JsonObject) -> Iterator[JsonObject]:
        """The whole text of an item, or the arguments or the input of a call."""
        event = _TEXT_EVENTS[growing.kind]
        done: JsonObject = {"text": growing.text}
        if growing.kind == "message":
            done["logprobs"] = [token.model_dump() for token in growing.logprobs]
        elif growing.kind == "function_call":
            done = {"arguments": growing.text, "name": growing.name}
        elif growing.kind == "custom_tool_call":
            done = {"input": read_text(growing.text)}
            yield self._make(f"{event}.delta", **place, delta=done["input"])
        yield self._make(f"{event}.done", **place, **done)

    def _finish(self, event: Finish) -> Iterator[JsonObject]:
        is_whole = event.reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
        status: Status = "completed" if is_whole else "incomplete"
        if self._growing is None and not self._items:
            yield from self._open("message")
        yield from self._close(status)
        self.response = self.response.model_copy(
            update={
                "status": status,
                "completed_at": int(time.time()) if is_whole else None,
                "incomplete_details": None if is_whole else IncompleteDetails(),
                "output": self._items,
                "usage": self._count(),
                "timings": self._tally.timings(),
            }
        )
        yield self._make(f"response.{status}", response=self._dump(), **self._tally.last_timings())

    def _count(self) -> ResponseUsage:
        tally = self._tally
        return ResponseUsage(
            input_tokens=tally.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=tally.cached_tokens),
            output_tokens=tally.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=tally.reasoning_tokens),
            total_tokens=tally.prompt_tokens + tally.completion_tokens,
        )
