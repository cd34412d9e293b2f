"""Reads parts of a `tokenizer.json`: its tokens with types, its spelling of bytes, its patterns for cutting words.

The `tokenizers` library encodes with the file but does not show these parts. Takes the parsed JSON; knows no folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from mlxr.core.errors import TokenizerError
from mlxr.tokenizers.vocabulary import (
    MAX_VOCABULARY_TOKENS,
    SPACE_MARK,
    WORD_PART,
    AddedSpelling,
    Spelling,
    TokenType,
    parse_byte_token,
)

Part = Mapping[str, object]
LOWEST_SCORE = -1e6  # the score of tokens that no text becomes; below every real score, and exact in 32 bits
KINDS = ("BPE", "Unigram", "WordPiece")
MAX_GROWTH = 64  # characters that normalisers may make of one
# Spellings that byte-level and SentencePiece vocabularies do not have, and random encoding (dropout). The library does
# not check the spellings against the merges, so they must be refused before it reads the file.
_REFUSED_FEATURES = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")


class TokenizerJson:
    """The parts of a tokenizer.json; `name` is the file's name in errors. Raises TokenizerError for malformed parts."""

    def __init__(self, data: Part, name: str) -> None:
        self.name = name
        self.model = self._read_part(data, "model") or {}
        self.kind = str(self.model.get("type") or ("BPE" if "merges" in self.model else "unknown"))
        if self.kind not in KINDS:
            raise TokenizerError(f"{name}: model type {self.kind} is not supported; supported are {', '.join(KINDS)}")
        for feature in _REFUSED_FEATURES:
            usual = WORD_PART if self.kind == "WordPiece" and feature == "continuing_subword_prefix" else None
            if self.model.get(feature) and self.model.get(feature) != usual:
                raise TokenizerError(f"{name}: model.{feature} is not supported")
        self.normalizers = _flatten(self._read_part(data, "normalizer"), "normalizers")
        self.pre_tokenizers = _flatten(self._read_part(data, "pre_tokenizer"), "pretokenizers")
        self.decoders = _flatten(self._read_part(data, "decoder"), "decoders")
        self._check_growth()
        self._check_post_processor(self._read_part(data, "post_processor"))
        self.added = [self._read_added(entry) for entry in self._read_list(data, "added_tokens")]

    @property
    def byte_fallback(self) -> bool:
        """True if unknown characters are spelt in byte tokens."""
        return bool(self.model.get("byte_fallback"))

    @property
    def ignore_merges(self) -> bool:
        """True if a word that is a token as a whole becomes it, whatever the merges are."""
        return bool(self.model.get("ignore_merges"))

    @property
    def unknown_text(self) -> str | None:
        """The spelling of the unknown token."""
        value = self.model.get("unk_token")
        if value is None and isinstance(index := self.model.get("unk_id"), int):
            value = self.list_pieces().get(index)
        return value if isinstance(value, str) else None

    def find_spelling(self) -> Spelling:
        """Return the tokens' spelling of bytes; raises TokenizerError for an unknown decoder."""
        kinds = {str(part.get("type")) for part in self.decoders}
        if self.kind == "WordPiece":
            return Spelling.WORD_PIECE
        if "ByteLevel" in kinds or (not kinds and any(part.get("type") == "ByteLevel" for part in self.pre_tokenizers)):
            return Spelling.BYTE_LEVEL
        marks = [part for part in self.decoders if part.get("type") == "Replace"]
        if "Metaspace" in kinds or any(_read_pattern(part, "String") == SPACE_MARK for part in marks):
            return Spelling.SPACE_MARK
        raise TokenizerError(
            f"{self.name}: decoder {' + '.join(sorted(kinds)) or 'null'} is not supported; supported are ByteLevel and "
            "those of SentencePiece (Metaspace, or Replace of the space mark)"
        )

    def strips_leading_space(self) -> bool:
        """True if decoding removes the space before the first word."""
        if self.kind == "WordPiece":
            return True
        for part in self.decoders:
            if part.get("type") == "Strip" and part.get("content") == " " and part.get("start"):
                return True
            if part.get("type") == "Metaspace" and adds_prefix(part):
                return True
        return False

    def list_pieces(self) -> dict[int, str]:
        """The model's own tokens by id."""
        vocab = self.model.get("vocab")
        entries: Iterable[tuple[object, object]]
        if isinstance(vocab, Mapping):
            entries = vocab.items()
        elif isinstance(vocab, list):
            entries = ((entry[0] if isinstance(entry, list) and entry else None, i) for i, entry in enumerate(vocab))
        else:
            raise TokenizerError(f"{self.name}: model.vocab is missing")
        pieces: dict[int, str] = {}
        for text, token_id in entries:
            if not isinstance(text, str) or not isinstance(token_id, int) or not 0 <= token_id < MAX_VOCABULARY_TOKENS:
                raise TokenizerError(f"{self.name}: model.vocab has the malformed entry {text!r}: {token_id!r}")
            pieces[token_id] = text
        return pieces

    def list_tokens(self) -> tuple[list[str], list[TokenType]]:
        """Spellings and types of the model's own tokens; gaps in the numbering are unused tokens.

        Added tokens are `self.added`; their types come from there.
        """
        pieces = self.list_pieces()
        # Ids beyond the pieces' count are gaps that added tokens fill; only those may be far apart.
        count = max(pieces, default=-1) + 1
        if count > len(pieces) + len(self.added) + 1024:
            raise TokenizerError(f"{self.name}: model.vocab has {len(pieces)} tokens but ids up to {count - 1}")
        texts = [pieces.get(index, f"[PAD{index}]") for index in range(count)]
        types = [TokenType.NORMAL if index in pieces else TokenType.UNUSED for index in range(count)]
        if self.byte_fallback:
            for index, text in pieces.items():
                if parse_byte_token(text) is not None:
                    types[index] = TokenType.BYTE
        return texts, types

    def list_scores(self, count: int) -> list[float]:
        """The scores of the first `count` tokens of a Unigram; a very low one for tokens without a score."""
        entries = self._read_list(self.model, "vocab")
        scores = [entry[1] if isinstance(entry, list) and len(entry) == 2 else None for entry in entries][:count]
        for index, score in enumerate(scores):
            if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
                raise TokenizerError(f"{self.name}: the score of token {index} is no number")
        known = [float(score) for score in scores if isinstance(score, int | float)]
        return known + [LOWEST_SCORE] * (count - len(known))

    def list_merges(self) -> list[tuple[str, str]]:
        """The merges, most important first."""
        merges: list[tuple[str, str]] = []
        for index, entry in enumerate(self._read_list(self.model, "merges")):
            parts = entry.split(" ") if isinstance(entry, str) else entry
            if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
                raise TokenizerError(f"{self.name}: merge {index} ({entry!r}) is not a pair of tokens")
            merges.append((parts[0], parts[1]))
        return merges

    def _check_growth(self) -> None:
        """Refuse replacements that, one after another, can turn one character into very long text."""
        growth = 1.0
        for part in self.normalizers:
            if part.get("type") == "Replace":
                pattern, content = read_replacement(part)
                added = len(content) if isinstance(content, str) else 0
                # A regular expression may match the empty text, so its replacement can come beside every character.
                growth *= max(1.0, added / len(pattern) if pattern else 1.0 + added)
        if growth > MAX_GROWTH:
            raise TokenizerError(
                f"{self.name}: the normalizer makes up to {growth:.3g} characters of one, more than {MAX_GROWTH}"
            )

    def _check_post_processor(self, part: Part | None) -> None:
        """Refuse a template with a special token that it does not define, which would crash the library."""
        for step in _flatten(part, "processors"):
            defined = step.get("special_tokens")
            for name in ("single", "pair"):
                pieces = step.get(name)
                for piece in pieces if isinstance(pieces, list) else ():
                    token = piece.get("SpecialToken") if isinstance(piece, Mapping) else None
                    text = token.get("id") if isinstance(token, Mapping) else None
                    if isinstance(text, str) and not (isinstance(defined, Mapping) and text in defined):
                        raise TokenizerError(f"{self.name}: post_processor uses {text!r} and does not define it")

    def _read_added(self, entry: object) -> AddedSpelling:
        if isinstance(entry, Mapping):
            token_id, text = entry.get("id"), entry.get("content")
            if isinstance(token_id, int) and token_id >= 0 and isinstance(text, str):
                return AddedSpelling(token_id, text, bool(entry.get("special")))
        raise TokenizerError(f"{self.name}: added_tokens has the malformed entry {entry!r}")

    def _read_part(self, data: Part, key: str) -> Part | None:
        value = data.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise TokenizerError(f"{self.name}: {key} must be an object")
        return value

    def _read_list(self, data: Part, key: str) -> Sequence[object]:
        value = data.get(key, [])
        if not isinstance(value, list):
            raise TokenizerError(f"{self.name}: {key} must be a list")
        return value


