"""The search for shortest texts finds what trying all texts finds."""

from __future__ import annotations

import re
from itertools import product

import pytest
from shortest_texts import Automaton, TokenSearch

TOKENS = dict(enumerate((b"a", b"b", b"ab", b"aab", b"(", b")", b"(a", b" ", b"\xc3", b"\xa9", b"c]", b"")))
PATTERNS = (
    "aaaa",
    "(ab|a)(b|ab)",
    "a{2,3}b{2}",
    "(a|b){5}",
    "(a{0,2}b)*c]",
    "( ?a){3}",
    "(a|bb)*( a+)?c]",
    r"\(\(?[ab]{2,5}\)*",
    r"[\x80-\xff]{2}( a)?",
    "|a",
    "(a*b?){2}a| {4}",
)


def permits(automaton: Automaton, text: bytes) -> bool:
    return automaton.may_end(automaton.read(text))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_text_of_fewer_tokens_is_permitted(pattern: str) -> None:
    found = TokenSearch(pattern, TOKENS).find_shortest()
    assert re.fullmatch(pattern.encode("latin-1"), b"".join(TOKENS[index] for index in found))
    automaton, lengths = Automaton(pattern), set()
    for count in range(5):
        for text in map(b"".join, product(TOKENS.values(), repeat=count)):
            is_permitted = re.fullmatch(pattern.encode("latin-1"), text) is not None
            assert permits(automaton, text) == is_permitted
            if is_permitted:
                lengths.add(count)
    assert len(found) == min(lengths)


def test_of_the_texts_with_as_few_tokens_the_shortest_is_found() -> None:
    tokens = {0: b"aaa", 1: b"aa", 2: b"a", 3: b"b"}
    assert TokenSearch("a+b", tokens).find_shortest() == (2, 3)
    assert TokenSearch("a{5}", tokens).find_shortest() == (1, 0)


def test_what_no_tokens_spell_is_refused() -> None:
    with pytest.raises(ValueError, match="spell no text"):
        TokenSearch("[a-z]+d", {0: b"a", 1: b"da"}).find_shortest()


def test_tokens_that_lead_on_are_listed() -> None:
    search = TokenSearch("[ab]+c]", TOKENS)
    begun = {index for token_ids, _ in search.list_next(search.automaton.start) for index in token_ids}
    assert begun == {0, 1, 2, 3}
    assert search.automaton.read(b"ac]b") == 0
