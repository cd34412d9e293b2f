"""Reads templates in the syntax of Go's text/template, as Ollama's models bring them.

Text comes in, a tree of nodes comes out. Parts of the syntax that no chat template needs (definitions, calls of other
templates) are refused by name. Knows no fields and no functions. Syntax: https://pkg.go.dev/text/template
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from mlxr.core.errors import InvalidRequest
from mlxr.core.frozen import frozen


@frozen
class Text:
    """Text that is written unchanged."""

    text: str


@frozen
class Value:
    """A literal: text, a whole number, true, false, or None for nil."""

    value: str | int | bool | None


@frozen
class Path:
    """Fields of the dot (start "."), of a variable ("$x", "$" for the root), or of a pipeline's value."""

    start: str | Pipe
    fields: tuple[str, ...] = ()


@frozen
class Word:
    """The name of a function."""

    name: str


Term = Value | Path | Word


@frozen
class Pipe:
    """Commands, each of which gets the value of the one before as its last argument; it may be kept in variables."""

    commands: tuple[tuple[Term, ...], ...]
    variables: tuple[str, ...] = ()
    assigns: bool = False  # `=`: to existing variables


@frozen
class Action:
    """A pipeline whose value is written, unless it goes into a variable."""

    pipe: Pipe
    line: int


@frozen
class Block:
    """if, with or range: the body, and the nodes for an empty value."""

    kind: Literal["if", "with", "range"]
    pipe: Pipe
    body: tuple[Node, ...]
    otherwise: tuple[Node, ...]
    line: int


@frozen
class Jump:
    """A `{{break}}` or a `{{continue}}` of a loop."""

    kind: Literal["break", "continue"]


Node = Text | Action | Block | Jump


def list_fields(nodes: tuple[Node, ...]) -> set[str]:
    """Return the names of all fields in a template."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, Action | Block):
            found |= _list_pipe_fields(node.pipe)
        if isinstance(node, Block):
            found |= list_fields(node.body) | list_fields(node.otherwise)
    return found


def _list_pipe_fields(pipe: Pipe) -> set[str]:
    found: set[str] = set()
    for command in pipe.commands:
        for term in command:
            if isinstance(term, Path):
                found |= {*term.fields} | (_list_pipe_fields(term.start) if isinstance(term.start, Pipe) else set())
    return found


MAX_DEPTH = 50  # of nested blocks and parentheses
MAX_ACTION_CHARACTERS = 1 << 14
_STOP = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|`[^`]*`|\}\}")  # texts, in which braces do not count, and the end
_TOKEN = re.compile(
    r"(?P<text>\"(?:\\.|[^\"\\\n])*\"|`[^`]*`)|(?P<number>[-+]?[0-9]+(?![\w.]))|(?P<variable>\$\w*)"
    r"|(?P<field>\.[A-Za-z_]\w*)|(?P<word>[A-Za-z_]\w*)|(?P<mark>:=|[=|(),.])|(?P<space>\s+)"
)
_REFUSED = ("define", "template", "block")


def refuse(line: int, reason: str) -> NoReturn:
    """Raise InvalidRequest about a line of the template."""
    raise InvalidRequest("template", f"line {line} of the Go template: {reason}")


def parse(source: str) -> tuple[Node, ...]:
    """Return the nodes of a template; raises InvalidRequest naming the line and the construct."""
    pieces = list(_split(source))
    reader = _Blocks(pieces)
    nodes, ending, line = reader.read(0)
    if ending:
        refuse(line, f"{{{{ {ending} }}}} without a beginning")
    return nodes


def _split(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield pieces as (line, text, whether it is an action), without the space that `{{-` and `-}}` remove."""
    at, line, cuts_left = 0, 1, False
    while True:
        begin = source.find("{{", at)
        text = source[at:] if begin < 0 else source[at:begin]
        begin_line = line + text.count("\n")
        action = "" if begin < 0 else _cut_action(source, begin, begin_line)
        cuts_before = action.startswith("{{-") and action[3].isspace()
        text = text.lstrip() if cuts_left else text
        text = text.rstrip() if cuts_before else text
        if text:
            yield line, text, False
        if begin < 0:
            return
        cuts_left = action.endswith("-}}") and action[-4].isspace()
        inner = action[3 if cuts_before else 2 : -3 if cuts_left else -2].strip()
        if not inner.startswith("/*"):
            yield begin_line, inner, True
        at, line = begin + len(action), begin_line + action.count("\n")


def _cut_action(source: str, begin: int, line: int) -> str:
    """Return the action that begins at `begin`, with its braces."""
    window = source[begin : begin + MAX_ACTION_CHARACTERS]
    head = window[2:].removeprefix("-").lstrip()
    end = window.find("*/") + 2 if head.startswith("/*") else 2
    while (match := _STOP.search(window, end)) is not None:
        if match[0] == "}}":
            return window[: match.end()]
        end = match.end()
    refuse(line, "{{ is not closed")


