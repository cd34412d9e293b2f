"""Keeps what users write from becoming control tokens.

A chat template writes control tokens as text, and so could anybody who writes `<|im_end|>` into a message. Before the
template sees a conversation, a mark, a character that occurs nowhere in it, goes into every spelling of a special
token that is found there. The rendered text then has only the template's own spellings; once it is encoded, the
tokens of the marks are taken out. What a user wrote is read as the plain characters that it is.

Tokens that a vocabulary spells with one character cannot be told from text. Knows no templates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby

from mlxr.core.errors import InvalidRequest
from mlxr.tokenizers import Tokenizer

# Private-use characters: no normalisation changes them, no text has them by accident, and no word contains them.
_MARKS = tuple(chr(0xE000 + 97 * step) for step in range(60))
_TRIES = 6


class SpecialGuard:
    """The guard of one vocabulary. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def warm_up(self) -> None:
        """Look through the vocabulary now, which takes a while for a large one, and not with the first request."""
        _ = self._pattern

    def choose_marks(self, *values: object) -> Sequence[str]:
        """Marks that may stand in `values`; none when nothing in them needs one."""
        texts = [text for value in values for text in _list_texts(value)]
        pattern = self._pattern
        if pattern is None or not any(pattern.search(text) for text in texts):
            return ()
        return [mark for mark in _MARKS if not any(mark in text for text in texts)][:_TRIES]

    def put_marks(self, value: object, mark: str) -> object:
        """A copy of a JSON-like value with `mark` in every spelling of a special token."""
        if isinstance(value, str):
            return value if self._pattern is None else self._pattern.sub(lambda match: match[0] + mark, value)
        if isinstance(value, Mapping):
            return {self.put_marks(key, mark): self.put_marks(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.put_marks(item, mark) for item in value]
        return value

    def take_marks(self, token_ids: Sequence[int], mark: str, count: int) -> list[int] | None:
        """`token_ids` without the tokens of `count` marks; None if these are not tokens of their own."""
        spelt = mark.encode()
        kept: list[int] = []
        run: list[int] = []  # tokens that may be those of a mark
        found = 0
        for token_id in token_ids:
            run.append(token_id)
            while run and not spelt.startswith(b"".join(map(self._tokenizer.token_bytes, run))):
                kept.append(run.pop(0))
            if run and b"".join(map(self._tokenizer.token_bytes, run)) == spelt:
                found += 1
                run.clear()
        return [*kept, *run] if found == count else None

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """The first character of every special token's spelling, where the rest follows."""
        tokenizer = self._tokenizer
        specials = (tokenizer.token_text(index) for index in range(tokenizer.vocab_size) if tokenizer.is_special(index))
        texts = sorted(text for text in specials if len(text) > 1)
        groups = [
            f"{re.escape(first)}(?={'|'.join(re.escape(text[1:]) for text in group)})"
            for first, group in groupby(texts, key=lambda text: text[0])
        ]
        return re.compile("|".join(groups)) if groups else None


def _list_texts(value: object) -> Iterator[str]:
    """All texts in a JSON-like value, keys included."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting.extend(value)
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)


def refuse_unprotected() -> InvalidRequest:
    """What to raise when no mark could be used."""
    return InvalidRequest("messages", "spell a control token, which this vocabulary cannot write as text")
