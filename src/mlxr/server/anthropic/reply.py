"""A message of the Anthropic dialect: the JSON of it and of the blocks in it."""

from __future__ import annotations

from typing import Literal

from mlxr.server.json_models import JsonObject, ReplyModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextReply(ReplyModel):
    """A block of text in an answer."""

    type: Literal["text"] = "text"
    text: str
    citations: None = None


class ThinkingReply(ReplyModel):
    """A thought. The signature is a checksum of it, for clients that expect one; it is not checked when sent back."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseReply(ReplyModel):
    """A block of an answer that is a call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: JsonObject


BlockReply = TextReply | ThinkingReply | ToolUseReply


class OutputDetails(ReplyModel):
    """Of the output's tokens, those of thoughts."""

    thinking_tokens: int


class UsageReply(ReplyModel):
    """Token counts; `input_tokens` are those that had to be computed, since the cache did not have them."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails
    service_tier: Literal["standard"] = "standard"


class MessageReply(ReplyModel):
    """The assistant's message, whole: the reply to a request that is not streamed."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[BlockReply]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: UsageReply


class TokenCount(ReplyModel):
    """How long a conversation is."""

    input_tokens: int
