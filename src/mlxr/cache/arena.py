"""The memory of the KV cache: per layer one pool of K pages and one of V pages, allocated once and never grown.

An `Arena` has the pools of one group of layers, a `StateArena` those of all recurrent layers, where a page is the slot
of one state; `ModelArena` has the pools of all groups, layer by layer. The pager knows who holds which page. Operators
read and write the pools in place through slots and page tables. On the host the operating system gives the memory when
a page is first written, so unused pages cost only address space, and free pages can be given back. The next slots of
large states get theirs early.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, product
from threading import Event, Thread
from typing import Any

from mlxr.cache.page_table import PageCopy
from mlxr.cache.shapes import CacheGroups, CacheShape, GroupShape, StatesShape
from mlxr.core.errors import SettingError
from mlxr.core.work_threads import LEAST_URGENT, give_way
from mlxr.kernels.attend import KV_TYPES, KVType, allocate_pools
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import (
    STATE_BYTES,
    ByteArray,
    PoolArray,
    allocate_states,
    copy_page,
    discard_pages,
    is_on_host,
    measure_written,
    pool_type,
    populate_pages,
    read_page,
    write_page,
)

SLOW_BYTES = 2 * 2**20  # of a state whose memory is taken early


class PoolSet:
    """Pools of one group of layers: page p of the group is part p of each pool.

    `page_bytes` are the bytes of one page over all pools, `nbytes` those of all pages. Exported pages can be exchanged
    between pool sets with the same `layout`.
    """

    shape: GroupShape

    def __init__(self, ctx: Context, pools: Sequence[PoolArray], pages: int, page_size: int, layout: str) -> None:
        self._ledger = ctx.ledger
        self._pools = tuple(pools)
        self.pages = pages
        self.page_size = page_size
        self.nbytes = sum(pool.nbytes for pool in pools)
        self.page_bytes = self.nbytes // pages
        self.layout = layout

    @property
    def is_on_host(self) -> bool:
        """True if any thread may read pages; pages of a device are read only by the thread that runs the model."""
        return is_on_host(self._pools[0])

    @property
    def layers(self) -> int:
        """Layers that have pools here."""
        raise NotImplementedError

    def measure(self, pages: int) -> int:
        """Return the bytes of memory that the pools take when `pages` of their pages have been written."""
        return sum(measure_written(pool, pages * (pool.nbytes // self.pages)) for pool in self._pools)

    def discard(self, pages: Sequence[int]) -> None:
        """Give the memory of `pages` (ascending) back to the system if it is the host's; their contents are lost."""
        for start, stop in _find_runs(pages):
            for pool in self._pools:
                discard_pages(pool, start, stop)

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Copy whole pages in every layer, in order; the bytes are counted in the ledger."""
        for copy in copies:
            for pool in self._pools:
                copy_page(pool, copy.source, copy.target)
            self._ledger.add_copied_bytes(self.page_bytes)

    def export_page(self, page: int, target: ByteArray) -> None:
        """Copy the bytes of `page` in every pool to `target` (page_bytes)."""
        for pool, start in self._parts():
            part = read_page(pool, page)
            target[start : start + part.nbytes] = part

    def import_page(self, page: int, source: ByteArray) -> None:
        """Overwrite `page` with bytes that `export_page` gave, of pools with the same layout."""
        if source.shape != (self.page_bytes,):
            raise ValueError(f"a page takes {self.page_bytes} bytes, got an array of shape {source.shape}")
        for pool, start in self._parts():
            write_page(pool, page, source[start : start + pool.nbytes // self.pages])

    def _parts(self) -> Iterator[tuple[PoolArray, int]]:
        """Yield every pool, and the offset of its part in an exported page."""
        start = 0
        for pool in self._pools:
            yield pool, start
            start += pool.nbytes // self.pages


def _find_runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first page of each run of neighbours, and the page after its last."""
    for _, run in groupby(enumerate(pages), lambda pair: pair[1] - pair[0]):
        numbers = [page for _, page in run]
        yield numbers[0], numbers[-1] + 1


class Arena(PoolSet):
    """Pools of a group of layers; `k_pools[layer]` and `v_pools[layer]` are (pages, kv_heads, page_size, head_dim).

    `shape` says what every layer keeps of a token, and for how long. If values are part of the keys (`value_dim`), both
    pools are the same. Raises SettingError if the system refuses the memory.
    """

    shape: CacheShape

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
        value_dim: int | None = None,
    ) -> None:
        self.shape = CacheShape(kv_heads, head_dim, window, value_dim)
        in_keys = value_dim is not None
        try:
            pools = [
                allocate_pools(ctx, pages, kv_heads, page_size, head_dim, kv_type, values_in_keys=in_keys)
                for _ in range(layers)
            ]
        except MemoryError as error:
            raise SettingError(
                f"arena_bytes: the system refused memory for {pages} pages of {page_size} tokens in {layers} layers; "
                "lower arena_bytes"
            ) from error
        self.k_pools: tuple[PoolArray, ...] = tuple(k_pool for k_pool, _ in pools)
        self.v_pools: tuple[PoolArray, ...] = tuple(v_pool for _, v_pool in pools)
        self.states = (None,) * layers
        sizes = "x".join(map(str, (layers, kv_heads, page_size, head_dim)))
        layout = f"{ctx.device}/{pool_type(self.k_pools[0])}/{sizes}" + (f"/{value_dim}" if in_keys else "")
        own = [pool for pair in pools for pool in (pair[:1] if in_keys else pair)]
        super().__init__(ctx, own, pages, page_size, layout)

    @property
    def layers(self) -> int:
        """Layers that have pools here."""
        return len(self.k_pools)


