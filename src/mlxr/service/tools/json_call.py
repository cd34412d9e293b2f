"""Reads one JSON object that calls a tool out of a growing text, and says where it ends.

Where a grammar keeps the object well-formed its arguments are given out as they come. Otherwise nothing is before the
object is complete and known to be a call: what has been given out cannot be taken back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from mlxr.service.json_text import JsonMender, mend_json, read_json, write_json
from mlxr.service.reasoning import hold_back
from mlxr.service.tools.format import CallPiece

_INSIDE = re.compile(r'["\\]')
_HEAD = re.compile(
    r'\s*\{\s*(?:"tool_call_id"\s*:\s*"[^"]*"\s*,\s*)?"(?:tool_)?name"\s*:\s*"([^"]*)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class JsonEnd:
    """Finds the end of a JSON object or list in a text that grows, by its brackets, or before one of `stops`."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops, self._longest = stops, max(map(len, stops), default=0)
        self._outside = re.compile("|".join([r'["{}\[\]]', *map(re.escape, stops)]))
        self._place = self._depth = 0
        self._is_in_string = self.is_stopped = False

    def find(self, text: str) -> int | None:
        """Where the value ends, None if it goes on; `text` is that of the last time and more."""
        while True:
            sign = (_INSIDE if self._is_in_string else self._outside).search(text, self._place)
            if sign is None:
                rest = text[max(self._place, len(text) - self._longest) :]
                held = max((hold_back(rest, stop) for stop in self._stops), default=0)
                self._place = len(text) - (0 if self._is_in_string else held)
                return None
            if sign[0] == "\\":
                if sign.end() == len(text):
                    self._place = sign.start()
                    return None
                self._place = sign.end() + 1
                continue
            if sign[0] in self._stops:
                self.is_stopped, self._place = True, sign.start()
                return self._place
            self._place = sign.end()
            if sign[0] == '"':
                self._is_in_string = not self._is_in_string
            else:
                self._depth += 1 if sign[0] in "{[" else -1
                if self._depth <= 0:
                    return self._place

    @property
    def certain(self) -> int:
        """Count the characters that belong to the value, or to nothing else."""
        return self._place

    def may_begin(self, text: str) -> bool:
        """Tell whether a text that goes on may be an object, or one of the marks that stand for none."""
        bare = text.lstrip()
        return bare[:1] in ("", "{") or any(stop.startswith(bare) for stop in self._stops)

    @property
    def misses_bracket(self) -> bool:
        """Tell whether nothing but the last bracket is missing."""
        return self._depth == 1 and not self._is_in_string


class ArgumentsReader:
    """The arguments of call number `number`, whose name is known already: a JSON object.

    `raw` is all text of it so far; what `is_broken` is no such object. It ends before one of `stops` at the latest,
    where an empty text stands for no arguments.
    """

    def __init__(self, number: int, name: str | None, *, is_enforced: bool, stops: Sequence[str] = ()) -> None:
        self._number, self._name = number, name
        self._mender = JsonMender() if is_enforced else None
        self._end = JsonEnd(stops)
        self._scanned = 0
        self.raw = ""
        self.is_complete = self.is_broken = False

    def push(self, text: str) -> tuple[list[CallPiece], str]:
        """Pieces of the call, and what comes after it (only when it is complete or broken)."""
        self.raw += text
        end, rest = self._end.find(self.raw), ""
        if end is not None:
            self.raw, rest = self.raw[:end], self.raw[end:]
        is_empty = self._end.is_stopped and not self.raw.strip()
        if self._mender is not None and not is_empty:
            return self._stream(self._mender, is_whole=end is not None and not self._end.is_stopped), rest
        if end is None:
            self.is_broken = not self._end.may_begin(self.raw)
            if self.is_broken:
                self.raw, rest = self.raw[: self._end.certain], self.raw[self._end.certain :]
            return [], rest
        arguments = {} if is_empty else _parse(self.raw)
        self.is_complete = isinstance(arguments, dict)
        self.is_broken = not self.is_complete
        return [CallPiece(self._number, write_json(arguments), self._name)] if self.is_complete else [], rest

    def finish(self) -> list[CallPiece]:
        """Nothing: what is not whole when the answer ends is no call."""
        return []

    def _stream(self, mender: JsonMender, *, is_whole: bool) -> list[CallPiece]:
        """Give out what is new."""
        self.is_complete = is_whole
        if not self.raw.strip():
            return []
        certain = min(self._end.certain, len(self.raw))
        fresh, self._scanned = mender.push(self.raw[self._scanned : certain]), certain
        name, self._name = self._name, None if fresh else self._name
        return [CallPiece(self._number, fresh, name)] if fresh else []


