"""SentencePiece-style BPE from pieces and scores, as GGUF files of kind `llama` carry it.

Knows pieces, scores and types; not where they came from. A text is cut at special tokens, spaces become U+2581, and
neighbouring pieces are merged, best score first, as long as the vocabulary knows the result. What is left unknown is
spelt in byte tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache

from mlxr.core.errors import TokenizerError
from mlxr.tokenizers.base import TokenType
from mlxr.tokenizers.codec import SpecialRules, VocabularyTokenizer
from mlxr.tokenizers.splitter import SpecialSplitter
from mlxr.tokenizers.vocabulary import SPACE_MARK, Vocabulary, parse_byte_token

# Unicode's, of which Python's has four control characters more.
_WHITE_SPACE = "".join(chr(code) for code in range(0x3001) if chr(code).isspace() and not 0x1C <= code <= 0x1F)
_CACHED_CHUNKS = 1 << 14
_CACHED_CHUNK_CHARACTERS = 48


class SpmTokenizer(VocabularyTokenizer):
    """Merge by score with a heap: the best score first, the leftmost of equals (sources: SentencePiece, llama.cpp).

    Control, unknown and byte tokens are never the result of a merge, so a text cannot smuggle them in. White space that
    follows one of `stripping_ids` is no part of the text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        scores: Sequence[float],
        rules: SpecialRules,
        *,
        add_space_prefix: bool,
        unknown_id: int | None,
        stripping_ids: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(vocabulary, rules, strips_leading_space=add_space_prefix)
        if len(scores) != len(vocabulary):
            raise TokenizerError(f"the vocabulary has {len(vocabulary)} tokens but {len(scores)} scores")
        if not all(map(math.isfinite, scores)):
            raise TokenizerError("a token's score is not a finite number")
        self.add_space_prefix, self._stripping_ids = add_space_prefix, stripping_ids
        reachable = vocabulary.list_ids(TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
        self._pieces = {
            vocabulary.texts[index]: (index, float(scores[index]))
            for index in reachable
            if index not in vocabulary.firsts
        }
        self._byte_ids = _find_byte_ids(vocabulary, unknown_id)
        self._unknown_id = unknown_id if unknown_id is not None else -1  # only used when there are no byte tokens
        user_defined = vocabulary.list_ids(TokenType.USER_DEFINED)
        hidden = vocabulary.list_ids(TokenType.CONTROL, TokenType.UNKNOWN)
        self._plain_splitter = SpecialSplitter({vocabulary.texts[index]: index for index in user_defined})
        self._special_splitter = SpecialSplitter({vocabulary.texts[index]: index for index in (*user_defined, *hidden)})
        # If no piece has a space mark after another character, nothing merges across the start of a word, and a text
        # may be merged word by word, most words from the cache. Merges elsewhere do not change, so neither do the ids.
        self._words_are_apart = not any(SPACE_MARK in piece.lstrip(SPACE_MARK) for piece in self._pieces)
        self._merge_cached = lru_cache(maxsize=_CACHED_CHUNKS)(self._merge)

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        splitter = self._special_splitter if parse_special else self._plain_splitter
        ids: list[int] = []
        after_special = True
        for piece in splitter.split(text):
            if isinstance(piece, int):
                ids.append(piece)
                after_special = True
                continue
            if ids and ids[-1] in self._stripping_ids:
                piece = piece.lstrip(_WHITE_SPACE)
                if not piece:
                    continue
            prefix = " " if self.add_space_prefix and after_special else ""
            marked = (prefix + piece).replace(" ", SPACE_MARK)
            for word in _cut_words(marked) if self._words_are_apart else [marked]:
                ids.extend(self._merge_cached(word) if len(word) <= _CACHED_CHUNK_CHARACTERS else self._merge(word))
            after_special = False
        return ids

    def _merge(self, word: str) -> tuple[int, ...]:
        """Ids of a piece of text without special tokens, spaces already marked.

        Symbol i starts as character i; `lengths[i]` is 0 once it was merged into its left neighbour. A heap entry is
        (-score, left, right, length): it is stale when one of the two is gone or has grown.
        """
        pieces, count = self._pieces, len(word)
        lengths = [1] * count
        previous = list(range(-1, count - 1))
        following = [*range(1, count), -1]
        heap: list[tuple[float, int, int, int]] = []

        def propose(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                length = lengths[left] + lengths[right]
                known = pieces.get(word[left : left + length])
                if known is not None:
                    heapq.heappush(heap, (-known[1], left, right, length))

        for right in range(1, count):
            propose(right - 1, right)
        while heap:
            _, left, right, length = heapq.heappop(heap)
            if not lengths[left] or not lengths[right] or lengths[left] + lengths[right] != length:
                continue
            lengths[left], lengths[right] = length, 0
            after = following[left] = following[right]
            if after >= 0:
                previous[after] = left
            propose(previous[left], left)
            propose(left, after)
        return self._look_up(word, lengths)

    def _look_up(self, word: str, lengths: list[int]) -> tuple[int, ...]:
        ids: list[int] = []
        for start, length in enumerate(lengths):
            if not length:
                continue
            text = word[start : start + length]
            known = self._pieces.get(text)
            if known is not None:
                ids.append(known[0])
            else:
                ids.extend(self._spell(text))
        return tuple(ids)

    def _spell(self, text: str) -> list[int]:
        """A character that is no piece: its bytes' tokens, or the unknown token where the vocabulary has no bytes."""
        return [self._byte_ids[byte] for byte in text.encode()] if self._byte_ids else [self._unknown_id]


def _find_byte_ids(vocabulary: Vocabulary, unknown_id: int | None) -> list[int]:
    """The token of each byte, or an empty list if the vocabulary spells none; bytes it lacks are unknown."""
    found: dict[int | None, int] = {}
    for index in vocabulary.list_ids(TokenType.BYTE):
        found.setdefault(parse_byte_token(vocabulary.texts[index]), index)
    if None in found:
        raise TokenizerError(f"byte token {vocabulary.texts[found[None]]!r} is not spelt <0x00> to <0xFF>")
    missing = [byte for byte in range(256) if byte not in found]
    if missing and unknown_id is None:
        raise TokenizerError(f"the vocabulary has no token for byte {missing[0]:#04x} and no unknown token")
    return [found.get(byte, unknown_id if unknown_id is not None else 0) for byte in range(256)] if found else []


def _cut_words(marked: str) -> list[str]:
    """Cut before every run of space marks that follows another character."""
    words: list[str] = []
    start = 0
    position = marked.find(SPACE_MARK, 1)
    while position > 0:
        if marked[position - 1] != SPACE_MARK:
            words.append(marked[start:position])
            start = position
        position = marked.find(SPACE_MARK, position + 1)
    words.append(marked[start:])
    return words
