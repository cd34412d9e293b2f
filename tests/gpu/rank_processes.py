"""Two processes, each a rank of one context, that do the same work."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.ranks import join_ranks, make_inbox
from mlxr.service.tensor_parallel import VISIBLE, order_devices

COUNT = 2
Work = Callable[[Context, Any], Any]


def join(device: str, rank: int, pipe: Connection) -> Context:
    """Make a context that has joined the other process, which is at the end of the pipe."""
    os.environ[VISIBLE] = order_devices(rank, COUNT)
    ctx = Context(device)  # type: ignore[arg-type]
    inbox = make_inbox(ctx.gpu, COUNT)
    pipe.send_bytes(inbox.handle)
    handles = [pipe.recv_bytes()]
    handles.insert(rank, inbox.handle)
    ctx.gpu.ranks = join_ranks(ctx.gpu, inbox, rank, handles)
    pipe.send_bytes(b"joined")
    pipe.recv_bytes()
    inbox.unlink()
    return ctx


def work_through(device: str, rank: int, work: Work, cases: Sequence[Any], pipe: Connection, out: Connection) -> None:
    """Do all cases as one rank, and send the result of each."""
    ctx = join(device, rank, pipe)
    for case in cases:
        out.send(work(ctx, case))


def run_ranks(device: str, work: Work, cases: Sequence[Any]) -> list[list[Any]]:
    """Return the ranks' results of each case; `work` is a function of a module."""
    spawn = multiprocessing.get_context("spawn")
    ends = spawn.Pipe()
    outs = [spawn.Pipe() for _ in range(COUNT)]
    processes = [
        spawn.Process(target=work_through, args=(device, rank, work, cases, ends[rank], outs[rank][1]), daemon=True)
        for rank in range(COUNT)
    ]
    for process in processes:
        process.start()
    for _, theirs in outs:
        theirs.close()
    found = [[own.recv() for own, _ in outs] for _ in cases]
    for process in processes:
        process.join()
    return found
