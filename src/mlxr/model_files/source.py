"""A model's files as they would be written to GGUF."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxr.core.errors import ModelError
from mlxr.formats import AffineTensor, GGUFFile, SafetensorsFolder, WeightSource, open_gguf, open_safetensors
from mlxr.formats.recipes import RECIPES
from mlxr.kernels.sources import Reordered
from mlxr.kernels.tensor import TensorSource
from mlxr.model_files.files import name_in_errors
from mlxr.model_files.finding import find_model
from mlxr.model_files.pooling import GGUF_KEY, GGUF_POOLINGS, read_folder_pooling
from mlxr.model_files.tensors import read_tensors
from mlxr.models import ModelConfig, config_from_gguf, config_from_hf
from mlxr.models.draft_layer import DraftLayer, add_draft_layer, describe_draft_layer, take_draft_layer
from mlxr.models.gguf_metadata import gguf_metadata, gguf_rope_factors
from mlxr.models.names import gguf_column_order, gguf_name, gguf_row_order
from mlxr.models.weights import arrange_tensors, check_tensors
from mlxr.tokenizers import to_gguf_metadata

logger = logging.getLogger(__name__)
_FOLDER_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt"})  # what is read of a folder beside its weights


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A model as it would be written to GGUF: canonical names, in the order of the file.

    `row_orders` tells which row of a source tensor comes where, for those that GGUF lays out differently;
    `extra` are small vectors that only GGUF has. `metadata_types` are the types the source file gave its keys.
    `head_config` is that of the layer that drafts, as a model of its own, if there is one.
    """

    config: ModelConfig
    metadata: Mapping[str, object]
    metadata_types: Mapping[str, str]
    tensors: Mapping[str, WeightSource]
    row_orders: Mapping[str, list[int]]
    extra: Mapping[str, Sequence[float]]
    file: GGUFFile | SafetensorsFolder
    head_config: ModelConfig | None


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
    config = config_from_gguf(file.metadata, file.tensors)
    check_tensors(config, arrange_tensors(config, file.tensors))
    head_config = describe_draft_layer(config, file.tensors)
    return SourceModel(config, file.metadata, file.metadata_types, file.tensors, {}, {}, file, head_config)


def _describe_folder(path: Path, folder: SafetensorsFolder) -> SourceModel:
    config = config_from_hf(folder.config)
    named = read_tensors(folder, config)
    tensors = arrange_tensors(config, named)
    check_tensors(config, tensors)
    layer = find_draft_layer(path, config, named)
    if config.tied_embeddings:  # a stored copy would say the contrary in GGUF
        tensors.pop("output.weight", None)
    metadata = gguf_metadata(config)
    if layer is not None:
        tensors, metadata = add_draft_layer(layer, config, tensors, metadata)
    tensors = {name: _order_columns(name, tensor, config) for name, tensor in tensors.items()}
    orders = {name: gguf_row_order(name, config) for name in tensors}
    return SourceModel(
        config=config,
        metadata={"general.name": path.resolve().name}
        | metadata
        | _state_pooling(path, metadata)
        | to_gguf_metadata(path),
        metadata_types={},
        tensors={gguf_name(name, config): tensor for name, tensor in tensors.items()},
        row_orders={name: order for name, order in orders.items() if order is not None},
        extra=gguf_rope_factors(config),
        file=folder,
        head_config=None if layer is None else layer.config,
    )


def _state_pooling(path: Path, metadata: Mapping[str, object]) -> dict[str, object]:
    """The key for how texts become vectors, where the folder says so and GGUF has a number for it."""
    pooling = read_folder_pooling(path)
    if pooling is not None and pooling not in GGUF_POOLINGS:
        logger.warning("%s: its vectors are made with %s, which GGUF cannot state; it is left out", path, pooling)
    key = f"{metadata['general.architecture']}.{GGUF_KEY}"
    return {key: GGUF_POOLINGS.index(pooling)} if pooling in GGUF_POOLINGS else {}


def _order_columns(name: str, tensor: Any, config: ModelConfig) -> Any:
    """A tensor with its columns in the order that they have in GGUF."""
    order = gguf_column_order(name, config)
    return tensor if order is None else Reordered(tensor, np.array(order, np.int32))


def find_draft_layer(path: Path, config: ModelConfig, tensors: Mapping[str, TensorSource]) -> DraftLayer | None:
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
