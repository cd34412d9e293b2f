"""Plans the memory for keys and values: in pages that requests share, or in one plain run for each request.

A plain run is a page as long as the context, so both use the same pools and operators. Knows no requests.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from mlxr.cache.arena import (
    Arena,
    ModelArena,
    StateArena,
    measure_page_bytes,
    measure_state_bytes,
    parse_kv_type,
)
from mlxr.cache.group import CacheGroup
from mlxr.cache.shapes import (
    LIVE_SLOTS,
    CacheGroups,
    CacheShape,
    PageNeeds,
    StatesShape,
    choose_pages,
    form_groups,
    space_snapshots,
)
from mlxr.cache.store import PageStore
from mlxr.core.errors import DeviceError, SettingError
from mlxr.core.frozen import frozen
from mlxr.core.memory import read_available_bytes
from mlxr.core.model_settings import ModelSettings, size_steps
from mlxr.engine.runner import ModelShape
from mlxr.kernels.attend import KVType, default_kv_type
from mlxr.kernels.context import Context, choose_device
from mlxr.kernels.gpu.mlx import load_mlx, read_free_bytes
from mlxr.models.model import Model
from mlxr.models.shares import Place, share_model


class Memory(Protocol):
    """The parts of a device that memory planning reads; `mlxr.kernels.context.Context` implements it."""

    @property
    def uses_host_memory(self) -> bool:
        """True if its arrays take the host's memory."""

    def read_free_bytes(self) -> int | None:
        """Return the bytes left in its own memory; None if it has none or does not tell."""


MIN_ARENA_BYTES = 64 * 2**20  # a smaller cache would serve hardly any request
LIGHT_MACS = {"cpu": 2**24, "cuda": 2**29}  # multiply-adds of a token: 34 GFLOP and 18 TFLOP for a step of LIGHT_SIZES
KV_CACHES = ("auto", "paged", "simple")


@frozen
class MemoryPlan:
    """The kind of cache: `page_size` positions to a page, shared by requests or not, and the store on disk, if any."""

    kv_cache: str
    page_size: int
    shares_prefixes: bool
    store_bytes: int
    store_folder: Path | None


def plan_memory(
    settings: ModelSettings, context_tokens: int, *, shares_prefixes: bool, has_fingerprint: bool
) -> MemoryPlan:
    """Return the plan that the settings ask for; raises SettingError if they contradict each other.

    `auto` is `paged` for every context and batch; docs/kv-cache.md has the measurements that this rests on.
    """
    kv_cache, store_bytes, store_folder = settings.kv_cache, settings.store_bytes, settings.store_folder
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
    folder = Path(store_folder) if store_bytes and store_folder is not None else None
    return MemoryPlan("paged", settings.page_size, shares_prefixes, store_bytes, folder)


