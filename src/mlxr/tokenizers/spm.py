"""SentencePiece-style BPE from pieces and scores, as in GGUF files of kind `llama`.

Knows pieces, scores and types; not where they came from. A text is cut at special tokens, spaces become U+2581, and
neighbouring pieces are merged, best score first, as long as the vocabulary has the result. Unknown characters are spelt
in byte tokens. Two other kinds look for whole pieces: the longest first (RWKV), or by their scores (PLaMo 2).
"""

from __future__ import annotations

import heapq
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from mlxr.core.errors import TokenizerError
from mlxr.core.frozen import frozen
from mlxr.tokenizers.vocabulary import (
    SPACE_MARK,
    AddedSpelling,
    SpecialRules,
    Spelling,
    TokenType,
    Vocabulary,
    VocabularyTokenizer,
    add_spellings,
    parse_byte_token,
)

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor


class SpecialSplitter:
    """Finds special tokens in texts: the leftmost first, and of several at one place the longest.

    The same rule as the `tokenizers` library, whose vocabularies the models were trained with. llama.cpp looks for
    the longest token of the whole text first; the two differ only if spellings overlap in part.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        self._lengths: dict[str, tuple[int, ...]] = {}
        for first in {text[0] for text in ids}:
            self._lengths[first] = tuple(sorted({len(text) for text in ids if text[0] == first}, reverse=True))
        starts = "".join(re.escape(first) for first in sorted(self._lengths))
        self._starts = re.compile(f"[{starts}]") if starts else None

    def split(self, text: str) -> Iterator[str | int]:
        """The pieces of `text`, none of them empty."""
        if self._starts is None:
            if text:
                yield text
            return
        done = position = 0
        while match := self._starts.search(text, position):
            position = match.start()
            found = self._match_at(text, position)
            if found is None:
                position += 1
                continue
            if position > done:
                yield text[done:position]
            yield self._ids[found]
            done = position = position + len(found)
        if done < len(text):
            yield text[done:]

    def _match_at(self, text: str, position: int) -> str | None:
        for length in self._lengths[text[position]]:
            candidate = text[position : position + length]
            if candidate in self._ids:
                return candidate
        return None


# Unicode's white space; Python's has four control characters more.
_WHITE_SPACE = "".join(chr(code) for code in range(0x3001) if chr(code).isspace() and not 0x1C <= code <= 0x1F)
_CACHED_CHUNKS = 1 << 14
_CACHED_CHUNK_CHARACTERS = 48


class CuttingTokenizer(VocabularyTokenizer):
    """Cuts a text at special tokens, and encodes the pieces between them."""

    def __init__(self, vocabulary: Vocabulary, rules: SpecialRules, *, strips_leading_space: bool = False) -> None:
        super().__init__(vocabulary, rules, strips_leading_space=strips_leading_space)
        user_defined = vocabulary.list_ids(TokenType.USER_DEFINED)
        hidden = vocabulary.list_ids(TokenType.CONTROL, TokenType.UNKNOWN)
        self._plain_splitter = SpecialSplitter({vocabulary.texts[index]: index for index in user_defined})
        self._special_splitter = SpecialSplitter({vocabulary.texts[index]: index for index in (*user_defined, *hidden)})

    def _split(self, text: str, parse_special: bool) -> Iterator[str | int]:
        return (self._special_splitter if parse_special else self._plain_splitter).split(text)

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        for piece in self._split(text, parse_special):
            ids += [piece] if isinstance(piece, int) else self._encode_piece(piece)
        return ids

    def _encode_piece(self, text: str) -> list[int]:
        """The ids of a text without special tokens."""
        raise NotImplementedError


class SpmTokenizer(CuttingTokenizer):
    """Merge by score with a heap: the best score first, the leftmost of equals (sources: SentencePiece, llama.cpp).

    Control, unknown and byte tokens are never the result of a merge, so a text cannot smuggle them in. White space
    after one of `stripping_ids` is dropped.
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
        # If no piece has a space mark after another character, nothing merges across the start of a word, and a text
        # may be merged word by word, most words from the cache. The merges are the same, so the ids are, too.
        self._words_are_apart = not any(SPACE_MARK in piece.lstrip(SPACE_MARK) for piece in self._pieces)
        self._merge_cached = lru_cache(maxsize=_CACHED_CHUNKS)(self._merge)

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        after_special = True
        for piece in self._split(text, parse_special):
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
        (-score, left, right, length): it is stale if one of the two is gone or has grown.
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
        """Spell a character that is no piece: the tokens of its bytes, or the unknown token if there are none."""
        return [self._byte_ids[byte] for byte in text.encode()] if self._byte_ids else [self._unknown_id]


