"""What a model's files say, without the model: the sizes of its weights, its sampling parameters, its chat template."""

from __future__ import annotations

from pathlib import Path

from mlxr.core.sampling import read_file_defaults
from mlxr.formats import open_gguf, open_safetensors
from mlxr.formats.safetensors import read_json_object
from mlxr.model_files.files import name_in_errors
from mlxr.model_files.finding import find_model
from mlxr.model_files.source import find_draft_layer
from mlxr.model_files.tensors import read_contents
from mlxr.models import Model, list_unknown_keys
from mlxr.models.eagle import is_eagle, read_eagle_config
from mlxr.models.footprint import Footprint, measure_footprint
from mlxr.models.weights import arrange_tensors
from mlxr.tokenizers.folder import DEFAULT_TEMPLATE, FolderConfig


def read_footprint(path_or_name: str | Path) -> Footprint:
    """What a model's files say of its weights; no tensor is read. Raises as `load` does for models that do not run."""
    path = find_model(path_or_name)
    with name_in_errors(path), open_safetensors(path) if path.is_dir() else open_gguf(path) as file:
        contents = read_contents(file)
        config, tensors = contents.config, contents.tensors
        layer = find_draft_layer(path, config, tensors)
        return measure_footprint(config, arrange_tensors(config, tensors), 0 if layer is None else layer.nbytes)


def read_unknown_keys(path_or_name: str | Path) -> list[str]:
    """The keys of a GGUF file that state something of the model and that mlxr does not read; none of a folder.

    Raises as `load` does for models that do not run.
    """
    path = find_model(path_or_name)
    if path.is_dir():
        return []
    with name_in_errors(path), open_gguf(path) as file:
        return list_unknown_keys(file.metadata, file.tensors)


def read_eagle(path: Path) -> Model | None:
    """The sizes of the EAGLE-3 head in a folder; None for other models. Raises FormatError and ModelError."""
    if not path.is_dir():
        return None
    config = read_json_object(path / "config.json")
    with name_in_errors(path):
        return read_eagle_config(config) if is_eagle(config) else None


def read_sampling(path_or_name: str | Path) -> dict[str, object]:
    """The sampling parameters that the files of a model recommend, under the names that models are made with.

    Raises NotFound where there is no such model, FormatError or TokenizerError for broken files.
    """
    path = find_model(path_or_name)
    if path.is_dir():
        return read_file_defaults(FolderConfig(path).name_sampling())
    if path.suffix != ".gguf":
        return {}
    with open_gguf(path) as file:
        return read_file_defaults(file.metadata)


def read_template(path_or_name: str | Path) -> str:
    """The source of a model's chat template, "" without one; raises as `read_sampling` does."""
    path = find_model(path_or_name)
    if path.is_dir():
        return FolderConfig(path).read_templates().get(DEFAULT_TEMPLATE, "")
    if path.suffix != ".gguf":
        return ""
    with open_gguf(path) as file:
        source = file.metadata.get("tokenizer.chat_template")
    return source if isinstance(source, str) else ""
