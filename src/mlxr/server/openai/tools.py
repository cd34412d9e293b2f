"""`tools` and `tool_choice` of chat completions, as the service's tools and choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from mlxr.core.errors import InvalidRequest
from mlxr.server.json_models import JsonObject, RequestModel
from mlxr.service.requests import NamedTool, Tool, ToolChoice

ToolName = Annotated[str, Field(min_length=1, max_length=256)]
Mode = Literal["none", "auto", "required"]


class FunctionDefinition(RequestModel):
    """A function the model may call. Its arguments always keep to `parameters`, whether `strict` or not."""

    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None


class FunctionTool(RequestModel):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(RequestModel):
    """A function by name."""

    name: ToolName


class NamedToolChoice(RequestModel):
    """The answer has to call the function that is named."""

    type: Literal["function"]
    function: FunctionName


class AllowedTool(RequestModel):
    """One of the tools that may be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(RequestModel):
    """Call one of these (`required`), or answer with text as well (`auto`)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1)]


class AllowedToolsChoice(RequestModel):
    """Narrow the tools down."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ObjectChoice = Annotated[NamedToolChoice | AllowedToolsChoice, Field(discriminator="type")]


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that may be called, and whether one must be."""

    tools: tuple[Tool, ...]
    choice: ToolChoice


def make_tool(name: str, description: str | None, parameters: JsonObject | None) -> Tool:
    """A tool of the service; without parameters it takes an empty object."""
    return Tool(name, description or "", parameters or {"type": "object", "properties": {}})


def make_offer(tools: Sequence[Tool], choice: Mode | NamedTool | None, allowed: Sequence[str] | None = None) -> Offer:
    """Check tools and choice against each other; `allowed` narrows the tools to those names.

    Raises InvalidRequest for names that occur twice, for choices among no tools, and for unknown names.
    """
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(f"tools[{index}]", f"there is another tool called {name!r}")
    if not names and choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice", "asks for a call, but there are no tools")
    wanted = [choice.name] if isinstance(choice, NamedTool) else list(allowed or ())
    for name in wanted:
        if name not in names:
            raise InvalidRequest("tool_choice", f"there is no tool called {name!r}")
    kept = tools if allowed is None else [tool for tool in tools if tool.name in allowed]
    return Offer(tuple(kept), choice or "auto")


def read_offer(tools: Sequence[FunctionTool] | None, choice: Mode | ObjectChoice | None) -> Offer:
    """The offer of a chat completion."""
    offered = [
        make_tool(tool.function.name, tool.function.description, tool.function.parameters) for tool in tools or ()
    ]
    match choice:
        case NamedToolChoice():
            return make_offer(offered, NamedTool(choice.function.name))
        case AllowedToolsChoice():
            names = [tool.function.name for tool in choice.allowed_tools.tools]
            return make_offer(offered, choice.allowed_tools.mode, names)
        case _:
            return make_offer(offered, choice)
