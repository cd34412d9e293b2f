"""How well a model predicts a text: perplexity and bits per byte over windows that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mlxr.core.errors import InvalidRequest, ModelError
from mlxr.engine.engine import Engine
from mlxr.tokenizers import Tokenizer

MIN_WINDOW_TOKENS = 2
MAX_MEAN_NATS = 700.0  # e to this is nearly the largest float; a guess of equal chances has ln(vocabulary), about 12


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A scored token: its position among the tokens of the text, and its negative log-probability in nats."""

    position: int
    token_id: int
    nats: float


@dataclass(frozen=True, slots=True)
class TextScore:
    """The sum over all scored tokens: how many, their bytes of text, and their negative log-probability in nats."""

    tokens: int
    text_bytes: int
    nats: float

    @property
    def perplexity(self) -> float:
        """e to the mean negative log-probability of a token."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Negative log-probability in bits for each byte of text: comparable across vocabularies."""
        return self.nats / math.log(2) / self.text_bytes


def score_text(
    engine: Engine,
    tokenizer: Tokenizer,
    text: str,
    context_tokens: int,
    progress: Callable[[int, int], None] | None = None,
    note: Callable[[TokenScore], None] | None = None,
) -> TextScore:
    """Score `text` in windows of `context_tokens` tokens, each on its own.

    A window starts with BOS where the vocabulary wants it; every token but a window's first is scored. The text's
    end is scored too, in a shorter window. `note` is told every token that is scored. Raises InvalidRequest when there
    is nothing to score or the window is too large for the engine, ModelError when the model's log-probabilities are no
    numbers.
    """
    if not MIN_WINDOW_TOKENS <= context_tokens <= engine.context_tokens:
        raise InvalidRequest(
            "context", f"must be from {MIN_WINDOW_TOKENS} to {engine.context_tokens} tokens, got {context_tokens}"
        )
    token_ids = tokenizer.encode(text, add_special=False)
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    windows = list(split_windows(token_ids, context_tokens, bos))
    if not windows:
        raise InvalidRequest("text", f"has {len(token_ids)} tokens, too few to score one")
    tokens = text_bytes = 0
    nats = 0.0
    for index, window in enumerate(windows):
        scored, logprobs = window[1:], engine.score(window)
        nats -= float(logprobs.sum())
        if note is not None:
            start = index * (context_tokens - len(bos)) + 1 - len(bos)
            for offset, (token_id, logprob) in enumerate(zip(scored, logprobs.tolist(), strict=True)):
                note(TokenScore(start + offset, token_id, -logprob))
        tokens += len(scored)
        text_bytes += sum(len(tokenizer.token_bytes(token_id)) for token_id in scored)
        if progress is not None:
            progress(index + 1, len(windows))
    if not math.isfinite(nats):
        raise ModelError(f"the model's log-probabilities sum up to {nats}: its weights or a kernel are broken")
    if nats / tokens > MAX_MEAN_NATS:
        raise ModelError(f"the model's log-probabilities are {-nats / tokens:.0f} on average: its weights are broken")
    return TextScore(tokens, text_bytes, nats)


def split_windows(token_ids: list[int], context_tokens: int, bos: list[int]) -> Iterator[list[int]]:
    """Windows of `bos` and the next tokens, `context_tokens` together; one with nothing to score is left out."""
    step = context_tokens - len(bos)
    for start in range(0, len(token_ids), step):
        window = bos + token_ids[start : start + step]
        if len(window) >= MIN_WINDOW_TOKENS:
            yield window
