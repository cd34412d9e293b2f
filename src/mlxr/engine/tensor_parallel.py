"""Tensor parallelism: several GPUs compute one model, each its share, and the first rank broadcasts every step.

Each other rank is a process that runs `follow_steps` with its share. Ranks never disagree, since their decisions follow
from what the first rank sends and from numbers that are equal to the bit. Before the first step each rank sends the
handle of its inbox to the first one, and gets those of the others. A step is sent in a frame: its length, kind and
number of arrays, then of each array its type, its shape and its numbers. When one rank ends, the others are of no use
any more, and the next call that computes raises DeviceError. Knows sockets, and no processes.
"""

from __future__ import annotations

import logging
import math
import struct
import threading
from collections.abc import Mapping, Sequence
from enum import IntEnum
from socket import socket
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from mlxr.cache.arena import Arena, ModelArena, parse_kv_type
from mlxr.cache.page_table import PageCopy
from mlxr.cache.shapes import form_groups
from mlxr.core.errors import DeviceError, SettingError
from mlxr.engine.memory_plan import ArenaPlan
from mlxr.engine.runner import Floats, Model
from mlxr.kernels.context import Context, Device
from mlxr.kernels.gpu.ranks import join_ranks, make_inbox
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import pool_type
from mlxr.models.adapter import Adapter

AnyArray = npt.NDArray[Any]
_HEAD, _ARRAY = struct.Struct("<IHH"), struct.Struct("<BB")
_TYPES = tuple(map(np.dtype, (np.int32, np.float32, np.int64, np.uint8)))
MAX_BYTES = 2**31
DEVICES = ("cuda", "emulated")
logger = logging.getLogger(__name__)
END_WAIT_S = 5.0  # to learn how a rank ended, once nothing can be sent to it


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
    """Return a frame as it is sent."""
    parts = []
    for array in arrays:
        parts += [_ARRAY.pack(_TYPES.index(array.dtype), array.ndim), struct.pack(f"<{array.ndim}I", *array.shape)]
        parts.append(array.tobytes())
    body = b"".join(parts)
    return _HEAD.pack(len(body), kind, len(arrays)) + body


def receive_frame(link: socket) -> tuple[Kind, list[AnyArray]]:
    """Wait for the next frame; raises EOFError if the other end is gone."""
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
    """Return the arrays of a batch without states and adapters."""
    places = [array for group in batch.groups for array in (group.slots, group.page_table)]
    own = batch.token_ids, batch.positions, batch.query_starts, batch.context_lengths, batch.output_rows
    return [*own, *places]


def read_batch(arrays: Sequence[AnyArray]) -> RaggedBatch:
    """Return the batch of such arrays."""
    token_ids, positions, query_starts, lengths, output_rows, slots, page_table, *others = arrays
    batch = RaggedBatch(token_ids, positions, slots, query_starts, lengths, page_table, output_rows)
    return batch.with_groups(zip(others[::2], others[1::2], strict=True)) if others else batch


def list_draw(numbers: AnyArray | None, following: Any) -> list[AnyArray]:
    """Return arrays of the numbers that tokens are drawn by, and of the next step's: each an array, None, or ... if
    unknown."""
    kinds = [_tell_kind(one) for one in (numbers, following)]
    return [np.array(kinds, np.int32), *(one for one in (numbers, following) if isinstance(one, np.ndarray))]


def read_draw(arrays: Sequence[AnyArray]) -> tuple[AnyArray | None, Any]:
    """Return the two arguments of `list_draw` from its arrays."""
    kinds, *given = arrays
    values = iter(given)
    first, second = ([None, ...][kind] if kind < 2 else next(values) for kind in kinds.tolist())
    return first, second


def _tell_kind(numbers: Any) -> int:
    return 2 if isinstance(numbers, np.ndarray) else int(numbers is not None)


def list_copies(copies: Sequence[PageCopy]) -> list[AnyArray]:
    """Return page copies as rows of group, source and target."""
    return [np.array([(copy.group, copy.source, copy.target) for copy in copies], np.int32).reshape(-1, 3)]


def read_copies(arrays: Sequence[AnyArray]) -> list[PageCopy]:
    """Return the page copies of such an array."""
    return [PageCopy(group=group, source=source, target=target) for group, source, target in arrays[0].tolist()]


def send_bytes(link: socket, text: bytes) -> None:
    """Send bytes, before the first step."""
    send_frame(link, Kind.BYTES, [np.frombuffer(text, np.uint8)])


