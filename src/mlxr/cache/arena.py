"""The memory of the KV cache: per layer one pool of K pages and one of V pages, allocated once and never grown.

An `Arena` has the pools of one group of layers; `ModelArena` brings those of all groups together, layer by layer. Which
page belongs to whom is the pager's matter. Operators read and write the pools in place through slots and page
tables. The operating system gives the memory when a page is first written, so unused pages cost address space only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlxr.cache.page_table import PageCopy
from mlxr.cache.shapes import CacheGroups, CacheShape
from mlxr.core.errors import SettingError
from mlxr.kernels.attend import KV_TYPES, KVType, allocate_pools
from mlxr.kernels.context import Context
from mlxr.kernels.pools import copy_page, is_on_host, read_page, write_page
from mlxr.kernels.tensor import ByteArray, PoolArray, pool_type


class Arena:
    """Pools of a group of layers; `k_pools[layer]` and `v_pools[layer]` are (pages, kv_heads, page_size, head_dim).

    `page_bytes` is what one page takes over all layers, K and V; `nbytes` the whole; `shape` what every layer keeps of
    a token, and for how long. Raises SettingError when the system refuses the memory.
    """

    def __init__(
        self,
        ctx: Context,
        layers: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        kv_type: KVType | None = None,
        *,
        window: int | None = None,
    ) -> None:
        self._ledger = ctx.ledger
        self.shape = CacheShape(kv_heads, head_dim, window)
        self.pages = pages
        self.page_size = page_size
        try:
            pools = [allocate_pools(ctx, pages, kv_heads, page_size, head_dim, kv_type) for _ in range(layers)]
        except MemoryError as error:
            raise SettingError(
                f"arena_bytes: the system refused memory for {pages} pages of {page_size} tokens in {layers} layers; "
                "lower arena_bytes"
            ) from error
        self.k_pools: tuple[PoolArray, ...] = tuple(k_pool for k_pool, _ in pools)
        self.v_pools: tuple[PoolArray, ...] = tuple(v_pool for _, v_pool in pools)
        self.nbytes = sum(pool.nbytes for pool in (*self.k_pools, *self.v_pools))
        self.page_bytes = self.nbytes // pages
        shape = "x".join(map(str, (layers, kv_heads, page_size, head_dim)))
        self.layout = f"{ctx.device}/{pool_type(self.k_pools[0])}/{shape}"  # bytes of equal layouts mean the same

    @property
    def is_on_host(self) -> bool:
        """Whether any thread may read pages; those of a device only the thread that runs the model reads."""
        return is_on_host(self.k_pools[0])

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Copy whole pages in every layer, in order; the bytes are counted in the ledger."""
        for copy in copies:
            for pool in (*self.k_pools, *self.v_pools):
                copy_page(pool, copy.source, copy.target)
            self._ledger.add_copied_bytes(self.page_bytes)

    def export_page(self, page: int, target: ByteArray) -> None:
        """Copy the bytes of `page` in every layer, K then V, to `target` (page_bytes)."""
        for pool, start in self._parts():
            part = read_page(pool, page)
            target[start : start + part.nbytes] = part

    def import_page(self, page: int, source: ByteArray) -> None:
        """Overwrite `page` with bytes that `export_page` gave, of an arena with the same layout."""
        if source.shape != (self.page_bytes,):
            raise ValueError(f"a page takes {self.page_bytes} bytes, got an array of shape {source.shape}")
        for pool, start in self._parts():
            write_page(pool, page, source[start : start + pool.nbytes // self.pages])

    def _parts(self) -> Iterator[tuple[PoolArray, int]]:
        """Every pool, and where its part of an exported page starts."""
        start = 0
        for pools in zip(self.k_pools, self.v_pools, strict=True):
            for pool in pools:
                yield pool, start
                start += pool.nbytes // self.pages


class ModelArena:
    """The pools of all layers of a model, in the arenas of its groups; layers that share one have the same.

    `k_pools[layer]` and `v_pools[layer]` are as in `Arena`, None for a layer that keeps nothing.
    """

    def __init__(self, arenas: Sequence[Arena], groups: CacheGroups) -> None:
        self.arenas = tuple(arenas)
        self.page_size = arenas[0].page_size
        self.nbytes = sum(arena.nbytes for arena in arenas)
        self.k_pools: tuple[Any, ...] = tuple(
            None if place is None else arenas[place.group].k_pools[place.index] for place in groups.places
        )
        self.v_pools: tuple[Any, ...] = tuple(
            None if place is None else arenas[place.group].v_pools[place.index] for place in groups.places
        )

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Copy whole pages in every layer of their groups, in order."""
        for copy in copies:
            self.arenas[copy.group].copy_pages([copy])


def parse_kv_type(name: str | None) -> KVType | None:
    """The kv_type setting as the kernels take it, None for the device's own; SettingError for other names."""
    match name:
        case None | "bf16" | "f16" | "f32" | "q8":
            return name
        case _:
            raise SettingError(f"kv_type: must be one of {', '.join(KV_TYPES)}; got {name!r}")


def measure_page_bytes(
    ctx: Context, layers: int, kv_heads: int, page_size: int, head_dim: int, kv_type: KVType | None = None
) -> int:
    """Bytes of one page over all layers, before an arena exists; measured, since the pools' packing is the kernels'."""
    k_pool, v_pool = allocate_pools(ctx, 1, kv_heads, page_size, head_dim, kv_type)
    return layers * (k_pool.nbytes + v_pool.nbytes)
