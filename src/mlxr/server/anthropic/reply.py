"""A message of the Anthropic dialect: the JSON of it and of the blocks in it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mlxr.server.json_models import JsonObject, ReplyModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextReply(ReplyModel):
    """A block of text in an answer. It cites nothing: an empty list, as some clients refuse null."""

    type: Literal["text"] = "text"
    text: str
    citations: list[JsonObject] = Field(max_length=0, default_factory=list)


class ThinkingReply(ReplyModel):
    """A thought. The signature is a checksum of it, for clients that expect one; it is not checked when sent back."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class CallerReply(ReplyModel):
    """Who made a call: the model itself, no program of it."""

    type: Literal["direct"] = "direct"


class ToolUseReply(ReplyModel):
    """A block of an answer that is a call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    caller: CallerReply = CallerReply()
    name: str
    input: JsonObject


BlockReply = TextReply | ThinkingReply | ToolUseReply


class OutputDetails(ReplyModel):
    """Of the output's tokens, those of thoughts."""

    thinking_tokens: int


class UsageReply(ReplyModel):
    """Token counts; `input_tokens` are those that had to be computed, since the cache did not have them.

    What is null tells of the service alone: caches with a lifetime, regions, and tools that it runs.
    """

    input_tokens: int
    cache_creation: None = None
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    inference_geo: None = None
    output_tokens: int
    output_tokens_details: OutputDetails
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"


class MessageReply(ReplyModel):
    """The assistant's message, whole: the reply to a request that is not streamed.

    What is null is never set here: why an answer was refused, and a container that the service runs code in.
    """

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[BlockReply]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None = None
    container: None = None
    usage: UsageReply


class TokenCount(ReplyModel):
    """How long a conversation is."""

    input_tokens: int