def receive_bytes(link: socket) -> bytes:
    """Return the bytes that were sent; raises EOFError if the other process is gone."""
    return receive_frame(link)[1][0].tobytes()


def open_first(device: str, count: int) -> Context:
    """Return the context of the first of `count` ranks. Raises SettingError if there cannot be so many."""
    if device not in DEVICES:
        raise SettingError(f"gpus: device {device} cannot be several; leave it at 1, or use device cuda")
    ctx = Context(cast(Device, device))
    found = ctx.gpu.driver.count_devices() if device == "cuda" and ctx.gpu.driver is not None else count
    if found < count:
        raise SettingError(f"gpus: {count} were asked for, and this machine shows {found}; ask for no more")
    return ctx


def join_first(ctx: Context, links: Mapping[int, socket], greetings: Mapping[int, bytes]) -> None:
    """Let the ranks behind the links, and this one, reach each other's memory; each is sent its greeting first.

    Raises EOFError or OSError if one of them is gone, DeviceError if memory cannot be reached.
    """
    inbox = make_inbox(ctx.gpu, len(links) + 1)
    for rank, link in links.items():
        send_bytes(link, greetings[rank])
    handles = [inbox.handle, *(receive_bytes(link) for link in links.values())]
    for link in links.values():
        send_frame(link, Kind.BYTES, [np.frombuffer(handle, np.uint8) for handle in handles])
    ctx.gpu.ranks = join_ranks(ctx.gpu, inbox, 0, handles)
    for link in links.values():
        receive_bytes(link)
    for link in links.values():
        send_bytes(link, b"joined")
    inbox.unlink()


def open_other(device: str, link: socket, rank: int, count: int) -> Context:
    """Return the context of another rank, which has joined the others."""
    ctx = Context(cast(Device, device))
    join_other(ctx, link, rank, count)
    return ctx


def join_other(ctx: Context, link: socket, rank: int, count: int) -> None:
    """Join as a rank other than the first, once it has received its greeting."""
    inbox = make_inbox(ctx.gpu, count)
    send_bytes(link, inbox.handle)
    handles: Sequence[bytes] = [handle.tobytes() for handle in receive_frame(link)[1]]
    ctx.gpu.ranks = join_ranks(ctx.gpu, inbox, rank, handles)
    send_bytes(link, b"joined")
    receive_bytes(link)
    inbox.unlink()


class RankLink(Protocol):
    """The process of another rank, and the socket to it."""

    rank: int
    link: socket

    def wait(self) -> str:
        """Wait until it has ended; return how it did."""

    def stop(self) -> None:
        """End its process at once."""


class Ranks:
    """All other ranks of a context. `failure` says in one line why they are useless; None as long as they work."""

    def __init__(self, ctx: Context, links: Sequence[RankLink]) -> None:
        self._kernels, self._steps, self._links = ctx.gpu.own_ranks, ctx.gpu.steps, tuple(links)
        self._steps.listener = lambda numbers, following: self.tell(Kind.DRAW, list_draw(numbers, following))
        self._lock = threading.Lock()
        self._is_closed = False
        self.failure: str | None = None
        self._watchers = [
            threading.Thread(target=self._watch, args=(link,), name="mlxr-rank", daemon=True) for link in self._links
        ]
        for watcher in self._watchers:
            watcher.start()

    def tell(self, kind: Kind, arrays: Sequence[AnyArray]) -> None:
        """Send all of them the same frame. Raises DeviceError if one of them has ended."""
        self.check()
        frame = make_frame(kind, arrays)
        for link, watcher in zip(self._links, self._watchers, strict=True):
            try:
                link.link.sendall(frame)
            except OSError:
                watcher.join(END_WAIT_S)  # most likely its process has ended; how it ended says more
                self.fail(f"GPU {link.rank} no longer listens")
        self.check()

    def check(self) -> None:
        """Raise DeviceError if a rank has ended, or a kernel waited for one in vain."""
        if self.failure is None and self._kernels.has_failed:
            self.fail("a GPU waited for another one in vain")
        if self.failure is not None:
            raise DeviceError(f"{self.failure}; all GPUs of the model were stopped")

    def fail(self, reason: str) -> None:
        """Note that nothing more can be computed together: let kernels wait no longer, and end all processes."""
        with self._lock:
            if self.failure is not None or self._is_closed:
                return
            self.failure = reason
        logger.error("%s; all GPUs of the model stop", reason)
        self._stop()

    def close(self) -> None:
        """End the other ranks' processes."""
        with self._lock:
            self._is_closed = True
        self._stop()

    def _stop(self) -> None:
        self._kernels.give_up()
        for link in self._links:
            link.stop()

    def _watch(self, link: RankLink) -> None:
        self.fail(f"the process of GPU {link.rank} ended ({link.wait()})")


