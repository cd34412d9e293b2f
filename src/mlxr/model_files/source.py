"""A model's files as they would be written to GGUF."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxr.core.errors import ModelError
from mlxr.formats import AffineTensor, GGUFFile, SafetensorsFolder, WeightSource, open_gguf, open_safetensors
from mlxr.formats.recipes import RECIPES
from mlxr.kernels.tensor import TensorSource
from mlxr.model_files.files import name_in_errors
from mlxr.model_files.finding import find_model
from mlxr.model_files.pooling import GGUF_KEY, GGUF_POOLINGS, read_folder_pooling
from mlxr.model_files.tensors import read_contents
from mlxr.models import Model
from mlxr.models.draft_layer import (
    DraftLayer,
    describe_draft_layer,
    drop_draft_layer,
    name_draft_layer,
    take_draft_layer,
)
from mlxr.models.names import gguf_name
from mlxr.models.weights import arrange_tensors, check_tensors
from mlxr.tokenizers import to_gguf_metadata

logger = logging.getLogger(__name__)
_FOLDER_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt"})  # what is read of a folder beside its weights


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A model as it would be written to GGUF: its tensors by their names there, in the order of the file."""

    config: Model
    metadata: Mapping[str, object]
    metadata_types: Mapping[str, str]  # that the source file gave its keys
    tensors: Mapping[str, WeightSource]
    file: GGUFFile | SafetensorsFolder
    head_config: Model | None  # of the layer that drafts, as a model of its own, if there is one


def open_source(path_or_name: str | Path) -> SourceModel:
    """Open a model for conversion; nothing is decoded yet. Raises as `load` does."""
    path = find_model(path_or_name)
    with name_in_errors(path):
        return _open_source(path)


def _open_source(path: Path) -> SourceModel:
    file: GGUFFile | SafetensorsFolder = open_safetensors(path) if path.is_dir() else open_gguf(path)
    try:
        return _describe_file(file) if isinstance(file, GGUFFile) else _describe_folder(path, file)
    except BaseException:
        file.close()
        raise


def _describe_file(file: GGUFFile) -> SourceModel:
    contents = read_contents(file)
    config = contents.config
    check_tensors(config, arrange_tensors(config, file.tensors))
    head_config = describe_draft_layer(config, file.tensors)
    return SourceModel(config, file.metadata, file.metadata_types, file.tensors, file, head_config)


def _describe_folder(path: Path, folder: SafetensorsFolder) -> SourceModel:
    contents = read_contents(folder)
    config, metadata = contents.config, contents.metadata
    tensors = arrange_tensors(config, contents.tensors)
    check_tensors(config, tensors)
    layer = find_draft_layer(path, config, contents.tensors)
    if config.is_tied:  # to other programs a stored copy would say the contrary
        tensors.pop("output.weight", None)
    if layer is None:
        metadata = drop_draft_layer(metadata)
    else:
        tensors |= name_draft_layer(layer, config)
    return SourceModel(
        config=config,
        metadata={"general.name": path.resolve().name}
        | dict(metadata)
        | _state_pooling(path, metadata)
        | to_gguf_metadata(path),
        metadata_types={},
        tensors={gguf_name(name, config): tensor for name, tensor in tensors.items()},
        file=folder,
        head_config=None if layer is None else layer.model,
    )


def _state_pooling(path: Path, metadata: Mapping[str, object]) -> dict[str, object]:
    """The key for how texts become vectors, where the folder says so and GGUF has a number for it."""
    pooling = read_folder_pooling(path)
    if pooling is not None and pooling not in GGUF_POOLINGS:
        logger.warning("%s: its vectors are made with %s, which GGUF cannot state; it is left out", path, pooling)
    key = f"{metadata['general.architecture']}.{GGUF_KEY}"
    return {key: GGUF_POOLINGS.index(pooling)} if pooling in GGUF_POOLINGS else {}


def find_draft_layer(path: Path, config: Model, tensors: Mapping[str, TensorSource]) -> DraftLayer | None:
    """The layer that drafts; one that does not fit is left out, as the model runs without."""
    try:
        return take_draft_layer(config, tensors)
    except ModelError as error:
        logger.warning("%s: %s; it is left out", path, error)
        return None


def list_files(model: SourceModel) -> tuple[Path, ...]:
    """All files that make up a model: the weights, and of a folder what is read beside them."""
    if isinstance(model.file, GGUFFile):
        return tuple(model.file.paths)
    weights = tuple(model.file.paths)
    beside = [path for path in weights[0].parent.iterdir() if path.suffix in _FOLDER_SUFFIXES and path.is_file()]
    return weights + tuple(sorted(set(beside) - set(weights)))


def name_quantization(model: SourceModel) -> str:
    """How the weights are stored, in ggml's words: the recipe that the file states, else the type of most bytes.

    A weight that MLX quantised counts as mlx_4bit, by its bits.
    """
    file_type = model.metadata.get("general.file_type")
    recipe = next((recipe.name for recipe in RECIPES if recipe.file_type == file_type), None)
    if recipe is not None and isinstance(model.file, GGUFFile):
        return recipe.upper()
    sizes: dict[str, int] = {}
    for tensor in model.tensors.values():
        name = f"mlx_{tensor.quantization.bits}bit" if isinstance(tensor, AffineTensor) else tensor.type_name
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return max(sizes, key=lambda name: sizes[name]).upper()
