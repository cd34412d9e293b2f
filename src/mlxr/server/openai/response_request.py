"""The body of a Responses call, and the request that it is to the service.

Stateless: what would have to be kept between two calls is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mlxr.server.json_models import JsonObject, RequestModel, Unsupported
from mlxr.server.openai.fields import Effort, SamplingFields
from mlxr.server.openai.formats import FlatFormat, make_grammar
from mlxr.server.openai.response_input import InputItem, read_input
from mlxr.server.openai.tools import Mode, Offer, ToolName, make_offer, make_tool
from mlxr.server.parameter_fields import ResponsesParameters
from mlxr.service.requests import ChatRequest, NamedTool

LOGPROBS = "message.output_text.logprobs"


class ResponseTool(RequestModel):
    """A function that the model may call; its arguments always keep to `parameters`, whether `strict` or not."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None


class FunctionChoice(RequestModel):
    """Call this function."""

    type: Literal["function"]
    name: ToolName


class AllowedChoice(RequestModel):
    """Call one of these (`required`), or answer with text as well (`auto`)."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1)]


class ReasoningConfig(RequestModel):
    """How much to think. Thoughts are given as they are, never as a summary."""

    effort: Effort | None = None


class TextConfig(RequestModel):
    """What the text must look like."""

    format: FlatFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseRequest(ResponsesParameters, SamplingFields):
    """Answer an input."""

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Mode | Annotated[FunctionChoice | AllowedChoice, Field(discriminator="type")] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = Field(None, description=f"{LOGPROBS} has an effect.")
    stream: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    background: Unsupported = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities were asked for."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def read_offer(self) -> Offer:
        """The tools and the choice among them; raises InvalidRequest where they do not fit."""
        tools = [make_tool(tool.name, tool.description, tool.parameters) for tool in self.tools or ()]
        match self.tool_choice:
            case FunctionChoice():
                return make_offer(tools, NamedTool(self.tool_choice.name))
            case AllowedChoice():
                return make_offer(tools, self.tool_choice.mode, [tool.name for tool in self.tool_choice.tools])
            case _:
                return make_offer(tools, self.tool_choice)

    def to_request(self) -> ChatRequest:
        """What the service is asked; raises InvalidRequest naming the field."""
        offer = self.read_offer()
        effort = self.reasoning.effort if self.reasoning else None
        return ChatRequest(
            messages=read_input(self.instructions, self.input),
            params=self.make_params(
                logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            ),
            tools=offer.tools,
            tool_choice=offer.choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            grammar=make_grammar(self.text.format if self.text else None, "text.format"),
            think=False if effort == "none" else effort,
            cache_prompt=self.cache_prompt is not False,
            priority=self.priority or 0,
            deadline_s=self.deadline_s,
        )
