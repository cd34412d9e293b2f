"""Messages between mlxr and its worker processes: a length, then values of Python's plain types.

`marshal` writes the plain types alone and runs no code when it reads, and both sides are the same interpreter.
"""

from __future__ import annotations

import marshal
import socket
import struct
from collections.abc import Mapping
from typing import Any

_LENGTH = struct.Struct("<Q")
_PLAIN_TYPES: tuple[type[Any], ...] = (str, int, float, bytes)
MAX_MESSAGE_BYTES = 1 << 30
MAX_DEPTH = 200  # of values that are not of plain types
READY = "ready"  # the first message of a worker


class Closed(Exception):
    """The other side is gone."""


def pack(value: Any) -> bytes:
    """Return `value` as the bytes of a message; raises ValueError for values that a template cannot get."""
    try:
        body = marshal.dumps(value)
    except ValueError:  # of a type of its own, or nested too deeply
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
