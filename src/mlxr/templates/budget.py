"""The bounds of a template's rendering, and the messages between the process that renders it and ours.

A template comes with a model, so it is an untrusted program: its steps, the characters that it makes and writes, and
its time are bounded. Knows nothing of Jinja; passing a bound becomes a TemplateError. A message is a length, then
values of Python's plain types: `marshal` writes only plain types and runs no code when it reads, and both sides are the
same interpreter.
"""

from __future__ import annotations

import marshal
import re
import socket
import struct
import time
from collections.abc import Mapping, Sequence, Sized
from typing import Any

MAX_SOURCE_CHARACTERS = 1 << 20  # of the template itself
MAX_STEPS = 1_000_000  # loop turns; a macro's call counts for several
STEPS_PER_CALL = 10
MAX_OUTPUT_CHARACTERS = 1 << 24  # of the finished prompt
MAX_VALUE_ITEMS = 1 << 24  # characters of one string, or entries of one list
MAX_TOTAL_ITEMS = 1 << 27  # of all values made on the way
MAX_INTEGER_BITS = 1 << 12
MAX_WIDTH = 1 << 12  # padding, indentation and the like
MAX_RENDER_S = 20.0
MAX_PROCESSOR_S = 5  # of one rendering; the system ends the process that goes past it
MAX_MEMORY_BYTES = 512 << 20  # of the process that renders
ENTRY_ITEMS = 8  # an entry of a list takes as much memory as this many characters
VISIT_ITEMS = 32  # looking at an entry takes as much time as this many characters

_PERCENT_WIDTHS = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|[0-9]*)(?:\.(\*|[0-9]*))?")
_BRACE_SPECIFICATION = re.compile(r"\{[^{}:]*:([^}]*)\}")
_BRACE_NAMED = re.compile(r"\{[^{}:!]")
_NUMBER = re.compile(r"[0-9]+")


class BudgetExceeded(Exception):
    """A template went past a bound; the message says which."""


