"""The interface of formats of tool calls, and functions that they share.

A parser gets the answer's text piece by piece and gives back text and pieces of calls; the result does not depend on
how the text was cut. Text that only looks like a call comes back as text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

from mlxr.core.frozen import frozen
from mlxr.service.identity import draw_hex
from mlxr.service.reasoning import Thought
from mlxr.service.requests import Tool

# Arguments as in the models' training data: on one line, spaced as Python writes JSON.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}


@frozen
class CallPiece:
    """A piece of call number `call`: the first one carries `name`, all carry `arguments` text."""

    call: int
    arguments: str
    name: str | None = None


Piece = str | Thought | CallPiece
Place = Literal["start", "thought", "text"]


class CallParser(ABC):
    """Reads one answer. `calls` counts complete calls; after `max_calls` all further text is ignored.

    `place` says where the prompt ends, for formats that mark whole answers. `answered` has name and arguments (as
    `write_json` writes them) of calls that were answered so often that another one without a marker counts as text.
    With `is_bound` a grammar holds for the whole answer, so text that only resembles a call is none.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.max_calls: int | None = None
        self.place: Place = "start"
        self.answered: frozenset[tuple[str, str]] = frozenset()
        self.is_bound = False
        self._text = ""  # not decided yet
        self._found: list[Piece] = []
        self._said_after = 0  # the number of complete calls when text was given out last

    def push(self, text: str) -> list[Piece]:
        """Add a piece of text; returns the pieces that are now certain."""
        if not self.is_over:
            self._text += text
        while not self.is_over and self._advance():
            pass
        return self._take()

    def flush(self) -> list[Piece]:
        """Return the pieces still held back; called once, when no more text comes."""
        if not self.is_over:
            self._end()
        return self._take()

    @property
    def is_over(self) -> bool:
        """True if the answer has all calls that it may have."""
        return self.calls == self.max_calls

    @abstractmethod
    def _advance(self) -> bool:
        """Do one step over the text that is not decided yet; returns True if another step may follow."""

    @abstractmethod
    def _end(self) -> None:
        """Give out the text that is left at the end, as a call or as text."""

    def _take(self) -> list[Piece]:
        found, self._found = self._found, []
        return found

    def _give(self, text: str) -> None:
        if text:
            self._found.append(text)
            self._said_after = self.calls

    def _give_begun(self, lead: str, text: str, heads: Sequence[str], *, is_enforced: bool) -> None:
        """Give out a marker and the text behind it at the answer's end, unless it is the beginning of a call.

        Calls begin with one of `heads`; if a grammar is enforced, nothing else can come.
        """
        bare = text.strip()
        is_begun = is_enforced and any(head.startswith(bare) or bare.startswith(head) for head in heads)
        if not is_begun:
            self._give_rest(lead + text, (lead.strip(),))

    def _give_rest(self, text: str, markers: Sequence[str]) -> None:
        """Give out the rest at the end, unless it is space or the beginning of a marker right behind a call."""
        bare = text.strip()
        is_begun = self.calls != self._said_after and any(marker.startswith(bare) for marker in markers)
        if not self.calls or (bare and not is_begun):
            self._give(text)


@frozen
class Asked:
    """The demands on a grammar of calls."""

    tools: Sequence[Tool]
    must_call: bool
    is_parallel: bool  # several calls may come
    specials: Mapping[str, str]  # Lark's names of the markers that are control tokens of the vocabulary
    answer: str | None = None  # part of a Lark rule that an answer without calls must follow


class ToolFormat(ABC):
    """One way of calling tools.

    `markers` must reach the parser as text even if they are control tokens. With `shows_tools` the chat template
    describes the tools itself; with `marks_calls` every call begins with a marker, so it cannot be taken for text. With
    `marks_answers` text and thoughts stand behind markers, too: the parser reads whole answers, with tools or without.
    """

    markers: Sequence[str]
    shows_tools: bool = True
    marks_calls: bool = True
    marks_answers: bool = False

    def make_id(self) -> str:
        """Make an id for a call, as the format's templates want it: here in OpenAI's spelling."""
        return make_call_id()

    def prepare_messages(self, messages: list[dict[str, object]], tools: Sequence[Tool]) -> list[dict[str, object]]:
        """Return messages that the chat template can show, with `tools` described if need be: here unchanged."""
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
        """Return the Lark grammar of the allowed answers (see `Asked`), None if nothing can be enforced."""
        return self._write_grammar(Asked(tools, must_call, is_parallel, specials, answer))

    @abstractmethod
    def _write_grammar(self, asked: Asked) -> str | None: ...