class TensorParallelModel:
    """A model of which this process computes one share, and `ranks` the others, all in the same steps."""

    def __init__(self, model: Model, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._arena: ModelArena | None = None

    @property
    def config(self) -> Any:
        """The configuration of this rank's share."""
        return self._model.config

    def forward(self, batch: RaggedBatch, arena: ModelArena) -> Floats:
        """Do what `Model.forward` says, on all ranks."""
        self._tell_batch(Kind.FORWARD, batch, arena)
        return self._run(self._model.forward, batch, arena)

    def forward_hidden(self, batch: RaggedBatch, arena: ModelArena) -> Floats:
        """Do what `Model.forward_hidden` says, on all ranks."""
        self._tell_batch(Kind.STATES, batch, arena)
        return self._run(self._model.forward_hidden, batch, arena)

    def project(self, hidden: Floats, adapters: Sequence[Adapter | None] = ()) -> Floats:
        """Do what `Model.project` says, on all ranks; there are no adapters."""
        self._ranks.tell(Kind.PROJECT, [np.ascontiguousarray(hidden, np.float32)])
        return self._run(self._model.project, hidden, adapters)

    def _tell_batch(self, kind: Kind, batch: RaggedBatch, arena: ModelArena) -> None:
        if batch.adapters:
            raise DeviceError("adapters are not computed by several GPUs yet; use one")
        if self._arena is not arena:
            self._arena = arena
            self._ranks.tell(Kind.ARENA, list_arena(arena))
            arena.on_copy = self._tell_copies
        self._ranks.tell(kind, list_batch(batch))

    def _tell_copies(self, copies: Sequence[PageCopy]) -> None:
        self._ranks.tell(Kind.COPY, list_copies(copies))

    def _run(self, compute: Any, *arguments: Any) -> Floats:
        """Compute this rank's part of a step that the others were told; end them if that fails, as they wait for it."""
        try:
            result: Floats = compute(*arguments)
        except BaseException as error:
            self._ranks.fail(f"GPU 0 failed: {type(error).__name__}: {error}")
            raise
        return result


def list_arena(arena: ModelArena) -> list[AnyArray]:
    """Return arrays of the page size and the number of pages of each group, and of the type of their numbers."""
    first = arena.arenas[0]
    assert isinstance(first, Arena)
    kind = pool_type(first.k_pools[0]).encode()
    return [np.array([arena.page_size, *(one.pages for one in arena.arenas)], np.int32), np.frombuffer(kind, np.uint8)]


def open_arena(ctx: Context, model: Model, arrays: Sequence[AnyArray]) -> ModelArena:
    """Return the arena of another rank, with as many pages as the first rank's."""
    page_size, *pages = arrays[0].tolist()
    groups, kind = form_groups(model.config.cache_layers), parse_kv_type(arrays[1].tobytes().decode())
    return ArenaPlan(groups, page_size, kind, tuple(pages), (0,) * len(pages)).allocate(ctx)[0]


def follow_steps(ctx: Context, model: Model, link: socket) -> None:
    """Do what the first rank sends, until it is gone."""
    arena: ModelArena | None = None
    while True:
        try:
            kind, arrays = receive_frame(link)
        except (EOFError, OSError):
            return
        if kind == Kind.ARENA:
            arena = open_arena(ctx, model, arrays)
        elif kind == Kind.DRAW:
            ctx.gpu.steps.draw(*read_draw(arrays))
        elif kind == Kind.PROJECT:
            np.asarray(model.project(arrays[0]))
        else:
            assert arena is not None
            _run_step(model, arena, kind, arrays)


def _run_step(model: Model, arena: ModelArena, kind: Kind, arrays: Sequence[AnyArray]) -> None:
    if kind == Kind.COPY:
        arena.copy_pages(read_copies(arrays))
    elif kind == Kind.STATES:
        model.forward_hidden(read_batch(arrays), arena)
    else:
        model.forward(read_batch(arrays), arena)
