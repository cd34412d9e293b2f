"""How many bytes of memory this process may still take: what the system has free, within its control groups.

Knows nothing of caches. Linux is read from /proc and /sys/fs/cgroup (versions 1 and 2, all parent groups); elsewhere
half of the physical memory stands for what is free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def read_available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can still be allocated, or None where the system does not tell. `root` stands for / in tests."""
    free = _read_fields(root / "proc/meminfo").get("MemAvailable")
    if free is None:
        return _half_of_physical_bytes()
    return max(0, min([free * 1024, *_cgroup_rooms(root)]))


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
            # Cold file cache counts as used but is given up when memory is asked for.
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