@dataclass(slots=True)
class _Blocks:
    """Builds blocks of pieces."""

    pieces: list[tuple[int, str, bool]]
    at: int = 0

    def read(self, depth: int) -> tuple[tuple[Node, ...], str, int]:
        """Return the nodes up to an `else` or `end`, and that action ("" at the template's end) with its line."""
        nodes: list[Node] = []
        while self.at < len(self.pieces):
            line, text, is_action = self.pieces[self.at]
            self.at += 1
            if not is_action:
                nodes.append(Text(text))
                continue
            word = text.split(None, 1)[0] if text else ""
            if word in ("else", "end"):
                return tuple(nodes), text, line
            nodes.append(self._read_action(word, text, line, depth))
        return tuple(nodes), "", 0

    def _read_action(self, word: str, text: str, line: int, depth: int) -> Node:
        if word in _REFUSED:
            refuse(line, f"{{{{ {word} }}}} is not supported")
        if word == "break" or word == "continue":
            return Jump("break" if word == "break" else "continue")
        if word == "if" or word == "with" or word == "range":
            kind: Literal["if", "with", "range"] = "if" if word == "if" else "with" if word == "with" else "range"
            return self._read_block(kind, text.removeprefix(word), line, depth + 1)
        return Action(parse_pipe(text, line), line)

    def _read_block(self, kind: Literal["if", "with", "range"], head: str, line: int, depth: int) -> Block:
        if depth > MAX_DEPTH:
            refuse(line, f"blocks are nested more than {MAX_DEPTH} deep")
        pipe = parse_pipe(head, line)
        body, ending, ending_line = self.read(depth)
        otherwise: tuple[Node, ...] = ()
        if ending.startswith("else"):
            rest = ending.removeprefix("else").strip()
            if rest:  # else if, else with
                word = rest.split(None, 1)[0]
                if word not in ("if", "with"):
                    refuse(ending_line, f"{{{{ {ending[:40]} }}}} is not supported")
                nested = self._read_block(
                    "if" if word == "if" else "with", rest.removeprefix(word), ending_line, depth + 1
                )
                return Block(kind, pipe, body, (nested,), line)
            otherwise, ending, ending_line = self.read(depth)
        if ending != "end":
            refuse(line, f"{{{{ {kind} }}}} without {{{{ end }}}}")
        return Block(kind, pipe, body, otherwise, line)


def parse_pipe(text: str, line: int) -> Pipe:
    """Read the contents of an action."""
    tokens = _Tokens(list(_read_tokens(text, line)), line)
    pipe = tokens.read_pipe(0)
    if tokens.at < len(tokens.tokens):
        refuse(line, f"{tokens.tokens[tokens.at][1][:40]!r} was not expected")
    return pipe


def _read_tokens(text: str, line: int) -> Iterator[tuple[str, str, bool]]:
    """Yield tokens as (kind, text, whether it follows the one before without a space)."""
    at, is_near = 0, False
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            refuse(line, f"{text[at : at + 40]!r} is not supported")
        kind, at = str(match.lastgroup), match.end()
        if kind != "space":
            yield kind, match[0], is_near
        is_near = kind != "space"


@dataclass(slots=True)
class _Tokens:
    tokens: list[tuple[str, str, bool]]
    line: int
    at: int = field(default=0)

    def read_pipe(self, depth: int) -> Pipe:
        if depth > MAX_DEPTH:
            refuse(self.line, f"parentheses are nested more than {MAX_DEPTH} deep")
        variables, assigns = self._read_declaration()
        commands: list[tuple[Term, ...]] = []
        while True:
            terms: list[Term] = []
            while (term := self._read_term(depth)) is not None:
                terms.append(term)
            if not terms:
                refuse(self.line, "a value is missing")
            commands.append(tuple(terms))
            if not self._take("|"):
                return Pipe(tuple(commands), variables, assigns)

    def _read_declaration(self) -> tuple[tuple[str, ...], bool]:
        names: list[str] = []
        begin = self.at
        while self.at < len(self.tokens) and self.tokens[self.at][0] == "variable":
            names.append(self.tokens[self.at][1])
            self.at += 1
            if self._take(":="):
                return tuple(names), False
            if self._take("="):
                return tuple(names), True
            if not self._take(","):
                break
        self.at = begin
        return (), False

    def _read_term(self, depth: int) -> Term | None:
        if self.at >= len(self.tokens):
            return None
        kind, text, _ = self.tokens[self.at]
        if kind == "mark" and text not in ("(", "."):
            return None
        self.at += 1
        if kind == "text":
            return Value(_unquote(text, self.line))
        if kind == "number":
            return Value(int(text))
        if kind == "word":
            constants: dict[str, bool | None] = {"true": True, "false": False, "nil": None}
            return Value(constants[text]) if text in constants else Word(text)
        if kind == "field":
            return Path(".", (text[1:], *self._read_fields()))
        if kind == "variable":
            return Path(text, self._read_fields())
        if text == ".":
            return Path(".")
        inner = self.read_pipe(depth + 1)
        if not self._take(")"):
            refuse(self.line, "( is not closed")
        return Path(inner, self._read_fields())

    def _read_fields(self) -> tuple[str, ...]:
        """Return the fields that follow at once, as in `$x.Function.Name`."""
        names: list[str] = []
        while self.at < len(self.tokens) and self.tokens[self.at][0] == "field" and self.tokens[self.at][2]:
            names.append(self.tokens[self.at][1][1:])
            self.at += 1
        return tuple(names)

    def _take(self, mark: str) -> bool:
        found = self.at < len(self.tokens) and self.tokens[self.at][:2] == ("mark", mark)
        self.at += found
        return found


def _unquote(text: str, line: int) -> str:
    if text[0] == "`":
        return text[1:-1]
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        value = None
    if not isinstance(value, str):
        refuse(line, f"{text[:40]} is no text")
    return value
