"""Finds the fewest tokens of a vocabulary that spell a text which a pattern permits. Knows no engine and no grammar.

A pattern is a regular expression of Python in which a character is a byte. It becomes an automaton, whose states a
search by breadth visits token by token: the first text that may end has the fewest tokens. Bytes that the pattern never
tells apart count as one, so that most tokens spell the same and are tried once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

_parser: Any = import_module("re._parser")
_BYTES = frozenset(map(chr, range(256)))


class Automaton:
    """The automaton of one pattern. Its states are numbers; `start` is that of the empty text.

    `_steps` has for each place in the pattern the characters that lead on, each step to one place; `_jumps` the places
    that are reached without any. A state is a set of places; one with no place, as no permitted text begins so, is 0.
    """

    start = 1

    def __init__(self, pattern: str) -> None:
        self._steps: list[list[tuple[frozenset[str], int]]] = []
        self._jumps: list[list[int]] = []
        first = self._add_place()
        self._end = self._add_all(_parser.parse(pattern), first)
        self._states = [frozenset[int](), self._complete({first})]
        self._numbers = {places: number for number, places in enumerate(self._states)}
        self._known: list[dict[str, int]] = [{}, {}]
        self._spelling = self._merge()

    def step(self, state: int, sign: str) -> int:
        """Return the state after one more character of a text that `spell` gave."""
        behind = self._known[state].get(sign)
        if behind is None:
            near = {place for at in self._states[state] for signs, place in self._steps[at] if sign in signs}
            behind = self._known[state][sign] = self._number(self._complete(near))
        return behind

    def may_end(self, state: int) -> bool:
        """Return True if the text up to here is permitted."""
        return self._end in self._states[state]

    def spell(self, text: bytes) -> str:
        """Return the text with one character for all those that the pattern never tells apart."""
        return text.decode("latin-1").translate(self._spelling)

    def read(self, text: bytes, state: int = start) -> int:
        """Return the state after a text that begins in `state`."""
        for sign in self.spell(text):
            state = self.step(state, sign)
        return state

    def _add_place(self) -> int:
        self._steps.append([])
        self._jumps.append([])
        return len(self._steps) - 1

    def _add_step(self, start: int, signs: frozenset[str]) -> int:
        end = self._add_place()
        self._steps[start].append((signs, end))
        return end

    def _add_all(self, parts: Any, start: int) -> int:
        """Add parts that come one after the other from `start` on; return where they end."""
        for name, value in parts:
            start = self._add(str(name), value, start)
        return start

    def _add(self, name: str, value: Any, start: int) -> int:
        if name == "LITERAL":
            return self._add_step(start, frozenset(chr(value)))
        if name == "IN":
            return self._add_step(start, frozenset().union(*(_list_signs(str(kind), part) for kind, part in value)))
        if name == "SUBPATTERN":
            return self._add_all(value[-1], start)
        end = self._add_place()
        if name == "BRANCH":
            for parts in value[1]:
                self._jumps[self._add_all(parts, start)].append(end)
            return end
        assert name == "MAX_REPEAT", name
        low, high, parts = value
        for _ in range(low):
            start = self._add_all(parts, start)
        if high == _parser.MAXREPEAT:
            loop = self._add_place()  # of its own: what comes before it must not come again
            self._jumps[start].append(loop)
            self._jumps[self._add_all(parts, loop)].append(loop)
            self._jumps[loop].append(end)
            return end
        for _ in range(high - low):
            self._jumps[start].append(end)
            start = self._add_all(parts, start)
        self._jumps[start].append(end)
        return end

    def _number(self, places: frozenset[int]) -> int:
        """Return the number of a state, a new one for a state that is met for the first time."""
        number = self._numbers.setdefault(places, len(self._states))
        if number == len(self._states):
            self._states.append(places)
            self._known.append({})
        return number

    def _complete(self, places: set[int]) -> frozenset[int]:
        """Return these places and all that are reached from them without a character."""
        waiting = list(places)
        while waiting:
            for place in self._jumps[waiting.pop()]:
                if place not in places:
                    places.add(place)
                    waiting.append(place)
        return frozenset(places)

    def _merge(self) -> dict[int, str]:
        """Return for each character the first that is in the same sets of characters."""
        sets = {signs for steps in self._steps for signs, _ in steps}
        firsts: dict[tuple[bool, ...], str] = {}
        return {ord(sign): firsts.setdefault(tuple(sign in signs for signs in sets), sign) for sign in sorted(_BYTES)}


def _list_signs(name: str, value: Any) -> frozenset[str]:
    """Return the characters of one part of a class such as `[a-z,]`."""
    first, last = value if name == "RANGE" else (value, value)
    return frozenset(map(chr, range(first, last + 1)))


@dataclass
class _Node:
    """The tokens whose spelling ends here, and those that go on, by their next character."""

    token_ids: list[int] = field(default_factory=list)
    longer: dict[str, _Node] = field(default_factory=lambda: defaultdict(_Node))


class _Way(NamedTuple):
    """Tokens of a text, and its length in bytes."""

    size: int
    token_ids: tuple[int, ...]


class TokenSearch:
    """The texts that a pattern permits, token by token; `tokens` are the bytes of all tokens that may come."""

    def __init__(self, pattern: str, tokens: Mapping[int, bytes]) -> None:
        self.automaton, self._tokens = Automaton(pattern), tokens
        self._root = _Node()
        for token_id, text in tokens.items():
            node = self._root
            for sign in self.automaton.spell(text):
                node = node.longer[sign]
            if text:
                node.token_ids.append(token_id)

    def list_next(self, state: int) -> Iterator[tuple[list[int], int]]:
        """Yield groups of tokens that may come next, with the state to which each of the group leads."""
        waiting = [(self._root, state)]
        while waiting:
            node, state = waiting.pop()
            if node.token_ids:
                yield node.token_ids, state
            for sign, longer in node.longer.items():
                if behind := self.automaton.step(state, sign):
                    waiting.append((longer, behind))

    def find_shortest(self) -> tuple[int, ...]:
        """Return the fewest tokens of a permitted text, and of those with as few the ones of a text with few bytes.

        Raises ValueError if tokens spell no permitted text.
        """
        newest, seen = {self.automaton.start: _Way(0, ())}, {self.automaton.start}
        while newest:
            ends = [way for state, way in newest.items() if self.automaton.may_end(state)]
            if ends:
                return min(ends).token_ids
            newest = self._go_on(newest, seen)
            seen |= newest.keys()
        raise ValueError("tokens spell no text that the pattern permits")

    def _go_on(self, ways: Mapping[int, _Way], seen: Container[int]) -> dict[int, _Way]:
        """Return the states that one more token reaches for the first time, each with the shortest text to it."""
        longer: dict[int, _Way] = {}
        for state, way in ways.items():
            for (token_id, *_), behind in self.list_next(state):
                if behind not in seen:
                    size = way.size + len(self._tokens[token_id])
                    if behind not in longer or size < longer[behind].size:
                        longer[behind] = _Way(size, (*way.token_ids, token_id))
        return longer
