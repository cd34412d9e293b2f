"""The body of a Responses call, and the request that it is to the service: items in, messages out.

What one turn of the assistant said, thought and called is several items here and one message there. Calls of `custom`
tools and of `local_shell` are calls of functions to the service, see `response_tools`. What an earlier response said is
put before the input by the route, which knows what is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag, TypeAdapter

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import MAX_INT
from mlxr.server.json_models import Arguments, JsonObject, RequestModel, Text, Unsupported, describe_call, dump_json
from mlxr.server.openai.fields import ReasoningOptions, SamplingFields
from mlxr.server.openai.response_tools import (
    LOCAL_SHELL,
    TOOL_SEARCH,
    ResponseTool,
    ResponseToolChoice,
    list_left_out,
    qualify,
    read_offer,
    read_tools,
)
from mlxr.server.request_fields import FlatFormat, ResponsesParameters
from mlxr.service.messages import parse_arguments
from mlxr.service.prompt import Message
from mlxr.service.requests import ChatRequest

# Items of earlier answers that tell of what only the service itself can do or read.
FOREIGN_ITEMS = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
)
LOGPROBS = "message.output_text.logprobs"


class TextPart(RequestModel):
    """A piece of text, given by the user or written by the model; images, audio and files are not supported."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


class ReasoningText(RequestModel):
    """A piece of a thought or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class MessageItem(RequestModel):
    """An item of the input that is a message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart]


class FunctionCallItem(RequestModel):
    """A call that the assistant made earlier, with its arguments as JSON text, or as the JSON itself."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Arguments = ""
    namespace: str | None = None

    def to_call(self, field: str) -> JsonObject:
        """The call for the service; raises InvalidRequest for arguments that are none."""
        given, place = self.arguments, f"{field}.arguments"
        parse_arguments(given, place)  # here the item still has its number
        text = given if isinstance(given, str) else dump_json(given, place)
        return describe_call(self.call_id, qualify(self.namespace, self.name), text)


class CustomCallItem(RequestModel):
    """A call with a text that the assistant made earlier."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    input: str
    namespace: str | None = None

    def to_call(self, field: str) -> JsonObject:
        """The item as a call of a tool, as the service reads it."""
        arguments = dump_json({"input": self.input}, f"{field}.input")
        return describe_call(self.call_id, qualify(self.namespace, self.name), arguments)


class ShellAction(RequestModel):
    """The command of an earlier call of the local shell."""

    command: list[str]
    working_directory: str | None = None
    timeout_ms: int | None = None


class ShellCallItem(RequestModel):
    """A command that the assistant asked for earlier."""

    type: Literal["local_shell_call"]
    call_id: Text
    action: ShellAction

    def to_call(self, field: str) -> JsonObject:
        """The item as a call of a tool, as the service reads it."""
        arguments = dump_json(self.action.model_dump(exclude_none=True), f"{field}.action")
        return describe_call(self.call_id, LOCAL_SHELL, arguments)


class SearchCallItem(RequestModel):
    """A search for tools that the assistant asked for earlier."""

    type: Literal["tool_search_call"]
    call_id: Text
    arguments: JsonObject = Field(default_factory=dict)

    def to_call(self, field: str) -> JsonObject:
        """The item as a call of a tool, as the service reads it."""
        return describe_call(self.call_id, TOOL_SEARCH, dump_json(self.arguments, f"{field}.arguments"))


class SearchOutputItem(RequestModel):
    """The tools that a search has found; from now on they may be called."""

    type: Literal["tool_search_output"]
    call_id: Text
    tools: list[ResponseTool] = Field(default_factory=list)

    @property
    def output(self) -> str:
        """The text of the item as the model reads it."""
        return "Found: " + (", ".join(tool.name for tool in read_tools(None, self.tools).tools) or "nothing")


class MoreToolsItem(RequestModel):
    """Tools that may be called from now on."""

    type: Literal["additional_tools"]
    tools: list[ResponseTool] = Field(default_factory=list)


class OutputItem(RequestModel):
    """An item of the input that holds what a call gave."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: Text = Field(validation_alias=AliasChoices("call_id", "id"))
    output: str | list[TextPart]


class ReferenceItem(RequestModel):
    """An item of an earlier response, by its id."""

    type: Literal["item_reference"]
    id: Text


class ForeignItem(RequestModel):
    """An item that this server leaves out, because it has no meaning here."""

    type: str


class ReasoningItem(RequestModel):
    """Holds what the assistant thought earlier. Thoughts travel in the open here."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None

    @property
    def thought(self) -> str:
        """The text of the item, else its summary; empty where the thoughts are hidden, or were none."""
        texts = ("".join(part.text for part in parts or ()) for parts in (self.content, self.summary))
        return next((text for text in texts if text.strip()), "")


OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})


