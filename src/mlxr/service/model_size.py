"""Compute from a model's files the memory that its weights will take."""

from __future__ import annotations

from mlxr.core.errors import MlxrError
from mlxr.core.settings import Settings
from mlxr.engine.speculative.planner import HOST_DEVICES
from mlxr.loading import read_footprint
from mlxr.registry.record import ModelRecord
from mlxr.service.opening import find_device, find_draft_path


def measure_weights(record: ModelRecord, settings: Settings) -> int:
    """Bytes that the weights of a model will take: those of its files, but for experts that stay there.

    Those of the model that drafts for it are added.
    """
    size_bytes = record.size_bytes // settings.gpus + _measure_draft(record, settings)
    if settings.expert_bytes is None:
        return size_bytes
    try:
        expert_bytes = read_footprint(record.path).expert_bytes
    except MlxrError:  # whoever loads it hears why
        return size_bytes
    return size_bytes - max(0, expert_bytes - settings.expert_bytes)


def _measure_draft(record: ModelRecord, settings: Settings) -> int:
    """Bytes of the files of the model that drafts."""
    try:
        path = find_draft_path(record.path, settings)
    except MlxrError:  # as above
        return 0
    if path is None or (settings.draft == "auto" and find_device(settings) not in HOST_DEVICES):
        return 0
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)