class LongestTokenizer(CuttingTokenizer):
    """Takes from the left the longest token that the bytes of a text begin with, as RWKV does (source: llama.cpp)."""

    def __init__(self, vocabulary: Vocabulary, rules: SpecialRules, unknown_id: int | None) -> None:
        super().__init__(vocabulary, rules)
        plain = vocabulary.list_ids(TokenType.NORMAL, TokenType.USER_DEFINED)
        self._tokens = {vocabulary.token_bytes(index): index for index in plain}
        self._lengths = _list_lengths(self._tokens)
        missing = [byte for byte in range(256) if bytes([byte]) not in self._tokens]
        if missing and unknown_id is None:
            raise TokenizerError(f"the vocabulary has no token for byte {missing[0]:#04x} and no unknown token")
        self._unknown_id = unknown_id if unknown_id is not None else 0

    def _encode_piece(self, text: str) -> list[int]:
        data, ids, at = text.encode(), list[int](), 0
        while at < len(data):
            parts = (data[at : at + length] for length in self._lengths.get(data[at : at + 1], ()))
            found = next((part for part in parts if part in self._tokens), None)
            ids.append(self._unknown_id if found is None else self._tokens[found])
            at += 1 if found is None else len(found)
        return ids


class BestPathTokenizer(CuttingTokenizer):
    """Cuts a text into the pieces with the largest sum of scores, as PLaMo 2 does.

    Scores count in ten-thousandths, a character that no piece begins with costs 1,000 and is spelt in bytes, and of
    equal ways the one with the longer first piece wins (source: llama.cpp).
    """

    _PARTS, _LEAST = 10_000, -20_000_000

    def __init__(
        self, vocabulary: Vocabulary, scores: Sequence[float], rules: SpecialRules, unknown_id: int | None
    ) -> None:
        super().__init__(vocabulary, rules)
        self._byte_ids = _find_byte_ids(vocabulary, unknown_id)
        if not self._byte_ids:
            raise TokenizerError("the vocabulary has no tokens for bytes")
        self._pieces: dict[str, tuple[int, int]] = {}
        for index in vocabulary.list_ids(TokenType.NORMAL, TokenType.USER_DEFINED):
            score = _round_half_up(scores[index] * self._PARTS) if math.isfinite(scores[index]) else self._LEAST
            if score > self._LEAST:
                self._pieces[vocabulary.texts[index]] = index, score
        self._lengths = _list_lengths(self._pieces)

    def _encode_piece(self, text: str) -> list[int]:
        text = text.removeprefix("\ufeff")
        count = len(text)
        costs, steps = [0] * (count + 1), [1] * count
        for at in range(count - 1, -1, -1):
            best = None
            for length in self._lengths.get(text[at], ()):
                piece = self._pieces.get(text[at : at + length])
                if at + length <= count and piece is not None:
                    cost = costs[at + length] - piece[1]
                    if best is None or cost < best:
                        best, steps[at] = cost, length
            spelt = costs[at + 1] + 1_000 * self._PARTS
            if best is None or spelt < best:
                best, steps[at] = spelt, 0
            costs[at] = best
        ids, at = list[int](), 0
        while at < count:
            part = text[at : at + steps[at]]
            ids += [self._pieces[part][0]] if part else [self._byte_ids[byte] for byte in text[at].encode()]
            at += steps[at] or 1
        return ids


