"""Tokenizers from the metadata of a GGUF file (source: the GGUF specification, keys `tokenizer.ggml.*`).

Takes a mapping of keys to plain values, checks every value it uses, and builds the tokenizer of the kind the file
names: `llama` (pieces with scores), `gpt2` (byte-level BPE), `gemma4` (merges of pieces), `bert` (WordPiece), `t5`
(Unigram), `rwkv` (the longest token), `plamo2` (the best path) or `whitespace` (merges in words). It knows nothing of
files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from mlxr.core.errors import TokenizerError
from mlxr.tokenizers.library import (
    LibraryTokenizer,
    build_byte_level_library,
    build_space_mark_library,
    build_unigram_library,
    build_word_library,
    build_word_piece_library,
    find_pre_type,
)
from mlxr.tokenizers.spm import BestPathTokenizer, LongestTokenizer, SpmTokenizer
from mlxr.tokenizers.vocabulary import (
    SpecialRules,
    Spelling,
    Tokenizer,
    TokenType,
    Vocabulary,
    find_end_ids,
    mark_control_tokens,
    parse_byte_token,
    surround_ids,
)

_PREFIX = "tokenizer.ggml."
# Kinds that exist in GGUF files and that no architecture here uses.
_OTHER_KINDS = ("hybriddna", "replit", "none", "no_vocab")
# Pre-tokenizers (`pre`) of gpt2 files whose merges are of pieces with marked spaces, not of bytes.
_MARKED_SPACES = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")

# GGUF files do not tell after which added tokens white space is dropped. In tokenizer.json of Phi-3 and Phi-3.5-MoE
# (`rstrip`) it is dropped after all but these; llama.cpp does the same for files that have phi-3 in their name.
_STRIPPING_ARCHITECTURES = "phi3", "phimoe"
_NOT_STRIPPING = ("<s>", "<|endoftext|>")


def from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Build the tokenizer that a GGUF file's metadata describes; raises TokenizerError naming the bad key."""
    keys = _Keys(metadata)
    kind = keys.read_text("model")
    if kind is None:
        raise TokenizerError("the file has no tokenizer: tokenizer.ggml.model is missing")
    builders: dict[str, Callable[[_Keys], Tokenizer]] = {
        "llama": _build_spm,
        "gpt2": _build_byte_level,
        "gemma4": _build_merged_pieces,
        "bert": _build_word_piece,
        "t5": _build_unigram,
        "rwkv": _build_longest,
        "plamo2": _build_best_path,
        "whitespace": _build_words,
    }
    if kind not in builders:
        known = "is not supported" if kind in _OTHER_KINDS else "is not known"
        raise TokenizerError(f"tokenizer.ggml.model {kind!r} {known}; supported are {', '.join(sorted(builders))}")
    return builders[kind](keys)


def _build_spm(keys: _Keys) -> Tokenizer:
    if keys.read_flag("remove_extra_whitespaces"):
        raise TokenizerError("tokenizer.ggml.remove_extra_whitespaces is not supported for kind llama")
    texts = keys.read_tokens()
    # The format's defaults for this kind: the first Llama's <unk>, <s> and </s>.
    bos_id = keys.read_id("bos_token_id", len(texts), default=1)
    eos_id = keys.read_id("eos_token_id", len(texts), default=2)
    unknown_id = keys.read_id("unknown_token_id", len(texts), default=0)
    types = keys.read_types(texts)
    if types is None:
        types = [TokenType.NORMAL if parse_byte_token(text) is None else TokenType.BYTE for text in texts]
        if unknown_id is not None:
            types[unknown_id] = TokenType.UNKNOWN
    vocabulary, rules = _read_specials(
        keys, texts, types, Spelling.SPACE_MARK, bos_id=bos_id, eos_id=eos_id, default_add_bos=True
    )
    prefix_flag = keys.read_flag("add_space_prefix")
    added = vocabulary.list_ids(TokenType.CONTROL, TokenType.USER_DEFINED)
    stripping = added if keys.architecture in _STRIPPING_ARCHITECTURES else []
    return SpmTokenizer(
        vocabulary,
        keys.read_scores(len(texts)),
        rules,
        add_space_prefix=True if prefix_flag is None else prefix_flag,
        unknown_id=unknown_id,
        stripping_ids=frozenset(index for index in stripping if vocabulary.texts[index] not in _NOT_STRIPPING),
    )


