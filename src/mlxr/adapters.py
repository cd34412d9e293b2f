"""Files of low-rank adapters beside those of models: what an adapter takes, and whether a model is its base.

Reads headers and matrices, no weights: `LoadedModel.load_adapter` makes an adapter that a model can use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxr.core.errors import ModelError
from mlxr.formats import AdapterFile, find_adapter_files, read_adapter
from mlxr.formats import measure_adapter as measure_adapter
from mlxr.loading import Model, SourceModel, open_source
from mlxr.models.adapter import OUTPUT, TABLE, list_experts, list_updates
from mlxr.models.weights import from_gguf_name, split_joined


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """An adapter's `format` ("gguf" or "safetensors"), largest `rank`, number of updated `weights`, and files."""

    format: str
    rank: int
    weights: int
    files: tuple[Path, ...]


def inspect_adapter(path: Path, base: Path) -> AdapterSummary:
    """Check that an adapter's files fit the model at `base`, of which headers are read, and sum them up.

    Raises NotFound, FormatError for broken files, ModelError for those of another model.
    """
    file, source = read_adapter(path), open_source(base)
    with source.file:
        try:
            _check_updates(path.name, file, source.config, _list_shapes(source))
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error
    format_name = "gguf" if file.is_gguf else "safetensors"
    rank = max(pair.a.shape[0] for pair in file.pairs)
    return AdapterSummary(format_name, rank, len(file.pairs), find_adapter_files(path))


def _check_updates(name: str, file: AdapterFile, config: Model, shapes: Mapping[str, tuple[int, int]]) -> None:
    for update in list_updates(name, file.pairs, config, is_gguf=file.is_gguf):
        if update.name not in shapes:
            raise update.refuse(f"{update.pair} is no weight of this model that adapters can update")
        update.check_shape(*shapes[update.name])


def _list_shapes(source: SourceModel) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a model's matrices as adapters name them; those that a file joins are listed one by one."""
    config = source.config
    tensors: dict[str, Any] = {from_gguf_name(name, config): one for name, one in source.tensors.items()}
    whole = (config.vocab_size, config.hidden)
    shapes = {TABLE: whole, OUTPUT: whole}
    for name, tensor in split_joined(config, tensors).items():
        if len(tensor.shape) == 2:
            shapes[name] = (tensor.shape[0], tensor.shape[1])
    return shapes | list_experts(config)
