"""Reading the memory that this process may still take, taking it early, and giving unused memory back to the system.

`read_available_bytes` is the free memory of the system within the control groups of this process, from /proc and
/sys/fs/cgroup (versions 1 and 2, all parent groups), or from the kernel of macOS; elsewhere half of the physical memory
counts as free. Memory is given back as far as the system and the C library allow.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h, glibc
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE_BYTES = 2 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux's mman-common.h


def share_heap() -> None:
    """Let all threads that start from now on take memory from one heap.

    By default glibc gives threads heaps of their own, whose free end `return_free_memory` cannot give back. Does
    nothing with other libraries.
    """
    set_option = _find("mallopt")
    if set_option is not None:
        set_option(_ARENA_MAX, 1)


def return_free_memory() -> None:
    """Let the C library give freed memory back to the system, which glibc otherwise keeps after large pieces.

    Other libraries have no such call, and nothing happens there. Takes milliseconds.
    """
    trim = _find("malloc_trim")
    if trim is not None:
        trim(0)


@cache
def read_unit_bytes() -> int:
    """Return the size of the pages that the system gives to anonymous memory that asked for huge pages."""
    try:
        has_huge = "[never]" not in _HUGE_PAGES.read_text()
    except OSError:
        has_huge = False
    return _HUGE_BYTES if has_huge else mmap.PAGESIZE


def discard(address: int, nbytes: int) -> None:
    """Give the whole pages within `nbytes` bytes from `address` on back to the system; they read as zeros then.

    The memory must be anonymous and not in use meanwhile. Does nothing on systems other than Linux.
    """
    advise = _find("madvise") if hasattr(mmap, "MADV_DONTNEED") and _HUGE_PAGES.parent.parent.is_dir() else None
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if advise is not None and last > first:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def populate(address: int, nbytes: int) -> None:
    """Let the system give the memory of `nbytes` bytes from `address` on now, not when each page is first written.

    What is written there stays, also while others write. Does nothing on systems other than Linux since 5.14.
    """
    advise = _find("madvise") if _HUGE_PAGES.parent.parent.is_dir() else None
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    last = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    if advise is not None:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _POPULATE_WRITE)


@cache
def _find(name: str) -> ctypes._NamedFuncPointer | None:
    """The C library's function of that name, None if the library has none."""
    try:
        found: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(None), name)
        return found
    except (OSError, AttributeError, TypeError):
        return None


MAC_MEMORY = 4  # HOST_VM_INFO64
MAC_WORDS = 64  # room for `vm_statistics64`, which has grown to 40 words of 32 bits
MAC_AVAILABLE = (0, 2, 22)  # words of it: free_count, inactive_count, purgeable_count


def read_available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that can still be allocated, or None if the system does not tell. `root` replaces / in tests."""
    free = _read_fields(root / "proc/meminfo").get("MemAvailable")
    if free is None:
        return _read_mac_bytes(ctypes.CDLL(None)) if sys.platform == "darwin" else _half_of_physical_bytes()
    return max(0, min([free * 1024, *_cgroup_rooms(root)]))


def _read_mac_bytes(system: Any) -> int | None:
    """Pages of macOS that are free, inactive or purgeable: fields of `vm_statistics64` (mach/vm_statistics.h)."""
    words, count = (ctypes.c_uint32 * MAC_WORDS)(), ctypes.c_uint32(MAC_WORDS)
    if system.host_statistics64(system.mach_host_self(), MAC_MEMORY, words, ctypes.byref(count)) != 0:
        return _half_of_physical_bytes()
    return sum(words[at] for at in MAC_AVAILABLE) * os.sysconf("SC_PAGE_SIZE")


def _half_of_physical_bytes() -> int | None:
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Bytes left in each control group that this process is in, and in all groups above it."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            yield from _rooms_upwards(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _rooms_upwards(
                root / "sys/fs/cgroup/memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )


def _rooms_upwards(mount: Path, path: str, limit_name: str, usage_name: str, cache_field: str) -> Iterator[int]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        group = mount.joinpath(*parts[:depth])
        limit, usage = _read_number(group / limit_name), _read_number(group / usage_name)
        if limit is not None and usage is not None:
            # Cold file cache counts as used, but the system frees it when memory is asked for.
            yield limit - usage + _read_fields(group / "memory.stat").get(cache_field, 0)


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_number(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None


def _read_fields(path: Path) -> dict[str, int]:
    """Lines of the form `name 123` or `Name:  123 kB`, as numbers in the unit that is written."""
    fields = {}
    for line in _read_text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            fields[words[0].rstrip(":")] = int(words[1])
    return fields
