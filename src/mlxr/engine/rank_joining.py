"""How ranks find each other before the first step: each tells the first one of its inbox, and hears of the others'.

Knows sockets, and no processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from socket import socket
from typing import cast

import numpy as np

from mlxr.core.errors import SettingError
from mlxr.engine.rank_frames import Kind, receive_frame, send_frame
from mlxr.kernels.context import Context, Device
from mlxr.kernels.gpu.ranks import join_ranks, make_inbox

DEVICES = ("cuda", "emulated")


def send_bytes(link: socket, text: bytes) -> None:
    """Send bytes, before the first step."""
    send_frame(link, Kind.BYTES, [np.frombuffer(text, np.uint8)])


def receive_bytes(link: socket) -> bytes:
    """The bytes that were sent; EOFError where the other process is gone."""
    return receive_frame(link)[1][0].tobytes()


def open_first(device: str, count: int) -> Context:
    """The context of the first of `count` ranks. Raises SettingError where they cannot be as many."""
    if device not in DEVICES:
        raise SettingError(f"gpus: device {device} cannot be several; leave it at 1, or use device cuda")
    ctx = Context(cast(Device, device))
    found = ctx.gpu.driver.count_devices() if device == "cuda" and ctx.gpu.driver is not None else count
    if found < count:
        raise SettingError(f"gpus: {count} were asked for, and this machine shows {found}; ask for no more")
    return ctx


def join_first(ctx: Context, links: Mapping[int, socket], greetings: Mapping[int, bytes]) -> None:
    """Let the ranks behind the links, and this one, reach each other's memory; each is sent its greeting first.

    Raises EOFError or OSError where one of them is gone, DeviceError where memory cannot be reached.
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
    """The context of another rank, which has joined the others."""
    ctx = Context(cast(Device, device))
    join_other(ctx, link, rank, count)
    return ctx


def join_other(ctx: Context, link: socket, rank: int, count: int) -> None:
    """Join as another rank than the first, once it has heard its greeting."""
    inbox = make_inbox(ctx.gpu, count)
    send_bytes(link, inbox.handle)
    handles: Sequence[bytes] = [handle.tobytes() for handle in receive_frame(link)[1]]
    ctx.gpu.ranks = join_ranks(ctx.gpu, inbox, rank, handles)
    send_bytes(link, b"joined")
    receive_bytes(link)
    inbox.unlink()
