"""A model's files as what GGUF files are: metadata and tensors by their names there, whichever kind of files it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlxr.formats import GGUFFile, SafetensorsFolder, join_quantised
from mlxr.kernels.tensor import TensorSource
from mlxr.models import Model, model_from_gguf
from mlxr.models.folders.metadata import read_folder, read_model
from mlxr.models.folders.tensors import convert_tensors, state_drafting


@dataclass(frozen=True, slots=True)
class Contents:
    """What a model's files hold of the model itself, as GGUF has it, and what it is by them."""

    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorSource]
    config: Model


def read_contents(file: GGUFFile | SafetensorsFolder) -> Contents:
    """Return what the files of a model hold. Raises FormatError and ModelError, in the words of those files."""
    if isinstance(file, GGUFFile):
        return Contents(file.metadata, file.tensors, model_from_gguf(file.metadata, file.tensors))
    stated = read_folder(file.config)
    config = read_model(stated)
    tensors = convert_tensors(join_quantised(file.tensors, file.config), stated, config)
    return Contents(state_drafting(stated, config, tensors), tensors, config)
