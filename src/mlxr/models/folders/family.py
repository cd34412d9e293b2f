"""A class of Hugging Face folders: its names, and how its `config.json` and its tensors become those of GGUF."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.statement import TensorLayout


@dataclass(frozen=True, slots=True)
class FolderFamily:
    """One class of folders."""

    model_type: str  # of `config.json`
    hf_class: str  # in its `architectures`
    architecture: str  # of GGUF
    state: Callable[[FolderConfig], None]  # states the metadata
    tensors: TensorLayout = field(default_factory=TensorLayout)
    older_class: str | None = None  # of folders that brought their own code
    experts_architecture: str | None = None  # GGUF's for a model with experts, where it is another one
