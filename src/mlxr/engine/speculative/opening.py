"""Whether an engine drafts, by its settings, its device and its models; and who plans drafts and who makes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mlxr.cache.kv_cache import KVCache
from mlxr.cache.shapes import LayerCache, PagesAndState, StateShape
from mlxr.core.errors import SettingError
from mlxr.core.model_settings import DRAFT_WORDS, ModelSettings, size_steps
from mlxr.engine.memory_plan import ArenaPlan
from mlxr.engine.runner import Model, ModelShape, Runner
from mlxr.engine.speculative.draft_model import DraftModel
from mlxr.engine.speculative.drafters import Drafter, DrafterMaker
from mlxr.engine.speculative.guesser import Guesser, HeadGuesser, HeadModel, ModelGuesser
from mlxr.engine.speculative.ngram import Lookup
from mlxr.engine.speculative.planner import Planner
from mlxr.kernels.context import Context

HOST_DEVICES = ("cpu", "reference")


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A model that drafts, with the same vocabulary as the one it drafts for. `fingerprint` names its weights.

    `ctx` is where it computes, if it has one of its own, as on a GPU, where steps of two models do not mix.
    """

    model: Model
    fingerprint: bytes = b""
    ctx: Context | None = None

    @property
    def config(self) -> ModelShape:
        """The sizes of the model that drafts."""
        return self.model.config


@dataclass(frozen=True, slots=True)
class HeadSource:
    """A head that drafts from the states of the model. `fingerprint` names its weights and the model's."""

    head: HeadModel
    fingerprint: bytes = b""
    ctx: Context | None = None

    @property
    def config(self) -> ModelShape:
        """The sizes of the head."""
        return self.head.config


def can_draft(
    settings: ModelSettings, device: str, draft: DraftSource | HeadSource | None, layers: Sequence[LayerCache] = ()
) -> bool:
    """Whether answers of a model with these layers get drafts. Raises SettingError where they cannot, and are wanted.

    A recurrent layer keeps one state, that after the last token of a step. From the state before, the tokens that were
    right are computed once more with the next ones; a draft model, whose guesses are often dropped, may have no such
    layers. On a GPU decoding steps are recorded, and one with drafts has each token as a sequence of its own, which
    shares the pages but could not share a state. There drafts have to be asked for.
    """
    if settings.draft == "off" or (settings.draft == "auto" and device not in HOST_DEVICES):
        return False
    reason = None
    if device not in HOST_DEVICES and _has_states(layers):
        reason = f"on the device {device} a decoding step takes one token of an answer that has states"
    elif device not in HOST_DEVICES and isinstance(draft, HeadSource):
        reason = f"on the device {device} no layer drafts"
    elif draft is not None and _has_states(draft.config.cache_layers):
        reason = "the draft model has recurrent layers, whose state cannot drop tokens"
    elif settings.draft == "mtp" and not isinstance(draft, HeadSource):
        reason = "the model has no layer that drafts"
    elif draft is None and settings.draft not in DRAFT_WORDS:
        reason = "no such model was loaded"
    if reason is not None and settings.draft != "auto":
        raise SettingError(f"draft: {settings.draft} cannot be used: {reason}; leave it at auto, or off")
    return reason is None


def _has_states(layers: Sequence[LayerCache]) -> bool:
    return any(isinstance(layer, StateShape | PagesAndState) for layer in layers)


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
