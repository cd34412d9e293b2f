"""What a format of tool calls has to offer, and what all formats share.

A parser gets the answer's text piece by piece and gives back text and pieces of calls; the result does not depend on
how the text was cut. What only looks like a call comes back as the text that it is.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mlxr.service.identity import draw_hex
from mlxr.service.reasoning import Thought
from mlxr.service.requests import Tool

# Arguments as models have seen them in training: on one line, spaced as Python writes JSON.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of call number `call`: its first piece carries `name`, all carry `arguments` text."""

    call: int
    arguments: str
    name: str | None = None


Piece = str | Thought | CallPiece
Place = Literal["start", "thought", "text"]


class CallParser(ABC):
    """Reads one answer. `calls` counts those that are complete; nothing counts any more after `max_calls`.

    `place` is where the prompt ends, for formats that mark whole answers. `answered` are name and arguments (as
    `write_json` writes them) of calls that have been answered so often that one more without a marker is text. With
    `is_bound` a grammar holds for all of the answer, so that nothing is a call that only resembles one.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.max_calls: int | None = None
        self.place: Place = "start"
        self.answered: frozenset[tuple[str, str]] = frozenset()
        self.is_bound = False
        self._text = ""  # not decided yet
        self._found: list[Piece] = []
        self._said_after = 0  # calls that were complete when text was given out last

    def push(self, text: str) -> list[Piece]:
        """What is certain with this piece of text."""
        if not self.is_over:
            self._text += text
        while not self.is_over and self._advance():
            pass
        return self._take()

    def flush(self) -> list[Piece]:
        """What was held back; called once, when no more text comes."""
        if not self.is_over:
            self._end()
        return self._take()

    @property
    def is_over(self) -> bool:
        """Whether there are all calls that there may be."""
        return self.calls == self.max_calls

    @abstractmethod
    def _advance(self) -> bool:
        """One step over the text that is not decided yet; whether there may be another one."""

    @abstractmethod
    def _end(self) -> None:
        """Decide what becomes of the text that is left at the end."""

    def _take(self) -> list[Piece]:
        found, self._found = self._found, []
        return found

    def _give(self, text: str) -> None:
        if text:
            self._found.append(text)
            self._said_after = self.calls

    def _give_begun(self, lead: str, text: str, heads: Sequence[str], *, is_enforced: bool) -> None:
        """Give out a marker and what stands behind it at the end, unless it is the beginning of a call.

        `heads` are what calls begin with; nothing but one of them comes where a grammar is enforced.
        """
        bare = text.strip()
        is_begun = is_enforced and any(head.startswith(bare) or bare.startswith(head) for head in heads)
        if not is_begun:
            self._give_rest(lead + text, (lead.strip(),))

    def _give_rest(self, text: str, markers: Sequence[str]) -> None:
        """Give out what is left at the end, unless it is space or the beginning of a marker right behind a call."""
        bare = text.strip()
        is_begun = self.calls != self._said_after and any(marker.startswith(bare) for marker in markers)
        if not self.calls or (bare and not is_begun):
            self._give(text)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a grammar of calls must allow."""

    tools: Sequence[Tool]
    must_call: bool
    is_parallel: bool  # several calls may come
    specials: Mapping[str, str]  # how Lark names those of the markers that are control tokens of the vocabulary
    answer: str | None = None  # part of a Lark rule: an answer without calls is that and nothing else


class ToolFormat(ABC):
    """One way of calling tools.

    `markers` are spellings that are to reach the parser even where they are control tokens. With `shows_tools` the
    chat template describes the tools itself; with `marks_calls` every call begins with a marker, so that it cannot be
    taken for text. With `marks_answers` all that is said and thought stands behind markers, too: the parser reads whole
    answers, whether there are tools or not.
    """

    markers: Sequence[str]
    shows_tools: bool = True
    marks_calls: bool = True
    marks_answers: bool = False

    def make_id(self) -> str:
        """Make an id for a call, as the format's templates want it: here as OpenAI spells them."""
        return make_call_id()

    def prepare_messages(self, messages: list[dict[str, object]], tools: Sequence[Tool]) -> list[dict[str, object]]:
        """Return messages that the chat template can show, with `tools` described if need be: here as they are."""
        del tools
        return messages

    @abstractmethod
    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser for one answer; `is_enforced` says that a grammar keeps all calls well-formed."""

    def write_grammar(
        self,
        tools: Sequence[Tool],
        *,
        must_call: bool,
        is_parallel: bool,
        specials: Mapping[str, str],
        answer: str | None = None,
    ) -> str | None:
        """The Lark grammar of the answers that may be given (see `Asked`), None where nothing can be enforced."""
        return self._write_grammar(Asked(tools, must_call, is_parallel, specials, answer))

    @abstractmethod
    def _write_grammar(self, asked: Asked) -> str | None: ...


def make_call_id() -> str:
    """As OpenAI spells them: `call_` and 24 characters."""
    return "call_" + draw_hex(12, "call")


def describe_tool(tool: Tool) -> dict[str, object]:
    """A tool as chat templates expect it: OpenAI's shape."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def quote_lark(text: str) -> str:
    """`text` as a Lark string."""
    return json.dumps(text)


