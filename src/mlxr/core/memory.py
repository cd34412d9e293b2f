"""Memory that was freed goes back to the system, as far as the C library can be told to."""

from __future__ import annotations

import ctypes
from functools import cache

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h, glibc


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
def _find(name: str) -> ctypes._NamedFuncPointer | None:
    """The C library's function of that name, where it is glibc or has one alike."""
    try:
        found: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(None), name)
        return found
    except (OSError, AttributeError, TypeError):
        return None
