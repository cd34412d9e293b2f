"""Converts the tokenizer of a Hugging Face folder to the `tokenizer.*` keys of a GGUF file that encodes the same way.

Takes a path, returns a plain mapping. Features that GGUF cannot express are refused by name: another algorithm, an
unknown way of cutting words, a normaliser that changes texts. One normaliser is dropped, as in every GGUF file of such
models: the NFC of Qwen's tokenizer.json, which changes only texts that are not composed already.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tokenizers import models

from mlxr.core.errors import TokenizerError
from mlxr.tokenizers.folder import (
    DEFAULT_TEMPLATE,
    JSON_FILE,
    MODEL_FILE,
    WORDS_FILE,
    FolderConfig,
    from_folder,
    make_model_rules,
    read_tokenizer_json,
    refuse_folder,
)
from mlxr.tokenizers.library import GPT2_PATTERN, PRE_TYPES, PreType, explain_failures, recognise_pre_type
from mlxr.tokenizers.spm import ModelKind, make_model_vocabulary, parse_sentencepiece_model
from mlxr.tokenizers.tokenizer_json import (
    LOWEST_SCORE,
    TokenizerJson,
    adds_prefix,
    list_split_patterns,
    read_replacement,
)
from mlxr.tokenizers.vocabulary import (
    SPACE_MARK,
    WORD_PART,
    SpecialRules,
    Spelling,
    TokenType,
    Vocabulary,
    VocabularyTokenizer,
    find_end_ids,
)

_PREFIX = "tokenizer.ggml."


def to_gguf_metadata(path: str | os.PathLike[str]) -> dict[str, object]:
    """The keys for the folder's tokenizer and chat templates (`tokenizer.*`), and for its recommended sampling.

    Lists are plain lists: in a file `token_type` are int32 and `scores` float32. Raises NotFound without a tokenizer
    file, TokenizerError naming a feature that GGUF cannot express.
    """
    config = FolderConfig(Path(path))
    if (config.folder / JSON_FILE).is_file():
        metadata = _convert_tokenizer_json(config)
    elif (config.folder / MODEL_FILE).is_file():
        metadata = _convert_sentencepiece(config)
    elif (config.folder / WORDS_FILE).is_file():
        metadata = _convert_tokenizer_json(config)
    else:
        raise refuse_folder(config.folder)
    return metadata | _convert_templates(config.read_templates()) | config.name_sampling()


def _convert_tokenizer_json(config: FolderConfig) -> dict[str, object]:
    tokenizer = from_folder(config.folder)
    if not isinstance(tokenizer, VocabularyTokenizer):
        raise TypeError("a folder's tokenizer is built on a vocabulary")
    _, parts = read_tokenizer_json(config)
    _check_size(tokenizer.vocabulary, config)
    vocabulary, rules = tokenizer.vocabulary, tokenizer.rules
    if parts.kind != "BPE":
        rules = replace(rules, eos_ids=rules.eos_ids or frozenset(rules.suffix_ids))
        encoder = (
            _convert_word_piece(parts, vocabulary) if parts.kind == "WordPiece" else _convert_unigram(parts, vocabulary)
        )
        if rules.suffix_ids:
            encoder[f"{_PREFIX}seperator_token_id"] = rules.suffix_ids[0]  # the format spells it so
        return encoder | _convert_rules(rules, config, vocabulary)
    if vocabulary.spelling is Spelling.BYTE_LEVEL:
        metadata = _convert_byte_level(parts, vocabulary)
    else:
        metadata = _convert_space_mark(parts, vocabulary)
    return metadata | _convert_rules(rules, config, vocabulary)


def _convert_word_piece(parts: TokenizerJson, vocabulary: Vocabulary) -> dict[str, object]:
    """Convert BERT's WordPiece: GGUF marks tokens that begin words, a folder those that continue them."""
    texts = [
        text.removeprefix(WORD_PART) if text.startswith(WORD_PART) else SPACE_MARK + text for text in vocabulary.texts
    ]
    listed = _list_vocabulary("bert", vocabulary)
    pairs = zip(vocabulary.types, texts, vocabulary.texts, strict=True)
    listed[f"{_PREFIX}tokens"] = [text if kind is TokenType.NORMAL else own for kind, text, own in pairs]
    kinds = [part.get("type") for part in (*parts.normalizers, *parts.pre_tokenizers)]
    if kinds != ["BertNormalizer", "BertPreTokenizer"]:
        raise TokenizerError(f"{parts.name}: WordPiece with {kinds} is not supported in GGUF")
    normalizer = parts.normalizers[0]
    if not (normalizer.get("clean_text") and normalizer.get("handle_chinese_chars")):
        raise TokenizerError(f"{parts.name}: normalizer {dict(normalizer)} is not supported in GGUF")
    lowercase, plain = bool(normalizer.get("lowercase")), normalizer.get("strip_accents")
    return listed | {
        f"{_PREFIX}normalizer.lowercase": lowercase,
        f"{_PREFIX}normalizer.strip_accents": lowercase if plain is None else bool(plain),
    }


