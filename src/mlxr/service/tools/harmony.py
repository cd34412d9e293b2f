"""Answers and calls as gpt-oss writes them: messages in the channels `analysis`, `commentary` and `final`.

`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>` is a call; its recipient may also
stand before the channel. `analysis` has the model's thoughts, `final` its answer, and commentary without a recipient
announces its next step. Source: OpenAI's description of the harmony response format and the chat template of
gpt-oss-120b.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from itertools import chain
from typing import cast

from mlxr.service.reasoning import Thought, hold_back
from mlxr.service.requests import Tool
from mlxr.service.tools.arguments import ArgumentsReader
from mlxr.service.tools.format import (
    Asked,
    CallParser,
    CallPiece,
    ToolFormat,
    quote_lark,
    write_argument_rules,
    write_rule,
)

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
MAX_HEADER_CHARACTERS = 1000
_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_HEADER_END = re.compile("|".join(map(re.escape, (MESSAGE, END, CALL, RETURN, START))))
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNELS = ("analysis", "commentary", "final")
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*({'|'.join(_CHANNELS)})?")
# The parts of a header; other text in a header without a body is text that the model put into the wrong place.
_HEADER_PARTS = re.compile(r"<\|\w+\|>|\bto=\S*|\b(?:assistant|analysis|commentary|final|json|code)\b")
_TO = "to="


class _Body(Enum):
    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()


class HarmonyParser(CallParser):
    """Reads thoughts, text and calls of the tools `names`. An empty line separates messages of one kind."""

    def __init__(self, names: frozenset[str], *, is_enforced: bool) -> None:
        super().__init__()
        self._names, self._is_enforced = names, is_enforced
        self._body: _Body | None = None  # none in a header, nor between two messages
        self._is_bare = True  # no `<|start|>` has begun the header, so text may come instead of one
        self._has_begun = False
        self._called = ""
        self._reader: ArgumentsReader | None = None
        self._said = set[_Body]()  # the kinds of bodies given out so far
        self._is_new = False  # nothing of this message was given out yet

    def _advance(self) -> bool:
        if not self._has_begun:
            self._has_begun = True
            begun = {"thought": _Body.THOUGHT, "text": _Body.TEXT}.get(self.place)
            if begun is not None:
                self._open(begun)
                self._is_new = False
        return self._read_header() if self._body is None else self._read_body(self._body)

    def _read_header(self) -> bool:
        bare = self._text.lstrip()
        if not bare:
            return False
        if self._is_bare and not bare.startswith("<|") and not bare.startswith(_TO):
            if any(begin.startswith(bare) for begin in ("<|", _TO)):
                return False
            self._open(_Body.TEXT)
            return True
        end = _HEADER_END.search(bare, 0, MAX_HEADER_CHARACTERS)
        if end is None and len(bare) < MAX_HEADER_CHARACTERS:
            return False
        if end is None:  # too long for a header
            self._open(_Body.THOUGHT)
            self._text = _MARKER.sub("", bare[:MAX_HEADER_CHARACTERS]) + bare[MAX_HEADER_CHARACTERS:]
            return True
        header, self._text = bare[: end.start()], bare[end.end() :]
        if end[0] == MESSAGE:
            self._read_parts(header)
        elif end[0] == START:
            self._end_header(header)
            self._is_bare = False
        else:
            self._end_header(header)
        return True

    def _read_parts(self, header: str) -> None:
        """Open the body that the header announces."""
        recipient = _RECIPIENT.search(header)
        channels = _CHANNEL.findall(header)
        named = next((channel for channel in reversed(channels) if channel), "analysis" if channels else "final")
        if recipient is not None and recipient[1] in self._names and named != "final":
            self._open(_Body.CALL)
            self._called = recipient[1]
            self._reader = ArgumentsReader(self.calls, self._called, is_enforced=self._is_enforced, stops=MARKERS)
        else:
            self._open(_Body.THOUGHT if named == "analysis" else _Body.TEXT)

    def _end_header(self, header: str) -> None:
        """End a header that has no body."""
        text = _HEADER_PARTS.sub("", header).strip()
        if text and not any(name.startswith(text) for name in _CHANNELS):  # the answer may break off in the name
            self._open(_Body.THOUGHT)
            self._say(text)
            self._close()
        self._is_bare = True

    def _open(self, body: _Body) -> None:
        self._body, self._is_new = body, True

    def _read_call(self, reader: ArgumentsReader) -> bool:
        """Read arguments, whose strings may spell markers."""
        pieces, self._text = reader.push(self._text)
        self._found += pieces
        if reader.is_complete:
            self.calls += 1
            self._reader = None
        elif reader.is_broken:
            self._give_up(reader.raw)
        elif self._text:  # a marker has ended arguments that were given out already
            self._reader = None
        return bool(self._text)

    def _read_body(self, body: _Body) -> bool:
        if self._reader is not None:
            return self._read_call(self._reader)
        marker = _MARKER.search(self._text)
        if marker is None:
            keep = max(hold_back(self._text, spelling) for spelling in MARKERS)
            text, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
            self._take_body(body, text)
            return False
        self._take_body(body, self._text[: marker.start()])
        self._text = self._text[marker.end() :]
        if marker[0] not in (MESSAGE, CONSTRAIN):  # these have no meaning in a body
            self._close()
        if marker[0] == CHANNEL:  # the end was forgotten
            self._text = CHANNEL + self._text
        elif marker[0] == START:
            self._is_bare = False
        return True

    def _take_body(self, body: _Body, text: str) -> None:
        if body is not _Body.CALL:  # there is nothing behind the arguments of a call
            self._say(text)

    def _give_up(self, raw: str) -> None:
        """Treat arguments that are broken as text."""
        self._reader, self._body = None, _Body.TEXT
        self._say(raw)

    def _say(self, text: str) -> None:
        if not text or self._body is None:
            return
        if self._is_new and self._body in self._said:
            text = f"\n\n{text}"
        self._is_new = False
        self._said.add(self._body)
        self._found.append(Thought(text) if self._body is _Body.THOUGHT else text)

    def _close(self) -> None:
        """End the message that is read."""
        if self._body is _Body.THOUGHT and not self._is_new:
            self._found.append(Thought(""))
        self._body, self._is_bare = None, True

    def _end_call(self, reader: ArgumentsReader) -> None:
        """End a call at the answer's end; it may be without arguments.

        A call that breaks off is text, unless it was given out already: a marker that seemed to be inside a string may
        be the one that ends the call.
        """
        self._reader = None
        marker = _MARKER.search(reader.raw)
        if not reader.raw.strip():
            self._found.append(CallPiece(self.calls, "{}", self._called))
            self.calls += 1
        elif not self._is_enforced:
            end = len(reader.raw) if marker is None else marker.start()
            self._give_up(reader.raw[:end])
            self._text = reader.raw[end:]
            while not self.is_over and self._advance():
                pass

    def _end(self) -> None:
        while self._reader is not None and not self.is_over:
            self._end_call(self._reader)
        if self._body is None and self._is_bare and not self._text.lstrip().startswith(("<|", _TO)):
            self._open(_Body.TEXT)
            self._say(self._text if self._text.strip() else "")
        elif self._body is None:
            self._end_header(self._text)
        else:
            self._take_body(self._body, self._text)
            self._close()
        self._text = ""


RECOGNISED_BY = "<|channel|>analysis<|message|>"
_PREAMBLE = f"{END}{START}assistant{CHANNEL}commentary{MESSAGE}"


class HarmonyFormat(ToolFormat):
    """The format of gpt-oss, for tool calls and all other parts of its answers."""

    markers: Sequence[str] = MARKERS
    marks_answers = True

    def prepare_messages(self, messages: list[dict[str, object]], tools: Sequence[Tool]) -> list[dict[str, object]]:
        """Return messages with one call each, its result behind it, and one system message: all that templates show."""
        del tools
        systems = [message for message in messages if message["role"] in ("system", "developer")]
        others = [message for message in messages if message["role"] not in ("system", "developer")]
        if systems:
            content = "\n\n".join(str(message["content"]) for message in systems)
            others.insert(0, {"role": "system", "content": content})
        return _pair_calls([_join_preamble(message) for message in others])

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser of all messages of an answer."""
        return HarmonyParser(frozenset(tool.name for tool in tools), is_enforced=is_enforced)

    def _write_grammar(self, asked: Asked) -> str | None:
        """Return a grammar of one call, or an answer in the channel `final`, perhaps after text about the next steps.

        The model's thoughts before that are not part of it. A call ends the answer, so there is only one.
        """
        start, end, message, channel, constrain = (
            asked.specials.get(marker, quote_lark(marker)) for marker in (START, END, MESSAGE, CHANNEL, CONSTRAIN)
        )
        rules = write_argument_rules(asked.tools)
        if asked.tools:
            bodies = (f"call_{index}" for index in range(len(asked.tools)))
            rules += write_rule("call", list(bodies)) + f'kind: " "? {constrain}? "json"\n'
        for index, tool in enumerate(asked.tools):
            recipient = quote_lark(f" to=functions.{tool.name}")
            header = f'{channel} ("commentary" | "analysis") {recipient} | {recipient} {channel} "commentary"'
            rules += f"call_{index}: ({header}) kind? {message} args_{index}\n"
        final = f'{channel} "final" {message}'
        if asked.must_call:
            return f"start: call\n{rules}"
        if asked.answer is not None:
            return write_rule("start", [*(["call"] if asked.tools else []), f"{final} {asked.answer}"]) + rules
        is_token = END in asked.specials  # else the marker's spelling ends a message
        body = f"body: TEXT? {end}\nTEXT: /(?s:.+)/\n" if is_token else f"body[suffix={end}]: /(?s:.*)/\n"
        rest = "TEXT?" if is_token else "/(?s:.*)/"
        more = f'{channel} ("commentary" | "analysis") {message} body {start} "assistant"'
        return f"start: ({more})* (call | {final} {rest})\n{body}{rules}"


