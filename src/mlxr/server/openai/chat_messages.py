"""The messages of a chat completion: from OpenAI's JSON to the service's messages.

One model serves all roles, so that a wrong message is refused with one error that names the field; what a role cannot
have is checked here, what the conversation cannot have by the service.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from mlxr.core.errors import InvalidRequest
from mlxr.server.json_models import Arguments, JsonObject, RequestModel, Text, Unsupported, describe_call, dump_json
from mlxr.service.prompt import Message

Role = Literal["system", "developer", "user", "assistant", "tool"]


PART_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}


class ContentPart(RequestModel):
    """A piece of text under the key that its type has; images, audio and files are not supported."""

    type: Literal["text", "input_text", "output_text", "refusal", "thinking"]
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


class CalledFunction(RequestModel):
    """A call's function and its arguments as JSON text, or as the JSON itself."""

    name: Text
    arguments: Arguments = ""


class ToolCallPart(RequestModel):
    """A call that the assistant made earlier."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class ThoughtPart(RequestModel):
    """A piece of an earlier thought, as LiteLLM (`thinking`) or OpenRouter (`text`, `summary`) keep it; what is
    encrypted is of no use here.
    """

    thinking: str | None = None
    text: str | None = None
    summary: str | None = None


class ChatMessage(RequestModel):
    """One message. What the assistant thought may stand in any of the fields in which clients send it back."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = Field(None, description="Of the participant, or of the tool.")
    tool_calls: list[ToolCallPart] | None = None
    tool_call_id: Text | None = None
    reasoning_content: str | None = Field(None, description="What the assistant thought before.")
    reasoning: str | None = Field(None, description="The same in another spelling.")
    thinking_blocks: list[ThoughtPart] | None = Field(None, description="The same in pieces.")
    reasoning_details: list[ThoughtPart] | None = Field(None, description="The same in pieces.")
    refusal: str | None = Field(None, description="What the assistant said in place of content.")
    audio: Unsupported = None
    function_call: Unsupported = None

    @property
    def thought(self) -> str:
        """Return what the assistant thought before, "" for nothing; it is the same in whichever field it stands."""
        pieces = self.thinking_blocks or self.reasoning_details or ()
        joined = "".join(piece.thinking or piece.text or piece.summary or "" for piece in pieces)
        return self.reasoning_content or self.reasoning or joined or _join(self.content, thoughts=True)

    @property
    def hides_all(self) -> bool:
        """Tell whether there is nothing but thoughts that are hidden, which is no turn."""
        says_something = self.thought or join_text(self.content) or self.refusal or self.tool_calls
        return bool(self.thinking_blocks or self.reasoning_details) and not says_something


def read_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Messages for the service; raises InvalidRequest naming the field that a role lacks or cannot have."""
    read = [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return [plain for message, plain in zip(messages, read, strict=True) if not message.hides_all]


def join_text(content: str | Sequence[ContentPart] | None) -> str:
    """The text of a content, without thoughts in it."""
    return (content or "") if content is None or isinstance(content, str) else _join(content, thoughts=False)


def _join(content: str | Sequence[ContentPart] | None, *, thoughts: bool) -> str:
    """The parts of a content that are thoughts, or those that are not."""
    if content is None or isinstance(content, str):
        return ""
    return "".join(
        getattr(part, PART_KEYS[part.type]) or "" for part in content if (part.type == "thinking") is thoughts
    )


def _read_message(message: ChatMessage, field: str) -> Message:
    _check_role(message, field)
    read: dict[str, object] = {"role": message.role, "content": join_text(message.content) or message.refusal or ""}
    if message.name is not None:
        read["name"] = message.name
    if message.tool_call_id is not None:
        read["tool_call_id"] = message.tool_call_id
    if message.thought:
        read["reasoning"] = message.thought
    if message.tool_calls:
        read["tool_calls"] = [
            _read_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return read


def _read_call(call: ToolCallPart, field: str) -> JsonObject:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else dump_json(arguments, f"{field}.function.arguments")
    return describe_call(call.id, call.function.name, text)


def _check_role(message: ChatMessage, field: str) -> None:
    is_assistant = message.role == "assistant"
    if message.content is None and message.role not in ("assistant", "tool"):
        raise InvalidRequest(f"{field}.content", "is missing")
    for index, part in enumerate(message.content or () if not isinstance(message.content, str) else ()):
        if getattr(part, PART_KEYS[part.type]) is None:
            raise InvalidRequest(f"{field}.content[{index}].{PART_KEYS[part.type]}", "is missing")
    if message.tool_calls and not is_assistant:
        raise InvalidRequest(f"{field}.tool_calls", "only the assistant calls tools")
    if message.thought and not is_assistant:
        raise InvalidRequest(f"{field}.reasoning_content", "only the assistant thinks aloud")
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(f"{field}.tool_call_id", "is missing; it names the call that this answers")
    if message.tool_call_id is not None and message.role != "tool":
        raise InvalidRequest(f"{field}.tool_call_id", "belongs to messages of the role 'tool'")
