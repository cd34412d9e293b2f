"""The body of Responses: its tools, its input items, and their translation to the service's request.

The model sees all tools that the client runs as functions; their calls go back to the client in the tool's own kind. A
`custom` tool takes a text and `local_shell` a command. Functions in a `namespace` get its name before theirs. Tools of
OpenAI's own service are left out.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag, TypeAdapter

from mlxr.core.errors import InvalidRequest
from mlxr.core.frozen import frozen
from mlxr.core.types import MAX_INT
from mlxr.server.openai.fields import Mode, Offer, ReasoningOptions, SamplingFields, ToolName, make_offer, make_tool
from mlxr.server.request_fields import FlatFormat, ResponsesParameters, explain_service_tool
from mlxr.server.routes import Arguments, JsonObject, RequestModel, Text, Unsupported, describe_call, dump_json
from mlxr.service.messages import parse_arguments
from mlxr.service.requests import ChatRequest, Message, NamedTool, Tool
from mlxr.service.sight import DETAILS, make_document, make_part, read_url

LOCAL_SHELL = "local_shell"
TOOL_SEARCH = "tool_search"
CallKind = Literal["function_call", "custom_tool_call", "local_shell_call", "tool_search_call"]
_INPUT: JsonObject = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_COMMAND: JsonObject = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
    "additionalProperties": False,
}


class FunctionTool(RequestModel):
    """A function that the model may call; its arguments always keep to `parameters`, whether `strict` or not."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class TextInput(RequestModel):
    """A custom tool takes any text."""

    type: Literal["text"]


class GrammarInput(RequestModel):
    """A custom tool takes text of a grammar, which is told to the model but not enforced."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(RequestModel):
    """A tool that takes a text."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[TextInput | GrammarInput, Field(discriminator="type")] | None = None


class LocalShell(RequestModel):
    """A command line that the client runs."""

    type: Literal["local_shell"]


class Namespace(RequestModel):
    """Tools under a common name, such as those of one MCP server."""

    type: Literal["namespace"]
    name: ToolName
    description: str = ""
    tools: list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]]


class ToolSearch(RequestModel):
    """A search for further tools that the client runs."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: str | None = None
    parameters: JsonObject | None = None


class ServiceTool(RequestModel):
    """A tool of OpenAI's service alone, such as a web search: left out among other tools, refused if it is alone."""

    type: Text


def _name_tool(tool: object) -> str:
    fields = tool if isinstance(tool, dict) else getattr(tool, "__dict__", {})
    kind = fields.get("type")
    if kind == TOOL_SEARCH and fields.get("execution") == "client":
        return TOOL_SEARCH
    return str(kind) if kind in ("function", "custom", LOCAL_SHELL, "namespace") else "service"


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[LocalShell, Tag(LOCAL_SHELL)]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[ToolSearch, Tag(TOOL_SEARCH)]
    | Annotated[ServiceTool, Tag("service")],
    Discriminator(_name_tool),
]


class OneChoice(RequestModel):
    """The answer has to call the tool that is named."""

    type: Literal["function", "custom"]
    name: ToolName
    namespace: str | None = None


class AllowedTool(RequestModel):
    """One of the tools that may be called; only function and custom tools count."""

    type: Text
    name: str | None = None
    namespace: str | None = None


class AllowedChoice(RequestModel):
    """Call one of these (`required`), or answer with text as well (`auto`)."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1)]


ResponseToolChoice = Mode | Annotated[OneChoice | AllowedChoice, Field(discriminator="type")]


@frozen
class Callee:
    """The client's tool behind a function of the model."""

    kind: CallKind
    name: str
    namespace: str | None = None


