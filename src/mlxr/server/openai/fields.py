"""Fields that several OpenAI requests share: sampling, our own additions, and labels of the caller.

Pure data: from JSON to SamplingParams. A field that only one value fits is declared with that value, so any other is
refused by name.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from mlxr.core.sampling import ALL_TOKENS, read_params
from mlxr.core.types import MAX_ANSWERS, MAX_INT, SamplingParams
from mlxr.server.formats import GrammarFields
from mlxr.server.json_models import RequestModel
from mlxr.server.parameter_fields import OpenAIParameters
from mlxr.server.samplers import SamplerFields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Count = Annotated[int, Field(ge=1, le=MAX_INT)]
Answers = Annotated[int, Field(ge=1, le=MAX_ANSWERS)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]


class ReasoningOptions(RequestModel):
    """How much to think: an effort, or tokens. Thoughts are given as they are, never as a summary."""

    effort: Effort | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = Field(
        None, description="Most tokens of thought; the same as `thinking_budget`."
    )
    enabled: bool | None = Field(None, description="Whether to think, where no effort says it.")

    @property
    def think(self) -> bool | str | None:
        """The effort, or whether to think."""
        return self.enabled if self.effort is None else self.effort


class StreamOptions(RequestModel):
    """Says what a stream carries besides the answer."""

    include_usage: bool | None = None


class AdapterShare(RequestModel):
    """A low-rank adapter by its id in `GET /lora-adapters`, and what its update is multiplied by."""

    id: Annotated[int, Field(ge=0, le=MAX_INT)]
    scale: Annotated[float, Field(ge=-1e6, le=1e6)]


class AdapterFields(RequestModel):
    """Which low-rank adapters the answer has."""

    lora: Annotated[list[AdapterShare], Field(max_length=64)] | None = Field(
        None, description="Adapters and their scales; those that are not listed have none. Absent: what `model` says."
    )

    @property
    def shares(self) -> list[tuple[int, float]] | None:
        """Ids of adapters and their factors; None where the request does not say."""
        return None if self.lora is None else [(one.id, one.scale) for one in self.lora]


class DraftFields(RequestModel):
    """How much may be guessed. The answer is the same."""

    draft_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = Field(
        None,
        validation_alias=AliasChoices("draft_tokens", "speculative.n_max"),
        description="Most tokens guessed at a time for the answer; 0: none. Also as `speculative.n_max`.",
    )


class SamplingFields(GrammarFields, SamplerFields, DraftFields, AdapterFields):
    """Says what all requests for an answer have besides the sampling parameters. All but `model` are additions."""

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
        """Parameters for the engine; `max_tokens` is what holds where the request does not say."""
        return SamplingParams(
            **read_params({"max_tokens": max_tokens, "temperature": 1.0}, self.list_given()),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logit_bias={int(token_id): bias for token_id, bias in (logit_bias or {}).items()},
            logprobs=logprobs,
            n=1 if n is None else n,
            best_of=best_of,
            reports_progress=bool(self.stream and self.return_progress),
            draft_tokens=self.draft_tokens,
        )


class PenaltyFields(OpenAIParameters, SamplingFields):
    """The fields that chat and text completions share and Responses do not have."""

    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Bias] | None = Field(
        None, description="Token id (as a string) to what is added to its logit."
    )
    n: Answers | None = None
    stream_options: StreamOptions | None = None