class CallReader:
    """Call number `number`, an object with name and arguments, whose text begins with `{`; see `ArgumentsReader`.

    Before one of `stops`, or at the end of the answer, its last bracket may be missing.
    """

    def __init__(
        self,
        number: int,
        names: Collection[str],
        keys: Sequence[str],
        *,
        is_enforced: bool,
        needs_arguments: bool = False,
        stops: Sequence[str] = (),
    ) -> None:
        self._number, self._names, self._keys = number, names, keys
        self._needs_arguments = needs_arguments
        self._streams = is_enforced
        self._arguments: ArgumentsReader | None = None
        self._closing = ""  # what stands behind the arguments, so far space
        self._end = JsonEnd(stops)
        self.raw = ""
        self.is_complete = self.is_broken = False

    def push(self, text: str) -> tuple[list[CallPiece], str]:
        """Pieces of the call, and what comes after it (only when it is complete or broken)."""
        self.raw += text
        if self._arguments is None and self._streams:
            head = _HEAD.match(self.raw)
            if head is not None and head[1] in self._names:
                self._arguments = ArgumentsReader(self._number, head[1], is_enforced=True)
                text = self.raw[head.end() :]
        return self._gather() if self._arguments is None else self._stream(self._arguments, text)

    def finish(self) -> list[CallPiece]:
        """The call that is whole but for its last bracket when the answer ends, if this is one."""
        return [] if self._arguments is not None else self._decide()

    def _gather(self) -> tuple[list[CallPiece], str]:
        """Wait for the whole object."""
        end = self._end.find(self.raw)
        if end is None:
            return [], ""
        self.raw, rest = self.raw[:end], self.raw[end:]
        return self._decide(), rest

    def _decide(self) -> list[CallPiece]:
        """The call, unless this is none."""
        is_short = self._end.misses_bracket and self.raw.rstrip().endswith("}")
        text = self.raw + "}" * is_short
        call = read_call(text, self._names, self._keys, needs_arguments=self._needs_arguments)
        self.is_complete, self.is_broken = call is not None, call is None
        return [] if call is None else [CallPiece(self._number, call[1], call[0])]

    def _stream(self, arguments: ArgumentsReader, text: str) -> tuple[list[CallPiece], str]:
        """Give out the arguments as they come, and read the closing bracket."""
        pieces: list[CallPiece] = []
        if not arguments.is_complete:
            pieces, text = arguments.push(text)
        if not arguments.is_complete:
            return pieces, ""
        self._closing += text
        bare = self._closing.lstrip()
        self.is_complete = bool(bare)
        return pieces, bare.removeprefix("}")


def read_call(
    text: str, names: Collection[str], keys: Sequence[str], *, needs_arguments: bool
) -> tuple[str, str] | None:
    """Name and arguments (JSON text) of a call written as one JSON object; None if it is no call of a known tool.

    Arguments may be left out, null or an empty text, unless it `needs_arguments`.
    """
    value = _parse(text)
    name = value.get("name", value.get("tool_name")) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or name not in names:
        return None
    arguments: object = next((value[key] for key in keys if key in value), None)
    if arguments in (None, "") and not needs_arguments:
        arguments = {}
    if isinstance(arguments, str):  # some models write the object as a string
        arguments = _parse(arguments)
    return (name, write_json(arguments)) if isinstance(arguments, dict) else None


def _parse(text: str) -> object:
    """The value that JSON text stands for, small mistakes mended; None if it is none."""
    try:
        return read_json(text)
    except ValueError:
        pass
    try:
        return read_json(mend_json(text))
    except ValueError:
        return None