def make_call_id() -> str:
    """Make an id in OpenAI's spelling: `call_` and 24 characters."""
    return "call_" + draw_hex(12, "call")


def describe_tool(tool: Tool) -> dict[str, object]:
    """Return a tool as chat templates expect it: in OpenAI's shape."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def quote_lark(text: str) -> str:
    """Return `text` as a Lark string."""
    return json.dumps(text)


def write_text_without(marker: str) -> str:
    """Return the body of a Lark terminal: any text that is not empty and in which parsers find no `marker`."""
    return f"/(?s:.+)/ & ~/(?s:.*){re.escape(marker).replace('/', chr(92) + '/')}(?s:.*)/"


def write_rule(name: str, alternatives: Sequence[str]) -> str:
    """Return one rule of a Lark grammar."""
    return f"{name}: " + "\n  | ".join(alternatives) + "\n"


def write_call_rules(
    tools: Sequence[Tool], key: str, name: str = "name", first: Mapping[str, object] | None = None
) -> str:
    """Return the rules `call`, one JSON object with the name of a tool and arguments that fit its schema, and `call_0`
    ...

    `key` and `name` are those of the object; `first` are the schemas of what comes before them.
    """
    rules = [f"call_{index}" for index in range(len(tools))]
    bodies = (_write_call_rule(*pair, key, name, first or {}) for pair in zip(rules, tools, strict=True))
    return write_rule("call", rules) + "".join(bodies)


def write_list_rules(tools: Sequence[Tool], *, is_parallel: bool, end: str = "") -> str:
    """Return the rule `calls`, a list of JSON objects and then `end`, a part of a Lark rule, and those below it."""
    more = '("," " "? call)*' if is_parallel else ""
    return f'calls: " "? "[" call {more} "]" {end}\n' + write_call_rules(tools, "arguments")


def write_marked_grammar(start: str, rules: str, asked: Asked) -> str:
    """Return the grammar for formats whose answers end with a marker and `calls`; see `Asked`.

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
    """Return the grammar for formats whose calls have no marker; see `Asked`."""
    if not asked.must_call and asked.answer is None:
        return None
    calls = f"call ({quote_lark(separator)} call)*" if asked.is_parallel else "call"
    return write_rule(
        "start", [calls] if asked.must_call or asked.answer is None else [calls, asked.answer]
    ) + write_call_rules(asked.tools, key)


def write_argument_rules(tools: Sequence[Tool]) -> str:
    """Return the rules `args_0`, `args_1`, ...: the arguments of each tool."""
    return "".join(f"args_{index}: %json {json.dumps(close_schema(tool))}\n" for index, tool in enumerate(tools))


def close_schema(tool: Tool) -> Mapping[str, object]:
    """Return the schema of the arguments, which are an object even if it does not say so."""
    return {"type": "object", **tool.parameters, "x-guidance": JSON_STYLE}


def _write_call_rule(rule: str, tool: Tool, key: str, name: str, first: Mapping[str, object]) -> str:
    """Return one rule for the calls of one tool. It is all JSON, so that it may stand beside an answer in JSON."""
    arguments = {"type": "object", **tool.parameters}
    definitions = arguments.pop("$defs", {})  # references start at the root
    call = {
        "$defs": definitions,
        "type": "object",
        "properties": {**first, name: {"const": tool.name}, key: arguments},
        "required": [*first, name, key],
        "additionalProperties": False,
        "x-guidance": JSON_STYLE,
    }
    return f"{rule}: %json {json.dumps(call)}\n"
