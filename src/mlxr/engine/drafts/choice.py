"""Whether an engine drafts: by its settings, its device and its models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxr.cache.shapes import LayerCache, PagesAndState, StateShape
from mlxr.core.errors import SettingError
from mlxr.core.model_settings import DRAFT_WORDS, ModelSettings
from mlxr.engine.drafts.guesser import HeadModel
from mlxr.engine.runner import Model, ModelShape
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