_Text = TypeVar("_Text", str, bytes)


def _list_lengths(pieces: Mapping[_Text, object]) -> dict[_Text, tuple[int, ...]]:
    """The lengths of the pieces that begin with each character or byte, the longest first."""
    found: dict[_Text, set[int]] = {}
    for piece in pieces:
        found.setdefault(piece[:1], set()).add(len(piece))
    return {first: tuple(sorted(lengths, reverse=True)) for first, lengths in found.items()}


def _round_half_up(number: float) -> int:
    """Round to the nearest whole number, halves away from 0."""
    return math.floor(number + 0.5) if number >= 0 else math.ceil(number - 0.5)


def _find_byte_ids(vocabulary: Vocabulary, unknown_id: int | None) -> list[int]:
    """The token of each byte, the unknown token for missing ones; an empty list if the vocabulary has no bytes."""
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


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of ModelProto


class ModelKind(IntEnum):
    """The algorithm of the model (TrainerSpec.ModelType)."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@frozen
class SentencePieceModel:
    """The contents of a tokenizer.model; ids as in TrainerSpec, -1 for none."""

    pieces: list[str]
    scores: list[float]
    types: list[TokenType]
    kind: ModelKind
    unknown_id: int
    bos_id: int
    eos_id: int
    pad_id: int
    normalizer: str
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    whitespace_as_suffix: bool


def parse_sentencepiece_model(data: bytes, name: str) -> SentencePieceModel:
    """Parse the model in `data`; errors call it `name`. Raises TokenizerError for anything malformed."""
    try:
        return _parse_model(data, name)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise TokenizerError(f"{name} is not a SentencePiece model: {error}") from error


def _parse_model(data: bytes, name: str) -> SentencePieceModel:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[TokenType] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for field, value in _read_fields(data):
        if field == _PIECES and isinstance(value, bytes):
            piece = dict(_read_fields(value))
            pieces.append(_as_bytes(piece.get(1, b"")).decode())
            scores.append(struct.unpack("<f", _as_bytes(piece.get(2, bytes(4))))[0])
            types.append(TokenType(_as_int(piece.get(3, TokenType.NORMAL))))
        elif field == _TRAINER and isinstance(value, bytes):
            trainer |= dict(_read_fields(value))  # parts of a message merge
        elif field == _NORMALIZER and isinstance(value, bytes):
            normalizer |= dict(_read_fields(value))
    if not pieces:
        raise TokenizerError(f"{name} is not a SentencePiece model: it has no pieces")
    # The second arguments are the defaults of the protocol's definition.
    return SentencePieceModel(
        pieces=pieces,
        scores=scores,
        types=types,
        kind=ModelKind(_as_int(trainer.get(3, ModelKind.UNIGRAM))),
        unknown_id=_as_int(trainer.get(40, 0)),
        bos_id=_as_int(trainer.get(41, 1)),
        eos_id=_as_int(trainer.get(42, 2)),
        pad_id=_as_int(trainer.get(43, -1)),
        normalizer=_as_bytes(normalizer.get(1, b"")).decode(),
        add_dummy_prefix=bool(normalizer.get(3, True)),
        remove_extra_whitespaces=bool(normalizer.get(4, True)),
        escape_whitespaces=bool(normalizer.get(5, True)),
        whitespace_as_suffix=bool(trainer.get(24, False)),
    )


def hide_repeats(data: bytes) -> bytes:
    """Rename later repeats of pieces and mark them unused, as the library refuses a piece that comes twice."""
    taken: set[bytes] = set()
    written: list[bytes] = []
    for field, value in _read_fields(data):
        if field == _PIECES and isinstance(value, bytes):
            text = _as_bytes(dict(_read_fields(value)).get(1, b""))
            if text in taken:
                name = b"[REPEATED_%d]" % len(written)
                # Of two values of one field the later one counts: this overrides the name and the type.
                value += b"\x0a" + _write_varint(len(name)) + name + b"\x18%c" % TokenType.UNUSED
            taken.add(text)
        tag = _write_varint(field << 3 | (_BYTES if isinstance(value, bytes) else _VARINT))
        written.append(tag + (_write_varint(len(value)) + value if isinstance(value, bytes) else _write_varint(value)))
    return b"".join(written)


def _write_varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def _read_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers with their values: whole numbers for varints, bytes for the other wire types."""
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        field, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            number, position = _read_varint(data, position)
            yield field, number
            continue
        if wire == _BYTES:
            length, position = _read_varint(data, position)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if length > len(data) - position:
            raise ValueError(f"a field of {length} bytes at byte {position} reaches beyond the end")
        yield field, data[position : position + length]
        position += length


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"a number at byte {position} does not end")


