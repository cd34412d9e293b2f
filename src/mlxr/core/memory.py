"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
from functools import cache


def return_free_memory() -> None:
    """Let the C library give back what it keeps of freed memory.

    glibc keeps some 64 MiB for each thread that has freed large pieces. Other libraries have no such call, and nothing
    happens there. Takes milliseconds.
    """
    trim = _find_trim()
    if trim is not None:
        trim(0)


@cache
def _find_trim() -> ctypes._NamedFuncPointer | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
