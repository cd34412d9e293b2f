"""A message while it grows: the service's events become those of Anthropic's stream.

The plain reply is the message that they add up to, so both are made by one path. Blocks follow one another: a thought,
then text, then calls; each is opened, grows and is closed before the next.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from mlxr.core.events import Event, Finish, ReasoningDelta, TextDelta, ToolCallDelta
from mlxr.core.types import FinishReason
from mlxr.server.anthropic.reply import (
    BlockReply,
    MessageReply,
    OutputDetails,
    StopReason,
    TextReply,
    ThinkingReply,
    ToolUseReply,
    UsageReply,
)
from mlxr.server.json_models import JsonObject

Kind = Literal["text", "thinking", "tool_use"]


@dataclass(slots=True)
class _Growing:
    """The block that is open: `texts` are its text, its thought or its input as JSON."""

    kind: Kind
    call: int | None
    id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)

    def make_block(self) -> BlockReply:
        text = "".join(self.texts)
        if self.kind == "text":
            return TextReply(text=text)
        if self.kind == "thinking":
            return ThinkingReply(thinking=text, signature=_sign(text))
        return ToolUseReply(id=self.id, name=self.name, input=_read_object(text))

    def make_start(self) -> JsonObject:
        """The block as it is opened: empty."""
        block: BlockReply = ToolUseReply(id=self.id, name=self.name, input={})
        if self.kind == "text":
            block = TextReply(text="")
        elif self.kind == "thinking":
            block = ThinkingReply(thinking="", signature="")
        return block.model_dump()

    def make_delta(self, text: str) -> JsonObject:
        if self.kind == "text":
            return {"type": "text_delta", "text": text}
        if self.kind == "thinking":
            return {"type": "thinking_delta", "thinking": text}
        return {"type": "input_json_delta", "partial_json": text}


class MessageEvents:
    """Makes the events of one message; afterwards `message` is the whole of it."""

    def __init__(
        self, message_id: str, model: str, prompt_tokens: int, max_tokens: int, *, hides_thoughts: bool = False
    ) -> None:
        """With `hides_thoughts` a thought's block has its signature alone."""
        self._max_tokens = max_tokens
        self._hides_thoughts = hides_thoughts
        self._growing: _Growing | None = None
        self._blocks: list[BlockReply] = []
        self._thinking_tokens = 0
        self.message = MessageReply(
            id=message_id,
            model=model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self._count(prompt_tokens, 0, 0),
        )

    def start(self) -> Iterator[JsonObject]:
        """Write the events with which a stream begins."""
        yield {"type": "message_start", "message": self.message.model_dump()}
        yield {"type": "ping"}

    def push(self, event: Event) -> Iterator[JsonObject]:
        """The events that follow from one of the service."""
        match event:
            case TextDelta():
                yield from self._open("text")
                yield from self._grow(event.text)
            case ReasoningDelta():
                self._thinking_tokens += len(event.token_ids)
                yield from self._open("thinking")
                yield from self._grow(event.text)
            case ToolCallDelta():
                yield from self._open("tool_use", event)
                yield from self._grow(event.arguments)
            case Finish():
                yield from self._finish(event)

    def _open(self, kind: Kind, event: ToolCallDelta | None = None) -> Iterator[JsonObject]:
        """Open a block of this kind, and close the one before, unless it is open already."""
        call = None if event is None else event.call
        if self._growing is not None and (self._growing.kind, self._growing.call) == (kind, call):
            return
        yield from self._close()
        self._growing = _Growing(kind, call)
        if event is not None:
            self._growing.id, self._growing.name = event.id or "", event.name or ""
        yield {
            "type": "content_block_start",
            "index": len(self._blocks),
            "content_block": self._growing.make_start(),
        }

    def _grow(self, text: str) -> Iterator[JsonObject]:
        growing = self._growing
        assert growing is not None
        growing.texts.append(text)
        if text and not (growing.kind == "thinking" and self._hides_thoughts):
            yield self._make_delta(growing.make_delta(text))

    def _close(self) -> Iterator[JsonObject]:
        """Close the block that is open, if any."""
        growing, self._growing = self._growing, None
        if growing is None:
            return
        block = growing.make_block()
        if isinstance(block, ThinkingReply):
            yield self._make_delta({"type": "signature_delta", "signature": block.signature})
            if self._hides_thoughts:
                block = block.model_copy(update={"thinking": ""})
        yield {"type": "content_block_stop", "index": len(self._blocks)}
        self._blocks.append(block)

    def _make_delta(self, delta: JsonObject) -> JsonObject:
        return {"type": "content_block_delta", "index": len(self._blocks), "delta": delta}

    def _finish(self, event: Finish) -> Iterator[JsonObject]:
        yield from self._close()
        stop_reason, usage = self._name_reason(event), event.usage
        self.message = self.message.model_copy(
            update={
                "content": self._blocks,
                "stop_reason": stop_reason,
                "stop_sequence": event.stop if stop_reason == "stop_sequence" else None,
                "usage": self._count(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
            }
        )
        delta = self.message.model_dump(include={"stop_reason", "stop_sequence", "stop_details", "container"})
        counts = self.message.usage.model_dump(exclude={"service_tier", "cache_creation", "inference_geo"})
        yield {"type": "message_delta", "delta": delta, "usage": counts}
        yield {"type": "message_stop"}

    def _name_reason(self, event: Finish) -> StopReason:
        if event.reason is FinishReason.TOOL_CALLS:
            return "tool_use"
        if event.reason is FinishReason.STOP:
            return "end_turn" if event.stop is None else "stop_sequence"
        is_own_limit = event.usage.completion_tokens >= self._max_tokens
        return "max_tokens" if is_own_limit else "model_context_window_exceeded"

    def _count(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> UsageReply:
        return UsageReply(
            input_tokens=prompt_tokens - cached_tokens,
            cache_read_input_tokens=cached_tokens,
            output_tokens=output_tokens,
            output_tokens_details=OutputDetails(thinking_tokens=self._thinking_tokens),
        )


def _sign(thought: str) -> str:
    return base64.b64encode(hashlib.sha256(thought.encode("utf-8", "replace")).digest()).decode()


def _read_object(text: str) -> JsonObject:
    """The input of a call; what is cut short, since the answer ended within, has none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