def _as_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field has the wrong type")
    return value


def _as_int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a field has the wrong type")
    # int32 fields carry -1 as a 64-bit number.
    return value - (1 << 64) if value >= 1 << 63 else value


# A protocol buffer's parts merge: this one appended says normalizer_spec { add_dummy_prefix: false }.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceTokenizer(VocabularyTokenizer):
    """Encodes with the `sentencepiece` library.

    `prefix_every_part`: text after a special token begins a new word, as at the start of the whole text.
    """

    def __init__(
        self,
        data: bytes,
        model: SentencePieceModel,
        vocabulary: Vocabulary,
        rules: SpecialRules,
        *,
        prefix_every_part: bool,
    ) -> None:
        super().__init__(vocabulary, rules, strips_leading_space=model.add_dummy_prefix)
        if len(set(model.pieces)) < len(model.pieces):
            data = hide_repeats(data)
        self._first = _load_processor(data)
        self._later = self._first if prefix_every_part else _load_processor(data + _NO_DUMMY_PREFIX)
        added = [index for index in vocabulary.list_ids(TokenType.USER_DEFINED) if index >= len(model.pieces)]
        hidden = vocabulary.list_ids(TokenType.CONTROL, TokenType.UNKNOWN)
        self._plain_splitter = SpecialSplitter({vocabulary.texts[index]: index for index in added})
        self._special_splitter = SpecialSplitter({vocabulary.texts[index]: index for index in (*added, *hidden)})

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        splitter = self._special_splitter if parse_special else self._plain_splitter
        ids: list[int] = []
        processor = self._first
        for piece in splitter.split(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(processor.EncodeAsIds(piece))
            processor = self._later
        return ids


def list_model_tokens(
    model: SentencePieceModel, added: Sequence[AddedSpelling], vocab_size: int | None
) -> tuple[list[str], list[TokenType]]:
    """Spellings and types of all tokens: the model's pieces, the added ones, and fillers up to `vocab_size`.

    User-defined pieces are spelt with plain spaces, as in texts.
    """
    texts = [
        piece.replace(SPACE_MARK, " ") if kind is TokenType.USER_DEFINED else piece
        for piece, kind in zip(model.pieces, model.types, strict=True)
    ]
    types = list(model.types)
    add_spellings(texts, types, added, vocab_size)
    return texts, types


def make_model_vocabulary(
    model: SentencePieceModel, added: Sequence[AddedSpelling], vocab_size: int | None
) -> Vocabulary:
    """The vocabulary of a model with the tokens that its folder adds."""
    return Vocabulary(*list_model_tokens(model, added, vocab_size), Spelling.SPACE_MARK)


def check_whitespace_rules(model: SentencePieceModel, name: str) -> None:
    """Raise TokenizerError for ways of writing spaces that decoding does not support."""
    if model.whitespace_as_suffix:
        raise TokenizerError(f"{name}: treat_whitespace_as_suffix is not supported")
    if not model.escape_whitespaces:
        raise TokenizerError(f"{name}: escape_whitespaces=false is not supported")


def _load_processor(data: bytes) -> SentencePieceProcessor:
    from sentencepiece import SentencePieceProcessor  # few models need it

    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
    except (RuntimeError, ValueError) as error:
        raise TokenizerError(f"the SentencePiece model cannot be loaded: {error}") from error
    return processor
