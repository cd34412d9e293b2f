"""A model's vocabulary as the grammar library wants it: the bytes of every token, and which tokens are special.

Tokens that no text can contain get no bytes, so that no grammar ever allows them: gaps in the numbering, rows of the
output weights beyond the tokenizer, and bytes that are never part of UTF-8. Special tokens are allowed only where a
grammar names them; end tokens are special here whatever the tokenizer says, since an answer ends with them.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import InvalidRequest
from mlxr.tokenizers import Tokenizer

SPECIAL_MARKER = b"\xff"  # the library writes it before the names of special tokens; it is no byte of UTF-8
_MAX_FORCED = 4096
_MAX_TOKEN_BYTES = 1000  # the library's trie is no deeper than 1024


class GrammarVocabulary:
    """The attributes and the call are those that `llguidance.TokenizerWrapper` asks for."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        known = range(min(vocab_size, tokenizer.vocab_size))
        self.special_token_ids = [index for index in known if tokenizer.is_special(index) or index in eos_ids]
        self.eos_token_id = min(eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [_find_bytes(tokenizer, index) for index in known] + [b""] * (vocab_size - len(known))
        special = set(self.special_token_ids)
        self._by_bytes = {part: index for index, part in enumerate(self.tokens) if part and index not in special}
        self._longest = max(map(len, self._by_bytes), default=1)
        self._forced: dict[bytes, list[int]] = {}

    def __call__(self, text: bytes) -> list[int]:
        """Tokens for a text that a grammar leaves no choice about: the tokenizer's own, if they are exactly this text.

        Asked for in every step of the names in a schema, so that answers are kept.
        """
        token_ids = self._forced.get(text)
        if token_ids is None:
            if len(self._forced) >= _MAX_FORCED:
                self._forced.clear()
            token_ids = self._forced[text] = self._find_tokens(text)
        return token_ids

    def list_longest_first(self) -> npt.NDArray[np.intp]:
        """Return all tokens that have a text, those with the most bytes first."""
        lengths = np.array([len(part) for part in self.tokens])
        lengths[self.special_token_ids] = 0
        order = np.argsort(-lengths, kind="stable")
        return order[: np.count_nonzero(lengths)]

    def _find_tokens(self, text: bytes) -> list[int]:
        """A tokenizer that writes a space before every text, or changes it, is asked for a further line, which begins
        where the text does; failing that the longest tokens are taken.
        """
        for start in ("", "\n"):
            try:
                token_ids = self._tokenizer.encode(start + text.decode(), add_special=False)
            except (UnicodeDecodeError, InvalidRequest):
                break
            tail = self._cut_tail(token_ids, text)
            if tail is not None:
                return tail
        return self.take_longest(text)

    def _cut_tail(self, token_ids: list[int], text: bytes) -> list[int] | None:
        """The last of `token_ids` that are `text` together, if there are such."""
        rest = text
        for place in range(len(token_ids) - 1, -1, -1):
            part = self.tokens[token_ids[place]]
            if not part or not rest.endswith(part):
                return None
            rest = rest[: len(rest) - len(part)]
            if not rest:
                return token_ids[place:]
        return None

    def take_longest(self, text: bytes) -> list[int]:
        """Tokens from the left, always the longest; ends where no token fits."""
        token_ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._by_bytes), None)
            if end is None:
                break
            token_ids.append(self._by_bytes[text[start:end]])
            start = end
        return token_ids


def _find_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    part = tokenizer.token_bytes(token_id)
    return b"" if part.startswith(SPECIAL_MARKER) or len(part) > _MAX_TOKEN_BYTES else part
