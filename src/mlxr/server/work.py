"""The threads for long work of routes, and bounds on the contents of a request's body.

Work has threads by kind, so that no kind delays another. A short look at a file runs on the event loop's own threads
(`asyncio.to_thread`), which are daemons too (`listen`). Everything that may wait for a lock, a hub or a slow disk
belongs here.

A parser makes some hundred bytes of every list or object and holds the interpreter's lock. So the contents of a body
are counted before it is parsed, in pieces and without that lock; long bodies are read only if there is room, and parsed
one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from starlette.requests import ClientDisconnect, Request

from mlxr.core.errors import Unavailable
from mlxr.core.work_threads import Stop, WorkThreads
from mlxr.registry import Registry
from mlxr.server.activity import in_flight
from mlxr.server.errors import ClientGone, ServerError
from mlxr.server.parts import parts_of
from mlxr.service.sight import Documents

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
INLINE_BYTES = 1 << 16  # shorter bodies are parsed at once on the event loop
LONG_BYTES = 1 << 20
MAX_PARTS = 1 << 18  # lists, objects and their items, except the numbers in lists
MAX_NUMBERS = 1 << 19  # in all lists; mostly token ids
MAX_HELD_BYTES = 1 << 27  # of long bodies that are being read or parsed
_BLOCK_BYTES = 1 << 20
_SPACES = np.isin(np.arange(256), list(b" \t\r\n"))
_COMMA, _LIST, _OBJECT, _QUOTE, _SLASH = b',[{"\\'


class Bodies:
    """The bodies that a server reads and parses; longer ones on `threads_for_short` or `threads_for_long`."""

    def __init__(self, threads_for_short: WorkThreads, threads_for_long: WorkThreads) -> None:
        self._short, self._long = threads_for_short, threads_for_long
        self._held_bytes = 0

    async def take(self, request: Request, parse: Callable[[bytearray], T], *, is_json: bool = True) -> T:
        """Return what `parse` makes of the body, which is then dropped. The contents of a JSON body are counted before.

        Raises ClientGone, ServerError if a body holds too much or there is no room for it now, and what `parse` raises.
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
            return await (threads.run(_check_and_parse, data, parse) if is_json else threads.run(parse, data))
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
    if sum(map(_count_signs, _cut(data))) <= MAX_PARTS:  # an upper bound, as it also counts signs in texts
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
    """Counts the contents of JSON that comes block by block."""

    def __init__(self) -> None:
        self.parts = self.numbers = 0
        self._is_inside = 0  # of a text in quotes
        self._is_escaped = False  # the next character
        self._follows = False  # a comma or the beginning of a list, so a number here belongs to a list

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
        """Return the places where texts begin and end: quotes without an odd number of backslashes before them."""
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


LOOKS, CHANGES, UPLOADS = 4, 2, 4
MAX_PULLS = 8  # at a time; more are refused
MAX_MAKES = 4  # models that are created, quantised or imported, and adapters that are read, at a time
MAX_WAITING_MAKES = 60
MAX_PDFS, MAX_WAITING_PDFS = 2, 6  # read at a time, each in a process, and waiting for that
PATIENCE_S = 4.0  # a request waits this long for a thread that reads or changes the catalogue


class ServerWork:
    """The threads of one server with `registry`; requests wait for others only a short time."""

    def __init__(self, registry: Registry) -> None:
        self.registry, self.patient_registry = registry, registry.wait_longer()
        held = f"{registry.folder}: the catalogue of models is held; end the process that holds it, or try again"
        self.looks = WorkThreads("mlxr-look", LOOKS, patience_s=PATIENCE_S, remedy=held, refusal=Unavailable)
        self.changes = WorkThreads("mlxr-change", CHANGES, patience_s=PATIENCE_S, remedy=held, refusal=Unavailable)
        self.uploads = WorkThreads("mlxr-upload", UPLOADS)
        ended = "wait until one of them has ended, or close the connection of one, which stops it"
        self.pulls = WorkThreads("mlxr-pull", MAX_PULLS, max_waiting=0, what="pulls", remedy=ended)
        self.makes = WorkThreads(
            "mlxr-make", MAX_MAKES, max_waiting=MAX_WAITING_MAKES, what="models or adapters", remedy=ended
        )

        self.documents = Documents()
        self.pdfs = WorkThreads("mlxr-pdf", MAX_PDFS, max_waiting=MAX_WAITING_PDFS, what="PDFs")
        self._short_bodies, self._long_bodies = WorkThreads("mlxr-body", 2), WorkThreads("mlxr-long-body", 1)
        self.bodies = Bodies(self._short_bodies, self._long_bodies)

    def stop(self) -> None:
        """Begin nothing more; does not wait for running work."""
        for threads in (self.looks, self.changes, self.uploads, self.pulls, self.makes, self.pdfs):
            threads.stop()
        for threads in (self._short_bodies, self._long_bodies):
            threads.stop()


def work_of(request: Request) -> ServerWork:
    """Return the threads of the server that the request came to."""
    return parts_of(request).work


async def look(request: Request, work: Callable[..., T], *arguments: object) -> T:
    """Return the result of `work(*arguments)`, which reads the catalogue or files; raises Unavailable after a while."""
    return await work_of(request).looks.run(work, *arguments)


async def change(request: Request, work: Callable[[Registry], T]) -> T:
    """Return the result of a short change of the registry; raises Unavailable if the catalogue stays locked."""
    threads = work_of(request)
    return await threads.changes.run(work, threads.registry)


def start_make(request: Request, work: Callable[[Registry, Stop], T]) -> asyncio.Task[T]:
    """Begin a long change of the registry, which is told to stop when the request ends. Raises Busy."""
    return _start(request, work_of(request).makes, work)


def start_pull(request: Request, work: Callable[[Registry, Stop], T]) -> asyncio.Task[T]:
    """Begin a pull in the same way."""
    return _start(request, work_of(request).pulls, work)


def _start(request: Request, threads: WorkThreads, work: Callable[[Registry, Stop], T]) -> asyncio.Task[T]:
    registry = work_of(request).patient_registry
    task = threads.start(lambda stop: work(registry, stop))
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # the client may have left
    in_flight(request).stack.callback(task.cancel)
    return task
