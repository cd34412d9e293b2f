"""The interface of all tokenizers, and a checked vocabulary: every token's spelling, type and bytes, the tokens with a
role, and decoding, also token by token.

Ids are positions in the vocabulary; bytes are UTF-8, possibly cut inside a character.

Both spellings of bytes are known here: byte-level (each byte one printable character, as in GPT-2) and
SentencePiece's (U+2581 for a space, <0x0A> for a byte). WordPiece marks tokens that continue a word (##), RWKV's
vocabularies escape bytes. Knows nothing of merges, nor of the source of the lists: a subclass of `VocabularyTokenizer`
turns a text into ids.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from enum import IntEnum, StrEnum
from typing import Protocol

from mlxr.core.errors import InvalidRequest, TokenizerError
from mlxr.core.frozen import frozen


class TokenType(IntEnum):
    """The type of a token; numbered as in GGUF's `tokenizer.ggml.token_type` and SentencePiece's `Type`."""

    NORMAL = 1
    UNKNOWN = 2  # stands for text that the vocabulary cannot spell
    CONTROL = 3  # steers the model; never part of a text unless asked for
    USER_DEFINED = 4  # found in a text before everything else, and written out like text
    UNUSED = 5  # fills a gap in the numbering
    BYTE = 6  # one byte, spelt <0x00> to <0xFF>


HIDDEN_TYPES = frozenset({TokenType.UNKNOWN, TokenType.CONTROL})


class Tokenizer(Protocol):
    """Text to token ids and back. Safe to use from several threads at once.

    `eos_ids` are all tokens that end an answer. With `add_bos` and `add_eos`, `encode` puts these around a text.
    `strips_leading_space`: the vocabulary puts a space before the first word of a text, which decoding removes.
    """

    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    pad_id: int | None
    add_bos: bool
    add_eos: bool
    strips_leading_space: bool

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of `text`.

        `add_special` puts BOS and EOS around it if the vocabulary wants them; `parse_special` reads control tokens
        written in the text as such, otherwise they are plain characters. Raises InvalidRequest for text that is not
        Unicode (half of a surrogate pair).
        """
        ...

    def encode_all(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = False
    ) -> list[list[int]]:
        """`encode` of each text; a library does all of them at once, and releases the interpreter lock meanwhile."""
        ...

    def cut(self, ids: Sequence[int], limit: int, /) -> list[int]:
        """At most `limit` of the ids from `encode`: a text that is too long loses its end, but not the end token."""

    def join_pair(self, first: Sequence[int], second: Sequence[int], limit: int, /) -> tuple[list[int], int | None]:
        """Join two texts to one input of at most `limit` tokens; also returns the start of the second if it has a type.

        Both are encoded without the tokens around a text. The longer one is cut first. Raises InvalidRequest if there
        is no room for both.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`, bytes that form no character as U+FFFD; control tokens are left out or spelt."""
        ...

    def token_bytes(self, token_id: int, /) -> bytes:
        """The exact bytes that the token adds to a text; those of a special token are its spelling."""
        ...

    def token_text(self, token_id: int, /) -> str:
        """The vocabulary's spelling of the token; raises TokenizerError for an id outside the vocabulary."""
        ...

    def token_id(self, text: str, /) -> int | None:
        """The token with that spelling, or None."""
        ...

    def is_special(self, token_id: int, /) -> bool:
        """Return True if the token is hidden from readers (control and unknown tokens)."""
        ...


_LONGEST_CHARACTER_BYTES = 4


class ByteVocabulary(Protocol):
    """The parts of a tokenizer that the detokenizer uses."""

    strips_leading_space: bool

    def token_bytes(self, token_id: int, /) -> bytes:
        """The exact bytes that the token adds to a text."""
        ...

    def is_special(self, token_id: int, /) -> bool:
        """Return True if the token is hidden from readers."""
        ...


class Detokenizer:
    """Turns one answer's tokens into text. One per answer; not for several threads at once.

    `prompt_ids` are the tokens before the answer. The space that a SentencePiece vocabulary writes before the first
    word of a text is removed only if nothing but special tokens comes before it; elsewhere a space stays.
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
        """Return an independent copy in the same state."""
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
        """Return the rest at the end: U+FFFD for a character that was not completed, or nothing."""
        return self._decoder.decode(b"", final=True)


def _find_open_character(tail: bytes) -> bytes:
    """The bytes at the end of `tail` that may still become a character, or nothing."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(tail)
    return decoder.getstate()[0]


SPACE_MARK = "\u2581"
WORD_PART = "##"
MAX_VOCABULARY_TOKENS = 1 << 22
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPE = re.compile(rb"\\(x[0-9a-f]{2}|.)", re.DOTALL)
_ESCAPED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}

