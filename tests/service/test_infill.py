"""Prompts that leave a gap in the middle."""

from __future__ import annotations

import pytest

from mlxr.core.errors import InvalidRequest
from mlxr.service.infill import INFILL_TOKENS, encode_infill, find_infill_tokens

BOS = 1


class Letters:
    """A vocabulary of characters and of the given special spellings, from 1000 on."""

    bos_id: int | None = BOS

    def __init__(self, specials: tuple[str, ...], *, add_bos: bool = True) -> None:
        self._specials = {text: 1000 + number for number, text in enumerate(specials)}
        self.add_bos = add_bos

    def token_id(self, text: str) -> int | None:
        return self._specials.get(text)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        assert not add_special
        assert not parse_special
        return [ord(letter) for letter in text]


@pytest.mark.parametrize("spellings", INFILL_TOKENS, ids=lambda spellings: spellings[0])
def test_every_family_is_known(spellings: tuple[str, str, str]) -> None:
    tokenizer = Letters(spellings)
    assert find_infill_tokens(tokenizer) == (1000, 1001, 1002)  # type: ignore[arg-type]
    ids = encode_infill(tokenizer, "ab", "c")  # type: ignore[arg-type]
    assert ids == [BOS, 1000, ord("a"), ord("b"), 1001, ord("c"), 1002]


def test_token_ids_before_the_gap() -> None:
    tokenizer = Letters(INFILL_TOKENS[0], add_bos=False)
    assert encode_infill(tokenizer, [7, 8], "c") == [1000, 7, 8, 1001, ord("c"), 1002]  # type: ignore[arg-type]


@pytest.mark.parametrize("specials", [(), INFILL_TOKENS[0][:2], (INFILL_TOKENS[0][0], *INFILL_TOKENS[1][1:])])
def test_a_vocabulary_without_the_tokens(specials: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match="no infill tokens") as refused:
        encode_infill(Letters(specials), "a", "b")  # type: ignore[arg-type]
    assert refused.value.field == "suffix"
