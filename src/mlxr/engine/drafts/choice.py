"""Whether an engine drafts: by its settings, its device and its model."""

from __future__ import annotations

from mlxr.core.errors import SettingError
from mlxr.core.model_settings import ModelSettings
from mlxr.engine.drafts.planner import Planner

_DEVICES = ("cpu", "reference")  # where one step takes several tokens of one answer and costs little more for them


def open_planner(settings: ModelSettings, device: str, *, is_recurrent: bool) -> Planner | None:
    """Who plans drafts; None where nobody drafts. Raises SettingError where drafts were asked for and cannot be.

    On a GPU the recorded decoding step takes one token of each answer. A recurrent layer keeps one state, that after
    the last token of a step, and cannot go back to the last token that was right.
    """
    if settings.draft == "off":
        return None
    reason = None
    if device not in _DEVICES:
        reason = f"on the device {device} a decoding step takes one token of each answer"
    elif is_recurrent:
        reason = "the model has recurrent layers, whose state cannot drop tokens"
    if reason is None:
        return Planner(settings.draft_tokens)
    if settings.draft == "auto":
        return None
    raise SettingError(f"draft: {settings.draft} cannot be used: {reason}; leave it at auto, or off")
