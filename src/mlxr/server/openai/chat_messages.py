"""The messages of a chat completion: from OpenAI's JSON to the service's messages.

One model serves all roles, so that a wrong message is refused with one error that names the field; what a role cannot
have is checked here, what the conversation cannot have by the service.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from mlxr.core.errors import InvalidRequest
from mlxr.server.json_models import JsonObject, RequestModel, Text, describe_call
from mlxr.service.prompt import Message

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ContentPart(RequestModel):
    """A piece of text; images, audio and files are not supported. All that can be cached is, whatever the hint says."""

    type: Literal["text"]
    text: str
    cache_control: JsonObject | None = None
    prompt_cache_breakpoint: JsonObject | None = None


class CalledFunction(RequestModel):
    """A call's function and its arguments as JSON text."""

    name: Text
    arguments: str


class ToolCallPart(RequestModel):
    """A call that the assistant made earlier."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(RequestModel):
    """One message. Fields that only replies of other services fill may be there, but empty."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = Field(None, description="Of the participant, or of the tool.")
    tool_calls: list[ToolCallPart] | None = None
    tool_call_id: Text | None = None
    reasoning_content: str | None = Field(None, description="What the assistant thought before.")
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[JsonObject], Field(max_length=0)] | None = None


def read_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Messages for the service; raises InvalidRequest naming the field that a role lacks or cannot have."""
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def join_text(content: str | Sequence[ContentPart] | None) -> str:
    """The text of a content."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _read_message(message: ChatMessage, field: str) -> Message:
    _check_role(message, field)
    read: dict[str, object] = {"role": message.role, "content": join_text(message.content)}
    if message.name is not None:
        read["name"] = message.name
    if message.tool_call_id is not None:
        read["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:
        read["reasoning"] = message.reasoning_content
    if message.tool_calls:
        read["tool_calls"] = [
            describe_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls
        ]
    return read


def _check_role(message: ChatMessage, field: str) -> None:
    is_assistant = message.role == "assistant"
    if message.content is None and not (is_assistant and message.tool_calls):
        raise InvalidRequest(f"{field}.content", "is missing")
    if message.tool_calls and not is_assistant:
        raise InvalidRequest(f"{field}.tool_calls", "only the assistant calls tools")
    if message.reasoning_content and not is_assistant:
        raise InvalidRequest(f"{field}.reasoning_content", "only the assistant thinks aloud")
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(f"{field}.tool_call_id", "is missing; it names the call that this answers")
    if message.tool_call_id is not None and message.role != "tool":
        raise InvalidRequest(f"{field}.tool_call_id", "belongs to messages of the role 'tool'")