@dataclass(slots=True)
class ToolTable:
    """The model's functions, and the client's tools behind them."""

    tools: list[Tool] = field(default_factory=list)
    callees: dict[str, Callee] = field(default_factory=dict)

    def add(self, tool: ResponseTool, namespace: str | None = None) -> None:
        """Offer a tool to the model, if it is one that the client runs."""
        match tool:
            case FunctionTool():
                name = qualify(namespace, tool.name)
                self._put(make_tool(name, tool.description, tool.parameters), "function_call", tool.name, namespace)
            case CustomTool():
                made = Tool(qualify(namespace, tool.name), _describe_custom(tool), _INPUT)
                self._put(made, "custom_tool_call", tool.name, namespace)
            case LocalShell():
                made = Tool(LOCAL_SHELL, "Runs a command on the user's machine.", _COMMAND)
                self._put(made, "local_shell_call", LOCAL_SHELL, None)
            case ToolSearch():
                made = make_tool(TOOL_SEARCH, tool.description, tool.parameters)
                self._put(made, "tool_search_call", TOOL_SEARCH, None)
            case Namespace():
                for inner in tool.tools:
                    self.add(inner, tool.name)

    def _put(self, tool: Tool, kind: CallKind, name: str, namespace: str | None) -> None:
        self.tools.append(tool)
        self.callees[tool.name] = Callee(kind, name, namespace)


def read_tools(tools: Sequence[ResponseTool] | None, loaded: Sequence[ResponseTool] = ()) -> ToolTable:
    """Return the tools for the model: those of the request, and those that the conversation has `loaded`, once each.

    Raises InvalidRequest if the request only has tools of OpenAI's service.
    """
    table = ToolTable()
    for tool in tools or ():
        table.add(tool)
    for tool in loaded:
        more = ToolTable()
        more.add(tool)
        table.tools += [one for one in more.tools if one.name not in table.callees]
        table.callees = {**more.callees, **table.callees}
    if tools and not table.tools:
        raise explain_service_tool(tools[0].type)
    return table


def list_left_out(tools: Sequence[ResponseTool] | None) -> Iterator[str]:
    """Yield the names of tools that the model does not get, for the header."""
    return (f"tools[].{tool.type}" for tool in tools or () if isinstance(tool, ServiceTool))


def read_offer(table: ToolTable, choice: ResponseToolChoice | None) -> Offer:
    """Return the tools and the choice among them; raises InvalidRequest if they do not fit."""
    match choice:
        case OneChoice():
            return make_offer(table.tools, NamedTool(qualify(choice.namespace, choice.name)))
        case AllowedChoice():
            names = [qualify(tool.namespace, tool.name) for tool in choice.tools if tool.name is not None]
            return make_offer(table.tools, choice.mode, names)
        case _:
            return make_offer(table.tools, choice)


def qualify(namespace: str | None, name: str) -> str:
    """Return the model's name for a tool of a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def read_text(arguments: str) -> str:
    """Return the text of a custom tool's call; arguments that are cut short are returned unchanged."""
    text = read_arguments(arguments).get("input")
    return text if isinstance(text, str) else arguments


def read_command(arguments: str) -> JsonObject:
    """Return the action of a call of `local_shell`; an empty command if the answer ended within it."""
    read = read_arguments(arguments)
    return {
        "type": "exec",
        "command": read.get("command", []),
        "env": {},
        "timeout_ms": read.get("timeout_ms"),
        "user": None,
        "working_directory": read.get("working_directory"),
    }


def read_arguments(arguments: str) -> JsonObject:
    """Return the arguments of a call as an object; an empty one if they are cut short."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _describe_custom(tool: CustomTool) -> str:
    description = tool.description or ""
    if not isinstance(tool.format, GrammarInput):
        return description
    return f"{description}\n\nThe input is text of this {tool.format.syntax} grammar:\n{tool.format.definition}".strip()


# Items of earlier answers about actions and contents of OpenAI's service alone.
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
    """A piece of text, given by the user or written by the model."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


class ImagePart(RequestModel):
    """A picture as a data: URL, or at an address of an origin that the setting image_origins names.

    With detail low it takes fewer tokens.
    """

    type: Literal["input_image"]
    image_url: str
    detail: Literal[DETAILS] | None = None  # type: ignore[valid-type]
    file_id: Unsupported = None


class FilePart(RequestModel):
    """A PDF, or a text in UTF-8, as a data: URL or at an address as for pictures."""

    type: Literal["input_file"]
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    file_id: Unsupported = None


