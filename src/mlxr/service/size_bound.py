"""How much text can fit in a context at most, which is known without reading it as tokens.

A token spells at most as many characters as the longest one of the vocabulary. So a text that is much longer than the
context times that length need not be tokenised to be refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from mlxr.core.errors import ContextFull
from mlxr.tokenizers import Tokenizer

MANY_ITEMS = 64  # from which on a list is asked for its kinds of items first
_NUMBERS = {int, float}
SLACK = 4  # for vocabularies that shorten a text before they cut it, as NFKC or runs of spaces


class SizeBound:
    """The bound of one model. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, context_tokens: int) -> None:
        self._tokenizer, self.context_tokens = tokenizer, context_tokens

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, map(self._tokenizer.token_text, range(self._tokenizer.vocab_size))))

    @property
    def characters(self) -> int:
        """Texts with more characters are refused."""
        return SLACK * self.context_tokens * self._longest

    def cut(self, text: str) -> str:
        """The beginning of a text that reaches as far as the context can."""
        return text if len(text) <= SLACK * self.context_tokens else text[: self.characters]

    def check(self, field: str, value: object, allowance: int = 0) -> None:
        """Raise ContextFull about `field` when the strings in a JSON-like value cannot fit in the context.

        `allowance` are characters that they may have besides.
        """
        if isinstance(value, list | tuple) and value and isinstance(value[0], int):  # a prompt that is ids already
            if len(value) > self.context_tokens:
                raise ContextFull.of(field, len(value), self.context_tokens)
            return
        enough = SLACK * self.context_tokens + allowance
        if count_characters(value, enough) <= enough:
            return  # fits even where each token is one character; the vocabulary need not be read
        characters = count_characters(value, self.characters + allowance)
        if characters > self.characters + allowance:
            reason = (
                f"this model's maximum context length is {self.context_tokens} tokens, which cannot hold a prompt of "
                f"{characters if isinstance(value, str) else f'more than {self.characters}'} characters"
            )
            raise ContextFull(field, reason, characters // self._longest, self.context_tokens)


def count_characters(value: object, enough: int, most_items: int | None = None) -> int:
    """Return how many characters the strings in a JSON-like value have; not all of them once there are `enough`.

    A list of more than `most_items` counts as more than enough, whatever it holds.
    """
    found, waiting = 0, [value]
    while waiting and found <= enough:
        part = waiting.pop()
        if isinstance(part, str):
            found += len(part)
        elif isinstance(part, Mapping):
            waiting.extend(part.values())
        elif isinstance(part, list | tuple):
            if most_items is not None and len(part) > most_items:
                return enough + len(part)
            if len(part) < MANY_ITEMS or not set(map(type, part)) <= _NUMBERS:
                waiting.extend(part)
    return found
