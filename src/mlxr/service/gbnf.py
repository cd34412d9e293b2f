"""GBNF, llama.cpp's notation of grammars, translated to the Lark notation that the grammar library reads.

A rule is `name ::= alternatives` and ends with its line, unless a parenthesis is open or an alternative must follow.
GBNF says which characters may follow each other and has no lexer. The library's lexer takes the longest match and never
goes back. Large terminals make masks cheap, but a part of the grammar may become one terminal only if no character that
may follow it could also continue it, or another terminal. Otherwise the part is split, down to single characters if
need be. Facts from llama.cpp's `grammars/README.md`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mlxr.core.frozen import frozen

Ranges = tuple[tuple[int, int], ...]


@frozen(eq=False)
class Chars:
    """One character of the code points in `ranges`, which are sorted, apart from each other, and inclusive."""

    ranges: Ranges


@frozen(eq=False)
class Token:
    """One token of the vocabulary, as both notations write it: `<think>` or `<[1000]>`."""

    text: str


@frozen(eq=False)
class Ref:
    """The rule of this name."""

    name: str


@frozen(eq=False)
class Sequence:
    """All parts, one after the other; nothing at all without parts."""

    parts: tuple[Node, ...]


@frozen(eq=False)
class Choice:
    """One of the parts."""

    parts: tuple[Node, ...]


@frozen(eq=False)
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
    """A grammar is wrong; says why, and in which line."""


def parse(text: str) -> dict[str, Node]:
    """Return the rules by their names; raises GbnfError, also for a reference to a rule that does not exist."""
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
    """Return the ranges sorted, without overlaps, and without surrogates, which no text has."""
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


MAX_POSITIONS = 300
MAX_VISITS = 3000
MAX_PAIRS = 50_000


class TooLarge(Exception):
    """A grammar has more positions, or needs more work, than the bounds allow."""


@dataclass(slots=True)
class Effort:
    """The number of pairs of positions compared so far for one grammar."""

    pairs: int = 0


@dataclass(slots=True)
class Alphabet:
    """Classes of characters that no set of the grammar tells apart; `masks` has the sets of characters met so far."""

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
    """An automaton: `chars` and `follow` of each position, where a match begins and ends, whether it may be empty."""

    chars: list[int] = field(default_factory=list)
    follow: list[int] = field(default_factory=list)
    first: int = 0
    last: int = 0
    is_nullable: bool = True
    visits: int = 0

    def collect(self, positions: int) -> int:
        """Return the characters of all these positions."""
        mask = 0
        for position in iterate(positions):
            mask |= self.chars[position]
        return mask

    def find_extensions(self) -> int:
        """Return the characters that may come where a match could also end."""
        positions = 0
        for position in iterate(self.last):
            positions |= self.follow[position]
        return self.collect(positions)


def build(node: Node, rules: Rules, alphabet: Alphabet) -> Automaton:
    """Return the automaton of a node in which no rule refers to itself; raises TooLarge."""
    automaton = Automaton()
    automaton.is_nullable, automaton.first, automaton.last = _add(node, automaton, rules, alphabet)
    return automaton


def runs_into(one: Automaton, other: Automaton, after: int, effort: Effort) -> bool:
    """Return True if one of the characters `after` may continue `other` where a match of `one` has ended.

    Raises TooLarge after too many comparisons for one grammar.
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
    """Return the numbers of the bits that are set."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def _add(node: Node, automaton: Automaton, rules: Rules, alphabet: Alphabet) -> tuple[bool, int, int]:
    """Add the positions of a node; returns True if it may be empty, and its first and last positions."""
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
            if node.high != 1:  # the count does not matter here, only that it may repeat
                for position in iterate(last):
                    automaton.follow[position] |= first
            return is_empty or node.low == 0, first, last
        case Token():
            raise TooLarge  # a token has no characters
        case _:
            return _add(rules[node.name], automaton, rules, alphabet)


def _chain(parts: list[tuple[bool, int, int]], automaton: Automaton) -> tuple[bool, int, int]:
    """Join parts that come one after the other."""
    is_nullable, first, last = True, 0, 0
    for part_nullable, part_first, part_last in parts:
        for position in iterate(last):
            automaton.follow[position] |= part_first
        first |= part_first if is_nullable else 0
        last = part_last | (last if part_nullable else 0)
        is_nullable = is_nullable and part_nullable
    return is_nullable, first, last


MAX_WRITTEN = 200_000  # characters of one terminal that lists texts
MAX_TERMINALS = 3000  # that are compared with each other


def translate(text: str) -> str:
    """Return the Lark grammar of the same texts; raises GbnfError, and RecursionError for deep nesting."""
    return _Translation(parse(text)).write()


class _Translation:
    """A translation in progress: `_split` are the nodes that are no terminals; it grows until all others are safe."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = {name: rules[name] for name in _reach(rules)}
        nodes = [node for rule in self._rules.values() for node in _walk(rule)]
        sets = [node for node in nodes if isinstance(node, Chars)]
        self._alphabet = Alphabet(
            sorted({edge for node in sets for low, high in node.ranges for edge in (low, high + 1)})
        )
        self._regular = self._find_regular()
        self._starts: dict[str, tuple[bool, int]] = dict.fromkeys(self._rules, (False, 0))
        while (found := {name: self._start(rule) for name, rule in self._rules.items()}) != self._starts:
            self._starts = found
        self._after: dict[Node, int] = dict.fromkeys(nodes, 0)
        self._follow_all()
        self._automata: dict[Node, Automaton] = {}
        self._split = {node for node in nodes if not self._is_regular(node)}

    def write(self) -> str:
        """Return the Lark grammar; splits nodes until every terminal is safe."""
        root = self._rules["root"]
        if MAX_POSITIONS < self._count_written(root, {}) <= MAX_WRITTEN:  # a long list of texts that nothing follows
            return f"start: T0{'?' * self._starts['root'][0]}\nT0: /{self._write_regex(root)}/ & /(?s:.+)/\n"
        effort = Effort()
        while True:
            text, terminals = self._write_rules()
            try:
                unsafe = self._find_unsafe(terminals, effort)
            except TooLarge:
                unsafe = set(terminals)  # single characters are always safe
            unsafe = {node for node in unsafe if not isinstance(node, Chars)}
            if not unsafe:
                return text
            self._split |= unsafe

    def _find_regular(self) -> set[str]:
        """Return the names of the rules that do not refer back to themselves, so that they could be written out."""
        needs = {
            name: [node for node in _walk(rule) if isinstance(node, Ref | Token)] for name, rule in self._rules.items()
        }
        found: set[str] = set()
        while True:
            more = {
                name
                for name, nodes in needs.items()
                if name not in found and all(isinstance(node, Ref) and node.name in found for node in nodes)
            }
            if not more:
                return found
            found |= more

    def _is_regular(self, node: Node) -> bool:
        return all(
            not isinstance(part, Token) and (not isinstance(part, Ref) or part.name in self._regular)
            for part in _walk(node)
        )

    def _count_written(self, node: Node, known: dict[str, float]) -> float:
        """Count a node's characters when its rules are written out; infinite if it has repetitions or tokens."""
        match node:
            case Chars():
                return 1
            case Ref():
                if node.name not in known:
                    known[node.name] = math.inf  # stays if the rule refers back to itself
                    known[node.name] = self._count_written(self._rules[node.name], known)
                return known[node.name]
            case Sequence() | Choice():
                return 1 + sum(self._count_written(part, known) for part in node.parts)
            case _:
                return math.inf

    def _start(self, node: Node) -> tuple[bool, int]:
        """Return True if a node may be empty, and its first characters, by what is known of the rules so far."""
        match node:
            case Chars():
                return False, self._alphabet.read(node)
            case Token():
                return False, 0
            case Ref():
                return self._starts[node.name]
            case Repeat():
                is_empty, first = self._start(node.part)
                return is_empty or node.low == 0, first if node.high != 0 else 0
            case Choice():
                parts = [self._start(part) for part in node.parts]
                first = 0
                for _, mask in parts:
                    first |= mask
                return any(is_empty for is_empty, _ in parts), first
            case Sequence():
                first = 0
                for part in node.parts:
                    is_empty, mask = self._start(part)
                    first |= mask
                    if not is_empty:
                        return False, first
                return True, first

    def _follow_all(self) -> None:
        """Find the characters that may come after each node."""
        ends = dict.fromkeys(self._rules, 0)
        while True:
            before = dict(ends)
            for name, rule in self._rules.items():
                self._follow(rule, ends[name], ends)
            if before == ends:
                return

    def _follow(self, node: Node, after: int, ends: dict[str, int]) -> None:
        self._after[node] |= after
        match node:
            case Ref():
                ends[node.name] |= after
            case Repeat():
                again = self._start(node.part)[1] if node.high != 1 else 0
                self._follow(node.part, after | again, ends)
            case Choice():
                for part in node.parts:
                    self._follow(part, after, ends)
            case Sequence():
                for part in reversed(node.parts):
                    self._follow(part, after, ends)
                    is_empty, first = self._start(part)
                    after = first | (after if is_empty else 0)
            case _:
                pass

    def _find_unsafe(self, terminals: list[Node], effort: Effort) -> set[Node]:
        """Return the terminals that the lexer could match too far, or in place of others."""
        unsafe: set[Node] = set()
        if len(terminals) > MAX_TERMINALS:
            raise TooLarge
        for node in terminals:
            if self._automata[node].find_extensions() & self._after[node]:
                unsafe.add(node)
        if unsafe:
            return unsafe
        firsts = {node: self._automata[node].collect(self._automata[node].first) for node in terminals}
        for node in filter(self._after.get, terminals):
            for other in terminals:
                if not firsts[node] & firsts[other] or other is node or other in unsafe:
                    continue
                if runs_into(self._automata[node], self._automata[other], self._after[node], effort):
                    unsafe.add(other)
        return unsafe

    def _write_rules(self) -> tuple[str, list[Node]]:
        """Return the Lark text, and the nodes that are terminals in it."""
        names = {"root": "start"}
        terminals: dict[Node, str] = {}
        known: dict[str, str] = {}

        def write(node: Node) -> str:
            if node not in self._split and self._automate(node):
                return name_terminal(node)
            match node:
                case Token():
                    return node.text
                case Ref():
                    return names.setdefault(node.name, f"rule_{len(names)}")
                case Sequence():
                    return " ".join(map(write, node.parts)) or '""'
                case Choice():
                    return "(" + " | ".join(map(write, node.parts)) + ")"
                case Repeat():
                    return f"({write(node.part)}){_write_bounds(node)}"
                case _:
                    raise AssertionError("a set of characters is always a terminal")

        def name_terminal(node: Node) -> str:
            automaton = self._automata[node]
            if not automaton.chars:
                return '""'
            regex = f"/{self._write_regex(node)}/" + (" & /(?s:.+)/" if automaton.is_nullable else "")
            terminals[node] = known.setdefault(regex, f"T{len(known)}")
            return terminals[node] + "?" * automaton.is_nullable

        written: dict[str, str] = {}
        while len(written) < len(names):
            for name in list(names):
                if name not in written:
                    written[name] = write(self._rules[name])
        lines = [f"{names[name]}: {text}" for name, text in written.items()]
        lines += [f"{name}: {regex}" for regex, name in known.items()]
        return "\n".join(lines) + "\n", list(terminals)

    def _automate(self, node: Node) -> bool:
        """Make the automaton of a node, unless it is too large."""
        if node not in self._automata:
            try:
                self._automata[node] = build(node, self._rules, self._alphabet)
            except TooLarge:
                self._split.add(node)
                return False
        return True

    def _write_regex(self, node: Node) -> str:
        match node:
            case Chars():
                return "[" + "".join(f"\\x{{{low:X}}}-\\x{{{high:X}}}" for low, high in node.ranges) + "]"
            case Sequence():
                return "".join(map(self._write_regex, node.parts))
            case Choice():
                return "(?:" + "|".join(map(self._write_regex, node.parts)) + ")"
            case Repeat():
                return f"(?:{self._write_regex(node.part)}){_write_bounds(node)}"
            case Ref():
                return f"(?:{self._write_regex(self._rules[node.name])})"
            case _:
                raise AssertionError("a token is no terminal")


def _write_bounds(node: Repeat) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return short.get((node.low, node.high), f"{{{node.low},{'' if node.high is None else node.high}}}")


def _walk(node: Node) -> Iterator[Node]:
    """Yield the node and all below it, but not the rules that references name."""
    yield node
    if isinstance(node, Repeat):
        yield from _walk(node.part)
    elif isinstance(node, Sequence | Choice):
        for part in node.parts:
            yield from _walk(part)


def _reach(rules: dict[str, Node]) -> list[str]:
    """Return the names of the rules that the root needs."""
    found = ["root"]
    for name in found:
        found += {node.name: None for node in _walk(rules[name]) if isinstance(node, Ref) and node.name not in found}
    return found