@frozen
class ArenaPlan:
    """The arena of a model: for each of its `groups` the number of `pages`, and the bytes of one.

    One state of the recurrent layers is kept as a snapshot for every `snapshot_pages` pages of tokens; None for a model
    without such layers, or if nothing is shared.
    """

    groups: CacheGroups
    page_size: int
    kv_type: KVType | None
    pages: tuple[int, ...]
    page_bytes: tuple[int, ...]
    snapshot_pages: int | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the whole arena."""
        return sum(pages * size for pages, size in zip(self.pages, self.page_bytes, strict=True))

    def allocate(self, ctx: Context) -> tuple[ModelArena, list[CacheGroup]]:
        """Return the arena as a whole, and the groups that keep account of its pages."""
        arenas = [
            StateArena(ctx, shape, pages, self.page_size)
            if isinstance(shape, StatesShape)
            else Arena(
                ctx,
                pools,
                pages,
                shape.kv_heads,
                self.page_size,
                shape.head_dim,
                self.kv_type,
                window=shape.window,
                value_dim=shape.value_dim,
            )
            for shape, pools, pages in zip(self.groups.shapes, self.groups.pools, self.pages, strict=True)
        ]
        return ModelArena(arenas, self.groups), [CacheGroup(arena, number) for number, arena in enumerate(arenas)]


def compare_windows(
    ctx: Context, config: ModelShape, page_size: int, kv_type: str | None, sequences: int, tokens: int, step_tokens: int
) -> tuple[int, int]:
    """Return the bytes of cache that `sequences` of `tokens` need, and those needed if no layer had a window."""
    groups, kind = form_groups(config.cache_layers), parse_kv_type(kv_type)
    needs = PageNeeds(groups.shapes, page_size, sequences, tokens, step_tokens)
    return needs.compare_bytes(measure_pages(ctx, groups, page_size, kind))


def measure_pages(ctx: Context, groups: CacheGroups, page_size: int, kind: KVType | None) -> tuple[int, ...]:
    """Return the bytes of one page of each group, or of one state. Raises SettingError for impossible pages."""
    if kind == "q8" and any(shape.value_dim is not None for shape in groups.paged):
        raise SettingError("kv_type: the model keeps latent vectors, which are bf16, f16 or f32; got 'q8'")
    return tuple(
        measure_state_bytes(shape)
        if isinstance(shape, StatesShape)
        else measure_page_bytes(
            ctx,
            pools,
            shape.kv_heads,
            page_size,
            shape.head_dim,
            kind,
            values_in_keys=shape.value_dim is not None,
        )
        for shape, pools in zip(groups.shapes, groups.pools, strict=True)
    )


def plan_arena(
    ctx: Context,
    config: ModelShape,
    plan: MemoryPlan,
    settings: ModelSettings,
    *,
    context_tokens: int,
    memory_bytes: int | None,
    pages: int | None = None,
    share: float = 1.0,
) -> ArenaPlan:
    """Return the plan of the arena that `Engine` makes of the arguments of the same names; nothing is allocated.

    It gets this `share` of the bytes that there are. Raises SettingError.
    """
    groups, kind = form_groups(config.cache_layers), choose_kv_type(ctx, config, settings)
    page_bytes = measure_pages(ctx, groups, plan.page_size, kind)
    steps = size_steps(settings, ctx.device, is_light=is_light(config, ctx.device), has_room=ctx.has_room)
    needs = PageNeeds(groups.shapes, plan.page_size, steps.max_sequences, context_tokens, steps.max_batch_tokens)
    if plan.shares_prefixes:
        needs = replace(needs, snapshot_pages=space_snapshots(page_bytes, needs, settings.snapshot_percent))
    chosen = choose_pages(
        page_bytes,
        needs,
        arena_bytes=_part(settings.arena_bytes, share),
        pages=pages,
        available_bytes=_part(bound_free_bytes(ctx, memory_bytes), share),
        available_percent=settings.arena_percent,
    )
    return ArenaPlan(groups, plan.page_size, kind, chosen, page_bytes, needs.snapshot_pages)


def is_light(config: ModelShape, device: str) -> bool:
    """Return True if a model is an encoder with so little work for a token, by the width of its heads, that it pays to
    compute many texts in a step on the device."""
    shapes = [shape for shape in config.cache_layers if isinstance(shape, CacheShape)]
    macs = sum(12 * (config.heads * shape.head_dim) ** 2 for shape in shapes)
    return not config.is_causal and macs <= LIGHT_MACS.get(device, 0)


def choose_kv_type(ctx: Context, config: ModelShape, settings: ModelSettings, *, is_quantized: bool = False) -> KVType:
    """Return the type of the numbers in pages: the setting, else the default of such a model."""
    default = default_kv_type(ctx, is_causal=config.is_causal, is_quantized=is_quantized)
    return parse_kv_type(settings.kv_type) or default


def plan_arenas(
    ctx: Context,
    config: ModelShape,
    draft: ModelShape | None,
    plan: MemoryPlan,
    settings: ModelSettings,
    *,
    context_tokens: int,
    memory_bytes: int | None,
    pages: int | None = None,
) -> tuple[ArenaPlan, ArenaPlan | None]:
    """Return `plan_arena` for a model, and for its draft model, if there is one: both hold as many tokens.

    They share what one alone would get. With `pages`, the draft model's pages come on top.
    """

    def measure_token(shape: ModelShape) -> float:
        groups, kind = form_groups(shape.cache_layers), choose_kv_type(ctx, shape, settings)
        return sum(measure_pages(ctx, groups, plan.page_size, kind)) / plan.page_size

    own, other = measure_token(config), 0.0 if draft is None else measure_token(draft)

    def plan_both(share: float) -> tuple[ArenaPlan, ArenaPlan | None]:
        arena = plan_arena(
            ctx,
            config,
            plan,
            settings,
            context_tokens=context_tokens,
            memory_bytes=memory_bytes,
            pages=pages,
            share=share,
        )
        return arena, None if draft is None else _plan_beside(ctx, arena, draft, plan, settings, context_tokens)

    share = own / (own + other)
    arena, beside = plan_both(share)
    if beside is None or pages is not None:
        return arena, beside
    # states of recurrent layers are no part of each page, so there are more pages than was counted on
    excess = (arena.nbytes + beside.nbytes) / (arena.nbytes / share)
    return plan_both(share / excess) if excess > 1 else (arena, beside)


def _plan_beside(
    ctx: Context, arena: ArenaPlan, draft: ModelShape, plan: MemoryPlan, settings: ModelSettings, context_tokens: int
) -> ArenaPlan:
    """Return the plan of a draft model's arena, for as many tokens as `arena` holds."""
    draft_plan = MemoryPlan("paged", settings.page_size, plan.shares_prefixes, 0, None)
    tokens = max(arena.pages) * arena.page_size
    draft_pages = -(-tokens // draft_plan.page_size)
    return plan_arena(
        ctx,
        draft,
        draft_plan,
        replace(settings, arena_bytes=None),
        context_tokens=min(context_tokens, draft.context_length),
        memory_bytes=None,
        pages=draft_pages,
    )


def _part(nbytes: int | None, share: float) -> int | None:
    return None if nbytes is None else int(nbytes * share)


def estimate_arena(
    config: ModelShape,
    settings: ModelSettings,
    memory_bytes: int | None,
    draft: ModelShape | None = None,
    *,
    is_quantized: bool = False,
) -> int:
    """Return the bytes of the arenas that an `Engine` with these arguments would make now on the settings' device.

    Of several GPUs, those of the first one. No model is needed, but to know if most of its weights are quantised.
    Raises SettingError and DeviceError as making the engine does.
    """
    if settings.gpus > 1 and isinstance(config, Model):
        config = share_model(config, Place(0, settings.gpus))
    chosen = choose_device(settings.device)
    tokens = choose_context(settings.context_tokens, config.context_length)
    plan = plan_memory(replace(settings, store_bytes=0), tokens, shares_prefixes=True, has_fingerprint=True)
    ctx = Context(chosen, 1 if chosen == "cpu" else None)
    settings = replace(settings, kv_type=choose_kv_type(ctx, config, settings, is_quantized=is_quantized))
    arenas = plan_arenas(ctx, config, draft, plan, settings, context_tokens=tokens, memory_bytes=memory_bytes)
    return sum(arena.nbytes for arena in arenas if arena is not None)


def measure_conversation(
    config: ModelShape, settings: ModelSettings, tokens: int | None = None, *, is_quantized: bool = False
) -> tuple[int, int]:
    """Return the tokens of a conversation, `tokens` or a whole context at most, and the bytes of cache that it fills.

    Allocates only one page of each kind, to measure it. Raises SettingError and DeviceError.
    """
    context_tokens = choose_context(settings.context_tokens, config.context_length)
    held = min(tokens or context_tokens, context_tokens)
    device = choose_device(settings.device)
    groups = form_groups(config.cache_layers)
    ctx = Context(device, 1 if device == "cpu" else None)
    kind = choose_kv_type(ctx, config, settings, is_quantized=is_quantized)
    sizes = measure_pages(ctx, groups, settings.page_size, kind)
    pages = [shape.count_resting(held, settings.page_size) for shape in groups.shapes]
    return held, sum(count * size for count, size in zip(pages, sizes, strict=True))


def open_store(plan: MemoryPlan) -> PageStore | None:
    """Return the store on disk that the plan wants, if it wants one."""
    return None if plan.store_folder is None else PageStore(plan.store_folder, plan.store_bytes)


def bound_free_bytes(memory: Memory, limit_bytes: int | None) -> int | None:
    """Return the free bytes where the arrays of `memory` lie, at most `limit_bytes`; None if neither is known."""
    known = [limit_bytes, memory.read_free_bytes()]
    if memory.uses_host_memory:
        known.append(read_available_bytes())
    return min((room_bytes for room_bytes in known if room_bytes is not None), default=None)


def read_room_bytes(device: str) -> int | None:
    """Return the bytes that models on `device` ("auto" as in `choose_device`) may take now; None if unknown."""
    chosen = choose_device(device)
    if chosen != "cuda":
        return read_available_bytes()
    try:
        return read_free_bytes(load_mlx(chosen), chosen)
    except DeviceError:
        return None  # loading a model reports why


def count_pages_alone(group: CacheGroup, context_tokens: int, step_tokens: int) -> int:
    """Return the pages of tokens that a sequence can have in `group` when it is alone, with `step_tokens` in a step."""
    pages, page_size, shape = group.arena.pages, group.arena.page_size, group.arena.shape
    if pages < shape.count_peak(context_tokens, step_tokens, page_size):
        return pages
    return max(pages, -(-context_tokens // page_size))


def choose_context(context_tokens: int | None, model_tokens: int) -> int:
    """Return the context served: the model's, or a shorter one that was asked for. Raises SettingError."""
    if context_tokens is not None and not 1 <= context_tokens <= model_tokens:
        raise SettingError(
            f"context_tokens: must be from 1 to {model_tokens}, the context of this model; got {context_tokens}"
        )
    return context_tokens or model_tokens


@frozen
class StateUse:
    """Bytes of the cache for a conversation of `tokens` tokens in a model with recurrent layers.

    Its keys and values take `page_bytes`. A state takes `slot_bytes`, both in the `live_slots` of a sequence that runs
    and as a snapshot. The cache is divided such that `snapshots` of the conversation find room.
    """

    tokens: int
    page_bytes: int
    slot_bytes: int
    live_slots: int
    snapshots: int

    @property
    def cached_bytes(self) -> int:
        """The bytes that are kept of the conversation between two turns."""
        return self.page_bytes + self.snapshots * self.slot_bytes


def measure_state_use(ctx: Context, config: ModelShape, settings: ModelSettings, tokens: int) -> StateUse | None:
    """Return the use of a conversation of `tokens` tokens, at most a whole context; None without recurrent layers.

    Allocates only one page of each kind, to measure it. Raises SettingError.
    """
    groups = form_groups(config.cache_layers)
    if not isinstance(groups.shapes[-1], StatesShape):
        return None
    context_tokens = choose_context(settings.context_tokens, config.context_length)
    tokens, page_size = min(tokens, context_tokens), settings.page_size
    sizes = measure_pages(ctx, groups, page_size, parse_kv_type(settings.kv_type))
    steps = size_steps(settings, ctx.device, has_room=ctx.has_room)
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
    """Return `measure_state_use` on the CPU, without a model."""
    return measure_state_use(Context("cpu", 1), config, settings, tokens)
