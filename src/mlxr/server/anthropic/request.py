"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the request that they are to the service."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from mlxr.core.errors import InvalidRequest
from mlxr.core.sampling import read_params
from mlxr.core.types import MAX_INT, SamplingParams
from mlxr.server.anthropic.content import (
    BILLING,
    ForeignBlock,
    MessageInput,
    System,
    is_billing,
    list_blocks,
    read_messages,
)
from mlxr.server.formats import make_schema_grammar
from mlxr.server.json_models import JsonObject, RequestModel, Text, Unsupported
from mlxr.server.parameter_fields import AnthropicParameters
from mlxr.service.continuation import is_unfinished
from mlxr.service.requests import ChatRequest, NamedTool, Tool, ToolChoice

ToolName = Annotated[str, Field(min_length=1, max_length=256)]


class CustomTool(RequestModel):
    """A function that the model may call. Its arguments always keep to `input_schema`, whether `strict` or not."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: JsonObject


class ServiceTool(RequestModel):
    """A tool that only the service itself has, such as a search of the web: left out among others, refused alone."""

    type: Text
    name: str | None = None


def _name_tool(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind in (None, "custom") else "service"


AnyTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[ServiceTool, Tag("service")], Discriminator(_name_tool)
]


class AnyChoice(RequestModel):
    """Whether to call tools: as the model likes (`auto`) or at least one (`any`)."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class OneChoice(RequestModel):
    """The answer has to call the tool that is named."""

    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoChoice(RequestModel):
    """The answer may call no tool."""

    type: Literal["none"]


class ThinkingOn(RequestModel):
    """Think before answering, if the model is one that does. Thoughts count towards `max_tokens`, of which a quarter
    stays for the answer where the budget would leave less.
    """

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = Field(
        None, description="Most tokens of thought; the same as `thinking_budget`."
    )
    display: Literal["summarized", "omitted", "updates"] | None = None


class ThinkingAdaptive(RequestModel):
    """Think where the model's template does so by itself."""

    type: Literal["adaptive", "between_tools"]
    display: Literal["summarized", "omitted", "updates"] | None = None


class ThinkingOff(RequestModel):
    """The model answers without thinking first."""

    type: Literal["disabled"]


class JsonFormat(RequestModel):
    """The answer is JSON of this schema."""

    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class OutputConfig(RequestModel):
    """How much to think, and what the answer must look like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ConversationFields(RequestModel):
    """What the prompt is made of."""

    model: Text
    messages: Annotated[list[MessageInput], Field(min_length=1)]
    system: System | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Annotated[AnyChoice | OneChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingOn | ThinkingAdaptive | ThinkingOff, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="The older place of output_config.format.")
    mcp_servers: Unsupported = None
    thread: Unsupported = None  # a conversation that the service keeps; clients send it whole once this is refused

    @property
    def budget_tokens(self) -> int | None:
        """The budget of `thinking`."""
        return self.thinking.budget_tokens if isinstance(self.thinking, ThinkingOn) else None

    def make_request(self, params: SamplingParams) -> ChatRequest:
        """What the service is asked; raises InvalidRequest naming the field."""
        tools = self._read_tools()
        choice = self._read_choice(tools)
        wanted = (self.output_config.format if self.output_config else None) or self.output_format
        grammar = make_schema_grammar(wanted.json_schema if wanted else None, "output_config.format")
        messages = read_messages(self.system, self.messages)
        return ChatRequest(
            messages=messages,
            ending="continued" if is_unfinished(messages) else "new turn",
            params=params,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=not getattr(self.tool_choice, "disable_parallel_tool_use", None),
            grammar=grammar,
            think=self._read_thinking(),
        )

    def list_left_out(self) -> Iterable[str]:
        """Tools of the service, blocks that are of no use here, and what is for the service's books."""
        for tool in self.tools or ():
            if isinstance(tool, ServiceTool):
                yield f"tools[].{tool.type}"
        if any(map(is_billing, list_blocks(self.system))):
            yield f"system[].{BILLING.rstrip(':')}"
        for message in self.messages:
            for block in message.content if not isinstance(message.content, str) else ():
                if isinstance(block, ForeignBlock):
                    yield f"messages[].content[].{block.type}"

    def _read_tools(self) -> list[Tool]:
        given = self.tools or []
        tools = [
            Tool(tool.name, tool.description or "", tool.input_schema) for tool in given if isinstance(tool, CustomTool)
        ]
        if given and not tools:
            raise InvalidRequest(
                "tools[0].type", f"{given[0].type!r} is a tool of the service itself, not of this server"
            )
        return tools

    def _read_choice(self, tools: Sequence[Tool]) -> ToolChoice:
        names = [tool.name for tool in tools]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise InvalidRequest(f"tools[{index}].name", f"there is another tool called {name!r}")
        match self.tool_choice:
            case None | NoChoice():
                return "none" if self.tool_choice else "auto"
            case OneChoice():
                if self.tool_choice.name not in names:
                    raise InvalidRequest("tool_choice.name", f"there is no tool called {self.tool_choice.name!r}")
                return NamedTool(self.tool_choice.name)
            case _:
                if self.tool_choice.type == "auto":
                    return "auto"
                if not names:
                    raise InvalidRequest("tool_choice", "asks for a call, but there are no tools")
                return "required"

    def _read_thinking(self) -> bool | str | None:
        effort = self.output_config.effort if self.output_config else None
        match self.thinking:
            case ThinkingOn():
                return effort or True
            case ThinkingAdaptive():
                return effort
            case _:
                return False


class CountRequest(ConversationFields):
    """Count the tokens of a conversation."""

    def to_request(self) -> ChatRequest:
        """The conversation for the service."""
        return self.make_request(SamplingParams(thinking_budget=self.budget_tokens))


class MessageRequest(AnthropicParameters, ConversationFields):
    """The body of a request to `/v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)]
    temperature: Annotated[float, Field(ge=0.0, le=1.0)] | None = Field(None, description="Absent: 1.")
    stream: bool | None = None

    @property
    def hides_thoughts(self) -> bool:
        """Whether the reply says that there were thoughts, but not what they were."""
        return getattr(self.thinking, "display", None) == "omitted"

    def list_given(self) -> dict[str, object]:
        """The values that the request sets; a budget in `thinking` is one of them."""
        given = super().list_given()
        return given if self.budget_tokens is None else {"thinking_budget": self.budget_tokens, **given}

    def to_request(self) -> ChatRequest:
        """What the service is asked; raises InvalidRequest naming the field."""
        return self.make_request(SamplingParams(**read_params({"temperature": 1.0}, self.list_given())))
