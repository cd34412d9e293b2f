"""Says what a GBNF grammar is made of: sets of characters, and sequences, choices and repetitions of them.

Two nodes are the same only if they are the same object, as what follows a part depends on where it stands.
"""

from __future__ import annotations

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