Part = Annotated[TextPart | ImagePart | FilePart, Field(discriminator="type")]


class ReasoningText(RequestModel):
    """A piece of a thought or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class MessageItem(RequestModel):
    """An item of the input that is a message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]

    def list_parts(self) -> list[JsonObject]:
        """Return the content as the parts of an input."""
        if isinstance(self.content, str):
            return [{"type": "input_text", "text": self.content}]
        return [part.model_dump(exclude_none=True) for part in self.content]


class FunctionCallItem(RequestModel):
    """A call that the assistant made earlier, with its arguments as JSON text, or as the JSON itself."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Arguments = ""
    namespace: str | None = None

    def to_call(self, field: str) -> JsonObject:
        """Return the call for the service; raises InvalidRequest for malformed arguments."""
        given, place = self.arguments, f"{field}.arguments"
        parse_arguments(given, place)  # checked here, where the item's number is known
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
        """Return the item as a call of a tool, for the service."""
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
        """Return the item as a call of a tool, for the service."""
        arguments = dump_json(self.action.model_dump(exclude_none=True), f"{field}.action")
        return describe_call(self.call_id, LOCAL_SHELL, arguments)


class SearchCallItem(RequestModel):
    """A search for tools that the assistant asked for earlier."""

    type: Literal["tool_search_call"]
    call_id: Text
    arguments: JsonObject = Field(default_factory=dict)

    def to_call(self, field: str) -> JsonObject:
        """Return the item as a call of a tool, for the service."""
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
    """An item of the input with the result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: Text = Field(validation_alias=AliasChoices("call_id", "id"))
    output: str | list[Part]


class ReferenceItem(RequestModel):
    """An item of an earlier response, by its id."""

    type: Literal["item_reference"]
    id: Text


class ForeignItem(RequestModel):
    """An item that this server leaves out, because it has no meaning here."""

    type: str


class ReasoningItem(RequestModel):
    """An earlier thought of the assistant. Thoughts are not encrypted here."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None

    @property
    def thought(self) -> str:
        """The text of the item, else its summary; empty if the thoughts are hidden, or there are none."""
        texts = ("".join(part.text for part in parts or ()) for parts in (self.content, self.summary))
        return next((text for text in texts if text.strip()), "")


class CompactionItem(RequestModel):
    """A summary in place of the earlier conversation, from `/v1/responses/compact`."""

    type: Literal["compaction"]
    encrypted_content: str

    @staticmethod
    def close(summary: str) -> str:
        """Return a summary in the form that clients send back; it is not secret."""
        return _SUMMARY_MARK + b64encode(summary.encode()).decode()

    def read(self, field: str) -> str:
        """Return the text for the model; raises InvalidRequest if another service has encrypted the summary."""
        mark, _, data = self.encrypted_content.rpartition(":")
        try:
            if f"{mark}:" != _SUMMARY_MARK:
                raise ValueError
            return f"Summary of the conversation so far:\n{b64decode(data, validate=True).decode()}"
        except ValueError:
            text = "is no summary of this server's, and only who made it can read it; send the conversation itself"
            raise InvalidRequest(f"{field}.encrypted_content", text) from None


_SUMMARY_MARK = "mlxr-summary:"
OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})


def _name_kind(item: object) -> str:
    """Return the kind of item of a JSON value; a message may leave its type out."""
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
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[ReferenceItem, Tag("item_reference")]
    | Annotated[ForeignItem, Tag("foreign")],
    Discriminator(
        _name_kind, custom_error_type="unknown_item", custom_error_message="this type of item is not supported"
    ),
]


CallItem = FunctionCallItem | CustomCallItem | ShellCallItem | SearchCallItem


def list_items(given: str | Sequence[InputItem]) -> list[InputItem]:
    """Return an input as items."""
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else list(given)


@cache
def _adapter() -> TypeAdapter[list[InputItem]]:
    return TypeAdapter(list[InputItem])


def list_loaded(items: Sequence[InputItem]) -> list[ResponseTool]:
    """Return the tools that came with the conversation."""
    return [tool for item in items if isinstance(item, SearchOutputItem | MoreToolsItem) for tool in item.tools]


def read_items(items: Sequence[JsonObject]) -> list[InputItem]:
    """Read the output of a response as if a later request sent it back."""
    return _adapter().validate_python(items)


def dump_items(items: Sequence[InputItem]) -> str:
    """Return items as JSON that `read_items` understands."""
    return _adapter().dump_json(list(items), exclude_none=True).decode()


def read_input(instructions: str | None, items: Sequence[InputItem], first: int = 0) -> list[Message]:
    """Return messages for the service; raises InvalidRequest naming the item that does not fit. The input of the
    request itself begins with number `first`.
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
            messages.append(
                {"role": "tool", "tool_call_id": item.call_id, "content": _join(item.output, f"input[{index}].output")}
            )
            turn = None
        elif isinstance(item, CompactionItem):
            messages.append({"role": "user", "content": item.read(f"input[{index}]")})
            turn = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _join(item.content, f"input[{index}].content")})
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
    """Return True if the item begins a new turn: a turn has no thought after a call, and only one text."""
    if isinstance(item, ReasoningItem):
        return bool(turn["content"]) or "tool_calls" in turn
    return isinstance(item, MessageItem) and (bool(turn["content"]) or "tool_calls" in turn)


