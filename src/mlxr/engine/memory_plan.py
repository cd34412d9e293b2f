"""How an engine uses the memory for keys and values: in pages that requests share, or in one plain run for each.

A plain run is a page as long as the context, so both use the same pools and operators. Knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlxr.cache.memory import read_available_bytes as read_available_bytes
from mlxr.cache.store import PageStore
from mlxr.core.errors import SettingError

KV_CACHES = ("auto", "paged", "simple")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`page_size` token positions to a page; whether requests share pages; where pages outlive memory, if anywhere."""

    kv_cache: str
    page_size: int
    shares_prefixes: bool
    store_bytes: int
    store_folder: Path | None


def plan_memory(
    kv_cache: str,
    page_size: int,
    context_tokens: int,
    *,
    shares_prefixes: bool,
    store_bytes: int,
    store_folder: Path | None,
    has_fingerprint: bool,
) -> MemoryPlan:
    """The plan that the settings of the same names ask for; SettingError where they contradict each other.

    `auto` is `paged` for every context and batch; docs/kv-cache.md has the measurements that this rests on.
    """
    if kv_cache not in KV_CACHES:
        raise SettingError(f"kv_cache: must be one of {', '.join(KV_CACHES)}; got {kv_cache!r}")
    if store_bytes < 0:
        raise SettingError(f"store_bytes: must be at least 0, got {store_bytes}")
    if store_bytes and store_folder is None:
        raise SettingError("store_folder: the store needs a folder; name one or set store_bytes to 0")
    if store_bytes and not has_fingerprint:
        raise SettingError("store_bytes: pages on disk need the model's fingerprint; set store_bytes to 0 without one")
    if kv_cache == "simple":
        if store_bytes:
            raise SettingError("store_bytes: kv_cache simple keeps no pages; set store_bytes to 0 or kv_cache to paged")
        return MemoryPlan("simple", context_tokens, False, 0, None)
    if store_bytes and not shares_prefixes:
        raise SettingError("store_bytes: pages that are not shared are not stored; set store_bytes to 0")
    return MemoryPlan("paged", page_size, shares_prefixes, store_bytes, store_folder if store_bytes else None)


def open_store(plan: MemoryPlan) -> PageStore | None:
    """The store on disk that the plan wants, if it wants one."""
    return None if plan.store_folder is None else PageStore(plan.store_folder, plan.store_bytes)


def bound_free_bytes(limit_bytes: int | None) -> int | None:
    """The system's free memory, or `limit_bytes` where that is less; None where neither is known."""
    available_bytes = read_available_bytes()
    if available_bytes is None or limit_bytes is None:
        return limit_bytes if available_bytes is None else available_bytes
    return min(available_bytes, limit_bytes)
