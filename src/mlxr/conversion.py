"""A model written anew as GGUF, its weights in the types of a recipe.

Tensors go from file to file in pieces, so a model of any size needs little memory. An adapter can be added to them on
the way. Knows files and types, no registry and no command.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import ModelError
from mlxr.formats import TensorToWrite, WeightSource, by_name, read_adapter, write_gguf
from mlxr.formats.recipes import RECIPES, find_recipe, is_converted, tensor_type
from mlxr.kernels.sources import Updated, UpdatedStack
from mlxr.kernels.tensor import TensorSource
from mlxr.loading import Progress, SourceModel
from mlxr.models.adapter import merge_pairs
from mlxr.models.fields import OWN, list_needed
from mlxr.models.weights import from_gguf_name, gguf_name

logger = logging.getLogger(__name__)
_CHUNK_VALUES = 1 << 22  # of a changed weight that are decoded at a time
QUANTIZATION_VERSION = 2  # of ggml's block layouts, stated in every quantised file
TIED = f"{OWN}tied_embeddings"
NO_OWN_TYPES: Mapping[str, str] = {}
_LAYER = re.compile(r"blk\.([0-9]{1,9})\.")


def write_model(
    model: SourceModel,
    tensors: list[TensorToWrite],
    recipe_name: str | None,
    out: Path,
    progress: Progress | None = None,
) -> int:
    """Write what `plan_tensors` planned; gives the size in bytes. Raises FormatError or ModelError."""
    metadata = dict(model.metadata)
    if recipe_name is not None or "general.file_type" not in metadata:
        metadata["general.file_type"] = find_recipe(recipe_name or _find_usual(tensors)).file_type
    if any(by_name(tensor.type_name).is_quantized for tensor in tensors):
        metadata["general.quantization_version"] = QUANTIZATION_VERSION
    needed = list_needed(metadata)
    if needed:
        logger.warning("%s: states %s in keys of mlxr's own, which other programs do not read", out, ", ".join(needed))
    types = {**model.metadata_types, "general.file_type": "u32", "general.quantization_version": "u32"}
    return write_gguf(out, metadata, tensors, metadata_types=types, progress=progress)


def _find_usual(tensors: list[TensorToWrite]) -> str:
    """The type of most numbers, of those that a recipe is named after."""
    counts = {recipe.name: 0 for recipe in RECIPES}
    for tensor in tensors:
        if tensor.type_name in counts:
            counts[tensor.type_name] += math.prod(tensor.shape)
    return max(counts, key=counts.__getitem__)


def plan_tensors(
    model: SourceModel, recipe_name: str | None, own: Mapping[str, str] = NO_OWN_TYPES
) -> list[TensorToWrite]:
    """Return the tensors to write with the type that the recipe gives each; ModelError for an unknown recipe.

    Without one each keeps its type; ModelError for one that changes and is of a type that cannot be written. `own` are
    types by patterns: the first that is found in a weight's name, without regard to case, goes before the recipe's.
    ModelError, naming it, for a pattern that is none or that no weight has, and a type that is none or does not fit.
    """
    planned = []
    patterns = {_read_pattern(pattern): type_name.lower() for pattern, type_name in own.items()}
    unused = set(patterns)
    for name, source in model.tensors.items():
        wanted = (
            _keep_type(name, source)
            if recipe_name is None
            else tensor_type(
                recipe_name,
                name,
                source.shape,
                layer=find_layer(name),
                layers=len(model.config.layers),
                tied_output="output.weight" not in model.tensors,
                query_groups=model.config.heads // model.config.kv_heads,
            )
        )
        found = [pattern for pattern in patterns if is_converted(name, source.shape) and pattern.search(name)]
        unused.difference_update(found)
        planned.append(_plan_tensor(name, source, _fit_own(name, source, patterns[found[0]]) if found else wanted))
    if unused:
        raise ModelError(
            f"no weight has {min(one.pattern for one in unused)!r} in its name; mlxr show --tensors lists them"
        )
    return planned


def _read_pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise ModelError(f"{text!r} is no pattern of tensors' names: {error}") from error


def _fit_own(name: str, source: WeightSource, type_name: str) -> str:
    """The type, if it can be written and its blocks fill the rows."""
    row = by_name(type_name)
    if row.id is None or row.encode is None:
        raise ModelError(f"tensor {name} cannot be written as {type_name}, which is read only")
    if source.shape[-1] % row.block_size:
        raise ModelError(
            f"tensor {name} has rows of {source.shape[-1]} numbers, {type_name} takes {row.block_size} at a time"
        )
    return type_name


def merge_adapter(model: SourceModel, path: str | Path) -> SourceModel:
    """The model with an adapter, a PEFT folder or a GGUF file, added to its weights, which stay undecoded until read.

    Raises NotFound, FormatError for a broken file, ModelError for one of another model.
    """
    file, config = read_adapter(path), model.config
    tensors = cast(Mapping[str, TensorSource], model.tensors)
    named = {from_gguf_name(name, config): tensor for name, tensor in tensors.items()}
    merged = merge_pairs(file.path.name, file.pairs, named, config, is_gguf=file.is_gguf)
    metadata = {name: value for name, value in model.metadata.items() if name != TIED or "output.weight" not in merged}
    return replace(model, metadata=metadata, tensors={gguf_name(name, config): one for name, one in merged.items()})


def find_lossy(model: SourceModel, tensors: list[TensorToWrite]) -> list[str]:
    """The types of weights that are quantised already and change; what that lost does not come back."""
    changed = set()
    for tensor in tensors:
        source = model.tensors.get(tensor.name)
        if isinstance(source, Updated | UpdatedStack):
            changed.add(source.source.type_name)
        elif source is not None and source.type_name != tensor.type_name:
            changed.add(source.type_name)
    return sorted(name for name in changed if by_name(name).is_quantized)


def find_layer(name: str) -> int:
    """The layer that a tensor name states, 0 for tensors of no layer."""
    match = _LAYER.match(name)
    return 0 if match is None else int(match[1])


def _keep_type(name: str, source: WeightSource) -> str:
    """The type that a file has a tensor in."""
    if not isinstance(source, Updated | UpdatedStack):
        return source.type_name
    kept = source.source.type_name
    if by_name(kept).encode is None:
        raise ModelError(f"tensor {name} changes, and nothing here writes its type {kept}; choose one with --type")
    return kept


def _write_updated(name: str, source: Updated, type_name: str) -> Iterator[NDArray[np.uint8]]:
    """The rows of a weight that an adapter changed, some at a time."""
    step = max(1, _CHUNK_VALUES // source.shape[1])
    for first in range(0, source.shape[0], step):
        yield from TensorToWrite.from_array(name, type_name, source.to_float32(first, first + step)).chunks()
    source.release()


def _plan_tensor(name: str, source: WeightSource, type_name: str) -> TensorToWrite:
    if isinstance(source, Updated):
        return TensorToWrite(name, type_name, source.shape, lambda: _write_updated(name, source, type_name))
    return TensorToWrite.from_source(source, name=name, type_name=type_name)
