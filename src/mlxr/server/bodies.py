"""How much a body of a request may hold, counted before it is parsed.

A parser makes some hundred bytes of every list or object, and nobody else has the interpreter meanwhile. So what a
body holds is counted first, in pieces and without the interpreter's lock; bodies that are long are read only as far as
there is room, and parsed one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from starlette.requests import ClientDisconnect, Request

from mlxr.core.work_threads import WorkThreads
from mlxr.server.errors import ClientGone, ServerError
from mlxr.server.parts import parts_of

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
INLINE_BYTES = 1 << 16  # which are parsed at once on the event loop
LONG_BYTES = 1 << 20
MAX_PARTS = 1 << 18  # lists, objects and what is in them, but for the numbers of lists
MAX_NUMBERS = 1 << 19  # of all lists; token ids as a rule
MAX_HELD_BYTES = 1 << 27  # of long bodies that are being read or parsed
_BLOCK_BYTES = 1 << 20
_SPACES = np.isin(np.arange(256), list(b" \t\r\n"))
_COMMA, _LIST, _OBJECT, _QUOTE, _SLASH = b',[{"\\'


class Bodies:
    """The bodies that a server reads and parses. `threads_for_short` and `threads_for_long` parse what is long."""

    def __init__(self, threads_for_short: WorkThreads, threads_for_long: WorkThreads) -> None:
        self._short, self._long = threads_for_short, threads_for_long
        self._held_bytes = 0

    async def take(self, request: Request, parse: Callable[[bytearray], T]) -> T:
        """Return what `parse` makes of the body, which is forgotten then.

        Raises ClientGone, ServerError for a body that holds too much or for which there is no room now, and what
        `parse` raises.
        """
        data, held_bytes = bytearray(), 0
        try:
            async for chunk in request.stream():
                data += chunk
                if len(data) > INLINE_BYTES:
                    self._held_bytes += len(data) - held_bytes
                    held_bytes = len(data)
                    self._check_room()
            if len(data) <= INLINE_BYTES:
                return parse(data)
            parts_of(request).lifecycle.had_large_body = True
            threads = self._long if len(data) > LONG_BYTES else self._short
            return await threads.run(_check_and_parse, data, parse)
        except ClientDisconnect as error:
            raise ClientGone from error
        finally:
            self._held_bytes -= held_bytes

    def _check_room(self) -> None:
        if self._held_bytes > MAX_HELD_BYTES:
            text = f"long bodies of {MAX_HELD_BYTES >> 20} MiB together are being read; try again"
            raise ServerError(429, "queue_full", text, "body", retry_after_s=1.0, closes=True)


def _check_and_parse(data: bytearray, parse: Callable[[bytearray], T]) -> T:
    check_parts(data)
    return parse(data)


def check_parts(data: bytes | bytearray) -> None:
    """Raise ServerError for JSON that holds more than MAX_PARTS or MAX_NUMBERS."""
    if sum(map(_count_signs, _cut(data))) <= MAX_PARTS:  # also counts what is in texts
        return
    count = _Count()
    for block in _cut(data):
        count.add(block)
        for found, most, what in (
            (count.parts - count.numbers, MAX_PARTS, "lists, objects and entries besides the numbers in lists"),
            (count.numbers, MAX_NUMBERS, "numbers in lists"),
        ):
            if found > most:
                raise ServerError(413, "too_large", f"the body holds more than {most} {what}", "body")


def _cut(data: bytes | bytearray) -> list[Bytes]:
    whole = np.frombuffer(data, np.uint8)
    return [whole[start : start + _BLOCK_BYTES] for start in range(0, len(data), _BLOCK_BYTES)]


def _count_signs(block: Bytes) -> int:
    return sum(int(np.count_nonzero(block == sign)) for sign in (_COMMA, _LIST, _OBJECT))


class _Count:
    """Counts what a text holds that comes block by block."""

    def __init__(self) -> None:
        self.parts = self.numbers = 0
        self._is_inside = 0  # of a text in quotes
        self._is_escaped = False  # the next character
        self._follows = False  # a comma or the beginning of a list, so that a number would be one of a list

    def add(self, block: Bytes) -> None:
        """Count the next block."""
        quotes = self._find_quotes(block)
        inside = (np.cumsum(quotes, dtype=np.uint8) + self._is_inside) & 1
        self._is_inside = int(inside[-1])
        signs = block[(inside == 0) & ~_SPACES[block]]
        if not len(signs):
            return
        before = (signs == _COMMA) | (signs == _LIST)
        numeric = (signs == ord("-")) | ((signs >= ord("0")) & (signs <= ord("9")))
        self.parts += _count_signs(signs)
        self.numbers += int(np.count_nonzero(before[:-1] & numeric[1:])) + (self._follows and bool(numeric[0]))
        self._follows = bool(before[-1])

    def _find_quotes(self, block: Bytes) -> npt.NDArray[np.bool_]:
        """Return where texts begin and end: quotes without an odd number of backslashes in front."""
        quotes: npt.NDArray[np.bool_] = block == _QUOTE
        slashes = np.flatnonzero(block == _SLASH)
        was_escaped, self._is_escaped = self._is_escaped, False
        if was_escaped and not (len(slashes) and slashes[0] == 0):
            quotes[0] = False
        if len(slashes):
            gaps = np.diff(slashes) != 1
            starts, ends = slashes[np.r_[True, gaps]], slashes[np.r_[gaps, True]]
            lengths = ends - starts + 1
            lengths[0] += was_escaped and starts[0] == 0
            after = ends[lengths % 2 == 1] + 1
            self._is_escaped = bool(len(after)) and int(after[-1]) == len(block)
            quotes[after[after < len(block)]] = False
        return quotes
