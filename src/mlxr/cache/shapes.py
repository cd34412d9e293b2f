"""What the layers of a model keep of each token, and the groups that follow from it. Integers only.

A model says for each of its layers how its keys and values look. Layers that look alike form a group: they have one
page table, one arena and one budget, and their pages come and go together. All groups have the same page size in
tokens; the bytes of a page are each group's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxr.core.errors import ModelError


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Keys and values of a layer: `kv_heads` vectors of `head_dim` each, for all positions or the last ones.

    With a `window` w, position p sees p - w + 1 to p, so older positions need not be kept.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None

    def __str__(self) -> str:
        seen = "full" if self.window is None else f"window {self.window}"
        return f"{seen}, {self.kv_heads}x{self.head_dim}"

    def first_needed(self, boundary: int, page_size: int) -> int:
        """The first page that positions from page `boundary` on may see; all before it can go."""
        return 0 if self.window is None else max(0, boundary * page_size - self.window + 1) // page_size

    def count_resting(self, tokens: int, page_size: int) -> int:
        """Most pages that a sequence holds while it grows to `tokens` tokens one by one."""
        pages = -(-tokens // page_size)
        return pages if self.window is None else min(pages, 1 - (1 - self.window) // page_size)

    def count_peak(self, tokens: int, chunk_tokens: int, page_size: int) -> int:
        """Most pages that a sequence holds while it grows to `tokens` tokens, `chunk_tokens` in one step."""
        resting = self.count_resting(tokens, page_size)
        if self.window is None:
            return resting
        return min(-(-tokens // page_size), resting + (page_size + chunk_tokens - 2) // page_size)


@dataclass(frozen=True, slots=True)
class SharedWith:
    """A layer without keys and values of its own, which reads those of an earlier `layer`."""

    layer: int


LayerCache = CacheShape | SharedWith | None  # None: the layer keeps nothing


@dataclass(frozen=True, slots=True)
class CachePlace:
    """Where the keys and values of a layer are: in pool `index` of group `group`."""

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """`shapes` of the groups, how many `pools` each has, and for each layer its place, if it has one."""

    shapes: tuple[CacheShape, ...]
    pools: tuple[int, ...]
    places: tuple[CachePlace | None, ...]


def form_groups(layers: Sequence[LayerCache]) -> CacheGroups:
    """The groups of a model's layers, in the order in which their first layers stand.

    Raises ModelError for a layer that shares with none before it, and for a model that keeps nothing.
    """
    pools: dict[CacheShape, int] = {}
    places: list[CachePlace | None] = []
    for number, layer in enumerate(layers):
        match layer:
            case None:
                places.append(None)
            case SharedWith(other):
                place = places[other] if 0 <= other < number else None
                if place is None:
                    raise ModelError(f"layer {number} shares the keys and values of layer {other}, which has none")
                places.append(place)
            case CacheShape():
                index = pools.get(layer, 0)
                pools[layer] = index + 1
                places.append(CachePlace(list(pools).index(layer), index))
    if not pools:
        raise ModelError("the model has no layer that keeps keys and values")
    return CacheGroups(tuple(pools), tuple(pools.values()), tuple(places))