def _join_preamble(message: dict[str, object]) -> dict[str, object]:
    """Return a call's message with its text moved behind the thought, as the template shows only one of the two."""
    thinking, content = message.get("thinking"), message["content"]
    if "tool_calls" not in message or not content or not thinking:
        return message
    return {**message, "thinking": f"{thinking}{_PREAMBLE}{content}", "content": ""}


def _pair_calls(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Return messages with one call each, and each result behind its call."""
    paired: list[dict[str, object]] = []
    groups: list[list[dict[str, object]]] = []  # of the last message with calls: each call and its results
    for message in messages:
        if message["role"] == "tool" and groups:
            _find_group(groups, message.get("tool_call_id")).append(message)
            continue
        paired += chain.from_iterable(groups)
        calls = cast("list[object]", message.get("tool_calls", []))
        bare = {"role": "assistant", "content": ""}
        groups = [[{**(bare if index else message), "tool_calls": [call]}] for index, call in enumerate(calls)]
        if not calls:
            paired.append(message)
    return [*paired, *chain.from_iterable(groups)]


def _find_group(groups: Sequence[list[dict[str, object]]], call_id: object) -> list[dict[str, object]]:
    """Return the group of the call with this id, or else the first one without a result."""
    for group in groups:
        call = cast("list[Mapping[str, object]]", group[0]["tool_calls"])[0]
        if call_id is not None and call.get("id") == call_id:
            return group
    return next((group for group in groups if len(group) == 1), groups[-1])
