"""The memory of the KV cache: per layer one pool of K pages and one of V pages, allocated once and never grown.

Which page belongs to whom is the pager's matter. Operators read and write the pools in place through slots and page
tables. The operating system gives the memory when a page is first written, so unused pages cost address space only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mlxr.cache.page_table import PageCopy
from mlxr.core.errors import SettingError
from mlxr.kernels.attend import KV_TYPES, KVType, allocate_pools
from mlxr.kernels.context import Context
from mlxr.kernels.pools import copy_page, is_on_host, read_page, write_page
from mlxr.kernels.tensor import ByteArray, PoolArray, pool_type


class Arena:
    """Pools of all layers; `k_pools[layer]` and `v_pools[layer]` are (pages, kv_heads, page_size, head_dim).

    `page_bytes` is what one page takes over all layers, K and V; `nbytes` the whole. Raises SettingError when the
    system refuses the memory.
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
    ) -> None:
        self._ledger = ctx.ledger
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
