"""The body of a text completion, and the requests that it is to the service: one for each prompt."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import Field

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import SamplingParams
from mlxr.server.formats import ResponseFormat
from mlxr.server.openai.fields import Answers, PenaltyFields, TokenId
from mlxr.service.prompt import Prompt
from mlxr.service.requests import TextRequest

MAX_PROMPTS = 2048
DEFAULT_MAX_TOKENS = 16
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
TokenLists = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
Prompts = str | TokenIds | Texts | TokenLists


def split_prompts(prompts: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
    """The prompts one by one: text, or token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts[0], int):  # then all are, as the request's model has checked
        return [prompts]
    return cast("list[Prompt]", prompts)


class CompletionRequest(PenaltyFields):
    """Continue one text, or each of several."""

    prompt: Prompts | None = Field(None, description="Text or token ids, one or several. Absent: the empty text.")
    best_of: Answers | None = None
    echo: bool | None = Field(None, description="Begin the answer with the prompt.")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = Field(None, description="What comes after the answer; for models with infill tokens.")
    response_format: ResponseFormat | None = Field(None, description="An addition to the dialect.")

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts one by one."""
        return [""] if self.prompt is None else split_prompts(self.prompt)

    def to_request(self, prompt: Prompt) -> TextRequest:
        """What the service is asked for one of the prompts; raises InvalidRequest naming the field."""
        if self.echo and self.suffix and self.logprobs is not None:
            raise InvalidRequest("logprobs", "cannot be had with echo and suffix: the model reads another prompt then")
        return TextRequest(
            prompt=prompt,
            params=self._make_params(),
            grammar=self.make_grammar(self.response_format, "response_format"),
            cache_prompt=self.cache_prompt is not False,
            priority=self.priority or 0,
            deadline_s=self.deadline_s,
        )

    def _make_params(self) -> SamplingParams:
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise InvalidRequest("best_of", "cannot be streamed: the best is known when all answers have ended")
        return self.make_params(
            max_tokens=DEFAULT_MAX_TOKENS,
            logit_bias=self.logit_bias,
            logprobs=self.logprobs,
            n=self.n,
            best_of=self.best_of,
        )
