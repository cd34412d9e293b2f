"""How many pages each arena gets: by a setting in bytes or in pages, or by what the context needs and memory allows.

Knows no arrays; the bytes of one page are measured by the arena and passed in. The groups of a model share one budget.
A group that keeps everything needs pages for all tokens, one with a window for the last ones of each sequence, for what
one step adds, and for the ends of texts that were computed before. Recurrent layers need slots for the states of the
sequences that run, and for snapshots at boundaries of cached texts.

`read_available_bytes` is what this process may still take: what the system has free, within its control groups, by
/proc and /sys/fs/cgroup (versions 1 and 2, all parent groups), or by the kernel of macOS; elsewhere half of the
physical memory stands for what is free.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from typing import Any

from mlxr.cache.shapes import LIVE_SLOTS, GroupShape, StatesShape
from mlxr.core.errors import SettingError

MAC_MEMORY = 4  # HOST_VM_INFO64
MAC_WORDS = 64  # room for `vm_statistics64`, which has grown to 40 words of 32 bits
MAC_AVAILABLE = (0, 2, 22)  # words of it: free_count, inactive_count, purgeable_count


def read_available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can still be allocated, or None where the system does not tell. `root` stands for / in tests."""
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


FREE_MEMORY_PERCENT = 50  # the rest is left to activations, logits, the system and other programs
MAX_SLOTS = 2**31 - 1  # slots travel to the kernels as int32
ENDS_SHARE = 1 / 8  # of the pages that sequences hold in a window, kept for the ends of earlier texts
RUNNING_SHARE = 1 / 8  # of a context is what a sequence has on average, when slots for states are counted
STATES_ALONE_SHARE = 1 / 8  # of a context lies between two snapshots, where nothing else is kept to compare them with


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """What the groups of a model need when `sequences` of `context_tokens` run, with steps of `step_tokens` tokens.

    There is room for one snapshot of the recurrent layers' state for every `snapshot_pages` pages of tokens, or none.
    """

    shapes: Sequence[GroupShape]
    page_size: int
    sequences: int
    context_tokens: int
    step_tokens: int
    snapshot_pages: int | None = None

    @property
    def most_pages(self) -> int:
        """Pages of tokens when every sequence has a whole context."""
        return self.sequences * self._context_pages

    def count_pages(self, token_pages: int) -> tuple[int, ...]:
        """Pages of each group for so many pages of tokens, which the sequences have evenly.

        Beyond whole contexts for all sequences, there are more of them.
        """
        return tuple(self._count_group(shape, token_pages) for shape in self.shapes)

    def compare_bytes(self, page_bytes: Sequence[int]) -> tuple[int, int]:
        """Bytes of all that the sequences need, and of as much without windows; `page_bytes` are each group's."""
        needed = self.count_pages(self.most_pages)
        without = (
            pages if isinstance(shape, StatesShape) else self.most_pages
            for shape, pages in zip(self.shapes, needed, strict=True)
        )
        return sum(map(mul, needed, page_bytes)), sum(map(mul, without, page_bytes))

    @property
    def _context_pages(self) -> int:
        return -(-self.context_tokens // self.page_size)

    def _count_slots(self, token_pages: int) -> int:
        """Two for each sequence that runs in so many pages of tokens, and those for snapshots."""
        running = min(self.sequences, -(-token_pages // max(1, int(self._context_pages * RUNNING_SHARE))))
        snapshots = 0 if self.snapshot_pages is None else -(-token_pages // self.snapshot_pages)
        return LIVE_SLOTS * running + snapshots

    def _count_group(self, shape: GroupShape, token_pages: int) -> int:
        if isinstance(shape, StatesShape):
            return self._count_slots(token_pages)
        if shape.window is None:
            return token_pages
        sequences = max(self.sequences, token_pages // self._context_pages)
        each_pages, longer = divmod(min(token_pages, sequences * self._context_pages), sequences)
        resting_pages = (sequences - longer) * shape.count_resting(each_pages * self.page_size, self.page_size)
        resting_pages += longer * shape.count_resting((each_pages + 1) * self.page_size, self.page_size)
        step_pages = -(-self.step_tokens // self.page_size) + 1
        return min(token_pages, resting_pages + step_pages + int(resting_pages * ENDS_SHARE))


def choose_pages(
    page_bytes: Sequence[int],
    needs: PageNeeds,
    *,
    arena_bytes: int | None = None,
    pages: int | None = None,
    available_bytes: int | None,
    available_percent: int = FREE_MEMORY_PERCENT,
) -> tuple[int, ...]:
    """Pages of each group's arena, whose pages take `page_bytes`.

    `arena_bytes` is for all groups together; `pages` is taken as it is, by groups with a window as far as they need so
    many; only one of them may be given. Without either, what full use needs, bounded by `available_percent` of
    `available_bytes`. Raises SettingError where `arena_bytes` are more than are free, where not even one page fits, or
    where slots would not fit in 32 bits.
    """
    if not 1 <= available_percent <= 100:
        raise SettingError(f"arena_percent: must be from 1 to 100, got {available_percent}")
    if arena_bytes is not None and pages is not None:
        raise SettingError("arena_bytes: give a size in bytes or a number of pages, not both")
    if pages is not None:
        _check_pages(pages, needs.page_size, "pages")
        return tuple(
            pages if shape.is_linked or len(needs.shapes) == 1 else min(most, needed)
            for shape, most, needed in zip(
                needs.shapes, needs.count_pages(pages), needs.count_pages(needs.most_pages), strict=True
            )
        )
    if arena_bytes is not None:
        if available_bytes is not None and arena_bytes > available_bytes:
            raise SettingError(
                f"arena_bytes: {arena_bytes >> 20} MiB are more than the {available_bytes >> 20} MiB of memory that "
                "are free; lower arena_bytes, or leave it out to use the part of free memory that arena_percent says"
            )
        chosen = _split_bytes(arena_bytes, page_bytes, needs, most_pages=None)
        _check_pages(max(chosen), needs.page_size, "arena_bytes")
        return chosen
    if available_bytes is None:
        raise SettingError("arena_bytes: this system does not tell its free memory; set arena_bytes, such as 1G")
    room_bytes = available_bytes * available_percent // 100
    chosen = _split_bytes(room_bytes, page_bytes, needs, most_pages=needs.most_pages)
    return tuple(min(pages, MAX_SLOTS // needs.page_size) for pages in chosen)


def _split_bytes(
    room_bytes: int, page_bytes: Sequence[int], needs: PageNeeds, most_pages: int | None
) -> tuple[int, ...]:
    """Pages of each group in `room_bytes`: as many pages of tokens as fit, and no more than `most_pages`."""

    def count_bytes(pages: Sequence[int]) -> int:
        return sum(count * size for count, size in zip(pages, page_bytes, strict=True))

    least_bytes = count_bytes(needs.count_pages(1))
    if room_bytes < least_bytes:
        raise SettingError(
            f"arena_bytes: {room_bytes} bytes hold no page of the cache; one page of {needs.page_size} tokens of this "
            f"model takes {least_bytes} bytes, so raise arena_bytes or lower page_size"
        )

    low, high = 0, most_pages or room_bytes // min(page_bytes) * needs.most_pages
    while low < high:
        middle = (low + high + 1) // 2
        if count_bytes(needs.count_pages(middle)) <= room_bytes:
            low = middle
        else:
            high = middle - 1
    return needs.count_pages(low)


def _check_pages(pages: int, page_size: int, setting: str) -> None:
    if pages < 1:
        raise SettingError(f"{setting}: must be at least 1 page, got {pages}")
    if pages * page_size > MAX_SLOTS:
        raise SettingError(
            f"{setting}: {pages} pages of {page_size} tokens are more than the {MAX_SLOTS} positions an arena can have"
        )


def space_snapshots(page_bytes: Sequence[int], needs: PageNeeds, snapshot_percent: int) -> int | None:
    """Pages of tokens for which there is one snapshot, so that these take at most `snapshot_percent` of the cache.

    None for a model without recurrent layers; where they are all that is kept, a part of the context. Raises
    SettingError.
    """
    if not 1 <= snapshot_percent <= 90:
        raise SettingError(f"snapshot_percent: must be from 1 to 90, got {snapshot_percent}")
    sizes = list(zip(needs.shapes, page_bytes, strict=True))
    state_bytes = sum(size for shape, size in sizes if isinstance(shape, StatesShape))
    token_bytes = sum(size for shape, size in sizes if not isinstance(shape, StatesShape))
    if not state_bytes:
        return None
    if not token_bytes:
        return max(1, int(-(-needs.context_tokens // needs.page_size) * STATES_ALONE_SHARE))
    return max(1, -(-state_bytes * (100 - snapshot_percent) // (token_bytes * snapshot_percent)))
