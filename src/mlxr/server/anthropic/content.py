"""Messages of the Anthropic dialect: blocks of content in, messages of the service out.

A user's message may answer calls of tools and say something as well; that is several messages to the service.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from mlxr.core.errors import InvalidRequest
from mlxr.server.json_models import JsonObject, RequestModel, Text, describe_call, dump_json
from mlxr.service.prompt import Message


class TextBlock(RequestModel):
    """A text; images, documents and search results are not supported."""

    type: Literal["text"]
    text: str


class ThinkingBlock(RequestModel):
    """What the assistant thought earlier."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(RequestModel):
    """A call that the assistant made earlier."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: JsonObject


class ToolResultBlock(RequestModel):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


def _is_text(value: object) -> str:
    return "text" if isinstance(value, str) else "blocks"


class MessageInput(RequestModel):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[Block], Tag("blocks")],
        Discriminator(_is_text),
    ]


System = str | list[TextBlock]


def read_messages(system: System | None, messages: Sequence[MessageInput]) -> list[Message]:
    """Messages for the service; raises InvalidRequest naming the block that does not belong where it is."""
    read: list[Message] = []
    if system:
        read.append({"role": "system", "content": _join(system)})
    tool_names: dict[str, str] = {}
    for index, message in enumerate(messages):
        field = f"messages[{index}].content"
        if isinstance(message.content, str):
            read.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            read.append(_read_assistant(message.content, field, tool_names))
        else:
            read.extend(_read_user(message.role, message.content, field, tool_names))
    return read


def _read_assistant(blocks: Sequence[Block], field: str, tool_names: dict[str, str]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, object]] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                tool_names[block.id] = block.name
                arguments = dump_json(block.input, f"{field}[{index}].input")
                calls.append(describe_call(block.id, block.name, arguments))
            case _:
                raise InvalidRequest(f"{field}[{index}]", "the assistant gives no tool_result")
    message: dict[str, object] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_user(role: str, blocks: Sequence[Block], field: str, tool_names: dict[str, str]) -> list[Message]:
    results: list[Message] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock) and role == "user":
            results.append(_read_result(block, tool_names))
        else:
            raise InvalidRequest(f"{field}[{index}]", f"a {role} message has no {block.type}")
    return [*results, {"role": role, "content": "\n".join(texts)}] if texts or not results else results


def _read_result(block: ToolResultBlock, tool_names: dict[str, str]) -> Message:
    text = _join(block.content or "")
    message: dict[str, object] = {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error else text,
    }
    if block.tool_use_id in tool_names:
        message["name"] = tool_names[block.tool_use_id]
    return message


def _join(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