# Names of tokens that always end an answer, whatever the file says; files often name only one of several.
_END_NAMES = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> [EOT] <turn|> <|tool_response> <|end_of_text|> <end_of_utterance> <eos> <｜end▁of▁sentence｜>"
)


class Spelling(StrEnum):
    """A vocabulary's way to write bytes that are not plain letters."""

    BYTE_LEVEL = "byte-level"
    SPACE_MARK = "space-mark"
    WORD_PIECE = "word-piece"
    PLAIN = "plain"  # unchanged
    ESCAPED = "escaped"  # as in a literal of Python, so that a token may be a part of a character (RWKV)


def list_byte_characters() -> list[str]:
    """The 256 characters that byte-level vocabularies write for the bytes 0 to 255 (source: GPT-2's encoder).

    Printable Latin-1 stands for itself; the others are numbered upwards from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _read_escape(match: re.Match[bytes]) -> bytes:
    """Return the byte that an escape stands for; any other character stands for itself."""
    kind = match[1]
    return bytes([int(kind[1:], 16)]) if len(kind) > 1 else _ESCAPED.get(kind, kind)


def parse_byte_token(text: str) -> int | None:
    """The byte that `text` spells as <0xNN>, or None."""
    match = _BYTE_TOKEN.fullmatch(text)
    return int(match[1], 16) if match else None


@frozen
class AddedSpelling:
    """A token that the configuration adds to the vocabulary."""

    token_id: int
    text: str
    special: bool


class Vocabulary:
    """Spellings, types and bytes of all tokens. Raises TokenizerError if the lists contradict each other.

    Files have some spellings twice. Both tokens decode to that text; the text encodes to the first of them in use,
    which is in `ids`, and not to a control token if only an ordinary token was meant.
    """

    def __init__(self, texts: Sequence[str], types: Sequence[TokenType], spelling: Spelling) -> None:
        if not texts:
            raise TokenizerError("the vocabulary is empty")
        if len(texts) > MAX_VOCABULARY_TOKENS:
            raise TokenizerError(f"the vocabulary has {len(texts)} tokens, more than {MAX_VOCABULARY_TOKENS}")
        if len(types) != len(texts):
            raise TokenizerError(f"the vocabulary has {len(texts)} tokens but {len(types)} token types")
        # An empty spelling could match anywhere; it gets a name that no text has by accident.
        self.texts = [text or f"[EMPTY_{index}]" for index, text in enumerate(texts)]
        self.types = list(types)
        self.spelling = spelling
        self.ids = dict(zip(reversed(self.texts), reversed(range(len(texts))), strict=True))
        self.firsts: dict[int, int] = {}  # each token that repeats an earlier spelling, and the earlier token
        if len(self.ids) < len(self.texts):
            self._find_firsts()
        self._byte_values = {character: byte for byte, character in enumerate(list_byte_characters())}
        self._bytes: list[bytes | None] = [None] * len(self.texts)

    def __len__(self) -> int:
        return len(self.texts)

    def take_firsts(self, ids: list[int]) -> list[int]:
        """Return `ids` with every repeat replaced by the first token of its spelling."""
        return [self.firsts.get(index, index) for index in ids] if self.firsts else ids

    def _find_firsts(self) -> None:
        """Make the first token in use count for every spelling. Tokens that decode differently are no repeats."""
        seen: dict[tuple[str, bool, bool], int] = {}
        for index in sorted(range(len(self.texts)), key=lambda index: self.types[index] is TokenType.UNUSED):
            text, kind = self.texts[index], self.types[index]
            first = seen.setdefault((text, kind in HIDDEN_TYPES, kind is TokenType.BYTE), index)
            if first != index:
                self.firsts[index] = first
        self.ids = {text: index for (text, _, _), index in reversed(seen.items())}

    def check_id(self, token_id: int) -> int:
        """Return `token_id`; raises TokenizerError if it is outside the vocabulary."""
        if not 0 <= token_id < len(self.texts):
            raise TokenizerError(f"token id {token_id} is outside the vocabulary of {len(self.texts)} tokens")
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that the token adds to a text; none for a gap in the numbering."""
        known = self._bytes[self.check_id(token_id)]
        if known is None:
            known = self._bytes[token_id] = self._spell_bytes(self.texts[token_id], self.types[token_id])
        return known

    def _spell_bytes(self, text: str, kind: TokenType) -> bytes:
        if kind is TokenType.UNUSED:
            return b""
        if kind is TokenType.BYTE:
            byte = parse_byte_token(text)
            if byte is None:
                raise TokenizerError(f"byte token {text!r} is not spelt <0x00> to <0xFF>")
            return bytes([byte])
        if kind is not TokenType.NORMAL or self.spelling is Spelling.PLAIN:
            return text.encode("utf-8", "replace")
        if self.spelling is Spelling.SPACE_MARK:
            return text.replace(SPACE_MARK, " ").encode("utf-8", "replace")
        if self.spelling is Spelling.WORD_PIECE:
            word = text.removeprefix(WORD_PART) if text.startswith(WORD_PART) else f" {text}"
            return word.encode("utf-8", "replace")
        if self.spelling is Spelling.ESCAPED:
            return _ESCAPE.sub(_read_escape, text.encode("utf-8", "replace"))
        values = [self._byte_values.get(character) for character in text]
        # A token with characters outside the alphabet was not made of bytes: it stands for itself.
        return (
            text.encode("utf-8", "replace") if None in values else bytes(value for value in values if value is not None)
        )

    def is_special(self, token_id: int) -> bool:
        """Return True if the token is hidden from readers."""
        return self.types[self.check_id(token_id)] in HIDDEN_TYPES

    def list_ids(self, *kinds: TokenType) -> list[int]:
        """Ids of all tokens of these types, ascending."""
        return [index for index, kind in enumerate(self.types) if kind in kinds]


