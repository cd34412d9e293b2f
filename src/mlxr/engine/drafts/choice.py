"""Whether an engine drafts: by its settings, its device and its models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxr.cache.shapes import LayerCache, PagesAndState, StateShape
from mlxr.core.errors import SettingError
from mlxr.core.model_settings import DRAFT_WORDS, ModelSettings
from mlxr.engine.drafts.guesser import HeadModel
from mlxr.engine.runner import Model, ModelShape

DRAFT_DEVICES = ("cpu", "reference")  # where one step takes several tokens of one answer and costs little more for them


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A model that drafts, with the same vocabulary as the one it drafts for. `fingerprint` names its weights."""

    model: Model
    fingerprint: bytes = b""

    @property
    def config(self) -> ModelShape:
        """The sizes of the model that drafts."""
        return self.model.config


@dataclass(frozen=True, slots=True)
class HeadSource:
    """A head that drafts from the states of the model. `fingerprint` names its weights and the model's."""

    head: HeadModel
    fingerprint: bytes = b""

    @property
    def config(self) -> ModelShape:
        """The sizes of the head."""
        return self.head.config


def can_draft(settings: ModelSettings, device: str, draft: DraftSource | HeadSource | None) -> bool:
    """Whether answers get drafts. Raises SettingError where drafts were asked for and cannot be.

    On a GPU the recorded decoding step takes one token of each answer. A recurrent layer keeps one state, that after
    the last token of a step. From the state before, the tokens that were right are computed once more with the next
    ones; a draft model, whose guesses are often dropped, may have no such layers.
    """
    if settings.draft == "off":
        return False
    reason = None
    if device not in DRAFT_DEVICES:
        reason = f"on the device {device} a decoding step takes one token of each answer"
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