def _name_kind(item: object) -> str:
    """Return what kind of item a JSON value is; a message may leave its type out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind in FOREIGN_ITEMS:
        return "foreign"
    return "output" if kind in OUTPUTS else str(kind or "message")


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[ShellCallItem, Tag("local_shell_call")]
    | Annotated[SearchCallItem, Tag("tool_search_call")]
    | Annotated[SearchOutputItem, Tag("tool_search_output")]
    | Annotated[MoreToolsItem, Tag("additional_tools")]
    | Annotated[OutputItem, Tag("output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("item_reference")]
    | Annotated[ForeignItem, Tag("foreign")],
    Discriminator(
        _name_kind,
        custom_error_type="unknown_item",
        custom_error_message="this type of item is not supported",
    ),
]


CallItem = FunctionCallItem | CustomCallItem | ShellCallItem | SearchCallItem


def list_items(given: str | Sequence[InputItem]) -> list[InputItem]:
    """An input as items."""
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else list(given)


@cache
def _adapter() -> TypeAdapter[list[InputItem]]:
    return TypeAdapter(list[InputItem])


def list_loaded(items: Sequence[InputItem]) -> list[ResponseTool]:
    """The tools that came with the conversation."""
    return [tool for item in items if isinstance(item, SearchOutputItem | MoreToolsItem) for tool in item.tools]


def read_items(items: Sequence[JsonObject]) -> list[InputItem]:
    """The output of a response as a later request would send it back."""
    return _adapter().validate_python(items)


def read_input(instructions: str | None, items: Sequence[InputItem], first: int = 0) -> list[Message]:
    """Messages for the service; raises InvalidRequest naming the item that does not fit. The input of the request
    itself begins with number `first`.
    """
    messages: list[dict[str, object]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    turn: dict[str, object] | None = None  # the assistant's turn that is being put together
    for index, item in enumerate(items, -first):
        if isinstance(item, ForeignItem | MoreToolsItem) or (isinstance(item, ReasoningItem) and not item.thought):
            continue
        if isinstance(item, ReferenceItem):
            raise InvalidRequest(f"input[{index}].id", f"there is no item {item.id[:80]!r}, or it is kept no longer")
        if isinstance(item, OutputItem | SearchOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _join(item.output)})
            turn = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _join(item.content)})
            turn = None
        else:
            if turn is None or _begins_turn(turn, item):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add_to_turn(turn, item, f"input[{index}]")
    if not messages:
        raise InvalidRequest("input", "is empty")
    return list(messages)


def _begins_turn(turn: dict[str, object], item: MessageItem | CallItem | ReasoningItem) -> bool:
    """Tell whether the turn so far is over: nobody thinks after calling, and a message has one text."""
    if isinstance(item, ReasoningItem):
        return bool(turn["content"]) or "tool_calls" in turn
    return isinstance(item, MessageItem) and (bool(turn["content"]) or "tool_calls" in turn)


def _add_to_turn(turn: dict[str, object], item: MessageItem | CallItem | ReasoningItem, field: str) -> None:
    if isinstance(item, MessageItem):
        turn["content"] = _join(item.content)
    elif isinstance(item, ReasoningItem):
        turn["reasoning"] = str(turn.get("reasoning", "")) + item.thought
    else:
        calls = turn.setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append(item.to_call(field))


def _join(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class TextConfig(RequestModel):
    """Says what the text must look like."""

    format: FlatFormat | None = None


class ResponseRequest(ResponsesParameters, SamplingFields):
    """The body of a request to `/v1/responses`."""

    input: str | list[InputItem] = Field(default_factory=list)
    instructions: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextConfig | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: ResponseToolChoice | None = None
    max_tool_calls: Annotated[int, Field(ge=0, le=MAX_INT)] | None = Field(
        None, description="Bounds calls of tools that the service runs itself, of which there are none here."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: an input that is too long loses its oldest items."
    )
    store: bool | None = Field(
        None, description="Absent: true. Keep the response, so that later ones can go on from it."
    )
    previous_response_id: str | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = Field(None, description=f"{LOGPROBS} has an effect.")
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    background: Unsupported = None

    @property
    def wants_logprobs(self) -> bool:
        """Tell whether log-probabilities were asked for."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def list_given(self) -> dict[str, object]:
        """The values that the request sets; a budget in `reasoning` is one of them."""
        nested = None if self.reasoning is None else self.reasoning.max_tokens
        given = super().list_given()
        return given if nested is None else {"thinking_budget": nested, **given}

    def list_left_out(self) -> Iterator[str]:
        """Tools of the service, and items that are of no use here."""
        yield from super().list_left_out()
        yield from list_left_out(self.tools)
        yield from (f"input[].{item.type}" for item in list_items(self.input) if isinstance(item, ForeignItem))

    def to_request(self, history: Sequence[InputItem] = (), given: Sequence[InputItem] | None = None) -> ChatRequest:
        """Return what the service is asked, with `history` before the input, or before `given` in its place.

        Raises InvalidRequest naming the field.
        """
        items = list_items(self.input) if given is None else given
        offer = read_offer(read_tools(self.tools, list_loaded([*history, *items])), self.tool_choice)
        effort = self.reasoning.think if self.reasoning else None
        return ChatRequest(
            messages=read_input(self.instructions, [*history, *items], len(history)),
            params=self.make_params(
                logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            ),
            tools=offer.tools,
            tool_choice=offer.choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            grammar=self.make_grammar(self.text.format if self.text else None, "text.format"),
            think=False if effort == "none" else effort,
            cache_prompt=self.cache_prompt is not False,
            priority=self.priority or 0,
            deadline_s=self.deadline_s,
        )
