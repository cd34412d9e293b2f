"""Filling in the middle: a prompt of what comes before and after, for vocabularies that have tokens for it.

Each row of INFILL_TOKENS is one family's spelling (prefix, suffix, middle) from its published vocabulary; the order is
that of the models' training data, prefix first.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.core.errors import InvalidRequest
from mlxr.tokenizers import Tokenizer

INFILL_TOKENS: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 and 3, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)


def find_infill_tokens(tokenizer: Tokenizer) -> tuple[int, int, int] | None:
    """Ids of the tokens that open prefix, suffix and middle; None for a vocabulary without them."""
    for spellings in INFILL_TOKENS:
        prefix, suffix, middle = (tokenizer.token_id(text) for text in spellings)
        if prefix is not None and suffix is not None and middle is not None:
            return prefix, suffix, middle
    return None


def encode_infill(tokenizer: Tokenizer, prompt: str | Sequence[int], suffix: str) -> list[int]:
    """Token ids of a prompt whose continuation leads from `prompt` to `suffix`; control tokens in it are plain text.

    Raises InvalidRequest naming `suffix` where the vocabulary has no infill tokens.
    """
    tokens = find_infill_tokens(tokenizer)
    if tokens is None:
        raise InvalidRequest("suffix", "is not supported by this model: its vocabulary has no infill tokens")
    before = tokenizer.encode(prompt, add_special=False) if isinstance(prompt, str) else list(prompt)
    after = tokenizer.encode(suffix, add_special=False)
    start = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    return [*start, tokens[0], *before, tokens[1], *after, tokens[2]]
