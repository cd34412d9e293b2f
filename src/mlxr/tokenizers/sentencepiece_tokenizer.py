"""A tokenizer from a `tokenizer.model` file: the `sentencepiece` library encodes, whatever the algorithm inside.

Gets the file's bytes and the tokens that the folder's configuration adds. Added and special tokens are cut out of a
text here; the library sees the text between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlxr.core.errors import TokenizerError
from mlxr.tokenizers.base import TokenType
from mlxr.tokenizers.codec import SpecialRules, VocabularyTokenizer
from mlxr.tokenizers.sentencepiece_model import SentencePieceModel, hide_repeats
from mlxr.tokenizers.splitter import SpecialSplitter
from mlxr.tokenizers.vocabulary import SPACE_MARK, AddedSpelling, Spelling, Vocabulary, add_spellings

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

# A protocol buffer's parts merge: this one appended says normalizer_spec { add_dummy_prefix: false }.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceTokenizer(VocabularyTokenizer):
    """Encodes with the `sentencepiece` library.

    `prefix_every_part`: text after a special token starts a word again, as at the start of the whole text.
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

    User-defined pieces are spelt with plain spaces, as they stand in texts.
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
    """Raises TokenizerError for the ways of writing spaces that decoding here does not know."""
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
