"""Fields that several OpenAI requests share: sampling, our own additions, and labels of the caller.

Pure data: from JSON to SamplingParams. A field that only one value fits is declared with that value, so any other is
refused by name.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mlxr.core.types import MAX_ANSWERS, MAX_SEED, MAX_STOP_STRINGS, SamplingParams
from mlxr.server.json_models import MAX_INT, RequestModel, Share, Text, bound_top_p

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Count = Annotated[int, Field(ge=1, le=MAX_INT)]
Answers = Annotated[int, Field(ge=1, le=MAX_ANSWERS)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Penalty = Annotated[float, Field(ge=-100.0, le=100.0)]
Seed = Annotated[int, Field(ge=-(2**63), lt=MAX_SEED)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
StopStrings = Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS)]


class StreamOptions(RequestModel):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None


class SamplingFields(RequestModel):
    """How tokens are chosen. From `top_k` on the fields are additions to the dialect."""

    model: str | None = Field(None, description="Name of the model; absent: the server's default model.")
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = Field(None, description="Absent: 1.")
    top_p: Share | None = Field(None, description="Absent: 1. 0: the likeliest token.")
    top_k: Annotated[int, Field(ge=0, le=MAX_INT)] | None = Field(None, description="Absent or 0: off.")
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = Field(None, description="Go on after an end token.")
    cache_prompt: bool | None = Field(None, description="False: use nothing that is cached. Absent: true.")
    priority: Annotated[int, Field(ge=-100, le=100)] | None = Field(None, description="Higher is served first.")
    deadline_s: Annotated[float, Field(gt=0.0, le=1e6)] | None = Field(
        None, description="Seconds until it is given up."
    )

    def make_params(
        self,
        *,
        max_tokens: int | None,
        stop: str | list[str] | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        seed: int | None = None,
        logit_bias: dict[str, float] | None = None,
        logprobs: int | None = None,
        n: int | None = None,
        best_of: int | None = None,
    ) -> SamplingParams:
        """Parameters for the engine; a negative seed counts as its 64-bit two's complement."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=bound_top_p(self.top_p),
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=presence_penalty or 0.0,
            frequency_penalty=frequency_penalty or 0.0,
            seed=None if seed is None else seed % MAX_SEED,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logit_bias={int(token_id): bias for token_id, bias in (logit_bias or {}).items()},
            logprobs=logprobs,
            n=1 if n is None else n,
            best_of=best_of,
        )


class PenaltyFields(SamplingFields):
    """The sampling fields that chat and text completions share and Responses do not have."""

    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Text | StopStrings | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Bias] | None = Field(
        None, description="Token id (as a string) to what is added to its logit."
    )
    n: Answers | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