def add_spellings(
    texts: list[str], types: list[TokenType], added: Sequence[AddedSpelling], vocab_size: int | None
) -> None:
    """Put `added` tokens into the lists, in place, and fill gaps up to `vocab_size` with unused `[PAD...]` tokens."""
    count = max(len(texts), vocab_size or 0, *(token.token_id + 1 for token in added), 0)
    if count > len(texts) + (vocab_size or 0) + len(added) + 1024:
        raise TokenizerError(f"the configuration adds a token with id {count - 1}, far beyond the vocabulary")
    for index in range(len(texts), count):
        texts.append(f"[PAD{index}]")
        types.append(TokenType.UNUSED)
    for token in added:
        index = token.token_id
        if types[index] is not TokenType.UNUSED and texts[index] != token.text:
            raise TokenizerError(
                f"the configuration calls token {index} {token.text!r}, the vocabulary {texts[index]!r}"
            )
        texts[index] = token.text
        if types[index] in (TokenType.UNUSED, TokenType.NORMAL, TokenType.USER_DEFINED):
            types[index] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED


def mark_control_tokens(texts: Sequence[str], types: list[TokenType], role_ids: Sequence[int | None]) -> None:
    """Turn normal tokens that should be control tokens into these, in place.

    These are the tokens with a role (BOS, EOS, ...) and known end markers, if they also look like markers: a model
    whose end token is a newline must still be able to read newlines.
    """
    roles = {index for index in role_ids if index is not None}
    ends = _END_NAMES.split()
    for index, text in enumerate(texts):
        if (
            types[index] is TokenType.NORMAL
            and (text in ends or index in roles)
            and _looks_like_marker(text, roles, index)
        ):
            types[index] = TokenType.CONTROL


def _looks_like_marker(text: str, roles: set[int], index: int) -> bool:
    if text.startswith(("<|", "<｜")) and text.endswith(("|>", "｜>")):
        return True
    return index in roles and len(text) > 2 and (text[0], text[-1]) in {("<", ">"), ("[", "]")}


def find_end_ids(vocabulary: Vocabulary, named: Sequence[int | None]) -> frozenset[int]:
    """All tokens that end an answer: those the files name, and control tokens known for it.

    If a vocabulary has markers for the end of a message beside those for the end of an answer (<|end|> with <|return|>
    and <|call|>, or with <|flush|> and <|calls|>), the former do not count, whatever the files say.
    """
    markers = TokenType.CONTROL, TokenType.USER_DEFINED
    names = frozenset(_END_NAMES.split())
    known = {index: vocabulary.texts[index] for index in vocabulary.list_ids(*markers)}
    known = {index: text for index, text in known.items() if text in names}
    ends = known.keys() | {index for index in named if index is not None}
    texts = set(known.values())
    if texts >= {"<|return|>", "<|call|>"} or texts >= {"<|flush|>", "<|calls|>"}:
        ends -= {index for index, text in known.items() if text == "<|end|>"}
    return frozenset(ends)


@frozen
class SpecialRules:
    """Tokens with a role, and those around a text.

    `prefix_ids` and `suffix_ids` are added by `encode(add_special=True)`; usually BOS and nothing.
    """

    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    pad_id: int | None = None
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    between_ids: tuple[int, ...] = ()  # between two texts in one input
    second_type: int = 0  # the type of the second text's tokens, for which encoders may have embeddings


