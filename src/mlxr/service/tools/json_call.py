"""Reads one JSON object that calls a tool out of a growing text, and says where it ends.

Where a grammar keeps the object well-formed its arguments are given out as they come. Otherwise nothing is before the
object is complete and known to be a call: what has been given out cannot be taken back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from mlxr.service.tools.format import CallPiece, write_json

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_HEAD = re.compile(
    r'\s*\{\s*(?:"tool_call_id"\s*:\s*"[^"]*"\s*,\s*)?"(?:tool_)?name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class JsonEnd:
    """Finds the end of a JSON object or list by its brackets; its text comes in pieces, beginning with the bracket."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """Where in `text` the value ends, None if it goes on."""
        position = 1 if self._is_escaped and text else 0
        self._is_escaped = self._is_escaped and not text
        while True:
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, position)
            if match is None:
                return None
            position, sign = match.end(), match[0]
            if sign == '"':
                self._in_string = not self._in_string
            elif sign == "\\":
                if position == len(text):
                    self._is_escaped = True
                position += 1
            else:
                self._depth += 1 if sign in "{[" else -1
                if self._depth <= 0:
                    return position


class ArgumentsReader:
    """The arguments of call number `number`, whose name is known already: a JSON object.

    `raw` is all text of it so far; what `is_broken` is no such object.
    """

    def __init__(self, number: int, name: str | None, *, is_enforced: bool) -> None:
        self._number, self._name, self._streams = number, name, is_enforced
        self._end = JsonEnd()
        self._scanned = 0
        self.raw = ""
        self.is_complete = self.is_broken = False

    def push(self, text: str) -> tuple[list[CallPiece], str]:
        """Pieces of the call, and what comes after it (only when it is complete or broken)."""
        self.raw += text
        end = self._end.feed(text)
        rest = ""
        if end is not None:
            end += len(self.raw) - len(text)
            rest, self.raw = self.raw[end:], self.raw[:end]
        fresh, name = self.raw[self._scanned :], self._name
        if self._streams:
            self._scanned, self._name = len(self.raw), None if fresh else name
            self.is_complete = end is not None
            return [CallPiece(self._number, fresh, name)] if fresh else [], rest
        if end is None:
            return [], ""
        arguments = _parse(self.raw)
        self.is_complete = isinstance(arguments, dict)
        self.is_broken = not self.is_complete
        return [CallPiece(self._number, write_json(arguments), name)] if self.is_complete else [], rest


class CallReader:
    """Call number `number`, an object with name and arguments; see `ArgumentsReader`."""

    def __init__(self, number: int, names: Collection[str], keys: Sequence[str], *, is_enforced: bool) -> None:
        self._number, self._names, self._keys = number, names, keys
        self._streams = is_enforced
        self._arguments: ArgumentsReader | None = None
        self._end = JsonEnd()
        self.raw = ""
        self.is_complete = self.is_broken = False

    def push(self, text: str) -> tuple[list[CallPiece], str]:
        """Pieces of the call, and what comes after it (only when it is complete or broken)."""
        return self._stream(text) if self._streams else self._gather(text)

    def _gather(self, text: str) -> tuple[list[CallPiece], str]:
        """Wait for the whole object."""
        self.raw += text
        if not self.raw.startswith("{"):
            self.is_broken = bool(self.raw)
            return [], ""
        end = self._end.feed(text)
        if end is None:
            return [], ""
        end += len(self.raw) - len(text)
        rest, self.raw = self.raw[end:], self.raw[:end]
        call = read_call(self.raw, self._names, self._keys)
        self.is_complete, self.is_broken = call is not None, call is None
        return [] if call is None else [CallPiece(self._number, call[1], call[0])], rest

    def _stream(self, text: str) -> tuple[list[CallPiece], str]:
        """Give out the name when it is there, then the arguments as they come, then read the closing bracket."""
        pieces: list[CallPiece] = []
        self.raw += text
        if self._arguments is None:
            head = _HEAD.match(self.raw)
            if head is None:
                return [], ""
            text = self.raw[head.end() :]
            self._arguments = ArgumentsReader(self._number, json.loads(head[1]), is_enforced=True)
        if not self._arguments.is_complete:
            pieces, text = self._arguments.push(text)
        if self._arguments.is_complete:
            _, closing, rest = text.partition("}")
            self.is_complete = bool(closing)
            return pieces, rest
        return pieces, ""


def read_call(text: str, names: Collection[str], keys: Sequence[str]) -> tuple[str, str] | None:
    """Name and arguments (JSON text) of a call written as one JSON object; None if it is no call of a known tool."""
    value = _parse(text)
    name = value.get("name", value.get("tool_name")) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or name not in names:
        return None
    arguments: object = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):  # some models write the object as a string
        arguments = _parse(arguments)
    return (name, write_json(arguments)) if isinstance(arguments, dict) else None


def _parse(text: str) -> object:
    """The value that JSON text stands for, None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
