"""A family of models by its name in GGUF, and the classes of Hugging Face folders that hold such models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field

from mlxr.core.frozen import frozen
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


@frozen
class Folder:
    """One class of folders."""

    model_type: str  # of `config.json`
    hf_class: str  # in its `architectures`
    state: Callable[[FolderConfig], None]  # states the metadata
    tensors: TensorLayout = field(default_factory=TensorLayout)
    older_class: str | None = None  # of folders that brought their own code
    left_out: Mapping[str, object] = field(default_factory=dict)  # values of keys that a `text_config` need not state


@frozen
class Family:
    """One family, by its name in GGUF."""

    name: str  # `general.architecture`
    build: Callable[[Metadata], Model]
    folders: tuple[Folder, ...] = ()  # which are such models
    prefix: str = ""  # of the names of layers in GGUF files, before blk.
    bare_names: tuple[str, ...] = ()  # weights of layers whose names do not end in `.weight` in GGUF files