def _convert_unigram(parts: TokenizerJson, vocabulary: Vocabulary) -> dict[str, object]:
    """Convert XLM-RoBERTa's Unigram: pieces with scores, and SentencePiece's table for normalising texts."""
    charsmap, removes = b"", False
    for part in parts.normalizers:
        kind = part.get("type")
        if kind == "Precompiled":
            charsmap = base64.b64decode(str(part.get("precompiled_charsmap") or ""))
        elif kind not in ("Strip", "Replace"):  # Strip and Replace of repeated spaces
            raise TokenizerError(f"{parts.name}: normalizer {kind} ({dict(part)}) is not supported in GGUF")
        else:
            removes = True
    prefixed = False
    for part in parts.pre_tokenizers:
        kind = part.get("type")
        if kind == "Metaspace" and part.get("replacement") == SPACE_MARK:
            prefixed = adds_prefix(part)
        elif kind != "WhitespaceSplit":
            raise TokenizerError(f"{parts.name}: pre-tokenizer {kind} ({dict(part)}) is not supported in GGUF")
        else:
            removes = True
    return _list_vocabulary("t5", vocabulary) | {
        f"{_PREFIX}pre": "default",
        f"{_PREFIX}scores": parts.list_scores(len(vocabulary)),
        f"{_PREFIX}add_space_prefix": prefixed,
        f"{_PREFIX}remove_extra_whitespaces": removes,
        **({f"{_PREFIX}precompiled_charsmap": list(charsmap)} if charsmap else {}),
    }


def _convert_byte_level(parts: TokenizerJson, vocabulary: Vocabulary) -> dict[str, object]:
    for part in parts.normalizers:
        if part.get("type") != "NFC":
            raise TokenizerError(f"{parts.name}: normalizer {part.get('type')} is not supported in GGUF")
    patterns = list_split_patterns(parts.pre_tokenizers, GPT2_PATTERN, parts.name)
    try:
        pre_type = _recognise(patterns, parts, vocabulary)
    except TokenizerError as error:
        raise TokenizerError(f"{parts.name}: {error}") from None
    return _list_vocabulary("gpt2", vocabulary) | {
        f"{_PREFIX}pre": pre_type.names[0],
        f"{_PREFIX}merges": [f"{left} {right}" for left, right in parts.list_merges()],
    }


def _recognise(patterns: tuple[str, ...], parts: TokenizerJson, vocabulary: Vocabulary) -> PreType:
    """The pre-tokenizer with these patterns: the first row of them, if `ignore_merges` makes no difference."""
    found = None
    with suppress(TokenizerError):
        found = recognise_pre_type(patterns, parts.ignore_merges)
    rows = (row for row in PRE_TYPES if row.patterns == patterns and (found is None or row.add_bos == found.add_bos))
    usual = next(rows, found)
    if usual is not None and (usual is found or _merges_make_all_tokens(parts, vocabulary)):
        return usual
    return found or recognise_pre_type(patterns, parts.ignore_merges)


