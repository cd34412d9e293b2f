"""Fields that several OpenAI requests share: sampling, our own additions, labels of the caller, and tools.

Pure data: from JSON to SamplingParams and to the service's tools and choice. A field that allows only one value is
declared with that value, so any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from mlxr.core.errors import InvalidRequest
from mlxr.core.frozen import frozen
from mlxr.core.sampling import ALL_TOKENS, read_params
from mlxr.core.types import MAX_ANSWERS, MAX_INT, DraftOptions, SamplingParams
from mlxr.server.request_fields import GrammarFields, OpenAIParameters, SamplerFields
from mlxr.server.routes import JsonObject, RequestModel
from mlxr.service.embedding import PromptChoice
from mlxr.service.requests import NamedTool, R, Tool, ToolChoice

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Count = Annotated[int, Field(ge=1, le=MAX_INT)]
Answers = Annotated[int, Field(ge=1, le=MAX_ANSWERS)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]


class ReasoningOptions(RequestModel):
    """The amount of thinking: an effort, or tokens. Thoughts are returned in full, never as a summary."""

    effort: Effort | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = Field(
        None, description="Most tokens of thought; the same as `thinking_budget`."
    )
    enabled: bool | None = Field(None, description="Whether to think, where no effort says it.")

    @property
    def think(self) -> bool | str | None:
        """The effort, or True or False for thinking on or off."""
        return self.enabled if self.effort is None else self.effort


class PromptFields(RequestModel):
    """The choice of the model's prompt that goes before each text that becomes a vector."""

    prompt_name: str | None = Field(
        None, description="A prompt of the model by its name, as sentence-transformers and TEI have it."
    )
    input_type: str | None = Field(
        None,
        validation_alias=AliasChoices("input_type", "task"),
        description="What the texts are: `query`, `document`, or Cohere's, Voyage's and Jina's names (`task`) of it.",
    )
    prompt: str | None = Field(None, description="An addition: what goes before each text, in your own words.")

    @property
    def prompt_choice(self) -> PromptChoice:
        """The choice in the service's form."""
        return PromptChoice(self.prompt_name, self.input_type, self.prompt)


class StreamOptions(RequestModel):
    """The contents of a stream besides the answer."""

    include_usage: bool | None = None


class AdapterShare(RequestModel):
    """A low-rank adapter by its id in `GET /lora-adapters`, and the factor of its update."""

    id: Annotated[int, Field(ge=0, le=MAX_INT)]
    scale: Annotated[float, Field(ge=-1e6, le=1e6)]


class AdapterFields(RequestModel):
    """The choice of the low-rank adapters for the answer."""

    lora: Annotated[list[AdapterShare], Field(max_length=64)] | None = Field(
        None, description="Adapters and their scales; those that are not listed have none. Absent: what `model` says."
    )

    @property
    def shares(self) -> list[tuple[int, float]] | None:
        """Ids of adapters and their factors; None if the request does not say."""
        return None if self.lora is None else [(one.id, one.scale) for one in self.lora]


class DraftFields(RequestModel):
    """Limits on drafts of tokens. The answer is the same with any of them."""

    draft_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = Field(
        None,
        validation_alias=AliasChoices("draft_tokens", "speculative.n_max"),
        description="Most tokens guessed at a time for the answer; 0: none. Also as `speculative.n_max`.",
    )


class SamplingFields(GrammarFields, SamplerFields, DraftFields, AdapterFields):
    """The fields of all requests for an answer besides sampling parameters. All but `model` are additions."""

    model: str | None = Field(None, description="Name of the model; absent: the server's default model.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    stream: bool | None = None
    timings_per_token: bool | None = Field(None, description="Tell `timings` with every token of a stream.")
    return_progress: bool | None = Field(
        None, description="Tell in a stream how much of the prompt has been read, in `prompt_progress`."
    )
    ignore_eos: bool | None = Field(None, description="Go on after an end token.")
    cache_prompt: bool | None = Field(None, description="False: use nothing that is cached. Absent: true.")
    priority: Annotated[int, Field(ge=-100, le=100)] | None = Field(None, description="Higher is served first.")
    deadline_s: Annotated[float, Field(gt=0.0, le=1e6)] | None = Field(
        None, description="Seconds until it is given up."
    )

    def make_params(
        self,
        *,
        max_tokens: int = ALL_TOKENS,
        logit_bias: dict[str, float] | None = None,
        logprobs: int | None = None,
        n: int | None = None,
        best_of: int | None = None,
    ) -> SamplingParams:
        """Make the parameters for the engine; `max_tokens` is the default if the request does not say."""
        return SamplingParams(
            **read_params({"max_tokens": max_tokens, "temperature": 1.0}, self.list_given()),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logit_bias={int(token_id): bias for token_id, bias in (logit_bias or {}).items()},
            logprobs=logprobs,
            n=1 if n is None else n,
            best_of=best_of,
        )

    def add_options(self, wanted: R, prediction: str = "") -> R:
        """Return the request with the options of these fields besides the parameters."""
        return replace(
            wanted,
            cache_prompt=self.cache_prompt is not False,
            priority=self.priority or 0,
            deadline_s=self.deadline_s,
            drafts=DraftOptions(self.draft_tokens, prediction),
            reports_progress=bool(self.stream and self.return_progress),
        )


class PenaltyFields(OpenAIParameters, SamplingFields):
    """The fields that chat and text completions share and Responses do not have."""

    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Bias] | None = Field(
        None, description="Token id (as a string) to what is added to its logit."
    )
    n: Answers | None = None
    stream_options: StreamOptions | None = None


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


@frozen
class Offer:
    """The tools that may be called, and whether one must be."""

    tools: tuple[Tool, ...]
    choice: ToolChoice


def make_tool(name: str, description: str | None, parameters: JsonObject | None) -> Tool:
    """Make a tool of the service; without parameters it takes an empty object."""
    return Tool(name, description or "", parameters or {"type": "object", "properties": {}})


def make_offer(tools: Sequence[Tool], choice: Mode | NamedTool | None, allowed: Sequence[str] | None = None) -> Offer:
    """Check tools and choice against each other; `allowed` narrows the tools to those names.

    Raises InvalidRequest for names that occur twice, for a choice without tools, and for unknown names.
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
    """Read the offer of a chat completion."""
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
