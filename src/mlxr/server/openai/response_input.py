"""The `input` of Responses: items in, messages of the service out.

What one turn of the assistant said, thought and called is several items here and one message there. Items that name
something stored are refused, since nothing is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Discriminator, Tag

from mlxr.core.errors import InvalidRequest
from mlxr.server.json_models import RequestModel, Text, describe_call
from mlxr.service.messages import parse_arguments
from mlxr.service.prompt import Message


class TextPart(RequestModel):
    """A piece of text, given by the user or written by the model; images, audio and files are not supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class ReasoningText(RequestModel):
    """A piece of a thought or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class MessageItem(RequestModel):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart]


class FunctionCallItem(RequestModel):
    """A call that the assistant made earlier."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: str


class FunctionOutputItem(RequestModel):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: Text
    output: str | list[TextPart]


class ReasoningItem(RequestModel):
    """What the assistant thought earlier. Thoughts travel in the open here."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None


def _name_kind(item: object) -> str:
    """What kind of item a JSON value is; a message may leave its type out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return str(kind or "message")


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _name_kind,
        custom_error_type="unknown_item",
        custom_error_message="this type of item is not supported",
    ),
]


def read_input(instructions: str | None, items: str | Sequence[InputItem]) -> list[Message]:
    """Messages for the service; raises InvalidRequest naming the item that does not fit."""
    messages: list[dict[str, object]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    turn: dict[str, object] | None = None  # the assistant's turn that is being put together
    for index, item in enumerate(items):
        if isinstance(item, FunctionCallItem):
            parse_arguments(item.arguments, f"input[{index}].arguments")  # here the item still has its number
        if isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _join(item.output)})
            turn = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _join(item.content)})
            turn = None
        else:
            if turn is None or _begins_turn(turn, item):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add_to_turn(turn, item)
    if not messages:
        raise InvalidRequest("input", "is empty")
    return list(messages)


def _begins_turn(turn: dict[str, object], item: MessageItem | FunctionCallItem | ReasoningItem) -> bool:
    """Whether the turn so far is over: nobody thinks after calling, and a message has one text."""
    if isinstance(item, ReasoningItem):
        return bool(turn["content"]) or "tool_calls" in turn
    return isinstance(item, MessageItem) and (bool(turn["content"]) or "tool_calls" in turn)


def _add_to_turn(turn: dict[str, object], item: MessageItem | FunctionCallItem | ReasoningItem) -> None:
    if isinstance(item, MessageItem):
        turn["content"] = _join(item.content)
    elif isinstance(item, ReasoningItem):
        thought = "".join(part.text for part in item.content or item.summary or ())
        turn["reasoning"] = str(turn.get("reasoning", "")) + thought
    else:
        calls = turn.setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append(describe_call(item.call_id, item.name, item.arguments))


def _join(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
