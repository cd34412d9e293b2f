"""The registry of the settings, which learns from the loader what model files hold."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import platformdirs

from mlxr import adapters
from mlxr.core.sampling import read_file_defaults
from mlxr.core.settings import Settings
from mlxr.loading import ASSETS, NAMED_MODELS, find_model, list_files, name_quantization, open_source
from mlxr.registry import ModelFacts, Registry
from mlxr.registry.catalogue import BUSY_TIMEOUT_S
from mlxr.registry.record import AdapterFacts
from mlxr.service.capabilities import find_capabilities

MAX_LICENSE_CHARACTERS = 1 << 16


def open_registry(settings: Settings, wait_s: float = BUSY_TIMEOUT_S) -> Registry:
    """The registry in the folder of the settings, with the models that come with mlxr.

    Another process that holds its catalogue is waited for up to `wait_s`.
    """
    builtin = {name: ASSETS / file_name for name, file_name in NAMED_MODELS.items()}
    folder = find_models_folder(settings)
    return Registry(folder, inspect=inspect_model, inspect_adapter=inspect_adapter, builtin=builtin, wait_s=wait_s)


def find_models_folder(settings: Settings) -> Path:
    """Where models are kept: the folder of the settings, or one in the user's data folder."""
    if settings.models_folder is not None:
        return Path(settings.models_folder).expanduser()
    return platformdirs.user_data_path("mlxr", appauthor=False) / "models"


def inspect_model(path: Path) -> ModelFacts:
    """What the files of a model say about it; raises as `loading.load` does for what could not be loaded."""
    source = open_source(find_model(path))
    with source.file:
        template = source.metadata.get("tokenizer.chat_template")
        license_text = source.metadata.get("general.license")
        template_text = template if isinstance(template, str) else ""
        return ModelFacts(
            format="safetensors" if path.is_dir() else "gguf",
            architecture=source.config.architecture,
            parameters=sum(math.prod(tensor.shape) for tensor in source.tensors.values()),
            quantization=name_quantization(source),
            context_tokens=source.config.context_length,
            embedding_length=source.config.hidden,
            template=template_text,
            capabilities=find_capabilities(template_text),
            files=list_files(source),
            license=license_text[:MAX_LICENSE_CHARACTERS] if isinstance(license_text, str) else "",
            sampling=read_file_defaults(source.metadata),
        )


def inspect_adapter(path: Path, base: Path) -> AdapterFacts:
    """Read the facts of an adapter for the model at `base`. Raises as the loader does if it is none of that model's."""
    summary = adapters.inspect_adapter(path, base)
    return AdapterFacts(summary.format, summary.rank, summary.weights, summary.files)


def read_metadata(
    path: Path, *, with_arrays: bool = False
) -> tuple[dict[str, object], list[tuple[str, str, tuple[int, ...]]]]:
    """What the files of a model say of themselves, under GGUF's keys, and name, type and shape of all tensors.

    Lists such as the vocabulary are None unless they are asked for, as they are long.
    """
    source = open_source(find_model(path))
    with source.file:
        metadata = {key: _to_json(value, with_arrays) for key, value in source.metadata.items()}
        tensors = [(tensor.name, tensor.type_name, tensor.shape) for tensor in source.tensors.values()]
    return metadata, tensors


def _to_json(value: object, with_arrays: bool) -> object:
    if isinstance(value, np.ndarray | list):
        return (
            [_to_json(item, True) for item in (value.tolist() if isinstance(value, np.ndarray) else value)]
            if with_arrays
            else None
        )
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
