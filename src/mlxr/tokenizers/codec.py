"""The part that all tokenizers share: BOS and EOS around a text, and the way back from ids to text.

A subclass says how a text becomes ids; everything else is answered from the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mlxr.core.errors import InvalidRequest, TokenizerError
from mlxr.tokenizers.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class SpecialRules:
    """Tokens with a role, and what goes around a text.

    `prefix_ids` and `suffix_ids` are what `encode(add_special=True)` writes; usually BOS and nothing.
    """

    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    pad_id: int | None = None
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()


class VocabularyTokenizer(ABC):
    """A tokenizer over a `Vocabulary`; see `base.Tokenizer` for what each method promises."""

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
        """Ids of a text that is not empty, without BOS and EOS."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`; see `base.Tokenizer.encode`."""
        _check_unicode(text)
        ids = self.vocabulary.take_firsts(self._encode_text(text, parse_special)) if text else []
        return [*self.rules.prefix_ids, *ids, *self.rules.suffix_ids] if add_special else ids

    def cut(self, ids: Sequence[int], limit: int) -> list[int]:
        """The first `limit` of `ids`; what goes behind every text stays at its end. See `base.Tokenizer.cut`."""
        suffix = self.rules.suffix_ids
        if len(ids) <= limit or len(suffix) >= limit or tuple(ids[len(ids) - len(suffix) :]) != suffix:
            return list(ids[:limit])
        return [*ids[: limit - len(suffix)], *suffix]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; see `base.Tokenizer.decode`."""
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
        """Exactly the bytes that the token adds to a text."""
        return self.vocabulary.token_bytes(token_id)

    def token_text(self, token_id: int, /) -> str:
        """The token as the vocabulary spells it."""
        return self.vocabulary.texts[self.vocabulary.check_id(token_id)]

    def token_id(self, text: str, /) -> int | None:
        """The token that the vocabulary spells so, or None."""
        return self.vocabulary.ids.get(text)

    def is_special(self, token_id: int, /) -> bool:
        """Whether the token is hidden from readers."""
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
    """What goes before and after a text. Raises TokenizerError if a token is wanted that `source` does not name."""
    if add_bos and bos_id is None:
        raise TokenizerError(f"{source} wants a BOS token before every text but names none")
    if add_eos and eos_id is None:
        raise TokenizerError(f"{source} wants an EOS token after every text but names none")
    prefix = (bos_id,) if add_bos and bos_id is not None else ()
    suffix = (eos_id,) if add_eos and eos_id is not None else ()
    return prefix, suffix
