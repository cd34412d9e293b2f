"""A small arena whose pages say what they hold: every slot carries a hash of all tokens up to it, and its position.

A state is the hash of all tokens that are written, and their number. So a test can check that a table reads the right
numbers, whoever computed its pages and wherever they have been since.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlxr.cache.arena import Arena, ModelArena, PoolSet, StateArena
from mlxr.cache.group import CacheGroup, Snapshot
from mlxr.cache.kv_cache import KVCache
from mlxr.cache.page_table import PageTable, SequenceTable
from mlxr.cache.shapes import CacheShape, LayerCache, StateShape, StatesShape, form_groups
from mlxr.cache.store import PageStore
from mlxr.core.stats import StoreStats
from mlxr.kernels.context import Context

PAGE_SIZE = 4
FULL = CacheShape(1, 2)
STATE = StateShape(2)
FLUSH_S = 60.0


def hash_prefixes(tokens: Sequence[int]) -> list[int]:
    """For each position a number that depends on all tokens up to it, and is exact in float32."""
    hashes, state = [], 0
    for token in tokens:
        state = zlib.crc32(int(token).to_bytes(4, "little", signed=True), state)
        hashes.append(state % 2**23)
    return hashes


class World:
    """One process's cache: `write` computes tokens as a model would, `read` checks what a table holds."""

    def __init__(
        self,
        *,
        pages: int = 16,
        page_size: int = PAGE_SIZE,
        folder: Path | None = None,
        max_bytes: int = 2**20,
        fingerprint: bytes = b"model",
        sharing: bool = True,
        layers: Sequence[LayerCache] = (FULL, FULL),
    ) -> None:
        groups, context = form_groups(layers), Context("reference")
        arenas: list[PoolSet] = [
            StateArena(context, shape, pages, page_size)
            if isinstance(shape, StatesShape)
            else Arena(
                context,
                pools,
                pages,
                shape.kv_heads,
                page_size,
                shape.head_dim,
                window=shape.window,
                value_dim=shape.value_dim,
            )
            for shape, pools in zip(groups.shapes, groups.pools, strict=True)
        ]
        self.model_arena = ModelArena(arenas, groups)
        self.store = None if folder is None else PageStore(folder, max_bytes)
        self.groups = [CacheGroup(arena, number) for number, arena in enumerate(arenas)]
        self.arena, self.pager = arenas[0], self.groups[0].pager
        self.cache = KVCache(self.groups, fingerprint=fingerprint, store=self.store, sharing=sharing)

    def write(self, table: SequenceTable, tokens: Sequence[int], count: int | None = None) -> None:
        """Compute the next `count` of `tokens` (all by default) after what `table` holds.

        With states, the last boundary before the end has a step of its own, so that there is a snapshot.
        """
        start = table.length_tokens
        stop = len(tokens) if count is None else start + count
        boundary = stop // table.page_size * table.page_size
        for part in (boundary, stop) if table.states is not None and start < boundary < stop else (stop,):
            self.prepare(table, part - table.length_tokens)
            self.fill(table, tokens, part)

    def fill(
        self, table: SequenceTable, tokens: Sequence[int], stop: int, snapshot: Snapshot = Snapshot.LASTING
    ) -> None:
        """Write the positions up to `stop` of a prepared table, as a model would, and commit them."""
        start, hashes = table.length_tokens, hash_prefixes(tokens[:stop])
        for group, own in zip(self.groups, table.groups, strict=True):
            if not isinstance(own, PageTable):
                for states in self.state_pools if stop > start else ():
                    states[own.spare] = hashes[stop - 1], stop
                continue
            for position in range(start, stop):
                page, offset = own.pages[position // table.page_size], position % table.page_size
                assert page >= 0
                for k_pool, v_pool in self.list_pools(group):
                    k_pool[page, :, offset] = hashes[position]
                    v_pool[page, :, offset] = position
        self.cache.commit(table, tokens, stop - start, snapshot)

    @property
    def state_pools(self) -> list[Any]:
        """The states of each recurrent layer, (slots, 2)."""
        return [states for states in self.model_arena.states if states is not None]

    @staticmethod
    def list_pools(group: CacheGroup) -> list[tuple[Any, Any]]:
        """The pools of keys and of values of each layer of a group that has pages."""
        assert isinstance(group.arena, Arena)
        return list(zip(group.arena.k_pools, group.arena.v_pools, strict=True))

    def prepare(self, table: SequenceTable, tokens: int) -> None:
        """Make room and do the copies."""
        self.model_arena.copy_pages(self.cache.prepare(table, tokens))

    def read(self, table: SequenceTable, tokens: Sequence[int]) -> None:
        """Assert that `table` holds exactly the first of `tokens`, in every layer, as far as later tokens see them."""
        hashes = np.array(hash_prefixes(tokens[: table.length_tokens]), dtype=int)
        for group, own in zip(self.groups, table.groups, strict=True):
            if not isinstance(own, PageTable):
                for states in self.state_pools if table.length_tokens else ():
                    assert states[own.state].tolist() == [hashes[-1], table.length_tokens], "a foreign state"
                continue
            assert isinstance(group.arena.shape, CacheShape)
            window = group.arena.shape.window or table.length_tokens + 1
            positions = np.arange(max(0, table.length_tokens + 1 - window), table.length_tokens)
            pages = np.array(own.pages, dtype=int)[positions // table.page_size]
            assert (pages >= 0).all(), "a page is gone that later tokens see"
            for k_pool, v_pool in self.list_pools(group):
                found = k_pool[pages, :, positions % table.page_size]
                wanted = hashes[positions, None, None]
                assert (found == wanted).all(), "a table holds other tokens than it should"
                assert (v_pool[pages, :, positions % table.page_size] == positions[:, None, None]).all()

    def open(self, tokens: Sequence[int], namespace: bytes = b"") -> SequenceTable:
        """Open a table with the cached part of `tokens`, and check it; the last token is left to compute."""
        table = self.cache.open_table(tokens, self.cache.start_keys(namespace), limit_tokens=len(tokens) - 1)
        self.read(table, tokens)
        return table

    def lookup(self, tokens: Sequence[int], limit_tokens: int = 10**6, namespace: bytes = b"") -> int:
        """Return how many tokens a new sequence would find."""
        return self.cache.lookup(tokens, self.cache.start_keys(namespace), limit_tokens=limit_tokens)

    def serve(self, tokens: Sequence[int], namespace: bytes = b"") -> int:
        """Serve a whole request; return how many of its tokens came from the cache."""
        table = self.open(tokens, namespace)
        cached_tokens = table.length_tokens
        self.write(table, tokens)
        self.read(table, tokens)
        self.cache.check([table])
        self.cache.release(table)
        self.cache.check([])
        return cached_tokens

    def flush(self) -> None:
        """Wait for the disk."""
        assert self.cache.flush(FLUSH_S)

    @property
    def store_stats(self) -> StoreStats:
        """Numbers of the store, which must be there."""
        stats = self.cache.stats().store
        assert stats is not None
        return stats


def page_files(folder: Path) -> list[Path]:
    """All stored pages, in the order of their names."""
    return sorted(folder.rglob("*.page"))
