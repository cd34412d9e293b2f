"""From a request to what the engine needs and what turns its tokens back into events; the one path of all front doors.

Knows the tokenizer and the conversation's format, not the engine. `Session` and `AsyncSession` both begin here, so a
conversation is the same whoever steps the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlxr.core.types import SamplingParams
from mlxr.service.answer import Answer
from mlxr.service.prompt import Prompt, encode_chat, encode_prompt
from mlxr.service.requests import ChatRequest, TextRequest
from mlxr.tokenizers import ChatTemplate, Detokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request, ready for the engine; `answers` are fed with the engine's events, each by its index."""

    token_ids: list[int]
    params: SamplingParams
    answers: list[Answer]
    priority: int = 0
    deadline_s: float | None = None
    uses_cache: bool = True


class Preparation:
    """How requests to one model are prepared. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        vocab_size: int,
        model_name: str,
        system: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._vocab_size = vocab_size
        self._model_name = model_name
        self._system = system

    @property
    def can_chat(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None

    def encode_prompt(self, prompt: Prompt, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of plain text or of ready ids; raises InvalidRequest."""
        return encode_prompt(
            self.tokenizer, self._vocab_size, prompt, add_special=add_special, parse_special=parse_special
        )

    def encode_chat(self, request: ChatRequest) -> list[int]:
        """Token ids of a conversation; TemplateError without a chat template, InvalidRequest for bad messages."""
        messages = request.messages
        if self._system is not None and not any(message.get("role") == "system" for message in messages):
            messages = [{"role": "system", "content": self._system}, *messages]
        return encode_chat(self.tokenizer, self._template, messages, self._model_name)

    def prepare(self, request: TextRequest | ChatRequest) -> Prepared:
        """Everything about a request but the engine's own refusals."""
        is_chat = isinstance(request, ChatRequest)
        token_ids = self.encode_chat(request) if is_chat else self.encode_prompt(request.prompt)
        return replace(
            self.prepare_tokens(token_ids, request.params),
            priority=request.priority,
            deadline_s=request.deadline_s,
            uses_cache=request.cache_prompt,
        )

    def prepare_tokens(self, token_ids: Sequence[int], params: SamplingParams) -> Prepared:
        """A prompt that is token ids already."""
        stop_tokens = self._find_stop_tokens(params)
        answers = [
            Answer(Detokenizer(self.tokenizer, prompt_ids=token_ids), params, len(token_ids), stop_tokens, index)
            for index in range(params.n)
        ]
        engine_params = replace(params, stop_token_ids=params.stop_token_ids | stop_tokens.keys())
        return Prepared(list(token_ids), engine_params, answers)

    def _find_stop_tokens(self, params: SamplingParams) -> dict[int, str]:
        """Stop strings that are one special token: those are never decoded to text, so the engine must stop at them."""
        found = {}
        for stop in params.stop:
            token_id = self.tokenizer.token_id(stop)
            if token_id is not None and self.tokenizer.is_special(token_id):
                found[token_id] = stop
        return found
