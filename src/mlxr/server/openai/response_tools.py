"""The `tools` of Responses: whatever the client runs is a function to the model, and a call of its own kind back.

A `custom` tool takes a text and `local_shell` a command; to the model both are functions like any other. Functions in
a `namespace` get its name before theirs. Tools that only the service itself has are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from mlxr.core.errors import InvalidRequest
from mlxr.server.json_models import JsonObject, RequestModel, Text
from mlxr.server.openai.fields import Mode, Offer, ToolName, make_offer, make_tool
from mlxr.service.requests import NamedTool, Tool

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
    """Text of a grammar, which the model is told and which is not enforced."""

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
    """A command line of the client's."""

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
    """A tool that only the service itself has, such as a search of the web: left out among others, refused alone."""

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
    """One of the tools that may be called; what is no function or custom tool does not count."""

    type: Text
    name: str | None = None
    namespace: str | None = None


class AllowedChoice(RequestModel):
    """Call one of these (`required`), or answer with text as well (`auto`)."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1)]


ResponseToolChoice = Mode | Annotated[OneChoice | AllowedChoice, Field(discriminator="type")]


@dataclass(frozen=True, slots=True)
class Callee:
    """Says what a call of a function of the model's is to the client."""

    kind: CallKind
    name: str
    namespace: str | None = None


@dataclass(slots=True)
class ToolTable:
    """The model's functions, and what their calls are to the client."""

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
    """The tools for the model: those of the request, and those that the conversation has `loaded` since, once each.

    Raises InvalidRequest where only the service itself has what was asked for.
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
        raise InvalidRequest("tools[0].type", f"{tools[0].type!r} is a tool of the service itself, not of this server")
    return table


def list_left_out(tools: Sequence[ResponseTool] | None) -> Iterator[str]:
    """The names of tools that the model is not offered, as the header has them."""
    return (f"tools[].{tool.type}" for tool in tools or () if isinstance(tool, ServiceTool))


def read_offer(table: ToolTable, choice: ResponseToolChoice | None) -> Offer:
    """The tools and the choice among them; raises InvalidRequest where they do not fit."""
    match choice:
        case OneChoice():
            return make_offer(table.tools, NamedTool(qualify(choice.namespace, choice.name)))
        case AllowedChoice():
            names = [qualify(tool.namespace, tool.name) for tool in choice.tools if tool.name is not None]
            return make_offer(table.tools, choice.mode, names)
        case _:
            return make_offer(table.tools, choice)


def qualify(namespace: str | None, name: str) -> str:
    """The model's name for a tool of a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def read_text(arguments: str) -> str:
    """The text that a custom tool is called with; what is cut short stands for itself."""
    text = read_arguments(arguments).get("input")
    return text if isinstance(text, str) else arguments


def read_command(arguments: str) -> JsonObject:
    """Return what `local_shell` is called with; an empty command where the answer ended within."""
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
    """The arguments of a call as an object; an empty one for what is cut short."""
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
