"""Tokenizers that encode with the `tokenizers` library: byte-level BPE built from lists, or a whole tokenizer.json.

A row of `PRE_TYPES` is one way of cutting a text into words before merging: `tokenizer.ggml.pre` of a GGUF file names
a row, a `tokenizer.json` is recognised by its patterns. Patterns are in Oniguruma's syntax, as in `tokenizer.json`; a
row's patterns apply one after the other, each cutting the pieces that the one before left, and the text between two
matches is a word too. Sources: the models' own `tokenizer.json` files, and the names that llama.cpp gives them. If
llama.cpp approximates a pattern that its regular expressions cannot express (`tekken`, `gpt-4o`: upper and lower case
outside ASCII), the row holds the model's own.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from mlxr.core.errors import TokenizerError
from mlxr.core.frozen import frozen
from mlxr.tokenizers.vocabulary import SPACE_MARK, WORD_PART, SpecialRules, TokenType, Vocabulary, VocabularyTokenizer

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN2 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN35 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL
)
_TEKKEN = _CASED % ("", "", "")
_GPT4O = _CASED % (_SUFFIXES + "?", _SUFFIXES + "?", "{1,3}")
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_MARKED_WORDS = (
    "[!\"#$%&'"
    r"()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
)
_DEEPSEEK3 = _MARKED_WORDS + r"| ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL
_SPARK = _MARKED_WORDS + r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"
# Letters with case, as code points: some of them would not survive Unicode normalisation of this file.
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f"
    "-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d"
    "\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
_DIGITS_FROM_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_NOT_HAN = r"[%s&&[^\p{Han}]]"
_KIMI = _CASED.replace(_UPPER, _NOT_HAN % _UPPER).replace(_LOWER, _NOT_HAN % _LOWER).replace("[\\r\\n/]*", "[\\r\\n]*")
_HAIR = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_DEEPSEEK_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_MARKS = r"\s?[!-/:-~" "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
_NOT_PUNCTUATION = r" ?[^(\s|.,!?" "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


@frozen
class PreType:
    """One family: its names (the first is the one written into files), its patterns and its options.

    `ignore_merges`: a word that is a token as a whole becomes it, whatever the merges say. `add_bos`: BOS goes
    before a text if the file does not tell.
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


