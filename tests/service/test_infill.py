"""Prompts that leave a gap in the middle."""

from __future__ import annotations

import pytest

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import SamplingParams
from mlxr.service.infill import FAMILIES, PROJECT, Snippet, Spelling, encode_infill, find_infill_tokens, make_infill
from mlxr.service.requests import TextRequest

BOS = 1


class Letters:
    """A vocabulary of characters and of the special spellings of a family, from 1000 on."""

    bos_id: int | None = BOS

    def __init__(self, family: Spelling | None, *, add_bos: bool = True, without: str | None = None) -> None:
        spelt = [family.prefix, family.suffix, family.middle, family.file, family.project] if family else []
        self._specials = {text: 1000 + at for at, text in enumerate(spelt) if text is not None and text != without}
        self.add_bos = add_bos

    def token_id(self, text: str) -> int | None:
        return self._specials.get(text)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        assert not add_special
        assert not parse_special
        return letters(text)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def encode(family: Spelling | None, *given: object, add_bos: bool = True, **options: object) -> list[int]:
    return encode_infill(Letters(family, add_bos=add_bos), *given, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.file or family.prefix)
def test_every_family_is_known(family: Spelling) -> None:
    tokens = find_infill_tokens(Letters(family))  # type: ignore[arg-type]
    assert tokens is not None
    assert (tokens.prefix, tokens.suffix, tokens.middle) == (1000, 1001, 1002)
    assert (tokens.file is None) is (family.file is None)
    assert encode(family, "ab", "c") == [BOS, 1000, *letters("ab"), 1001, *letters("c"), 1002]


def test_token_ids_before_the_gap() -> None:
    assert encode(FAMILIES[0], [7, 8], "c", add_bos=False) == [1000, 7, 8, 1001, ord("c"), 1002]


def test_other_files_come_first() -> None:
    extra = [Snippet("xy", "a.py"), Snippet("z", "b.py")]
    assert encode(FAMILIES[0], "p", "s", extra, add_bos=False) == [
        *(1004, *letters(PROJECT)),
        *(1003, *letters("a.py\nxy")),
        *(1003, *letters("b.py\nz")),
        *(1003, *letters("file\n")),
        *(1000, ord("p"), 1001, ord("s"), 1002),
    ]
    plain = next(family for family in FAMILIES if family.file is None)
    assert encode(plain, "p", "s", extra) == [
        *(BOS, *letters("\n\nxy\n\nz")),
        *(1000, ord("p"), 1001, ord("s"), 1002),
    ]


def test_what_is_too_long_loses_what_is_furthest_from_the_gap() -> None:
    before, after = "b" * 50 + "B" * 50, "A" * 50 + "a" * 50
    ids = encode(FAMILIES[0], before, after, [Snippet("x" * 10, "f")], max_tokens=44, add_bos=False)
    assert ids == [1000, *letters("B" * 30), 1001, *letters("A" * 11), 1002]
    short = encode(FAMILIES[0], "b", after, max_tokens=44, add_bos=False)
    assert short == [1000, ord("b"), 1001, *letters("A" * 40), 1002]
    for most in (1, 5, 20, 100, 203):
        assert len(encode(FAMILIES[0], before, after, max_tokens=most)) <= max(most, 6)


def test_files_that_do_not_fit_are_left_out_from_the_first_on() -> None:
    extra = [Snippet("x" * 100, "far"), Snippet("near", "n")]
    ids = encode(FAMILIES[0], "p", "s", extra, max_tokens=60, add_bos=False)
    assert ord("x") not in ids
    assert ids.count(1003) == 2  # the file that fits, and that with the gap
    assert encode(FAMILIES[0], "p", "s", extra, max_tokens=10, add_bos=False)[0] == 1000


def test_the_tokens_around_gaps_end_an_answer() -> None:
    wanted = make_infill(Letters(FAMILIES[0]), TextRequest("a", SamplingParams(stop_token_ids=frozenset({5}))), "b")  # type: ignore[arg-type]
    assert wanted.params.stop_token_ids == {5, 1000, 1001, 1002, 1003, 1004}


@pytest.mark.parametrize("without", [None, FAMILIES[0].prefix, FAMILIES[0].suffix, FAMILIES[0].middle])
def test_a_vocabulary_without_the_tokens(without: str | None) -> None:
    vocabulary = Letters(None if without is None else FAMILIES[0], without=without)
    with pytest.raises(InvalidRequest, match="no infill tokens") as refused:
        encode_infill(vocabulary, "a", "b")  # type: ignore[arg-type]
    assert refused.value.field == "suffix"