def _build_byte_level(keys: _Keys) -> Tokenizer:
    """Build a byte-level BPE. `add_space_prefix` is ignored: it only repeats a default of the source's Python class."""
    if keys.read_text("pre") in _MARKED_SPACES:
        return _build_merged_pieces(keys, is_bos_usual=False)
    texts = keys.read_tokens()
    pre_type = find_pre_type(keys.read_text("pre") or "default")
    types = keys.read_types(texts) or [TokenType.NORMAL] * len(texts)
    vocabulary, rules = _read_specials(
        keys,
        texts,
        types,
        Spelling.BYTE_LEVEL,
        bos_id=keys.read_id("bos_token_id", len(texts)),
        eos_id=keys.read_id("eos_token_id", len(texts)),
        default_add_bos=pre_type.add_bos,
    )
    library = build_byte_level_library(vocabulary, keys.read_merges("gpt2"), pre_type)
    return LibraryTokenizer(library, vocabulary, rules, strips_leading_space=False)


def _build_merged_pieces(keys: _Keys, *, is_bos_usual: bool = True) -> Tokenizer:
    """Build Gemma 4's: SentencePiece's pieces, merged in the order of a list. If BOS is usual it always goes first,
    whatever the file says, as in llama.cpp."""
    texts = keys.read_tokens()
    types = keys.read_types(texts)
    if types is None:
        types = [TokenType.NORMAL if parse_byte_token(text) is None else TokenType.BYTE for text in texts]
    vocabulary, rules = _read_specials(
        keys,
        texts,
        types,
        Spelling.SPACE_MARK,
        bos_id=keys.read_id("bos_token_id", len(texts)),
        eos_id=keys.read_id("eos_token_id", len(texts)),
        default_add_bos=is_bos_usual,
        is_bos_stated=not is_bos_usual,
    )
    unknown_id = keys.read_id("unknown_token_id", len(texts))
    library = build_space_mark_library(vocabulary, keys.read_merges("gemma4"), unknown_id)
    return LibraryTokenizer(library, vocabulary, rules, strips_leading_space=False)


def _build_words(keys: _Keys) -> Tokenizer:
    """Build one with merges of characters in words; white space between them is lost (Jina v2's Chinese model)."""
    texts = keys.read_tokens()
    vocabulary, rules = _read_plain(keys, texts, Spelling.PLAIN, bos_id=None, eos_id=None)
    lowercase = keys.read_flag("normalizer.lowercase")
    library = build_word_library(vocabulary, keys.read_merges("whitespace"), lowercase=bool(lowercase))
    return LibraryTokenizer(library, vocabulary, rules, strips_leading_space=False)


def _build_longest(keys: _Keys) -> Tokenizer:
    texts = keys.read_tokens()
    vocabulary, rules = _read_plain(keys, texts, Spelling.ESCAPED, bos_id=None, eos_id=None)
    return LongestTokenizer(vocabulary, rules, keys.read_id("unknown_token_id", len(texts)))


def _build_best_path(keys: _Keys) -> Tokenizer:
    """Build PLaMo 2's, with the format's defaults for this kind."""
    texts = keys.read_tokens()
    vocabulary, rules = _read_plain(keys, texts, Spelling.PLAIN, bos_id=1, eos_id=2)
    unknown_id = keys.read_id("unknown_token_id", len(texts), default=0)
    return BestPathTokenizer(vocabulary, keys.read_scores(len(texts)), rules, unknown_id)


def _read_plain(
    keys: _Keys, texts: list[str], spelling: Spelling, *, bos_id: int | None, eos_id: int | None
) -> tuple[Vocabulary, SpecialRules]:
    """Read the vocabulary of a kind that by default has these BOS and EOS, and puts neither around a text."""
    return _read_specials(
        keys,
        texts,
        keys.read_types(texts) or [TokenType.NORMAL] * len(texts),
        spelling,
        bos_id=keys.read_id("bos_token_id", len(texts), default=bos_id),
        eos_id=keys.read_id("eos_token_id", len(texts), default=eos_id),
        default_add_bos=False,
    )


