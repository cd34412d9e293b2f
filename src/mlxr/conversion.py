"""A model written anew as GGUF, its weights in the types of a recipe.

Tensors go from file to file in pieces, so a model of any size needs little memory. Knows files and types, no registry
and no command.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from mlxr.formats import TensorToWrite, WeightSource, by_name, write_gguf
from mlxr.formats.recipes import find_recipe, tensor_type
from mlxr.loading import Progress, SourceModel

QUANTIZATION_VERSION = 2  # of ggml's block layouts, stated in every quantised file
_LAYER = re.compile(r"blk\.([0-9]{1,9})\.")


def write_model(
    model: SourceModel, tensors: list[TensorToWrite], recipe_name: str, out: Path, progress: Progress | None = None
) -> int:
    """Write what `plan_tensors` planned; gives the size in bytes. Raises FormatError or ModelError."""
    metadata = dict(model.metadata) | {"general.file_type": find_recipe(recipe_name).file_type}
    if any(by_name(tensor.type_name).is_quantized for tensor in tensors):
        metadata["general.quantization_version"] = QUANTIZATION_VERSION
    types = {**model.metadata_types, "general.file_type": "u32", "general.quantization_version": "u32"}
    return write_gguf(out, metadata, tensors, metadata_types=types, progress=progress)


def plan_tensors(model: SourceModel, recipe_name: str) -> list[TensorToWrite]:
    """Return the tensors to write with the type that the recipe gives each; ModelError for an unknown recipe."""
    planned = []
    for name, source in model.tensors.items():
        wanted = tensor_type(
            recipe_name,
            name,
            source.shape,
            layer=find_layer(name),
            layers=model.config.layers,
            tied_output="output.weight" not in model.tensors,
            query_groups=model.config.heads // model.config.kv_heads,
        )
        planned.append(_plan_tensor(name, source, wanted, model.row_orders.get(name)))
    for name, values in model.extra.items():
        planned.append(TensorToWrite.from_array(name, "f32", np.array(values, np.float32)))
    return planned


def find_lossy(model: SourceModel, tensors: list[TensorToWrite]) -> list[str]:
    """The types of weights that are quantised already and change; what that lost does not come back."""
    changed = {
        model.tensors[tensor.name].type_name
        for tensor in tensors
        if tensor.name in model.tensors and model.tensors[tensor.name].type_name != tensor.type_name
    }
    return sorted(name for name in changed if by_name(name).is_quantized)


def find_layer(name: str) -> int:
    """The layer that a tensor name states, 0 for tensors of no layer."""
    match = _LAYER.match(name)
    return 0 if match is None else int(match[1])


def _plan_tensor(name: str, source: WeightSource, type_name: str, row_order: list[int] | None) -> TensorToWrite:
    if row_order is not None and len(source.shape) == 1:  # a bias: reorder its numbers, not its rows
        return TensorToWrite.from_array(name, type_name, source.to_float32()[row_order])
    order = None if row_order is None else np.array(row_order, np.intp)
    return TensorToWrite.from_source(source, name=name, type_name=type_name, row_order=order)
