"""How many pages the arena gets: from a setting in bytes or in pages, or from what the context needs and memory allows.

Knows no arrays; the bytes of one page are measured by the arena and passed in.
"""

from __future__ import annotations

from mlxr.core.errors import SettingError

FREE_MEMORY_PERCENT = 50  # the rest is left to activations, logits, the system and other programs
MAX_SLOTS = 2**31 - 1  # slots travel to the kernels as int32


def choose_pages(
    page_bytes: int,
    page_size: int,
    *,
    arena_bytes: int | None = None,
    pages: int | None = None,
    wanted_pages: int,
    available_bytes: int | None,
    available_percent: int = FREE_MEMORY_PERCENT,
) -> int:
    """Pages of the arena.

    `arena_bytes` is rounded down to whole pages; `pages` is taken as it is; only one of them may be given. Without
    either, `wanted_pages` (what full use needs) bounded by `available_percent` of `available_bytes`. Raises
    SettingError where `arena_bytes` are more than are free, where not even one page fits, or where slots would not fit
    in 32 bits.
    """
    if not 1 <= available_percent <= 100:
        raise SettingError(f"arena_percent: must be from 1 to 100, got {available_percent}")
    if arena_bytes is not None and pages is not None:
        raise SettingError("arena_bytes: give a size in bytes or a number of pages, not both")
    if pages is not None:
        return _check_pages(pages, page_size, "pages")
    if arena_bytes is not None:
        if available_bytes is not None and arena_bytes > available_bytes:
            raise SettingError(
                f"arena_bytes: {arena_bytes >> 20} MiB are more than the {available_bytes >> 20} MiB of memory that "
                "are free; lower arena_bytes, or leave it out to use the part of free memory that arena_percent says"
            )
        return _check_pages(_fit_pages(arena_bytes, page_bytes, page_size), page_size, "arena_bytes")
    if available_bytes is None:
        raise SettingError("arena_bytes: this system does not tell its free memory; set arena_bytes, such as 1G")
    fitting = _fit_pages(available_bytes * available_percent // 100, page_bytes, page_size)
    return min(wanted_pages, fitting, MAX_SLOTS // page_size)


def _fit_pages(room_bytes: int, page_bytes: int, page_size: int) -> int:
    if room_bytes < page_bytes:
        raise SettingError(
            f"arena_bytes: {room_bytes} bytes hold no page of the cache; one page of {page_size} tokens of this model "
            f"takes {page_bytes} bytes, so raise arena_bytes or lower page_size"
        )
    return room_bytes // page_bytes


def _check_pages(pages: int, page_size: int, setting: str) -> int:
    if pages < 1:
        raise SettingError(f"{setting}: must be at least 1 page, got {pages}")
    if pages * page_size > MAX_SLOTS:
        raise SettingError(
            f"{setting}: {pages} pages of {page_size} tokens are more than the {MAX_SLOTS} positions an arena can have"
        )
    return pages
