"""Frames that the first rank sends the others for each step: a kind and some arrays of numbers, in few bytes.

A frame is its length, kind and number of arrays, then of each array its type, its shape and its numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from enum import IntEnum
from socket import socket
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxr.cache.page_table import PageCopy
from mlxr.kernels.ragged import RaggedBatch

AnyArray = npt.NDArray[Any]
_HEAD, _ARRAY = struct.Struct("<IHH"), struct.Struct("<BB")
_TYPES = tuple(map(np.dtype, (np.int32, np.float32, np.int64, np.uint8)))
MAX_BYTES = 2**31


class Kind(IntEnum):
    """The subject of a frame."""

    BYTES = 0  # before the first step: handles, settings, answers
    ARENA = 1
    FORWARD = 2
    STATES = 3
    PROJECT = 4
    DRAW = 5
    COPY = 6


def send_frame(link: socket, kind: Kind, arrays: Sequence[AnyArray]) -> None:
    """Send one frame; blocks while the other end is far behind."""
    link.sendall(make_frame(kind, arrays))


def make_frame(kind: Kind, arrays: Sequence[AnyArray]) -> bytes:
    """A frame as it is sent."""
    parts = []
    for array in arrays:
        parts += [_ARRAY.pack(_TYPES.index(array.dtype), array.ndim), struct.pack(f"<{array.ndim}I", *array.shape)]
        parts.append(array.tobytes())
    body = b"".join(parts)
    return _HEAD.pack(len(body), kind, len(arrays)) + body


def receive_frame(link: socket) -> tuple[Kind, list[AnyArray]]:
    """Wait for the next frame; raises EOFError where the other end is gone."""
    size, kind, count = _HEAD.unpack(_receive(link, _HEAD.size))
    body, at, arrays = _receive(link, size), 0, []
    for _ in range(count):
        code, dimensions = _ARRAY.unpack_from(body, at)
        shape = struct.unpack_from(f"<{dimensions}I", body, at + _ARRAY.size)
        at += _ARRAY.size + 4 * dimensions
        numbers = math.prod(shape)
        arrays.append(np.frombuffer(body, _TYPES[code], numbers, at).reshape(shape).copy())
        at += numbers * _TYPES[code].itemsize
    return Kind(kind), arrays


def _receive(link: socket, size: int) -> bytearray:
    received, at = bytearray(size), 0
    view = memoryview(received)
    while at < size:
        more = link.recv_into(view[at:])
        if not more:
            raise EOFError
        at += more
    return received


def list_batch(batch: RaggedBatch) -> list[AnyArray]:
    """The arrays of a batch without states and adapters."""
    places = [array for group in batch.groups for array in (group.slots, group.page_table)]
    own = batch.token_ids, batch.positions, batch.query_starts, batch.context_lengths, batch.output_rows
    return [*own, *places]


def read_batch(arrays: Sequence[AnyArray]) -> RaggedBatch:
    """The batch of such arrays."""
    token_ids, positions, query_starts, lengths, output_rows, slots, page_table, *others = arrays
    batch = RaggedBatch(token_ids, positions, slots, query_starts, lengths, page_table, output_rows)
    return batch.with_groups(zip(others[::2], others[1::2], strict=True)) if others else batch


def list_draw(numbers: AnyArray | None, following: Any) -> list[AnyArray]:
    """The numbers that tokens are drawn by, and those of the step after it: an array, None, or ... if unknown."""
    kinds = [_tell_kind(one) for one in (numbers, following)]
    return [np.array(kinds, np.int32), *(one for one in (numbers, following) if isinstance(one, np.ndarray))]


def read_draw(arrays: Sequence[AnyArray]) -> tuple[AnyArray | None, Any]:
    """The two of such arrays."""
    kinds, *given = arrays
    values = iter(given)
    first, second = ([None, ...][kind] if kind < 2 else next(values) for kind in kinds.tolist())
    return first, second


def _tell_kind(numbers: Any) -> int:
    return 2 if isinstance(numbers, np.ndarray) else int(numbers is not None)


def list_copies(copies: Sequence[PageCopy]) -> list[AnyArray]:
    """Page copies as rows of group, source and target."""
    return [np.array([(copy.group, copy.source, copy.target) for copy in copies], np.int32).reshape(-1, 3)]


def read_copies(arrays: Sequence[AnyArray]) -> list[PageCopy]:
    """The page copies of such an array."""
    return [PageCopy(group=group, source=source, target=target) for group, source, target in arrays[0].tolist()]
