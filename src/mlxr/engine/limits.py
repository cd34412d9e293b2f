"""What a request may ask of an engine: tokens of the vocabulary, a context that holds it, pages that can hold it.

Refusals name the field, what was asked and what there is. Knows no running requests.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

from mlxr.cache.group import CacheGroup
from mlxr.core.errors import ContextFull, InvalidRequest, OutOfPages, SettingError
from mlxr.engine.request import EngineRequest
from mlxr.engine.scheduler import MAX_PRIORITY, MIN_PRIORITY


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one engine; all methods raise InvalidRequest or return.

    `pages` is how many pages of tokens one sequence can have that is alone in the arena.
    """

    vocab_size: int
    context_tokens: int
    pages: int
    page_size: int
    max_running: int

    def check_tokens(self, field: str, token_ids: Collection[int]) -> None:
        """There are some, and all are in the vocabulary."""
        if not token_ids:
            raise InvalidRequest(field, "has no tokens")
        self._check_vocabulary(field, token_ids)

    def check_prompt(self, request: EngineRequest) -> None:
        """All tokens that the request names are in the vocabulary, and all answers to it can grow together."""
        params = request.params
        self.check_tokens("prompt", request.token_ids)
        self._check_vocabulary("logit_bias", params.logit_bias)
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("prediction_ids", request.prediction_ids)
        if () in request.dry_breaker_ids:
            raise InvalidRequest("dry_breaker_ids", "has a breaker without tokens")
        self._check_vocabulary("dry_breaker_ids", [*chain.from_iterable(request.dry_breaker_ids)])
        if params.streams > self.max_running:
            raise InvalidRequest(
                "n" if params.best_of is None else "best_of",
                f"{params.streams} answers cannot grow together, the engine runs at most {self.max_running}; ask for "
                "fewer or raise the settings max_sequences and max_batch_tokens",
            )
        if request.constraint is not None and request.constraint.needs_end and params.ignore_eos:
            raise InvalidRequest("ignore_eos", "cannot be combined with a grammar, which ends with an end token")

    def check_urgency(self, request: EngineRequest) -> None:
        """The priority is in its range and the deadline a time to come."""
        priority, deadline_s = request.priority, request.deadline_s
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise InvalidRequest("priority", f"must be from {MIN_PRIORITY} to {MAX_PRIORITY}, got {priority}")
        if deadline_s is not None and not deadline_s > 0:
            raise InvalidRequest("deadline_s", f"must be above 0 seconds, got {deadline_s}")

    def choose_end(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Tokens that prompt and answer may have together: as many as asked for, bounded by the context.

        Without `max_tokens` the arena is a bound too; with it, OutOfPages says what the request would need.
        """
        if prompt_tokens >= self.context_tokens:
            raise ContextFull.of("prompt", prompt_tokens, self.context_tokens)
        arena_tokens = self.pages * self.page_size + 1  # the last token of an answer is never written
        asked_tokens = max(arena_tokens - prompt_tokens, 1) if max_tokens is None else max(max_tokens, 1)
        end_tokens = min(prompt_tokens + asked_tokens, self.context_tokens)
        if end_tokens > arena_tokens:
            raise OutOfPages(self._pages_for(end_tokens - 1), self.pages, self.page_size)
        return end_tokens

    def check_text(self, request: EngineRequest) -> None:
        """The tokens of a text to embed are in the vocabulary, and the empty arena and the context can hold them."""
        self.check_tokens("input", request.token_ids)
        tokens = len(request.token_ids)
        if tokens > self.context_tokens:
            reason = (
                f"is too large: this model's maximum context length is {self.context_tokens} tokens, the input has "
                f"{tokens}"
            )
            raise ContextFull("input", reason, tokens, self.context_tokens)
        if self._pages_for(tokens) > self.pages:
            raise InvalidRequest(
                "input",
                f"needs {self._pages_for(tokens)} cache pages of {self.page_size} tokens, the arena has {self.pages}; "
                "shorten it or raise the setting arena_bytes",
            )

    def check_score(self, tokens: int) -> None:
        """A text of `tokens` tokens can be scored."""
        if not 2 <= tokens <= self.context_tokens:
            raise InvalidRequest(
                "token_ids", f"scoring takes from 2 tokens to the context of {self.context_tokens}, got {tokens}"
            )

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _check_vocabulary(self, field: str, token_ids: Collection[int]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            foreign = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
            raise InvalidRequest(field, f"token {foreign} is not from 0 to {self.vocab_size - 1}")


def count_pages_alone(group: CacheGroup, context_tokens: int, step_tokens: int) -> int:
    """Pages of tokens that a sequence can have in `group` when it is alone, `step_tokens` of them in one step."""
    pages, page_size, shape = group.arena.pages, group.arena.page_size, group.arena.shape
    if pages < shape.count_peak(context_tokens, step_tokens, page_size):
        return pages
    return max(pages, -(-context_tokens // page_size))


def choose_context(context_tokens: int | None, model_tokens: int) -> int:
    """The context served: the model's, or a shorter one that was asked for."""
    if context_tokens is not None and not 1 <= context_tokens <= model_tokens:
        raise SettingError(
            f"context_tokens: must be from 1 to {model_tokens}, the context of this model; got {context_tokens}"
        )
    return context_tokens or model_tokens
