"""Ranks: devices, each with its own process, that compute one model together, and their exchange of numbers.

Each rank has an inbox, memory on its device into which kernels of the other ranks write lines (`ranks.h`); another
process reaches it by its handle. This module knows no operator and no model.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import DeviceError
from mlxr.core.frozen import frozen

if TYPE_CHECKING:
    from mlxr.kernels.gpu.cuda.driver import CudaDriver
    from mlxr.kernels.gpu.device import Gpu

Ints = npt.NDArray[np.int32]
LINE_BYTES = 16
LINES = 1 << 19  # lines of each sender and turn
MAX_GROUPS = 128  # most threadgroups of a launch: all of them must run at once
MAX_RANKS = 16
PATIENCE_MS = 120_000  # another rank may have to compile its kernels first
COUNTS_BYTES = HOST_BYTES = 256


class Inbox(Protocol):
    """Memory of one rank to which the others write. `counts` and `host` are addresses as in `ranks.h`."""

    address: int
    counts: int
    host: int
    handle: bytes

    def open(self, handle: bytes) -> int:
        """Return the address, in this process, of another rank's inbox."""

    def unlink(self) -> None:
        """Remove what the handle names, after all ranks have opened it."""


@frozen(eq=False)
class Ranks:
    """The place of this process, `rank` of `count`; `addresses` is an array on the device, an input of kernels."""

    rank: int
    count: int
    addresses: Any
    inbox: Inbox
    words: Ints  # words of the inbox in host memory

    @property
    def has_failed(self) -> bool:
        """True if a kernel has waited for another rank in vain."""
        return bool(self.words.any())

    def give_up(self) -> None:
        """Let kernels stop waiting for other ranks."""
        self.words[0] = 1


def make_inbox(gpu: Gpu, count: int) -> Inbox:
    """Return the inbox of this process, one of `count`. Raises DeviceError if devices cannot share their memory."""
    if not 2 <= count <= MAX_RANKS:
        raise DeviceError(f"{count} ranks cannot compute one model, expected from 2 to {MAX_RANKS}")
    size_bytes = 2 * count * LINES * LINE_BYTES
    if gpu.device == "emulated":
        return HostInbox(size_bytes)
    if gpu.driver is None:
        raise DeviceError(f"device {gpu.device!r} does not share its memory with others; use one GPU")
    return CudaInbox(gpu.driver, size_bytes)


def join_ranks(gpu: Gpu, inbox: Inbox, rank: int, handles: Sequence[bytes]) -> Ranks:
    """Open the inboxes of all ranks, whose handles are in order of rank."""
    places = [inbox.address if other == rank else inbox.open(handle) for other, handle in enumerate(handles)]
    addresses = gpu.mx.array(np.array([*places, inbox.counts, inbox.host, *[0] * 8], np.int64))
    gpu.mx.eval(addresses)
    held = (ctypes.c_int32 * (HOST_BYTES // 4)).from_address(inbox.host)
    return Ranks(rank, len(handles), addresses, inbox, np.ctypeslib.as_array(held))


class HostInbox:
    """The emulator's inbox: a file that processes map, and that is gone when nobody has it open."""

    def __init__(self, size_bytes: int) -> None:
        descriptor, name = tempfile.mkstemp(prefix="mlxr-rank-")
        os.ftruncate(descriptor, size_bytes)
        self.handle = name.encode()
        self._size_bytes = size_bytes
        self._maps: list[Any] = []
        self._own = np.zeros((COUNTS_BYTES + HOST_BYTES) // 4, np.int32)
        self.counts = int(self._own.ctypes.data)
        self.host = self.counts + COUNTS_BYTES
        self.address = self._map(descriptor)

    def open(self, handle: bytes) -> int:
        """Map another rank's file."""
        return self._map(os.open(handle.decode(), os.O_RDWR))

    def unlink(self) -> None:
        """Remove the file's name; all ranks have it open."""
        os.unlink(self.handle.decode())

    def _map(self, descriptor: int) -> int:
        mapped = mmap.mmap(descriptor, self._size_bytes)
        os.close(descriptor)
        held = np.frombuffer(mapped, np.uint8)
        self._maps.append(held)
        return int(held.ctypes.data)


class CudaInbox:
    """Memory of one NVIDIA GPU to which processes on others write through NVLink or PCIe."""

    def __init__(self, driver: CudaDriver, size_bytes: int) -> None:
        driver.enter()
        self._driver = driver
        self.address, self.counts = driver.allocate(size_bytes), driver.allocate(COUNTS_BYTES)
        driver.clear(self.address, size_bytes)
        driver.clear(self.counts, COUNTS_BYTES)
        self.host = driver.allocate_host(HOST_BYTES)
        ctypes.memset(self.host, 0, HOST_BYTES)
        self.handle = driver.share(self.address)

    def open(self, handle: bytes) -> int:
        """Let this device reach another one's memory."""
        self._driver.enter()
        return self._driver.reach(handle)

    def unlink(self) -> None:
        """Do nothing: a handle is no file."""
