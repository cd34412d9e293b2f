"""What one conversation takes of the cache in a model with recurrent layers: its pages, its slots and its snapshots."""

from __future__ import annotations

from dataclasses import dataclass

from mlxr.cache.arena import parse_kv_type
from mlxr.cache.shapes import LIVE_SLOTS, StatesShape, form_groups
from mlxr.cache.sizing import PageNeeds, space_snapshots
from mlxr.core.model_settings import ModelSettings, size_steps
from mlxr.engine.limits import choose_context
from mlxr.engine.memory_plan import measure_pages
from mlxr.engine.runner import ModelShape
from mlxr.kernels.context import Context


@dataclass(frozen=True, slots=True)
class StateUse:
    """Bytes of the cache for a conversation of `tokens` tokens, whose keys and values take `page_bytes`.

    A state takes `slot_bytes`, be it in a slot of a sequence that runs, which holds `live_slots`, or a snapshot. The
    cache is divided such that `snapshots` of the conversation find room.
    """

    tokens: int
    page_bytes: int
    slot_bytes: int
    live_slots: int
    snapshots: int

    @property
    def cached_bytes(self) -> int:
        """What is kept of the conversation between two turns."""
        return self.page_bytes + self.snapshots * self.slot_bytes


def measure_state_use(ctx: Context, config: ModelShape, settings: ModelSettings, tokens: int) -> StateUse | None:
    """Of a conversation of `tokens` tokens, or a whole context where that is less; None without recurrent layers.

    Nothing is allocated but one page of each kind, to measure it. Raises SettingError.
    """
    groups = form_groups(config.cache_layers)
    if not isinstance(groups.shapes[-1], StatesShape):
        return None
    context_tokens = choose_context(settings.context_tokens, config.context_length)
    tokens, page_size = min(tokens, context_tokens), settings.page_size
    sizes = measure_pages(ctx, groups, page_size, parse_kv_type(settings.kv_type))
    steps = size_steps(settings, ctx.device)
    needs = PageNeeds(groups.shapes, page_size, steps.max_sequences, context_tokens, steps.max_batch_tokens)
    spacing_pages = space_snapshots(sizes, needs, settings.snapshot_percent)
    assert spacing_pages is not None
    token_pages = -(-tokens // page_size)
    return StateUse(
        tokens,
        sum(
            shape.count_resting(tokens, page_size) * size
            for shape, size in zip(groups.shapes[:-1], sizes[:-1], strict=True)
        ),
        sizes[-1],
        LIVE_SLOTS,
        -(-token_pages // spacing_pages),
    )


def estimate_state_use(config: ModelShape, settings: ModelSettings, tokens: int) -> StateUse | None:
    """The same on the CPU, without a model."""
    return measure_state_use(Context("cpu", 1), config, settings, tokens)
