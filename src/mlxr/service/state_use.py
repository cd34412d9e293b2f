"""What a conversation takes of the cache in a model with recurrent layers, of a model that runs or of its files."""

from __future__ import annotations

from pathlib import Path

from mlxr.core.settings import Settings
from mlxr.engine.memory_plan import StateUse, estimate_state_use, measure_state_use
from mlxr.loading import LoadedModel, open_source

__all__ = ["StateUse", "find_state_use", "read_state_use"]

TOKENS = 8192


def find_state_use(loaded: LoadedModel, settings: Settings) -> StateUse | None:
    """Of a model that is loaded; None without recurrent layers."""
    return measure_state_use(loaded.ctx, loaded.config, settings, TOKENS)


def read_state_use(path: Path, settings: Settings) -> StateUse | None:
    """Of a model on the CPU by what its files say; no tensor is read. Raises as `load` does."""
    source = open_source(path)
    source.file.close()
    return estimate_state_use(source.config, settings, TOKENS)