def write_text_without(marker: str) -> str:
    """The body of a Lark terminal: any text that is not empty and does not spell `marker`, as parsers read that."""
    return f"/(?s:.+)/ & ~/(?s:.*){re.escape(marker).replace('/', chr(92) + '/')}(?s:.*)/"


def write_rule(name: str, alternatives: Sequence[str]) -> str:
    """One rule of a Lark grammar."""
    return f"{name}: " + "\n  | ".join(alternatives) + "\n"


def write_call_rules(
    tools: Sequence[Tool], key: str, name: str = "name", first: Mapping[str, object] | None = None
) -> str:
    """The rules `call`, one JSON object with the name of a tool and arguments that fit its schema, and `call_0` ...

    `key` and `name` are those of the object; `first` are the schemas of what comes before them.
    """
    rules = [f"call_{index}" for index in range(len(tools))]
    bodies = (_write_call_rule(*pair, key, name, first or {}) for pair in zip(rules, tools, strict=True))
    return write_rule("call", rules) + "".join(bodies)


def write_list_rules(tools: Sequence[Tool], *, is_parallel: bool, end: str = "") -> str:
    """The rule `calls`, a list of JSON objects and then `end`, a part of a Lark rule, and those below it."""
    more = '("," " "? call)*' if is_parallel else ""
    return f'calls: " "? "[" call {more} "]" {end}\n' + write_call_rules(tools, "arguments")


def write_marked_grammar(start: str, rules: str, asked: Asked) -> str:
    """The grammar for formats of which an answer ends with a marker and `calls`, see `Asked`.

    `start` is the marker, `rules` are `calls` and those below it.
    """
    marker = asked.specials.get(start, quote_lark(start))
    if asked.must_call:
        return f"start: {marker} calls\n{rules}"
    if asked.answer is not None:
        return write_rule("start", [f"{marker} calls", asked.answer]) + rules
    if start in asked.specials:
        return f"start: TEXT? ({marker} calls)?\nTEXT: /(?s:.+)/\n{rules}"
    pattern = re.escape(start)
    return (
        f"start: until calls | TAIL\nuntil[suffix={quote_lark(start)}]: /(?s:.*)/\n"
        f"TAIL: /(?s:.*)/ & ~/(?s:.*){pattern}(?s:.*)/\n{rules}"
    )


def write_bare_grammar(asked: Asked, key: str, separator: str) -> str | None:
    """The grammar for formats whose calls have no marker; see `Asked`."""
    if not asked.must_call and asked.answer is None:
        return None
    calls = f"call ({quote_lark(separator)} call)*" if asked.is_parallel else "call"
    return write_rule(
        "start", [calls] if asked.must_call or asked.answer is None else [calls, asked.answer]
    ) + write_call_rules(asked.tools, key)


def write_argument_rules(tools: Sequence[Tool]) -> str:
    """The rules `args_0`, `args_1`, ...: the arguments of each tool."""
    return "".join(f"args_{index}: %json {json.dumps(close_schema(tool))}\n" for index, tool in enumerate(tools))


def close_schema(tool: Tool) -> Mapping[str, object]:
    """The schema of the arguments, which are an object even where it does not say so."""
    return {"type": "object", **tool.parameters, "x-guidance": JSON_STYLE}


def _write_call_rule(rule: str, tool: Tool, key: str, name: str, first: Mapping[str, object]) -> str:
    """One rule for the calls of one tool. It is JSON throughout, so that it may stand beside an answer in JSON."""
    arguments = {"type": "object", **tool.parameters}
    definitions = arguments.pop("$defs", {})  # references start at the whole
    call = {
        "$defs": definitions,
        "type": "object",
        "properties": {**first, name: {"const": tool.name}, key: arguments},
        "required": [*first, name, key],
        "additionalProperties": False,
        "x-guidance": JSON_STYLE,
    }
    return f"{rule}: %json {json.dumps(call)}\n"
