"""A tokenizer that the `tokenizers` library encodes for: byte-level BPE built from lists, or a whole tokenizer.json.

Knows the library's pieces; not the files the lists came from. Encoding is the library's, BOS and EOS and the way back
are `codec.VocabularyTokenizer`'s.
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
from mlxr.tokenizers.base import TokenType
from mlxr.tokenizers.codec import SpecialRules, VocabularyTokenizer
from mlxr.tokenizers.pre_types import PreType
from mlxr.tokenizers.vocabulary import SPACE_MARK, Vocabulary

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a text is one piece; threads would only lie in wait


@contextmanager
def explain_failures(name: str) -> Iterator[None]:
    """Turn what the library raises, bare Exception and panics too, into TokenizerError about `name`."""
    try:
        yield
    except TokenizerError:
        raise
    except Exception as error:
        raise TokenizerError(f"{name}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # no Exception, and not to be imported
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
        library = self._library if parse_special else self._plain_library
        with explain_failures("the tokenizer cannot encode a text"):
            # Other than `encode`, this lets go of the interpreter, so that long texts hold up no other thread.
            (encoding,) = library.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    @cached_property
    def _plain_library(self) -> Library:
        """A second library object, for which special tokens in a text are plain characters.

        That is a state of the object; one object for both would have to be locked while it encodes.
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
    """A BPE object over texts whose spaces are marked, without words; what is left unknown is spelt in byte tokens.

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


def _add_tokens(library: Library, vocabulary: Vocabulary) -> None:
    """Tell the library which tokens are found in a text before anything else."""
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