# Of rows that cut in the same way, recognition picks the first.
PRE_TYPES: tuple[PreType, ...] = (
    PreType(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        (_LLAMA3,),
        ignore_merges=True,
        add_bos=True,
    ),
    PreType(("dbrx", "smaug-bpe", "chatglm-bpe"), (_LLAMA3,)),
    PreType(("glm4", "glm5"), (_LLAMA3,), ignore_merges=True),
    PreType(
        ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "kormo", "f2llmv2", "solar-open", "grok-2"),
        (_QWEN2,),
    ),
    PreType(("qwen35",), (_QWEN35,)),
    PreType(
        (
            *("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "granite-docling", "gigachat", "a.x-4.0"),
            *("mellum", "modern-bert", "jina-es", "jina-de", "jina-v1-en", "jina-v2-code", "jina-v2-es", "jina-v2-de"),
            "roberta-bpe",
        ),
        (GPT2_PATTERN,),
    ),
    PreType(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (r"\p{N}", GPT2_PATTERN),
    ),
    PreType(("tekken",), (_TEKKEN,), ignore_merges=True, add_bos=True),
    PreType(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (_GPT4O,)),
    PreType(("deepseek-llm",), (r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_MARKS, r"\s+$", _DEEPSEEK_HAN, r"\p{N}+")),
    PreType(("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, r"\p{N}")),
    PreType(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), (r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    PreType(("kimi-k2",), (r"\p{Han}+|" + _KIMI % (_SUFFIXES + "?", _SUFFIXES + "?", "{1,3}"),)),
    PreType(("afmoe",), (_DIGITS_FROM_RIGHT, _ASIAN, _DEEPSEEK3)),
    PreType(("jais-2",), (_LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + f"|{_HAIR}|" + r"\s",)),
    PreType(("tiny_aya", "cohere2moe"), (_DIGITS_FROM_RIGHT, _GPT4O)),
    PreType(("youtu",), (_YOUTU, _CASED % (_SUFFIXES + "?", _SUFFIXES + "?", "")), ignore_merges=True),
    PreType(("granite-embed-multi-97m",), (_GPT4O,), ignore_merges=True),
    PreType(("falcon",), (r"[\p{P}\$\+<=>\^~\|`]+", GPT2_PATTERN, "[0-9][0-9][0-9]")),
    PreType(("poro-chat", "bloom", "gpt3-finnish"), (_NOT_PUNCTUATION,)),
    PreType(("viking",), (_NOT_PUNCTUATION, r"\p{N}")),
    PreType(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",),
    ),
    PreType(("seed-coder",), (_SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _TAIL,)),
    PreType(("ufakzeka",), (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL,)),
    PreType(
        ("exaone-moe",),
        (
            _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
    PreType(("laguna",), (r"[^\n]+|[\n]+", _QWEN2)),
    PreType(
        ("minicpm5",),
        (r"\p{N}{1,3}", _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL),
        ignore_merges=True,
    ),
    PreType(("spark2_5",), (r"\p{N}{1,3}", _CJK, _SPARK, r"\p{N}")),
    PreType(("superbpe",), (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    PreType(
        ("chameleon",),
        (
            *("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}"),
            *(r"[\p{P}!-/:-@\[-`{-~]", GPT2_PATTERN),
        ),
        add_bos=True,
    ),
    PreType(("default", ""), (_PUNCTUATION, GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")),
)


def list_names() -> list[str]:
    """Every name that `find_pre_type` knows, sorted."""
    return sorted(name for row in PRE_TYPES for name in row.names if name)


def find_pre_type(name: str) -> PreType:
    """The row called `name`; raises TokenizerError with all known names."""
    for row in PRE_TYPES:
        if name in row.names:
            return row
    raise TokenizerError(
        f"tokenizer.ggml.pre {name!r} is a way of cutting words that is not known; known are {', '.join(list_names())}"
    )


def recognise_pre_type(patterns: tuple[str, ...], ignore_merges: bool) -> PreType:
    """The row with these patterns; raises TokenizerError naming the patterns if there is none.

    Line ends may be written as such or as `\\r` and `\\n`: files do both.
    """
    patterns = tuple(pattern.replace("\r", r"\r").replace("\n", r"\n") for pattern in patterns)
    for row in PRE_TYPES:
        if row.patterns == patterns and row.ignore_merges == ignore_merges:
            return row
    also = (
        " (known only with the other value of ignore_merges)" if any(r.patterns == patterns for r in PRE_TYPES) else ""
    )
    raise TokenizerError(
        f"the pre-tokenizer with patterns {list(patterns)} and ignore_merges={str(ignore_merges).lower()} is not one "
        f"that a GGUF file can name{also}; known are {', '.join(list_names())}"
    )


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts are encoded one by one; threads would only wait


@contextmanager
def explain_failures(name: str) -> Iterator[None]:
    """Turn all errors of the library, bare Exception and panics too, into TokenizerError about `name`."""
    try:
        yield
    except TokenizerError:
        raise
    except Exception as error:
        raise TokenizerError(f"{name}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # it is no Exception, and cannot be imported
            raise
        raise TokenizerError(f"{name}: {error}") from error


class LibraryTokenizer(VocabularyTokenizer):
    """Encodes with a library object whose ids are the vocabulary's."""

    def __init__(
        self, library: Library, vocabulary: Vocabulary, rules: SpecialRules, *, strips_leading_space: bool
    ) -> None:
        super().__init__(vocabulary, rules, strips_leading_space=strips_leading_space)
        self._library = library

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        return self._encode_texts([text], parse_special)[0]

    def _encode_texts(self, texts: Sequence[str], parse_special: bool) -> list[list[int]]:
        library = self._library if parse_special else self._plain_library
        with explain_failures("the tokenizer cannot encode a text"):
            # Unlike `encode`, this releases the interpreter lock, so that long texts block no other thread.
            encodings = library.encode_batch_fast(texts, add_special_tokens=False)
        return [list(encoding.ids) for encoding in encodings]

    @cached_property
    def _plain_library(self) -> Library:
        """A second library object, for which special tokens in a text are plain characters.

        That is a state of the object; a single object would have to be locked while it encodes.
        """
        plain = copy.deepcopy(self._library)
        plain.encode_special_tokens = True
        return plain


def build_byte_level_library(vocabulary: Vocabulary, merges: Sequence[str], pre_type: PreType) -> Library:
    """A byte-level BPE object with these tokens and merges (`left right`, most important first).

    Raises TokenizerError when a merge needs a token that is not there.
    """
    pairs = [_split_merge(merge, index, vocabulary) for index, merge in enumerate(merges)]
    with explain_failures("the merges do not fit the vocabulary"):
        library = Library(models.BPE(vocab=vocabulary.ids, merges=pairs, ignore_merges=pre_type.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_type.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    _add_tokens(library, vocabulary)
    return library


def build_space_mark_library(vocabulary: Vocabulary, merges: Sequence[str], unknown_id: int | None) -> Library:
    """A BPE object over texts with marked spaces, not cut into words; unknown parts are spelt in byte tokens.

    Raises TokenizerError when a merge needs a token that is not there.
    """
    pairs = [_split_merge(merge, index, vocabulary) for index, merge in enumerate(merges)]
    unknown = None if unknown_id is None else vocabulary.texts[unknown_id]
    with explain_failures("the merges do not fit the vocabulary"):
        model = models.BPE(vocab=vocabulary.ids, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        library = Library(model)
    library.normalizer = normalizers.Replace(" ", SPACE_MARK)
    _add_tokens(library, vocabulary)
    return library


def build_word_library(vocabulary: Vocabulary, merges: Sequence[str], *, lowercase: bool) -> Library:
    """A BPE object over words separated by white space, which is dropped, as are parts that it cannot spell."""
    pairs = [_split_merge(merge, index, vocabulary) for index, merge in enumerate(merges)]
    with explain_failures("the merges do not fit the vocabulary"):
        library = Library(models.BPE(vocab=vocabulary.ids, merges=pairs))
    if lowercase:
        library.normalizer = normalizers.Lowercase()
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    _add_tokens(library, vocabulary)
    return library


def build_word_piece_library(vocabulary: Vocabulary, unknown_id: int, *, lowercase: bool, accents: bool) -> Library:
    """A WordPiece object over tokens that mark the space before a word, as in GGUF files; see BERT's tokenizer.

    With `lowercase` capitals become small, and with `accents` these stay on letters.
    """
    words = {_mark_word_part(vocabulary, index): index for index in range(len(vocabulary))}
    with explain_failures("the vocabulary makes no WordPiece"):
        model = models.WordPiece(vocab=words, unk_token=vocabulary.texts[unknown_id], max_input_chars_per_word=100)
        library = Library(model)
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=not accents)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    _add_tokens(library, vocabulary)
    return library


def _mark_word_part(vocabulary: Vocabulary, index: int) -> str:
    text = vocabulary.texts[index]
    if vocabulary.types[index] is not TokenType.NORMAL:
        return text
    return text.removeprefix(SPACE_MARK) if text.startswith(SPACE_MARK) else WORD_PART + text


def build_unigram_library(
    vocabulary: Vocabulary,
    scores: Sequence[float],
    unknown_id: int,
    *,
    add_space_prefix: bool,
    remove_extra_whitespaces: bool,
    charsmap: bytes,
) -> Library:
    """A Unigram object with these tokens and their scores, whose texts SentencePiece's `charsmap` normalises."""
    with explain_failures("the scores do not fit the vocabulary"):
        library = Library(models.Unigram(list(zip(vocabulary.texts, scores, strict=True)), unknown_id, False))
        if charsmap:
            library.normalizer = normalizers.Precompiled(charsmap)
    marks = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="always" if add_space_prefix else "never")
    splits = [pre_tokenizers.WhitespaceSplit()] if remove_extra_whitespaces else []
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, marks])
    _add_tokens(library, vocabulary)
    return library


def _add_tokens(library: Library, vocabulary: Vocabulary) -> None:
    """Add the tokens to the library that are found in a text before anything else."""
    for kind, special in ((TokenType.USER_DEFINED, False), (TokenType.CONTROL, True), (TokenType.UNKNOWN, True)):
        tokens = [
            AddedToken(vocabulary.texts[index], special=special, normalized=False)
            for index in vocabulary.list_ids(kind)
        ]
        if special:
            library.add_special_tokens(tokens)
        else:
            library.add_tokens(tokens)


def _split_merge(merge: str, index: int, vocabulary: Vocabulary) -> tuple[str, str]:
    left, space, right = (
        merge[:1] + merge[1:].partition(" ")[0],
        merge[1:].partition(" ")[1],
        merge[1:].partition(" ")[2],
    )
    if not space or not left or not right:
        raise TokenizerError(f"merge {index} ({merge!r}) is not two tokens with a space between")
    for text in (left, right, left + right):
        if text not in vocabulary.ids:
            raise TokenizerError(f"merge {index} ({merge!r}) needs the token {text!r}, which the vocabulary lacks")
    return left, right
