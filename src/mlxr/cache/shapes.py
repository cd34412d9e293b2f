"""Shapes of the KV cache: what each layer keeps, the groups that follow from it, and how many pages each group gets.

All of it is integers.

A model gives the shape of each layer's keys and values, or of its recurrent state. Layers with equal shapes of keys and
values form a group: they have one page table, one arena and one budget, and their pages come and go together. All
recurrent layers form one more group, the last one: a sequence has one state for all of them. All groups have the same
page size in tokens, but the bytes of a page differ.

The number of pages of each arena follows from a setting in bytes or in pages, or from what the context needs and memory
allows. The groups of a model share one budget. A group without a window needs pages for all tokens; one with a window
for the last tokens of each sequence, the tokens of one step, and the ends of cached texts. Recurrent layers need slots
for the states of running sequences, and for snapshots at boundaries of cached texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from mlxr.core.errors import ModelError, SettingError
from mlxr.core.frozen import frozen


@frozen
class CacheShape:
    """Keys and values of a layer: `kv_heads` vectors of `head_dim` each, for all positions or the last ones.

    With a `window` w, position p sees p - w + 1 to p, so older positions need not be kept. With `value_dim`, only keys
    are kept, and their last `value_dim` numbers are the values (latent attention).
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
        """True if a page can be used only together with all pages before it."""
        return self.window is None

    @property
    def fork_pages(self) -> int:
        """Pages that a second answer to the same prompt needs for itself."""
        return 1

    def first_needed(self, boundary: int, page_size: int) -> int:
        """Return the first page that positions from page `boundary` on may see; earlier pages can be released."""
        return 0 if self.window is None else max(0, boundary * page_size - self.window + 1) // page_size

    def count_resting(self, tokens: int, page_size: int) -> int:
        """Return the most pages that a sequence holds while it grows to `tokens` tokens one by one."""
        pages = -(-tokens // page_size)
        return pages if self.window is None else min(pages, 1 - (1 - self.window) // page_size)

    def count_peak(self, tokens: int, chunk_tokens: int, page_size: int) -> int:
        """Return the most pages that a sequence holds while it grows to `tokens` tokens, `chunk_tokens` in a step."""
        resting = self.count_resting(tokens, page_size)
        if self.window is None:
            return resting
        return min(-(-tokens // page_size), resting + (page_size + chunk_tokens - 2) // page_size)


@frozen
class StateShape:
    """The state of a recurrent layer: `floats` numbers in f32 for a whole sequence. The layer gives them meaning."""

    floats: int


@frozen
class StatesShape:
    """The state of all recurrent `layers` of a model. A sequence has it in a slot, which counts as a page.

    A step reads one slot and writes another, so a running sequence of any length holds two.
    """

    layers: tuple[StateShape, ...]

    def __str__(self) -> str:
        return f"state, {len(self.layers)} layers"

    @property
    def is_linked(self) -> bool:
        """False: a state can be used without those before it."""
        return False

    @property
    def fork_pages(self) -> int:
        """Slots that a second answer to the same prompt needs for itself."""
        return LIVE_SLOTS

    def first_needed(self, boundary: int, _page_size: int) -> int:
        """Return the place of the last page before `boundary`: the state there is all that is needed."""
        return max(0, boundary - 1)

    def count_resting(self, tokens: int, _page_size: int) -> int:
        """Return the most slots that a sequence holds while it grows to `tokens` tokens one by one."""
        return LIVE_SLOTS if tokens > 0 else 0

    def count_peak(self, tokens: int, _chunk_tokens: int, _page_size: int) -> int:
        """Return the most slots that a sequence holds while it grows to `tokens` tokens, `chunk_tokens` in a step."""
        return LIVE_SLOTS if tokens > 0 else 0


@frozen
class SharedWith:
    """A layer without keys and values of its own, which reads those of an earlier `layer`."""

    layer: int


@frozen
class PagesAndState:
    """A layer that keeps keys and values, or shares them, and a state beside them."""

    pages: CacheShape | SharedWith
    state: StateShape


LayerCache = CacheShape | StateShape | SharedWith | PagesAndState | None  # None: the layer keeps nothing
GroupShape = CacheShape | StatesShape
LIVE_SLOTS = 2  # slots of a running sequence: the one that a step reads, and the one that it writes


@frozen
class CachePlace:
    """The place of a layer's keys and values, or of its state: pool number `index` of group number `group`."""

    group: int
    index: int


@frozen
class CacheGroups:
    """The groups of a model: their `shapes`, and the number of `pools` (layers) of each.

    For each layer, `places` has the place of its keys and values, and `states` that of its state; None if it has none.
    Groups of pages come first; the group of states, if there is one, is the last.
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
    """Return the groups of a model's layers, in the order of their first layers, states last.

    Raises ModelError if a layer shares the keys and values of a layer that is not before it or has none, and if no
    layer keeps anything.
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
    """Return the place of each layer's keys and values, and the number of pools of each shape."""
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


FREE_MEMORY_PERCENT = 50  # the rest is left to activations, logits, the system and other programs
MAX_SLOTS = 2**31 - 1  # slots travel to the kernels as int32
ENDS_SHARE = 1 / 8  # pages for the ends of earlier texts, as a share of the pages that sequences hold in a window
RUNNING_SHARE = 1 / 8  # average length of a sequence as a share of the context, for counting slots for states
STATES_ALONE_SHARE = 1 / 8  # distance of snapshots as a share of the context, in models that cache only states


@frozen
class PageNeeds:
    """Pages that the groups of a model need if `sequences` of `context_tokens` run, with steps of `step_tokens` tokens.

    There is room for one snapshot of the recurrent layers' state for every `snapshot_pages` pages of tokens; for none
    if it is None.
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
        """Return the pages of each group for `token_pages` pages of tokens, shared evenly by the sequences.

        If these are more than whole contexts for all sequences, more sequences are assumed.
        """
        return tuple(self._count_group(shape, token_pages) for shape in self.shapes)

    def compare_bytes(self, page_bytes: Sequence[int]) -> tuple[int, int]:
        """Return the bytes that the sequences need, and those without windows; `page_bytes` has a number per group."""
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
        """Return the slots for `token_pages` pages of tokens: two for each running sequence, and those of snapshots."""
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
    """Return the number of pages of each group's arena; `page_bytes` are the bytes of a page of each.

    `arena_bytes` is for all groups together. `pages` is for each group; groups with a window get fewer if they need
    fewer. Only one of the two may be given. Without either, the result is what full use needs, within
    `available_percent` of `available_bytes`. Raises SettingError if `arena_bytes` are more than are free, if not even
    one page fits, or if slots do not fit in 32 bits.
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
    """Return the pages of each group in `room_bytes`, for as many pages of tokens as fit, at most `most_pages`."""

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
    """Return the pages of tokens per snapshot, so that snapshots take at most `snapshot_percent` of the cache.

    That is None for a model without recurrent layers, and a fixed share of the context for one without any other.
    Raises SettingError if the percentage is not from 1 to 90.
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
