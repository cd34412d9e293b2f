"""Stop strings over a stream: the result does not depend on how the text was cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxr.service.answer import StopScanner

TEXTS = st.text("abc", max_size=40)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def scan(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, str | None]:
    """Return all text that comes out, and the stop string found."""
    scanner = StopScanner(stops)
    text = ""
    for piece in pieces:
        sure, stop = scanner.push(piece)
        text += sure
        if stop is not None:
            return text, stop
    return text + scanner.flush(), None


def expect(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return the right result by the plain rule: character by character, the longest stop string just completed."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(TEXTS, STOPS, st.lists(st.integers(0, 40), max_size=12))
def test_any_cutting_gives_the_same(text: str, stops: list[str], cuts: list[int]) -> None:
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    assert scan(pieces, stops) == expect(text, stops)


@given(TEXTS, STOPS)
def test_nothing_is_given_out_that_a_stop_string_could_take_back(text: str, stops: list[str]) -> None:
    wanted, _ = expect(text, stops)
    scanner, shown = StopScanner(stops), ""
    for char in text:
        sure, stop = scanner.push(char)
        shown += sure
        assert wanted.startswith(shown)
        if stop is not None:
            break


@given(TEXTS, STOPS)
def test_only_what_could_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    scanner, shown = StopScanner(stops), ""
    for count, char in enumerate(text, 1):
        sure, stop = scanner.push(char)
        if stop is not None:
            return
        shown += sure
        held = text[len(shown) : count]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "result"),
    [
        (["Hello", " wor", "ld"], ["wor"], ("Hello ", "wor")),
        (["x", "abc"], ["abc", "b"], ("xa", "b")),
        (["xabc"], ["bc", "abc"], ("x", "abc")),
        (["a", "a", "a", "b"], ["aab"], ("a", "aab")),
        (["ab", "ab"], ["abc"], ("abab", None)),
        ([], ["a"], ("", None)),
    ],
)
def test_examples(pieces: list[str], stops: list[str], result: tuple[str, str | None]) -> None:
    assert scan(pieces, stops) == result