def _merges_make_all_tokens(parts: TokenizerJson, vocabulary: Vocabulary) -> bool:
    """Return True if the merges make every normal token from its own text, so that `ignore_merges` has no effect."""
    with explain_failures("the merges do not fit the vocabulary"):
        model = models.BPE(vocab=vocabulary.ids, merges=parts.list_merges())
    texts = (vocabulary.texts[index] for index in vocabulary.list_ids(TokenType.NORMAL))
    return all(len(model.tokenize(text)) == 1 for text in texts)


def _convert_space_mark(parts: TokenizerJson, vocabulary: Vocabulary) -> dict[str, object]:
    """Convert a SentencePiece vocabulary that was turned into merges back to scores."""
    scores = restore_scores(vocabulary, parts.list_merges(), parts.name)
    return _list_vocabulary("llama", vocabulary) | {
        f"{_PREFIX}pre": "default",
        f"{_PREFIX}scores": scores,
        f"{_PREFIX}add_space_prefix": _finds_space_prefix(parts),
    }


def _finds_space_prefix(parts: TokenizerJson) -> bool:
    """Return True if the file puts a space before a text; raises TokenizerError if it does more than mark spaces."""
    prefixed = False
    for part in parts.normalizers:
        kind = part.get("type")
        if kind == "Prepend" and part.get("prepend") == SPACE_MARK:
            prefixed = True
        elif not (kind == "Replace" and read_replacement(part) == (" ", SPACE_MARK)):
            raise TokenizerError(f"{parts.name}: normalizer {kind} ({dict(part)}) is not supported in GGUF")
    for part in parts.pre_tokenizers:
        kind = part.get("type")
        if kind == "Metaspace" and part.get("replacement") == SPACE_MARK:
            prefixed = prefixed or adds_prefix(part)
        elif not (
            kind == "Split" and read_replacement(part)[0] == " "
        ):  # Gemma's: there are no spaces left to split at
            raise TokenizerError(f"{parts.name}: pre-tokenizer {kind} ({dict(part)}) is not supported in GGUF")
    return prefixed


def restore_scores(vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], name: str) -> list[float]:
    """A score for every token, minus the place of its first merge, so that merging by score equals `merges`.

    That holds if the merges came from scores in the first place: all merges that make one token stand together, and
    every pair of tokens that makes a token is a merge. Otherwise TokenizerError names the token.
    """
    scores = [LOWEST_SCORE] * len(vocabulary)
    for index, kind in enumerate(vocabulary.types):
        if kind is not TokenType.NORMAL:
            scores[index] = 0.0
    made: dict[str, set[str]] = {}
    last = ""
    for rank, (left, right) in enumerate(merges):
        text = left + right
        if text not in vocabulary.ids:
            raise TokenizerError(f"{name}: merge {rank} makes {text!r}, which the vocabulary lacks")
        if text not in made:
            scores[vocabulary.ids[text]] = -float(rank)
        elif text != last:
            raise TokenizerError(f"{name}: the merges that make {text!r} are apart, so no score can say their order")
        made.setdefault(text, set()).add(left)
        last = text
    normal = {vocabulary.texts[index] for index in vocabulary.list_ids(TokenType.NORMAL)}
    for text in normal:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in normal and right in normal and left not in made.get(text, ()):
                raise TokenizerError(f"{name}: {left!r} and {right!r} make {text!r} but no merge says so, scores would")
    return scores


