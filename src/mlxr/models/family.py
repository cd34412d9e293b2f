"""A family of models: the function that builds a model of GGUF's metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


@dataclass(frozen=True, slots=True)
class Family:
    """One family, by the name that GGUF has for it."""

    name: str  # `general.architecture`
    build: Callable[[Metadata], Model]
    bare_names: tuple[str, ...] = ()  # weights of layers whose names do not end in `.weight` in GGUF files