def adds_prefix(metaspace: Part) -> bool:
    """Return True if a Metaspace part puts a space before the first word."""
    return metaspace.get("prepend_scheme", "always" if metaspace.get("add_prefix_space", True) else "never") != "never"


def _flatten(part: Part | None, key: str) -> list[Part]:
    """The parts of a Sequence, nested ones too, in order; a lone part as a list of one."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    items = part.get(key)
    return (
        [leaf for item in items if isinstance(item, Mapping) for leaf in _flatten(item, key)]
        if isinstance(items, list)
        else []
    )


def _read_pattern(part: Part, kind: str) -> str | None:
    pattern = part.get("pattern")
    value = pattern.get(kind) if isinstance(pattern, Mapping) else None
    return value if isinstance(value, str) else None


def read_replacement(part: Part) -> tuple[str | None, object]:
    """Return the text that a Replace normaliser replaces (plain strings only), and its replacement."""
    return _read_pattern(part, "String"), part.get("content")


def list_split_patterns(pre_tokenizers: Sequence[Part], gpt2_pattern: str, name: str) -> tuple[str, ...]:
    """The patterns by which byte-level pre-tokenizers cut a text, in order.

    Raises TokenizerError naming a part that has no equivalent pattern, or that does more than cut.
    """
    patterns: list[str] = []
    for part in pre_tokenizers:
        kind = part.get("type")
        if kind == "ByteLevel":
            if part.get("add_prefix_space"):
                raise TokenizerError(f"{name}: pre-tokenizer ByteLevel with add_prefix_space is not supported in GGUF")
            if part.get("use_regex", True):
                patterns.append(gpt2_pattern)
        elif kind == "Digits":
            patterns.append(r"\p{N}" if part.get("individual_digits") else r"\p{N}+")
        elif kind == "Split" and (pattern := _read_pattern(part, "Regex")) is not None and _only_cuts(part):
            patterns.append(pattern)
        else:
            raise TokenizerError(f"{name}: pre-tokenizer {kind} ({dict(part)}) is not supported in GGUF")
    return tuple(patterns)


def _only_cuts(split: Part) -> bool:
    """Return True if all text becomes words: matches isolated, or the text between them (none) removed."""
    behavior, inverted = split.get("behavior"), bool(split.get("invert"))
    return (behavior == "Isolated" and not inverted) or (behavior == "Removed" and inverted)