def _convert_sentencepiece(config: FolderConfig) -> dict[str, object]:
    file = config.folder / MODEL_FILE
    model = parse_sentencepiece_model(file.read_bytes(), str(file))
    if model.kind is not ModelKind.BPE:
        raise TokenizerError(f"{file}: model type {model.kind.name} is not supported in GGUF; supported is BPE")
    if model.normalizer not in ("identity", "") or model.remove_extra_whitespaces:
        rule = "remove_extra_whitespaces" if model.remove_extra_whitespaces else f"normalizer {model.normalizer}"
        raise TokenizerError(f"{file}: {rule} is not supported in GGUF")
    vocabulary = make_model_vocabulary(model, config.list_added(), config.read_vocab_size())
    _check_size(vocabulary, config)
    scores = [*model.scores, *(0.0 for _ in range(len(vocabulary) - len(model.scores)))]
    if not all(map(math.isfinite, scores)):
        raise TokenizerError(f"{file}: a token's score is not a finite number")
    rules = make_model_rules(vocabulary, config, model.bos_id, model.eos_id, model.pad_id)
    return (
        _list_vocabulary("llama", vocabulary)
        | {f"{_PREFIX}pre": "default", f"{_PREFIX}scores": scores, f"{_PREFIX}add_space_prefix": model.add_dummy_prefix}
        | _convert_rules(rules, config, vocabulary)
    )


def _list_vocabulary(kind: str, vocabulary: Vocabulary) -> dict[str, object]:
    return {
        f"{_PREFIX}model": kind,
        f"{_PREFIX}tokens": list(vocabulary.texts),
        f"{_PREFIX}token_type": [int(entry) for entry in vocabulary.types],
    }


def _check_size(vocabulary: Vocabulary, config: FolderConfig) -> None:
    vocab_size = config.read_vocab_size()
    if vocab_size is not None and len(vocabulary) > vocab_size:
        raise TokenizerError(
            f"{config.folder}: token {vocab_size} ({vocabulary.texts[vocab_size]!r}) is beyond the model's vocab_size "
            f"{vocab_size}"
        )


def _convert_rules(rules: SpecialRules, config: FolderConfig, vocabulary: Vocabulary) -> dict[str, object]:
    if rules.prefix_ids not in ((), (rules.bos_id,)):
        texts = [vocabulary.texts[index] for index in rules.prefix_ids]
        raise TokenizerError(f"{config.folder}: {texts} goes before every text; GGUF can say only BOS")
    eos_id = _choose_eos(rules, config, vocabulary)
    if rules.suffix_ids not in ((), (eos_id,)):
        texts = [vocabulary.texts[index] for index in rules.suffix_ids]
        raise TokenizerError(f"{config.folder}: {texts} goes after every text; GGUF can say only EOS")
    # Readers know the usual end markers by name; the format has room for two others.
    others = sorted(rules.eos_ids - find_end_ids(vocabulary, [eos_id]))
    if len(others) > 2:
        texts = [vocabulary.texts[index] for index in others]
        raise TokenizerError(f"{config.folder}: {texts} end an answer; GGUF can name EOS and two more")
    unknown = vocabulary.list_ids(TokenType.UNKNOWN)
    optional = {
        "bos_token_id": rules.bos_id,
        "eos_token_id": eos_id,
        "eot_token_id": others[0] if others else None,
        "eom_token_id": others[1] if len(others) > 1 else None,
        "unknown_token_id": unknown[0] if unknown else None,
        "padding_token_id": rules.pad_id,
    }
    metadata: dict[str, object] = {f"{_PREFIX}{name}": value for name, value in optional.items() if value is not None}
    metadata[f"{_PREFIX}add_bos_token"] = bool(rules.prefix_ids)
    metadata[f"{_PREFIX}add_eos_token"] = bool(rules.suffix_ids)
    return metadata


def _choose_eos(rules: SpecialRules, config: FolderConfig, vocabulary: Vocabulary) -> int | None:
    """The one token that `eos_token_id` may name: the configuration's, or else the lowest of them."""
    named = config.read_role("eos_token")
    if named is not None:
        return vocabulary.ids[named]
    return min(rules.eos_ids, default=None)


def _convert_templates(templates: dict[str, str]) -> dict[str, object]:
    metadata: dict[str, object] = {}
    named = sorted(name for name in templates if name != DEFAULT_TEMPLATE)
    if DEFAULT_TEMPLATE in templates:
        metadata["tokenizer.chat_template"] = templates[DEFAULT_TEMPLATE]
    if named:
        metadata["tokenizer.chat_templates"] = named
    return metadata | {f"tokenizer.chat_template.{name}": templates[name] for name in named}
