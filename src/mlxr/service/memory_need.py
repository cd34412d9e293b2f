"""The memory that a model takes, or would take if it were loaded now, and the reason if it does not fit.

Asks the same functions as a load does, so both give the same numbers and the same reasons. The size of prepared weights
is known only after preparing them; until then the size of the files stands for it, as in the pool.
"""

from __future__ import annotations

import asyncio

from mlxr.core.errors import DoesNotFit, MlxrError
from mlxr.core.frozen import frozen
from mlxr.core.settings import Settings
from mlxr.engine.memory_plan import estimate_arena, measure_conversation, read_room_bytes
from mlxr.loading import is_mostly_quantized, open_source
from mlxr.registry import ModelRecord
from mlxr.service.model_pool import MIN_ARENA_BYTES, ModelPool, Room, measure_weights
from mlxr.service.opening import find_draft_config


@frozen
class MemoryNeed:
    """Bytes of weights and cache, and `free_bytes` that models may take besides those that stay loaded.

    The cache gets `cache_bytes` in any case and at most `cache_max_bytes`; it takes `cache_in_use_bytes` now. A model
    counts as loaded also if its files are loaded under another name. `leaving` names the models that would be unloaded
    for it; `reason` says why it does not fit, None if it does.
    """

    is_loaded: bool
    weight_bytes: int
    cache_bytes: int
    cache_in_use_bytes: int
    cache_max_bytes: int
    free_bytes: int
    leaving: tuple[str, ...] = ()
    reason: str | None = None


async def find_memory_need(pool: ModelPool, record: ModelRecord, settings: Settings) -> MemoryNeed:
    """Return the need of a model, or what it takes if it is loaded. Raises what reading its files raises."""
    loaded = await pool.find_session(record)
    refusal: str | None = None
    weight_bytes = await asyncio.to_thread(measure_weights, record, settings)
    try:
        room = await pool.find_room(record)
    except DoesNotFit as error:
        room, refusal = Room(error.budget_bytes - error.pinned_bytes, ()), str(error)
    if loaded is not None:
        cache, weight_bytes = loaded.measure_cache(), loaded.weight_bytes
        kept_bytes = loaded.least_bytes - weight_bytes
        return MemoryNeed(True, weight_bytes, kept_bytes, cache.in_use_bytes, cache.max_bytes, room.free_bytes)
    least_bytes = settings.arena_bytes or MIN_ARENA_BYTES
    if refusal is not None:
        return MemoryNeed(False, weight_bytes, least_bytes, 0, least_bytes, room.free_bytes, reason=refusal)
    max_bytes, reason = await asyncio.to_thread(_plan_cache, record, settings, weight_bytes, room.free_bytes)
    kept_bytes = min(least_bytes, max_bytes)
    return MemoryNeed(False, weight_bytes, kept_bytes, 0, max_bytes, room.free_bytes, room.leaving, reason)


async def find_conversation_need(record: ModelRecord, settings: Settings, tokens: int | None) -> tuple[int, int]:
    """Return the tokens of a conversation (`tokens`; None: as many as the context takes) and its bytes of cache."""

    def measure() -> tuple[int, int]:
        source = open_source(record.path)
        source.file.close()
        is_quantized = is_mostly_quantized(source.tensors)
        return measure_conversation(source.config, settings, tokens, is_quantized=is_quantized)

    return await asyncio.to_thread(measure)


def _plan_cache(record: ModelRecord, settings: Settings, weight_bytes: int, free_bytes: int) -> tuple[int, str | None]:
    """Return the bytes of the cache, and the reason if there can be none."""
    source = open_source(record.path)
    source.file.close()
    machine_bytes = read_room_bytes(settings.device)
    if machine_bytes is not None and machine_bytes < weight_bytes:
        return MIN_ARENA_BYTES, (
            f"{record.short_name}: needs {weight_bytes >> 20} MiB for its weights, and this machine has "
            f"{machine_bytes >> 20} MiB of memory free; end other programs or take a smaller model"
        )
    rooms = [free_bytes] if machine_bytes is None else [free_bytes, machine_bytes]
    try:
        draft = find_draft_config(record.path, settings)
        is_quantized = is_mostly_quantized(source.tensors)
        room_bytes = min(rooms) - weight_bytes
        return estimate_arena(source.config, settings, room_bytes, draft, is_quantized=is_quantized), None
    except MlxrError as error:
        return settings.arena_bytes or MIN_ARENA_BYTES, f"{record.short_name}: {error}"