class VocabularyTokenizer(ABC):
    """A tokenizer over a `Vocabulary`; see `Tokenizer` for the methods."""

    def __init__(self, vocabulary: Vocabulary, rules: SpecialRules, *, strips_leading_space: bool) -> None:
        for token_id in (rules.bos_id, rules.pad_id, *rules.eos_ids, *rules.prefix_ids, *rules.suffix_ids):
            if token_id is not None:
                vocabulary.check_id(token_id)
        self.vocabulary, self.rules = vocabulary, rules
        self.vocab_size = len(vocabulary)
        self.bos_id, self.eos_ids, self.pad_id = rules.bos_id, rules.eos_ids, rules.pad_id
        self.add_bos = rules.bos_id is not None and rules.bos_id in rules.prefix_ids
        self.add_eos = any(token_id in rules.eos_ids for token_id in rules.suffix_ids)
        self.strips_leading_space = strips_leading_space

    @abstractmethod
    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        """The ids of a text that is not empty, without BOS and EOS."""

    def _encode_texts(self, texts: Sequence[str], parse_special: bool) -> list[list[int]]:
        return [self._encode_text(text, parse_special) for text in texts]

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`; see `Tokenizer.encode`."""
        return self.encode_all([text], add_special=add_special, parse_special=parse_special)[0]

    def encode_all(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = False
    ) -> list[list[int]]:
        """Token ids of each text; see `Tokenizer.encode_all`."""
        for text in texts:
            _check_unicode(text)
        encoded = iter(self._encode_texts([text for text in texts if text], parse_special))
        ids = [self.vocabulary.take_firsts(next(encoded)) if text else [] for text in texts]
        return [[*self.rules.prefix_ids, *one, *self.rules.suffix_ids] for one in ids] if add_special else ids

    def cut(self, ids: Sequence[int], limit: int) -> list[int]:
        """The first `limit` of `ids`; the tokens after every text stay at the end. See `Tokenizer.cut`."""
        suffix = self.rules.suffix_ids
        if len(ids) <= limit or len(suffix) >= limit or tuple(ids[len(ids) - len(suffix) :]) != suffix:
            return list(ids[:limit])
        return [*ids[: limit - len(suffix)], *suffix]

    def join_pair(self, first: Sequence[int], second: Sequence[int], limit: int) -> tuple[list[int], int | None]:
        """Two texts as one input; see `Tokenizer.join_pair`."""
        rules = self.rules
        room = limit - len(rules.prefix_ids) - len(rules.between_ids) - len(rules.suffix_ids)
        if room < 2:
            raise InvalidRequest("query", f"has no room beside a document in a context of {limit} tokens")
        half = room // 2
        kept = min(len(first), max(half, room - len(second)))
        begin = [*rules.prefix_ids, *first[:kept], *rules.between_ids]
        joined = [*begin, *second[: room - kept], *rules.suffix_ids]
        return joined, len(begin) if rules.second_type else None

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; see `Tokenizer.decode`."""
        parts: list[bytes] = []
        at_start = self.strips_leading_space
        for token_id in ids:
            special = self.is_special(token_id)
            if special and skip_special:
                continue
            part = self.token_bytes(token_id)
            if at_start and part and not special:
                at_start = False
                part = part.removeprefix(b" ")
            parts.append(part)
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, /) -> bytes:
        """The exact bytes that the token adds to a text."""
        return self.vocabulary.token_bytes(token_id)

    def token_text(self, token_id: int, /) -> str:
        """The vocabulary's spelling of the token."""
        return self.vocabulary.texts[self.vocabulary.check_id(token_id)]

    def token_id(self, text: str, /) -> int | None:
        """The token with that spelling, or None."""
        return self.vocabulary.ids.get(text)

    def is_special(self, token_id: int, /) -> bool:
        """Return True if the token is hidden from readers."""
        return self.vocabulary.is_special(token_id)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            "text", f"character {error.start} is half of a surrogate pair, which is no Unicode text"
        ) from None


def surround_ids(
    bos_id: int | None, eos_id: int | None, add_bos: bool, add_eos: bool, source: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens before and after a text. Raises TokenizerError if one is wanted that `source` does not name."""
    if add_bos and bos_id is None:
        raise TokenizerError(f"{source} wants a BOS token before every text but names none")
    if add_eos and eos_id is None:
        raise TokenizerError(f"{source} wants an EOS token after every text but names none")
    prefix = (bos_id,) if add_bos and bos_id is not None else ()
    suffix = (eos_id,) if add_eos and eos_id is not None else ()
    return prefix, suffix
