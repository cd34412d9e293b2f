"""The body of a chat completion, and the request that it is to the service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from mlxr.core.errors import InvalidRequest
from mlxr.server.formats import ResponseFormat
from mlxr.server.json_models import JsonObject, RequestModel, Text, Unsupported
from mlxr.server.openai.chat_messages import ChatMessage, ContentPart, join_text, read_messages
from mlxr.server.openai.fields import Effort, PenaltyFields, ReasoningOptions
from mlxr.server.openai.tools import FunctionTool, Mode, ObjectChoice, read_offer
from mlxr.service.continuation import is_unfinished
from mlxr.service.prompt import Message
from mlxr.service.requests import ChatRequest, Ending

MAX_MESSAGE_CHARACTERS = 4096
FIELDS = {
    "prompt": "messages",
    "think": "reasoning_effort",
    "extra": "chat_template_kwargs",
}  # the service's words for what may be wrong


class PredictedContent(RequestModel):
    """A text that the answer is likely to repeat in long parts."""

    type: Literal["content"] = "content"
    content: str | list[ContentPart]


class ChatCompletionRequest(PenaltyFields):
    """The body of a request to `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Mode | ObjectChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = Field(None, description="Another place of these: OpenRouter's.")
    reasoning_budget_message: Annotated[str, Field(max_length=MAX_MESSAGE_CHARACTERS)] | None = Field(
        None, description="What a thought ends with when its budget is used up. Absent: the setting thinking_message."
    )
    reasoning_control: bool | None = Field(
        None, description="Thoughts can always be ended by POST /v1/chat/completions/control, whatever this says."
    )
    modalities: list[Literal["text"]] | None = None
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    prediction: PredictedContent | None = Field(
        None, description="What the answer is likely to repeat, which makes it faster; the answer is the same."
    )
    continue_final_message: bool | None = Field(
        None, description="Go on with the assistant's last message, which happens unless this is false."
    )
    add_generation_prompt: bool | None = Field(
        None, description="True: the answer is a new message even behind one of the assistant; false: nothing is added."
    )
    verbose: bool | None = Field(None, description="Tell the prompt as the model read it, in `__verbose`.")
    chat_template: str | None = Field(
        None, description="A template to use instead of the model's, in Jinja, or the name of one that mlxr brings."
    )
    chat_template_kwargs: JsonObject | None = Field(None, description="Further variables of the chat template.")

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def list_given(self) -> dict[str, object]:
        """The values that the request sets; a budget in `reasoning` is one of them."""
        nested = None if self.reasoning is None else self.reasoning.max_tokens
        given = super().list_given()
        return given if nested is None else {"thinking_budget": nested, **given}

    def to_request(self) -> ChatRequest:
        """What the service is asked; raises InvalidRequest naming the field."""
        offer = read_offer(self.tools, self.tool_choice)
        effort = self.reasoning_effort or (self.reasoning.think if self.reasoning else None)
        messages = read_messages(self.messages)
        return ChatRequest(
            messages=messages,
            ending=self._find_ending(messages),
            params=replace(
                self.make_params(logit_bias=self.logit_bias, logprobs=self._count_logprobs(), n=self.n),
                prediction="" if self.prediction is None else join_text(self.prediction.content),
            ),
            tools=offer.tools,
            tool_choice=offer.choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            grammar=self.make_grammar(self.response_format, "response_format"),
            think=False if effort == "none" else effort,
            chat_template=self.chat_template or None,
            template_values=self.chat_template_kwargs or {},
            thinking_message=self.reasoning_budget_message,
            cache_prompt=self.cache_prompt is not False,
            priority=self.priority or 0,
            deadline_s=self.deadline_s,
        )

    def _find_ending(self, messages: Sequence[Message]) -> Ending:
        """Where the prompt ends: by default inside a last message of the assistant, as llama.cpp has it."""
        adds, continues = self.add_generation_prompt, self.continue_final_message
        if adds and continues:
            raise InvalidRequest("continue_final_message", "and add_generation_prompt cannot both be true")
        if continues or (is_unfinished(messages) and continues is None and adds is None):
            return "continued"
        return "closed" if adds is False else "new turn"

    def _count_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None


class ControlRequest(RequestModel):
    """A word to the answer that grows; `id` is that of the completion, or of its request."""

    id: Text
    action: Literal["reasoning_end"]