def _build_word_piece(keys: _Keys) -> Tokenizer:
    """Build BERT's. By default capitals become small and accents are removed, as in llama.cpp."""
    texts = keys.read_tokens()
    types = keys.read_types(texts) or [TokenType.NORMAL] * len(texts)
    # The format's defaults for this kind: the first BERT's [UNK], [CLS] and [SEP].
    unknown_id = keys.read_id("unknown_token_id", len(texts), default=100)
    if unknown_id is None:
        raise TokenizerError(f"{_PREFIX}unknown_token_id is missing, and kind bert needs it")
    bos_id = keys.read_id("bos_token_id", len(texts))
    bos_id = keys.read_id("cls_token_id", len(texts), default=101) if bos_id is None else bos_id
    end_id = keys.read_id("seperator_token_id", len(texts))  # the format spells it so
    end_id = keys.read_id("eos_token_id", len(texts), default=102) if end_id is None else end_id
    vocabulary, rules = _read_ends(keys, texts, types, bos_id, end_id, unknown_id)
    lowercase, plain = (keys.read_flag(f"normalizer.{name}") for name in ("lowercase", "strip_accents"))
    library = build_word_piece_library(vocabulary, unknown_id, lowercase=lowercase is not False, accents=plain is False)
    rules = replace(rules, between_ids=rules.suffix_ids, second_type=1)
    return LibraryTokenizer(library, vocabulary, rules, strips_leading_space=True)


def _build_unigram(keys: _Keys) -> Tokenizer:
    """Build T5's and XLM-RoBERTa's; by default texts begin with BOS and end with EOS."""
    texts = keys.read_tokens()
    types = keys.read_types(texts) or [TokenType.NORMAL] * len(texts)
    unknown_id = keys.read_id("unknown_token_id", len(texts), default=2)
    if unknown_id is None:
        raise TokenizerError(f"{_PREFIX}unknown_token_id is missing, and kind t5 needs it")
    bos_id, end_id = keys.read_id("bos_token_id", len(texts)), keys.read_id("eos_token_id", len(texts), default=1)
    vocabulary, rules = _read_ends(keys, texts, types, bos_id, end_id, unknown_id)
    prefix_flag = keys.read_flag("add_space_prefix")
    library = build_unigram_library(
        vocabulary,
        keys.read_scores(len(texts)),
        unknown_id,
        add_space_prefix=prefix_flag is not False,
        remove_extra_whitespaces=keys.read_flag("remove_extra_whitespaces") is not False,
        charsmap=keys.read_bytes("precompiled_charsmap"),
    )
    rules = replace(rules, between_ids=rules.suffix_ids * 2)
    return LibraryTokenizer(library, vocabulary, rules, strips_leading_space=True)


def _read_ends(
    keys: _Keys, texts: list[str], types: list[TokenType], bos_id: int | None, end_id: int | None, unknown_id: int
) -> tuple[Vocabulary, SpecialRules]:
    """Read the vocabulary of an encoder, and the tokens around a text: by default both ends."""
    for index in (bos_id, end_id, keys.read_padding_id(len(texts)), keys.read_id("mask_token_id", len(texts))):
        if index is not None and types[index] is TokenType.NORMAL:
            types[index] = TokenType.CONTROL
    types[unknown_id] = TokenType.UNKNOWN
    add_bos, add_end = keys.read_flag("add_bos_token") is not False, keys.read_flag("add_eos_token") is not False
    prefix_ids, suffix_ids = surround_ids(
        bos_id, end_id, add_bos and bos_id is not None, add_end and end_id is not None, "the file"
    )
    return Vocabulary(texts, types, Spelling.SPACE_MARK), SpecialRules(
        bos_id=bos_id,
        eos_ids=frozenset() if end_id is None else frozenset({end_id}),
        pad_id=keys.read_padding_id(len(texts)),
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
    )


def _read_specials(
    keys: _Keys,
    texts: list[str],
    types: list[TokenType],
    spelling: Spelling,
    *,
    bos_id: int | None,
    eos_id: int | None,
    default_add_bos: bool,
    is_bos_stated: bool = True,
) -> tuple[Vocabulary, SpecialRules]:
    ends = [eos_id, *(keys.read_id(name, len(texts)) for name in ("eot_token_id", "eom_token_id"))]
    mark_control_tokens(texts, types, [bos_id, *ends])
    vocabulary = Vocabulary(texts, types, spelling)
    add_bos, add_eos = keys.read_flag("add_bos_token"), keys.read_flag("add_eos_token")
    if add_bos is None or not is_bos_stated:
        add_bos = default_add_bos and bos_id is not None
    prefix_ids, suffix_ids = surround_ids(bos_id, eos_id, add_bos, bool(add_eos), "the file")
    rules = SpecialRules(
        bos_id=bos_id,
        eos_ids=find_end_ids(vocabulary, ends),
        pad_id=keys.read_padding_id(len(texts)),
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
    )
    return vocabulary, rules


