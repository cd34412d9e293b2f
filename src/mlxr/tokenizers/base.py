"""What every tokenizer of mlxr is to its callers: text to token ids, and ids back to bytes and text, also as they come.

Knows no files and no libraries. Ids are positions in the vocabulary; bytes are UTF-8, possibly cut inside a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from copy import copy
from enum import IntEnum
from typing import Protocol


class TokenType(IntEnum):
    """What a token is; numbered as in GGUF's `tokenizer.ggml.token_type` and SentencePiece's `Type`."""

    NORMAL = 1
    UNKNOWN = 2  # stands for what the vocabulary cannot spell
    CONTROL = 3  # steers the model; never part of a text unless asked for
    USER_DEFINED = 4  # found in a text before everything else, and written out like text
    UNUSED = 5  # fills a gap in the numbering
    BYTE = 6  # one byte, spelt <0x00> to <0xFF>


HIDDEN_TYPES = frozenset({TokenType.UNKNOWN, TokenType.CONTROL})


class Tokenizer(Protocol):
    """Text to token ids and back. Safe to use from several threads at once.

    `eos_ids` are all tokens that end an answer. `add_bos` and `add_eos` say what `encode` puts around a text.
    `strips_leading_space`: the vocabulary writes a space before the first word of a text, which decoding takes off.
    """

    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    pad_id: int | None
    add_bos: bool
    add_eos: bool
    strips_leading_space: bool

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        `add_special` puts BOS and EOS around it where the vocabulary wants them; `parse_special` reads control
        tokens written in the text as such, otherwise they are plain characters. Raises InvalidRequest for text that
        is not Unicode (half of a surrogate pair).
        """
        ...

    def cut(self, ids: Sequence[int], limit: int, /) -> list[int]:
        """At most `limit` of the ids that `encode` gave: of a text that is too long, its end, but not the end token."""

    def join_pair(self, first: Sequence[int], second: Sequence[int], limit: int, /) -> tuple[list[int], int | None]:
        """Two texts as one input of at most `limit` tokens, and where the second one begins if its tokens have a type.

        They are encoded without what goes around a text. The longer one is cut first. Raises InvalidRequest where there
        is no room for both.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`, bytes that form no character as U+FFFD; control tokens are left out or spelt."""
        ...

    def token_bytes(self, token_id: int, /) -> bytes:
        """Exactly the bytes that the token adds to a text; a special token's are its spelling."""
        ...

    def token_text(self, token_id: int, /) -> str:
        """The token as the vocabulary spells it; raises TokenizerError for an id outside the vocabulary."""
        ...

    def token_id(self, text: str, /) -> int | None:
        """The token that the vocabulary spells so, or None."""
        ...

    def is_special(self, token_id: int, /) -> bool:
        """Whether the token is hidden from readers (control and unknown tokens)."""
        ...


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