class Budget:
    """The rest of one rendering's budget."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._items = MAX_TOTAL_ITEMS
        self._output = MAX_OUTPUT_CHARACTERS
        self._deadline_s = time.monotonic() + MAX_RENDER_S

    def count_steps(self, steps: int) -> None:
        """Count steps of a loop's turn or a macro's call; raises BudgetExceeded, as all methods here do."""
        self._steps -= steps
        if self._steps < 0:
            raise BudgetExceeded(f"takes more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline_s:
            raise BudgetExceeded(f"takes longer than {MAX_RENDER_S:.0f} s")

    def count_output(self, characters: int) -> None:
        """Count characters of the prompt."""
        self._output -= characters
        if self._output < 0:
            raise BudgetExceeded(f"writes more than {MAX_OUTPUT_CHARACTERS} characters")

    def count_items(self, items: int) -> None:
        """Count a value of that many characters (or entries, weighted) that is about to be made, or was just made."""
        if items > MAX_VALUE_ITEMS:
            raise BudgetExceeded(f"makes a value of {items} characters or entries, more than {MAX_VALUE_ITEMS}")
        self._items -= items
        if self._items < 0:
            raise BudgetExceeded(f"makes more than {MAX_TOTAL_ITEMS} characters and entries on the way")

    def count_value(self, value: object) -> None:
        """Count a value that the template has just made."""
        if isinstance(value, str | bytes):
            self.count_items(len(value))
        elif isinstance(value, list | tuple | dict):
            self.count_items(len(value) * ENTRY_ITEMS)
        elif isinstance(value, int):
            self.check_bits(value.bit_length())

    def check_bits(self, bits: int) -> None:
        """Check the bits of a whole number that is about to be made."""
        if bits > MAX_INTEGER_BITS:
            raise BudgetExceeded(f"makes a number of {bits} bits, more than {MAX_INTEGER_BITS}")

    def check_width(self, *values: object) -> None:
        """Check the arguments of a function that pads, indents or repeats."""
        for value in values:
            if isinstance(value, int) and abs(value) > MAX_WIDTH:
                raise BudgetExceeded(f"pads or repeats by {value}, more than {MAX_WIDTH}")

    def check_operator(self, operator: str, left: object, right: object) -> None:
        """Check `left operator right` before it is computed."""
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.check_bits(max(left.bit_length(), 1) * abs(right) if abs(left) > 1 else 1)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            weight = 1 if isinstance(left, str | bytes) else ENTRY_ITEMS
            self.count_items((len(left) + len(right)) * weight)
        elif operator == "%" and isinstance(left, str | bytes):
            self.check_format(left if isinstance(left, str) else left.decode("latin-1"), right)

    def _check_product(self, left: object, right: object) -> None:
        if isinstance(left, int) and isinstance(right, int):
            self.check_bits(left.bit_length() + right.bit_length())
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str | bytes | list | tuple) and isinstance(times, int):
                weight = 1 if isinstance(repeated, str | bytes) else ENTRY_ITEMS
                self.count_items(len(repeated) * max(times, 0) * weight)

    def check_format(self, text: str, *values: object) -> None:
        """Check a `%` format: its widths may not be large, nor come from arguments; named values may repeat."""
        for match in _PERCENT_WIDTHS.finditer(text):
            self._check_written_widths(match.groups(""))
        self.count_items(len(text) + max(1, text.count("%(")) * self.measure(*values))

    def check_brace_format(self, text: str, *values: object) -> None:
        """Check a `str.format` format: its widths may not be large, nor come from arguments; values may repeat."""
        self.count_items(len(text) + max(1, len(_BRACE_NAMED.findall(text))) * self.measure(*values))
        for match in _BRACE_SPECIFICATION.finditer(text):
            if "{" in match[1]:
                raise BudgetExceeded("formats with a width from its arguments, which is not supported")
            self._check_written_widths(_NUMBER.findall(match[1]))

    def _check_written_widths(self, widths: Sequence[str]) -> None:
        for width in widths:
            if width == "*":
                raise BudgetExceeded("formats with a width from its arguments, which is not supported")
            if width:
                self.check_width(int(width) if len(width) < 9 else MAX_WIDTH + 1)

    def measure(self, *values: object) -> int:
        """Return the characters and entries in `values` and everything in them; raises past the bound for one value.

        A part that a value holds twice counts twice, as in the written text.
        """
        found, waiting = 0, list(values)
        while waiting:
            value = waiting.pop()
            if isinstance(value, str | bytes):
                found += len(value)
            elif isinstance(value, Mapping):
                waiting.extend(value)
                waiting.extend(value.values())
            elif isinstance(value, list | tuple | set | frozenset):
                waiting.extend(value)
            found += VISIT_ITEMS
            if found + len(waiting) > MAX_VALUE_ITEMS:
                raise BudgetExceeded(f"writes out a value of more than {MAX_VALUE_ITEMS} characters and entries")
        return found


_LENGTH = struct.Struct("<Q")
_PLAIN_TYPES: tuple[type[Any], ...] = (str, int, float, bytes)
MAX_MESSAGE_BYTES = 1 << 30
MAX_DEPTH = 200  # of nested values that are not of plain types
READY = "ready"  # the first message of a worker


class Closed(Exception):
    """The other side is gone."""


def pack(value: Any) -> bytes:
    """Return `value` as the bytes of a message; raises ValueError for values that a template cannot get."""
    try:
        body = marshal.dumps(value)
    except ValueError:  # not of a plain type, or nested too deeply
        body = marshal.dumps(_make_plain(value))
    return _LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> Any:
    """Wait for one message and return its value; raises Closed, or TimeoutError by the connection's timeout."""
    (length,) = _LENGTH.unpack(_receive_bytes(connection, _LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise Closed
    return marshal.loads(_receive_bytes(connection, length))


def _receive_bytes(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view, got = memoryview(data), 0
    while got < length:
        count = connection.recv_into(view[got:])
        if not count:
            raise Closed
        got += count
    return data


def _make_plain(value: object, depth: int = 0) -> Any:
    """Return `value` with mappings as dicts, sequences as lists, and subclasses of plain types as these types."""
    if depth > MAX_DEPTH:
        raise ValueError("values are nested too deeply")
    if isinstance(value, Mapping):
        return {_make_plain(key, depth + 1): _make_plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for plain in _PLAIN_TYPES:
        if isinstance(value, plain):
            return plain(value)
    raise ValueError(f"a template cannot get a value of type {type(value).__name__}")
