"""The first rank's side of several that compute one model: it tells the others each step before it begins that itself.

Each other rank is a process (`Follower`) that does the same with its share: `follow` is what it runs. Ranks never
disagree, since what they decide follows from what is told and from numbers that are equal to the bit. Where one of them
ends, all of them are of no use any more; whoever computes next hears so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from socket import socket
from typing import Any, Protocol

import numpy as np

from mlxr.cache.arena import Arena, ModelArena, parse_kv_type
from mlxr.cache.page_table import PageCopy
from mlxr.cache.shapes import form_groups
from mlxr.core.errors import DeviceError
from mlxr.engine.memory_plan import ArenaPlan
from mlxr.engine.rank_frames import (
    AnyArray,
    Kind,
    list_batch,
    list_copies,
    list_draw,
    make_frame,
    read_batch,
    read_copies,
    read_draw,
    receive_frame,
)
from mlxr.engine.runner import Floats, Model
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import pool_type
from mlxr.models.adapter import Adapter

logger = logging.getLogger(__name__)
END_WAIT_S = 5.0  # from when a rank cannot be told anything until its end must be known


class Follower(Protocol):
    """The process of another rank, and how to tell it something."""

    rank: int
    link: socket

    def wait(self) -> str:
        """Wait until it has ended; how it did."""

    def stop(self) -> None:
        """End its process, at once."""


class Followers:
    """All other ranks of a context. `failure` says in one line why they are of no use any more, None as long as they
    are."""

    def __init__(self, ctx: Context, followers: Sequence[Follower]) -> None:
        self._ranks, self._steps, self._followers = ctx.gpu.own_ranks, ctx.gpu.steps, tuple(followers)
        self._steps.listener = lambda numbers, following: self.tell(Kind.DRAW, list_draw(numbers, following))
        self._lock = threading.Lock()
        self._is_closed = False
        self.failure: str | None = None
        self._watchers = [
            threading.Thread(target=self._watch, args=(follower,), name="mlxr-rank", daemon=True)
            for follower in self._followers
        ]
        for watcher in self._watchers:
            watcher.start()

    def tell(self, kind: Kind, arrays: Sequence[AnyArray]) -> None:
        """Tell all of them the same. Raises DeviceError where one of them has ended."""
        self.check()
        frame = make_frame(kind, arrays)
        for follower, watcher in zip(self._followers, self._watchers, strict=True):
            try:
                follower.link.sendall(frame)
            except OSError:
                watcher.join(END_WAIT_S)  # most likely its process has ended, and how says more
                self.fail(f"GPU {follower.rank} no longer listens")
        self.check()

    def check(self) -> None:
        """Raise DeviceError where a rank has ended, or was waited for in vain."""
        if self.failure is None and self._ranks.has_failed:
            self.fail("a GPU waited for another one in vain")
        if self.failure is not None:
            raise DeviceError(f"{self.failure}; all GPUs of the model were stopped")

    def fail(self, reason: str) -> None:
        """Nothing more can be computed together: let kernels wait no longer, and end all processes."""
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
        self._ranks.give_up()
        for follower in self._followers:
            follower.stop()

    def _watch(self, follower: Follower) -> None:
        self.fail(f"the process of GPU {follower.rank} ended ({follower.wait()})")


class LedModel:
    """A model of which this process computes one share, and `followers` the others, all of them the same steps."""

    def __init__(self, model: Model, followers: Followers) -> None:
        self._model, self._followers = model, followers
        self._arena: ModelArena | None = None

    @property
    def config(self) -> Any:
        """That of this rank's share."""
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
        """Do what `Model.project` says, on all ranks; states of adapters there are none."""
        self._followers.tell(Kind.PROJECT, [np.ascontiguousarray(hidden, np.float32)])
        return self._run(self._model.project, hidden, adapters)

    def _tell_batch(self, kind: Kind, batch: RaggedBatch, arena: ModelArena) -> None:
        if batch.adapters:
            raise DeviceError("adapters are not computed by several GPUs yet; use one")
        if self._arena is not arena:
            self._arena = arena
            self._followers.tell(Kind.ARENA, list_arena(arena))
            arena.on_copy = self._tell_copies
        self._followers.tell(kind, list_batch(batch))

    def _tell_copies(self, copies: Sequence[PageCopy]) -> None:
        self._followers.tell(Kind.COPY, list_copies(copies))

    def _run(self, compute: Any, *arguments: Any) -> Floats:
        """Compute this rank's part of a step that the others were told; end them if that fails, as they wait for it."""
        try:
            result: Floats = compute(*arguments)
        except BaseException as error:
            self._followers.fail(f"GPU 0 failed: {type(error).__name__}: {error}")
            raise
        return result


def list_arena(arena: ModelArena) -> list[AnyArray]:
    """How many pages each group has and how long they are, and the type of their numbers."""
    first = arena.arenas[0]
    assert isinstance(first, Arena)
    kind = pool_type(first.k_pools[0]).encode()
    return [np.array([arena.page_size, *(one.pages for one in arena.arenas)], np.int32), np.frombuffer(kind, np.uint8)]


def open_arena(ctx: Context, model: Model, arrays: Sequence[AnyArray]) -> ModelArena:
    """The arena of another rank, as large as the first one's in pages."""
    page_size, *pages = arrays[0].tolist()
    groups, kind = form_groups(model.config.cache_layers), parse_kv_type(arrays[1].tobytes().decode())
    return ArenaPlan(groups, page_size, kind, tuple(pages), (0,) * len(pages)).allocate(ctx)[0]


def follow(ctx: Context, model: Model, link: socket) -> None:
    """Do what the first rank tells, until it is gone."""
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
            _follow_step(model, arena, kind, arrays)


def _follow_step(model: Model, arena: ModelArena, kind: Kind, arrays: Sequence[AnyArray]) -> None:
    if kind == Kind.COPY:
        arena.copy_pages(read_copies(arrays))
    elif kind == Kind.STATES:
        model.forward_hidden(read_batch(arrays), arena)
    else:
        model.forward(read_batch(arrays), arena)
