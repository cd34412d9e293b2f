"""The body of a Responses call, and the request that it is to the service.

What an earlier response said is put before the input by the route, which knows what is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from mlxr.core.types import MAX_INT
from mlxr.server.formats import FlatFormat
from mlxr.server.json_models import RequestModel, Unsupported
from mlxr.server.openai.fields import ReasoningOptions, SamplingFields
from mlxr.server.openai.response_input import ForeignItem, InputItem, list_items, list_loaded, read_input
from mlxr.server.openai.response_tools import (
    ResponseTool,
    ResponseToolChoice,
    list_left_out,
    read_offer,
    read_tools,
)
from mlxr.server.parameter_fields import ResponsesParameters
from mlxr.service.requests import ChatRequest

LOGPROBS = "message.output_text.logprobs"


class TextConfig(RequestModel):
    """What the text must look like."""

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
        """Whether log-probabilities were asked for."""
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
