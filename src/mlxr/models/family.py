"""A family of models: the function that builds a model of GGUF's metadata, and what only its files call tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


@dataclass(frozen=True, slots=True)
class Family:
    """One family, by the name that GGUF has for it."""

    name: str  # `general.architecture`
    build: Callable[[Metadata], Model]
    gguf_names: dict[str, str] = field(default_factory=dict, hash=False)  # what GGUF files call tensors of layers
    gguf_bare: tuple[str, ...] = ()  # weights whose names do not end in `.weight` there