class StateArena(PoolSet):
    """Pools of all recurrent layers; `states[layer]` is (slots, floats of the layer) in f32.

    Raises SettingError when the system refuses the memory.
    """

    shape: StatesShape

    def __init__(self, ctx: Context, shape: StatesShape, slots: int, page_size: int) -> None:
        self.shape = shape
        try:
            self.states = tuple(allocate_states(ctx, slots, layer.floats) for layer in shape.layers)
        except MemoryError as error:
            raise SettingError(
                f"arena_bytes: the system refused memory for {slots} states of {len(shape.layers)} layers; "
                "lower arena_bytes or max_sequences"
            ) from error
        layout = "/".join((ctx.device, "state", str(page_size), ",".join(str(layer.floats) for layer in shape.layers)))
        super().__init__(ctx, self.states, slots, page_size, layout)
        self._stop, self._populating = Event(), Thread()

    @property
    def layers(self) -> int:
        """Layers that have pools here."""
        return len(self.states)

    @property
    def is_slow_to_populate(self) -> bool:
        """True if the first write to a slot holds a step up: virtual machines take 3 ms for 2 MiB."""
        return self.is_on_host and self.page_bytes >= SLOW_BYTES

    def populate(self, slots: Sequence[int]) -> None:
        """Take memory for `slots` in the background, where the system can; what they hold stays."""
        if not slots:
            return
        self._stop_populating()
        stop = self._stop = Event()
        pools = self._pools

        def take() -> None:
            give_way(LEAST_URGENT)
            for slot, pool in product(slots, pools):
                if stop.is_set():
                    return
                populate_pages(pool, slot, slot + 1)

        self._populating = Thread(target=take, name="mlxr-memory", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads may be; then a step takes the memory
            self._populating.start()

    def discard(self, pages: Sequence[int]) -> None:
        """Give the memory of `pages` back, as all pools do; what was taken in the background is not taken again."""
        self._stop_populating()
        super().discard(pages)

    def _stop_populating(self) -> None:
        self._stop.set()
        if self._populating.is_alive():
            self._populating.join()


class ModelArena:
    """The pools of all layers of a model, from the arenas of its groups.

    `k_pools[layer]` and `v_pools[layer]` are as in `Arena`, None for a layer without keys and values; layers that share
    keys and values have the same pools. `states[layer]` is as in `StateArena`, None for a layer that is not recurrent.
    `on_copy` is called with copies before they are made.
    """

    def __init__(self, arenas: Sequence[PoolSet], groups: CacheGroups) -> None:
        self.arenas = tuple(arenas)
        self.on_copy: Callable[[Sequence[PageCopy]], None] | None = None
        self.page_size = arenas[0].page_size
        self.nbytes = sum(arena.nbytes for arena in arenas)
        k_pools: list[Any] = []
        v_pools: list[Any] = []
        states: list[Any] = []
        for place, state in zip(groups.places, groups.states, strict=True):
            arena = None if place is None else arenas[place.group]
            index = 0 if place is None else place.index
            k_pools.append(arena.k_pools[index] if isinstance(arena, Arena) else None)
            v_pools.append(arena.v_pools[index] if isinstance(arena, Arena) else None)
            kept = None if state is None else arenas[state.group]
            states.append(kept.states[state.index] if state is not None and isinstance(kept, StateArena) else None)
        self.k_pools, self.v_pools, self.states = tuple(k_pools), tuple(v_pools), tuple(states)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages in every layer of their groups, in order."""
        if self.on_copy is not None:
            self.on_copy(copies)
        for copy in copies:
            self.arenas[copy.group].copy_pages([copy])


def parse_kv_type(name: str | None) -> KVType | None:
    """Return the kv_type setting for the kernels, None for the device's default; SettingError for other names."""
    match name:
        case None | "bf16" | "f16" | "f32" | "q8":
            return name
        case _:
            raise SettingError(f"kv_type: must be one of {', '.join(KV_TYPES)}; got {name!r}")


def measure_page_bytes(
    ctx: Context,
    layers: int,
    kv_heads: int,
    page_size: int,
    head_dim: int,
    kv_type: KVType | None = None,
    *,
    values_in_keys: bool = False,
) -> int:
    """Return the bytes of one page over all layers, measured on a pool of one page, as kernels decide the packing."""
    pools = allocate_pools(ctx, 1, kv_heads, page_size, head_dim, kv_type, values_in_keys=values_in_keys)
    return layers * sum(pool.nbytes for pool in pools[: 1 if values_in_keys else 2])


def measure_state_bytes(shape: StatesShape) -> int:
    """Return the bytes of one state of all recurrent layers."""
    return STATE_BYTES * sum(layer.floats for layer in shape.layers)
