"""The characters of a part of a grammar as an automaton: which may come first, which last, and which after each.

Positions are numbered; sets of positions, and of characters, are the bits of integers (Glushkov's construction). What
is repeated counts as repeated without bounds, so that an automaton may take more than its part of the grammar does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxr.service.gbnf.nodes import Chars, Choice, Node, Repeat, Rules, Sequence, Token

MAX_POSITIONS = 300
MAX_VISITS = 3000
MAX_PAIRS = 50_000


class TooLarge(Exception):
    """More positions, or more work, than a grammar is worth."""


@dataclass(slots=True)
class Effort:
    """How many pairs of positions were compared for one grammar."""

    pairs: int = 0


@dataclass(slots=True)
class Alphabet:
    """Characters that no set of the grammar tells apart are one; `masks` has the sets of characters met so far."""

    starts: list[int]
    masks: dict[Chars, int] = field(default_factory=dict)

    def read(self, chars: Chars) -> int:
        """The set of characters as bits."""
        mask = self.masks.get(chars)
        if mask is None:
            inside = (any(low <= start <= high for low, high in chars.ranges) for start in self.starts)
            mask = self.masks[chars] = sum(1 << index for index, is_in in enumerate(inside) if is_in)
        return mask


@dataclass(slots=True)
class Automaton:
    """`chars` and `follow` of each position; where a match begins and ends, and whether it may be empty."""

    chars: list[int] = field(default_factory=list)
    follow: list[int] = field(default_factory=list)
    first: int = 0
    last: int = 0
    is_nullable: bool = True
    visits: int = 0

    def collect(self, positions: int) -> int:
        """The characters of some positions together."""
        mask = 0
        for position in iterate(positions):
            mask |= self.chars[position]
        return mask

    def find_extensions(self) -> int:
        """The characters that may come where a match could end as well."""
        positions = 0
        for position in iterate(self.last):
            positions |= self.follow[position]
        return self.collect(positions)


def build(node: Node, rules: Rules, alphabet: Alphabet) -> Automaton:
    """The automaton of a node in which no rule refers to itself; raises TooLarge."""
    automaton = Automaton()
    automaton.is_nullable, automaton.first, automaton.last = _add(node, automaton, rules, alphabet)
    return automaton


def runs_into(one: Automaton, other: Automaton, after: int, effort: Effort) -> bool:
    """Whether `other` may go on, by one of the characters `after`, where a match of `one` has ended.

    Raises TooLarge when all comparisons together were too many.
    """
    if not after or not one.collect(one.first) & other.collect(other.first):
        return False
    seen, waiting = set[tuple[int, int]](), list[tuple[int, int]]()
    pairs = [(p, q) for p in iterate(one.first) for q in iterate(other.first)]
    while pairs or waiting:
        for p, q in pairs:
            if (p, q) not in seen and one.chars[p] & other.chars[q]:
                seen.add((p, q))
                waiting.append((p, q))
        if not waiting:
            break
        p, q = waiting.pop()
        effort.pairs += 1
        if effort.pairs > MAX_PAIRS:
            raise TooLarge
        if one.last >> p & 1 and other.collect(other.follow[q]) & after:
            return True
        pairs = [(p2, q2) for p2 in iterate(one.follow[p]) for q2 in iterate(other.follow[q])]
    return False


def iterate(bits: int) -> list[int]:
    """The numbers of the bits that are set."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def _add(node: Node, automaton: Automaton, rules: Rules, alphabet: Alphabet) -> tuple[bool, int, int]:
    """Add the positions of a node; whether it may be empty, its first and its last positions."""
    automaton.visits += 1
    if automaton.visits > MAX_VISITS:
        raise TooLarge
    match node:
        case Chars():
            if len(automaton.chars) >= MAX_POSITIONS:
                raise TooLarge
            automaton.chars.append(alphabet.read(node))
            automaton.follow.append(0)
            bit = 1 << len(automaton.chars) - 1
            return False, bit, bit
        case Sequence():
            return _chain([_add(part, automaton, rules, alphabet) for part in node.parts], automaton)
        case Choice():
            parts = [_add(part, automaton, rules, alphabet) for part in node.parts]
            first, last = 0, 0
            for part in parts:
                first, last = first | part[1], last | part[2]
            return any(part[0] for part in parts), first, last
        case Repeat():
            is_empty, first, last = _add(node.part, automaton, rules, alphabet)
            if node.high != 1:  # however often: what might be is enough here
                for position in iterate(last):
                    automaton.follow[position] |= first
            return is_empty or node.low == 0, first, last
        case Token():
            raise TooLarge  # a token has no characters
        case _:
            return _add(rules[node.name], automaton, rules, alphabet)


def _chain(parts: list[tuple[bool, int, int]], automaton: Automaton) -> tuple[bool, int, int]:
    """One part after the other."""
    is_nullable, first, last = True, 0, 0
    for part_nullable, part_first, part_last in parts:
        for position in iterate(last):
            automaton.follow[position] |= part_first
        first |= part_first if is_nullable else 0
        last = part_last | (last if part_nullable else 0)
        is_nullable = is_nullable and part_nullable
    return is_nullable, first, last
