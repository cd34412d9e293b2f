"""Text from tokens as they come: never half a character, and together exactly what decoding all at once gives.

Knows the tokenizer's bytes. Ids are pushed one by one; each push returns the text that is certain by now, `flush` the
rest. Bytes that cannot become a character turn into U+FFFD as soon as that is certain, not before.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from copy import copy
from typing import Protocol

_LONGEST_CHARACTER_BYTES = 4


class ByteVocabulary(Protocol):
    """What the detokenizer needs of a tokenizer."""

    strips_leading_space: bool

    def token_bytes(self, token_id: int, /) -> bytes:
        """Exactly the bytes that the token adds to a text."""
        ...

    def is_special(self, token_id: int, /) -> bool:
        """Whether the token is hidden from readers."""
        ...


class Detokenizer:
    """Turns one answer's tokens into text. One per answer; not for several threads at once.

    `prompt_ids` are the tokens before the answer. The space that a SentencePiece vocabulary writes before the first
    word of a text is taken off only if nothing but special tokens comes before it: in the middle a space is a space.
    If the prompt ends inside a character, the answer's first bytes complete it, and the whole character is returned.
    """

    def __init__(self, tokenizer: ByteVocabulary, *, skip_special: bool = True, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_leading_space
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) >= _LONGEST_CHARACTER_BYTES and not self._at_start:
                break
            if not tokenizer.is_special(token_id):
                part = tokenizer.token_bytes(token_id)
                self._at_start = self._at_start and not part
                tail = part + tail
        self._decoder.decode(_find_open_character(tail))

    def fork(self) -> Detokenizer:
        """Return one more in the same state, which goes its own way."""
        other = copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def push(self, token_id: int) -> str:
        """The text that is certain after this token and was not returned yet; may be empty."""
        special = self._tokenizer.is_special(token_id)
        if special and self._skip_special:
            return ""
        part = self._tokenizer.token_bytes(token_id)
        if self._at_start and part and not special:
            self._at_start = False
            part = part.removeprefix(b" ")
        return self._decoder.decode(part)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never was completed, or nothing."""
        return self._decoder.decode(b"", final=True)


def _find_open_character(tail: bytes) -> bytes:
    """The bytes at the end of `tail` that may still become a character, or nothing."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(tail)
    return decoder.getstate()[0]
