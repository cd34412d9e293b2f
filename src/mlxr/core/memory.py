"""Memory that is not used goes back to the system, as far as the system and the C library can be told to."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from pathlib import Path

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h, glibc
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE_BYTES = 2 << 20


def share_heap() -> None:
    """Let all threads that start from now on take memory from one heap.

    By default glibc gives threads heaps of their own, of which `return_free_memory` cannot give back the free end.
    Nothing happens with other libraries.
    """
    set_option = _find("mallopt")
    if set_option is not None:
        set_option(_ARENA_MAX, 1)


def return_free_memory() -> None:
    """Let the C library give back what it keeps of freed memory.

    Without this glibc keeps what large pieces left behind. Other libraries have no such call, and nothing happens
    there. Takes milliseconds.
    """
    trim = _find("malloc_trim")
    if trim is not None:
        trim(0)


@cache
def read_unit_bytes() -> int:
    """Return the bytes that the system gives at a time to anonymous memory that asked for huge pages."""
    try:
        has_huge = "[never]" not in _HUGE_PAGES.read_text()
    except OSError:
        has_huge = False
    return _HUGE_BYTES if has_huge else mmap.PAGESIZE


def discard(address: int, nbytes: int) -> None:
    """Give the whole pages within `nbytes` bytes from `address` on back to the system; they read as zeros then.

    The memory must be anonymous and nobody may use it meanwhile. Nothing happens on systems other than Linux.
    """
    advise = _find("madvise") if hasattr(mmap, "MADV_DONTNEED") and _HUGE_PAGES.parent.parent.is_dir() else None
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if advise is not None and last > first:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


@cache
def _find(name: str) -> ctypes._NamedFuncPointer | None:
    """The C library's function of that name, where it is glibc or has one alike."""
    try:
        found: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(None), name)
        return found
    except (OSError, AttributeError, TypeError):
        return None
