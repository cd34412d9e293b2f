"""Reads GBNF text. Facts from llama.cpp's `grammars/README.md`.

A rule is `name ::= alternatives` and ends with its line, unless a parenthesis is open or an alternative is due.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Chars:
    """One character of the code points in `ranges`, which are sorted, apart from each other, and inclusive."""

    ranges: Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """One token of the vocabulary, as both notations write it: `<think>` or `<[1000]>`."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Ref:
    """The rule of this name."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """All parts, one after the other; nothing at all without parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """The part from `low` to `high` times; as often as one likes where `high` is None."""

    part: Node
    low: int
    high: int | None


Node = Chars | Token | Ref | Sequence | Choice | Repeat
Rules = Mapping[str, Node]


MAX_NODES = 20_000
MAX_REPEATS = 2000
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_TOKEN = re.compile(r"<(?:\[\d+\]|[^\s<>]+)>")
_BOUNDS = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


class GbnfError(ValueError):
    """Says what is wrong with a grammar, and in which line."""


def parse(text: str) -> dict[str, Node]:
    """The rules by their names; raises GbnfError, also for names that no rule has."""
    return _Parser(text).read_rules()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._nodes = text, 0, 0
        self._named: dict[str, int] = {}  # where a rule is first referred to

    def read_rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip(_LINES)
        while self._at < len(self._text):
            name = self._expect(_NAME, "the name of a rule")
            self._skip(_SPACE)
            if not self._take("::="):
                raise self._fail("'::=' is missing")
            self._skip(_LINES)
            if name in rules:
                raise self._fail(f"the rule {name} is there twice")
            rules[name] = self._read_choice(is_nested=False)
            if self._at < len(self._text) and self._peek() not in "\r\n":
                raise self._fail(f"{self._peek()!r} is not expected")
            self._skip(_LINES)
        if "root" not in rules:
            raise GbnfError("the grammar has no rule 'root'")
        for name, at in self._named.items():
            if name not in rules:
                self._at = at
                raise self._fail(f"there is no rule {name[:80]!r}")
        return rules

    def _read_choice(self, *, is_nested: bool) -> Node:
        parts = [self._read_sequence(is_nested=is_nested)]
        while self._take("|"):
            self._skip(_LINES)
            parts.append(self._read_sequence(is_nested=is_nested))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _read_sequence(self, *, is_nested: bool) -> Node:
        space, parts = _LINES if is_nested else _SPACE, list[Node]()
        while (part := self._read_part()) is not None:
            self._nodes += 1
            if self._nodes > MAX_NODES:
                raise GbnfError(f"the grammar has more than {MAX_NODES} parts")
            self._skip(space)
            parts.append(self._read_repeat(part))
            self._skip(space)
        self._skip(space)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _read_part(self) -> Node | None:
        sign = self._peek()
        if sign == '"':
            return self._read_literal()
        if sign == "[":
            return self._read_class()
        if sign == "<":
            return Token(self._expect(_TOKEN, "a token such as <think> or <[1000]>"))
        if self._take("."):
            return Chars(((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, _LAST)))
        if self._take("("):
            self._skip(_LINES)
            inner = self._read_choice(is_nested=True)
            if not self._take(")"):
                raise self._fail("')' is missing")
            return inner
        found = _NAME.match(self._text, self._at)
        if found is None:
            return None
        self._named.setdefault(found[0], self._at)
        self._at = found.end()
        return Ref(found[0])

    def _read_repeat(self, part: Node) -> Node:
        while self._peek() and self._peek() in "*+?{":
            sign = self._peek()
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign, (0, None))
            if sign == "{":
                found = _BOUNDS.match(self._text, self._at)
                if found is None:
                    raise self._fail("bounds must be {m}, {m,} or {m,n}")
                low = int(found[1][:9])
                high = low if found[2] is None else int(found[3][:9]) if found[3] else None
                if max(low, high or 0) > MAX_REPEATS or (high is not None and high < low):
                    raise self._fail(f"bounds must rise, to {MAX_REPEATS} at most")
                self._at = found.end() - 1
            self._at += 1
            part = Repeat(part, low, high)
        return part

    def _read_literal(self) -> Node:
        self._at += 1
        parts = []
        while not self._take('"'):
            code = self._read_character("a text")
            parts.append(Chars(((code, code),)))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _read_class(self) -> Node:
        self._at += 1
        is_negated, ranges = self._take("^"), list[tuple[int, int]]()
        while not self._take("]"):
            low = high = self._read_character("a class")
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._read_character("a class")
            if high < low:
                raise self._fail("a range must rise")
            ranges.append((low, high))
        merged = _merge(ranges)
        return Chars(_complement(merged) if is_negated else merged)

    def _read_character(self, place: str) -> int:
        sign = self._peek()
        if not sign or sign in "\r\n":
            raise self._fail(f"{place} has no end")
        self._at += 1
        if sign != "\\":
            return ord(sign)
        kind = self._peek()
        self._at += 1
        if kind in _SIMPLE and kind:
            return ord(_SIMPLE[kind])
        digits = _HEX_DIGITS.get(kind, 0)
        code = self._text[self._at : self._at + digits]
        if not digits or not re.fullmatch(f"[0-9A-Fa-f]{{{digits}}}", code) or int(code, 16) > _LAST:
            raise self._fail("an escape is none of those that GBNF knows")
        self._at += digits
        return int(code, 16)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        is_there = self._text.startswith(text, self._at)
        self._at += len(text) * is_there
        return is_there

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _expect(self, pattern: re.Pattern[str], what: str) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._fail(f"{what} is missing")
        self._at = found.end()
        return found[0]

    def _fail(self, reason: str) -> GbnfError:
        return GbnfError(f"line {self._text.count(chr(10), 0, self._at) + 1}: {reason}")


def _merge(ranges: list[tuple[int, int]]) -> Ranges:
    """Sorted, without overlaps, and without surrogates, which no text has."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    first, last = _SURROGATES
    cut = [part for low, high in merged for part in ((low, min(high, first - 1)), (max(low, last + 1), high))]
    return tuple((low, high) for low, high in cut if low <= high)


def _complement(ranges: Ranges) -> Ranges:
    ends = [-1, *(high for _, high in ranges)]
    starts = [*(low for low, _ in ranges), _LAST + 1]
    return _merge([(end + 1, start - 1) for end, start in zip(ends, starts, strict=True) if end + 1 < start])