class _Keys:
    """Reads `tokenizer.ggml.*` values, refusing any of the wrong type by its key."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.architecture = metadata.get("general.architecture")

    def read_text(self, name: str) -> str | None:
        value = self._metadata.get(_PREFIX + name)
        if value is not None and not isinstance(value, str):
            raise self._refuse(name, "must be a string")
        return value

    def read_flag(self, name: str) -> bool | None:
        value = self._metadata.get(_PREFIX + name)
        if value is not None and not isinstance(value, bool):
            raise self._refuse(name, "must be true or false")
        return value

    def read_id(self, name: str, count: int, default: int | None = None) -> int | None:
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return default if default is not None and default < count else None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refuse(name, "must be a whole number")
        if value in (-1, 0xFFFFFFFF):  # some writers' value for "none"
            return None
        if not 0 <= value < count:
            raise self._refuse(name, f"is {value}, outside the vocabulary of {count} tokens")
        return value

    def read_padding_id(self, count: int) -> int | None:
        # Nothing here writes padding; some files name a token beyond their vocabulary for it, which counts as none.
        value = self._metadata.get(_PREFIX + "padding_token_id")
        return value if isinstance(value, int) and 0 <= value < count else None

    def read_strings(self, name: str) -> list[str] | None:
        items = self._read_list(name)
        if items is None:
            return None
        for index, item in enumerate(items):
            if not isinstance(item, str):
                raise self._refuse(name, f"entry {index} must be a string")
        return [str(item) for item in items]

    def read_tokens(self) -> list[str]:
        texts = self.read_strings("tokens")
        if not texts:
            raise TokenizerError("tokenizer.ggml.tokens is missing or empty")
        # The same replacement of an empty spelling as in `Vocabulary`, so that all lists have the same texts.
        return [text or f"[EMPTY_{index}]" for index, text in enumerate(texts)]

    def read_merges(self, kind: str) -> list[str]:
        merges = self.read_strings("merges")
        if merges is None:
            raise TokenizerError(f"{_PREFIX}merges is missing, and kind {kind} needs it")
        return merges

    def read_types(self, texts: list[str]) -> list[TokenType] | None:
        items = self._read_list("token_type")
        if items is None:
            return None
        self._check_length("token_type", len(items), len(texts))
        known = {0: TokenType.UNUSED, **{int(kind): kind for kind in TokenType}}
        types: list[TokenType] = []
        for index, item in enumerate(items):
            if not isinstance(item, int) or item not in known:
                raise self._refuse("token_type", f"entry {index} is {item!r}, not 0 to 6")
            types.append(known[item])
        return types

    def read_scores(self, count: int) -> list[float]:
        items = self._read_list("scores")
        if items is None:
            raise TokenizerError("tokenizer.ggml.scores is missing, and this kind needs it")
        self._check_length("scores", len(items), count)
        for index, item in enumerate(items):
            if isinstance(item, bool) or not isinstance(item, int | float):
                raise self._refuse("scores", f"entry {index} must be a number")
        return [float(item) for item in items if isinstance(item, int | float)]

    def read_bytes(self, name: str) -> bytes:
        items = self._read_list(name) or []
        if not all(isinstance(item, int) and -128 <= item < 256 for item in items):
            raise self._refuse(name, "must be a list of bytes")
        return bytes(item % 256 for item in items if isinstance(item, int))

    def _read_list(self, name: str) -> list[object] | None:
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return None
        as_list = getattr(value, "tolist", None)  # large numeric lists come as arrays
        if as_list is not None:
            value = as_list()
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise self._refuse(name, "must be a list")
        return list(value)

    def _check_length(self, name: str, length: int, count: int) -> None:
        if length != count:
            raise self._refuse(name, f"has {length} entries for {count} tokens")

    def _refuse(self, name: str, reason: str) -> TokenizerError:
        return TokenizerError(f"{_PREFIX}{name} {reason}")
