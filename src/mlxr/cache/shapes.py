"""What the layers of a model keep of the tokens, and the groups that follow from it. Integers only.

A model says for each of its layers how its keys and values look, or its recurrent state. Layers whose keys and values
look alike form a group: they have one page table, one arena and one budget, and their pages come and go together. All
recurrent layers form one group more, the last one: a sequence has one state of all of them. All groups have the same
page size in tokens; the bytes of a page are each group's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxr.core.errors import ModelError


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Keys and values of a layer: `kv_heads` vectors of `head_dim` each, for all positions or the last ones.

    With a `window` w, position p sees p - w + 1 to p, so older positions need not be kept. With a `value_dim` values
    are the last so many numbers of the keys, which alone are kept (latent attention).
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    value_dim: int | None = None

    def __str__(self) -> str:
        seen = "full" if self.window is None else f"window {self.window}"
        kind = "" if self.value_dim is None else "latent "
        return f"{seen}, {kind}{self.kv_heads}x{self.head_dim}"

    @property
    def is_linked(self) -> bool:
        """Whether a page is of use only together with all pages before it."""
        return self.window is None

    @property
    def fork_pages(self) -> int:
        """Pages that a second answer to the same prompt needs for itself."""
        return 1

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
class StateShape:
    """The state of a recurrent layer: so many f32 numbers, for a sequence as a whole; what they mean is its matter."""

    floats: int


@dataclass(frozen=True, slots=True)
class StatesShape:
    """The state of all recurrent `layers` of a model. A sequence has it in a slot, which stands for a page.

    A step reads one slot and writes another, so a sequence that runs holds two of them, however long it is.
    """

    layers: tuple[StateShape, ...]

    def __str__(self) -> str:
        return f"state, {len(self.layers)} layers"

    @property
    def is_linked(self) -> bool:
        """Whether a state is of use only together with those before it."""
        return False

    @property
    def fork_pages(self) -> int:
        """Slots that a second answer to the same prompt needs for itself."""
        return LIVE_SLOTS

    def first_needed(self, boundary: int, _page_size: int) -> int:
        """The state after `boundary` pages stands in the place of the last of them, and is all that is needed."""
        return max(0, boundary - 1)

    def count_resting(self, tokens: int, _page_size: int) -> int:
        """Most slots that a sequence holds while it grows to `tokens` tokens one by one."""
        return LIVE_SLOTS if tokens > 0 else 0

    def count_peak(self, tokens: int, _chunk_tokens: int, _page_size: int) -> int:
        """Most slots that a sequence holds while it grows to `tokens` tokens, `chunk_tokens` in one step."""
        return LIVE_SLOTS if tokens > 0 else 0


@dataclass(frozen=True, slots=True)
class SharedWith:
    """A layer without keys and values of its own, which reads those of an earlier `layer`."""

    layer: int


@dataclass(frozen=True, slots=True)
class PagesAndState:
    """A layer that keeps keys and values, or shares them, and a state beside them."""

    pages: CacheShape | SharedWith
    state: StateShape


LayerCache = CacheShape | StateShape | SharedWith | PagesAndState | None  # None: the layer keeps nothing
GroupShape = CacheShape | StatesShape
LIVE_SLOTS = 2  # of a sequence that runs: the state that a step reads, and the one that it writes


@dataclass(frozen=True, slots=True)
class CachePlace:
    """Where the keys and values of a layer are, or its state: in pool `index` of group `group`."""

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """`shapes` of the groups, how many `pools` each has, and for each layer the place of its keys and values, if it has
    some, and that of its state.

    Groups of pages come first; that of states is the last one, if there is one.
    """

    shapes: tuple[GroupShape, ...]
    pools: tuple[int, ...]
    places: tuple[CachePlace | None, ...]
    states: tuple[CachePlace | None, ...]

    @property
    def paged(self) -> tuple[CacheShape, ...]:
        """The shapes of the groups that keep keys and values in pages."""
        return tuple(shape for shape in self.shapes if isinstance(shape, CacheShape))


def form_groups(layers: Sequence[LayerCache]) -> CacheGroups:
    """The groups of a model's layers, in the order in which their first layers stand, the states last.

    Raises ModelError for a layer that shares with none before it, and for a model that keeps nothing.
    """
    places, pools = _place_pages([_part_pages(layer) for layer in layers])
    kept = [_part_state(layer) for layer in layers]
    states = tuple(state for state in kept if state is not None)
    if not pools and not states:
        raise ModelError("the model has no layer that keeps keys and values, or a state")
    numbers = iter(range(len(states)))
    state_places = tuple(None if state is None else CachePlace(len(pools), next(numbers)) for state in kept)
    shapes: tuple[GroupShape, ...] = (*pools, StatesShape(states)) if states else tuple(pools)
    counts = (*pools.values(), len(states)) if states else tuple(pools.values())
    return CacheGroups(shapes, counts, places, state_places)


def _part_pages(layer: LayerCache) -> CacheShape | SharedWith | None:
    if isinstance(layer, PagesAndState):
        return layer.pages
    return None if isinstance(layer, StateShape) else layer


def _part_state(layer: LayerCache) -> StateShape | None:
    state = layer.state if isinstance(layer, PagesAndState) else layer
    return state if isinstance(state, StateShape) else None


def _place_pages(
    layers: Sequence[CacheShape | SharedWith | None],
) -> tuple[tuple[CachePlace | None, ...], dict[CacheShape, int]]:
    """The place of each layer's keys and values, and how many pools each shape has."""
    pools: dict[CacheShape, int] = {}
    places: list[CachePlace | None] = []
    groups = list(dict.fromkeys(layer for layer in layers if isinstance(layer, CacheShape)))
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
                places.append(CachePlace(groups.index(layer), index))
    return tuple(places), pools
