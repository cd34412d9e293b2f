"""From settings, and from a model that drafts if there is one, to who plans drafts and who makes them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from mlxr.cache.kv_cache import KVCache
from mlxr.core.model_settings import ModelSettings, size_steps
from mlxr.engine.drafts.choice import DraftSource, HeadSource
from mlxr.engine.drafts.draft_model import DraftModel
from mlxr.engine.drafts.drafter import Drafter, DrafterMaker
from mlxr.engine.drafts.guesser import Guesser, HeadGuesser, ModelGuesser
from mlxr.engine.drafts.lookup import Lookup
from mlxr.engine.drafts.planner import Planner
from mlxr.engine.memory_plan import ArenaPlan
from mlxr.engine.runner import Runner
from mlxr.kernels.context import Context


def open_drafts(
    ctx: Context,
    settings: ModelSettings,
    draft: DraftSource | HeadSource | None,
    arena: ArenaPlan | None,
    *,
    vocab_size: int,
    stop_ids: Collection[int],
    shares_prefixes: bool,
    clock: Callable[[], float],
) -> tuple[Planner, DrafterMaker]:
    """Who plans drafts, and who makes them for an answer; allocates the `arena` of the model or head that drafts."""
    if draft is None or arena is None:
        return Planner(settings.draft_tokens, runs_ahead=ctx.gpu is not None), _look_up
    own = draft.ctx or ctx
    pools, groups = arena.allocate(own)
    cache = KVCache(groups, fingerprint=draft.fingerprint, sharing=shares_prefixes)
    config = draft.config
    if isinstance(draft, HeadSource):
        guesser: Guesser = HeadGuesser(own, draft.head, pools, cache)
    else:
        guesser = ModelGuesser(own, Runner(draft.model, pools, cache), cache)
    model = DraftModel(
        guesser,
        vocab_size=min(vocab_size, config.vocab_size),
        context_tokens=config.context_length,
        stop_ids=stop_ids,
        chunk_tokens=size_steps(settings, ctx.device).prefill_chunk_tokens,
        clock=clock,
    )
    return Planner(settings.draft_tokens, model, clock, runs_ahead=ctx.gpu is not None), model.open


def _look_up(tokens: list[int], _: bool) -> Drafter:
    return Lookup(tokens)
