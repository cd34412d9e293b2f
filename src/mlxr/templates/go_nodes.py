"""The parts of a template in the syntax of Go's text/template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is written as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Value:
    """A literal: text, a whole number, true, false, or None for nil."""

    value: str | int | bool | None


@dataclass(frozen=True, slots=True)
class Path:
    """Fields of something: of the dot (start "."), of a variable ("$x", "$" for the root), or of a pipeline."""

    start: str | Pipe
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Word:
    """The name of a function."""

    name: str


Term = Value | Path | Word


@dataclass(frozen=True, slots=True)
class Pipe:
    """Commands, each of which gets the value of the one before as its last argument; it may be kept in variables."""

    commands: tuple[tuple[Term, ...], ...]
    variables: tuple[str, ...] = ()
    assigns: bool = False  # `=`: to variables that are there already


@dataclass(frozen=True, slots=True)
class Action:
    """A pipeline whose value is written, unless it goes into a variable."""

    pipe: Pipe
    line: int


@dataclass(frozen=True, slots=True)
class Block:
    """if, with or range: the body, and what comes instead where the value is empty."""

    kind: Literal["if", "with", "range"]
    pipe: Pipe
    body: tuple[Node, ...]
    otherwise: tuple[Node, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Jump:
    """A `{{break}}` or a `{{continue}}` of a loop."""

    kind: Literal["break", "continue"]


Node = Text | Action | Block | Jump


def list_fields(nodes: tuple[Node, ...]) -> set[str]:
    """All names of fields that a template speaks of."""
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
