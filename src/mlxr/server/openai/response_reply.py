"""A response of the Responses API: the JSON of it and of the items in it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mlxr.server.json_models import JsonObject, ReplyModel, optional
from mlxr.server.openai.replies import TimingsReply, TokenLogprobReply

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(ReplyModel):
    """A text that the model wrote."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[JsonObject] = Field(max_length=0, default_factory=list)
    logprobs: list[TokenLogprobReply] | None = optional()


class OutputMessage(ReplyModel):
    """What the model says."""

    type: Literal["message"] = "message"
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputThought(ReplyModel):
    """A text that the model thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(ReplyModel):
    """What the model thinks before it answers."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    status: Status
    summary: list[OutputThought] = Field(max_length=0, default_factory=list)
    content: list[OutputThought]


class OutputCall(ReplyModel):
    """A call of a function."""

    type: Literal["function_call"] = "function_call"
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | None = optional()


class OutputCustomCall(ReplyModel):
    """A call of a tool that takes a text."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str
    status: Status
    call_id: str
    name: str
    input: str
    namespace: str | None = optional()


class OutputShellCall(ReplyModel):
    """A command for the client to run."""

    type: Literal["local_shell_call"] = "local_shell_call"
    id: str
    status: Status
    call_id: str
    action: JsonObject


class OutputSearchCall(ReplyModel):
    """A search for tools for the client to run."""

    type: Literal["tool_search_call"] = "tool_search_call"
    id: str
    status: Status
    call_id: str
    execution: Literal["client"] = "client"
    arguments: JsonObject


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall | OutputShellCall | OutputSearchCall


class InputTokensDetails(ReplyModel):
    """Of the input's tokens, those that came from the cache; what is written there is not counted."""

    cached_tokens: int
    cache_write_tokens: Literal[0] = 0


class OutputTokensDetails(ReplyModel):
    """Of the output's tokens, those of reasoning."""

    reasoning_tokens: int


class ResponseUsage(ReplyModel):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(ReplyModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(ReplyModel):
    """Why a response is cut short."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReply(ReplyModel):
    """A response. The fields after `usage` say how it was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: JsonObject
    store: bool
    background: Literal[False] = False
    service_tier: Literal["default"] = "default"
    temperature: float
    presence_penalty: float
    frequency_penalty: float
    text: JsonObject
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    timings: TimingsReply | None = optional()