def _add_to_turn(turn: dict[str, object], item: MessageItem | CallItem | ReasoningItem, field: str) -> None:
    if isinstance(item, MessageItem):
        turn["content"] = _join(item.content, f"{field}.content")
    elif isinstance(item, ReasoningItem):
        turn["reasoning"] = str(turn.get("reasoning", "")) + item.thought
    else:
        calls = turn.setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append(item.to_call(field))


def _join(content: str | Sequence[Part], field: str) -> str | list[JsonObject]:
    """Return the text of a content, or all of its parts if it has pictures or documents."""
    if isinstance(content, str):
        return content
    parts: list[JsonObject] = []
    for index, part in enumerate(content):
        if isinstance(part, ImagePart):
            name = f"{field}[{index}].image_url"
            parts.append(make_part(read_url(part.image_url, name), part.detail, name))
        elif isinstance(part, FilePart):
            key = "file_data" if part.file_url is None else "file_url"
            name, given = f"{field}[{index}].{key}", part.file_url or part.file_data
            if given is None:
                raise InvalidRequest(name, "is missing")
            parts.append(make_document(read_url(given, name), part.filename, name))
        else:
            parts.append({"type": "text", "text": part.text})
    has_files = any(not isinstance(part, TextPart) for part in content)
    return parts if has_files else "".join(str(part["text"]) for part in parts)


class TextConfig(RequestModel):
    """The form of the answer's text."""

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
        """True if log-probabilities were asked for."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def list_given(self) -> dict[str, object]:
        """Return the values that the request sets; a budget in `reasoning` is one of them."""
        nested = None if self.reasoning is None else self.reasoning.max_tokens
        given = super().list_given()
        return given if nested is None else {"thinking_budget": nested, **given}

    def list_left_out(self) -> Iterator[str]:
        """Yield tools of OpenAI's service, and items that have no use here."""
        yield from super().list_left_out()
        yield from list_left_out(self.tools)
        yield from (f"input[].{item.type}" for item in list_items(self.input) if isinstance(item, ForeignItem))

    def to_request(self, history: Sequence[InputItem] = (), given: Sequence[InputItem] | None = None) -> ChatRequest:
        """Return the service's request, with `history` before the input, or before `given` in its place.

        Raises InvalidRequest naming the field.
        """
        items = list_items(self.input) if given is None else given
        offer = read_offer(read_tools(self.tools, list_loaded([*history, *items])), self.tool_choice)
        effort = self.reasoning.think if self.reasoning else None
        wanted = ChatRequest(
            messages=read_input(self.instructions, [*history, *items], len(history)),
            params=self.make_params(logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None),
            tools=offer.tools,
            tool_choice=offer.choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            grammar=self.make_grammar(self.text.format if self.text else None, "text.format"),
            think=False if effort == "none" else effort,
        )
        return self.add_options(wanted)
