"""A model written anew as GGUF, its weights in the types of a recipe.

Tensors go from file to file in pieces, so a model of any size needs little memory. An adapter can be added to them on
the way. An importance matrix tells which columns count: `InputTap` collects one while a model reads a text, in files as
llama.cpp's `llama-imatrix` has them (its tools/imatrix/imatrix.cpp). Knows files and types, no registry and no command.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.formats import TensorToWrite, WeightSource, by_name, open_gguf, read_adapter, write_gguf
from mlxr.formats.recipes import RECIPES, find_recipe, is_converted, tensor_type
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.sources import Updated, UpdatedStack, number_rows
from mlxr.kernels.tensor import TensorSource
from mlxr.loading import Progress, SourceModel
from mlxr.models import Decoder, Model
from mlxr.models.adapter import Adapter, merge_pairs, part_stack
from mlxr.models.decoder import Pools
from mlxr.models.fields import OWN, list_needed
from mlxr.models.weights import from_gguf_name, gguf_name, split_rows

Floats = NDArray[np.float32]
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
    model: SourceModel,
    recipe_name: str | None,
    own: Mapping[str, str] = NO_OWN_TYPES,
    importance: Importance | None = None,
) -> list[TensorToWrite]:
    """Return the tensors to write with the type that the recipe gives each; ModelError for an unknown recipe.

    Without one each keeps its type; ModelError for one that changes and is of a type that cannot be written. `own` are
    types by patterns: the first that is found in a weight's name, without regard to case, goes before the recipe's.
    ModelError, naming it, for a pattern that is none or that no weight has, and a type that is none or does not fit.
    Weights are rounded by their `importance`, where it has them; ModelError for one of another model.
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
        chosen = _fit_own(name, source, patterns[found[0]]) if found else wanted
        planned.append(
            _plan_tensor(name, source, chosen, None if importance is None else importance.find(source, name))
        )
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


def _plan_tensor(name: str, source: WeightSource, type_name: str, importance: Floats | None) -> TensorToWrite:
    if isinstance(source, Updated):
        return TensorToWrite(name, type_name, source.shape, lambda: _write_updated(name, source, type_name))
    return TensorToWrite.from_source(source, name=name, type_name=type_name, importance=importance)


_SUMS, _COUNTS = ".in_sum2", ".counts"
_DATASETS, _CHUNKS, _CHUNK_TOKENS = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
_LEAST = np.float32(1e-7)  # of the largest: what a column counts whose input was always 0


@frozen
class Importance:
    """By a tensor's name the sums of the squares of each column of its input, f32 (matrices, columns), and of how many
    rows (matrices,): one matrix, or each of a stack of experts. `datasets` the texts, in `chunks` of so many tokens.
    """

    sums: dict[str, Floats]
    counts: dict[str, Floats]
    datasets: tuple[str, ...] = ()
    chunks: int = 0
    chunk_tokens: int = 0

    def find(self, source: WeightSource, name: str) -> Floats | None:
        """Means (matrices, columns) for a tensor, 1 for experts that no token was sent to; None of one that was not
        read. Raises ModelError for means of another number of columns or matrices."""
        if name not in self.sums:
            return None
        sums, counts = self.sums[name], self.counts[name][:, None]
        matrices = math.prod(source.shape[:-2])
        if sums.shape[1] != source.shape[-1] or len(sums) not in (1, matrices):
            raise ModelError(
                f"the importance of {name} is of shape {sums.shape}, expected {matrices, source.shape[-1]}"
            )
        means: Floats = np.where(counts > 0, sums / np.maximum(counts, 1), 1).astype(np.float32)
        raised: Floats = np.maximum(means, means.max(axis=1, keepdims=True) * _LEAST + np.finfo(np.float32).tiny)
        return raised

    def add(self, other: Importance) -> Importance:
        """Return both together. Raises ModelError for those of two models."""
        sums, counts = dict(self.sums), dict(self.counts)
        for name, own in other.sums.items():
            if name in sums and sums[name].shape != own.shape:
                raise ModelError(f"the importance of {name} is of shape {own.shape}, and of {sums[name].shape} before")
            sums[name] = own + sums.get(name, np.float32(0))
            counts[name] = other.counts[name] + counts.get(name, np.float32(0))
        chunks = self.chunks + other.chunks
        return Importance(sums, counts, self.datasets + other.datasets, chunks, self.chunk_tokens or other.chunk_tokens)


def note_importance(model: SourceModel, path: Path, importance: Importance) -> SourceModel:
    """The model with the keys by which llama.cpp's files say what weighted their rounding. Raises ModelError for an
    importance matrix that has none of its tensors."""
    known = len(importance.sums.keys() & model.tensors.keys())
    if not known:
        raise ModelError(f"{path} is the importance matrix of another model: it has none of this one's tensors")
    keys = {"file": str(path), "dataset": importance.datasets[-1] if importance.datasets else ""}
    numbers = {"entries_count": known, "chunks_count": importance.chunks}
    own = {f"quantize.imatrix.{key}": value for key, value in (keys | numbers).items()}
    types = {**model.metadata_types, **{f"quantize.imatrix.{key}": "i32" for key in numbers}}
    return replace(model, metadata={**model.metadata, **own}, metadata_types=types)


def read_importance(path: Path) -> Importance:
    """Read an importance matrix in GGUF. Raises NotFound, and FormatError or ModelError for what is none."""
    with open_gguf(path) as file:
        names = [name.removesuffix(_SUMS) for name in file.tensors if name.endswith(_SUMS)]
        if not names:
            raise ModelError(f"{path} has no tensor whose name ends in {_SUMS}: it is no importance matrix in GGUF")
        sums, counts = dict[str, Floats](), dict[str, Floats]()
        for name in names:
            squares, rows = file.tensors[name + _SUMS], file.tensors.get(name + _COUNTS)
            if rows is None or {squares.type_name, rows.type_name} != {"f32"} or not 1 <= len(squares.shape) <= 3:
                raise ModelError(f"{path}: tensor {name}{_SUMS} has no f32 {name}{_COUNTS} beside it, or is none")
            counts[name] = rows.to_float32().reshape(-1)
            total = squares.to_float32()
            matrices = len(counts[name])
            if not matrices or not total.size or total.size % matrices or not _are_sums(total, counts[name]):
                raise ModelError(f"{path}: tensor {name}{_SUMS} does not fit its {matrices} counts, or holds no sums")
            sums[name] = total.reshape(matrices, -1)
        datasets, chunks, tokens = (file.metadata.get(key) for key in (_DATASETS, _CHUNKS, _CHUNK_TOKENS))
        texts = tuple(str(text) for text in datasets) if isinstance(datasets, list) else ()
        numbers = [value if isinstance(value, int) else 0 for value in (chunks, tokens)]
        return Importance(sums, counts, texts, *numbers)


def _are_sums(*arrays: Floats) -> bool:
    return all(bool(np.isfinite(array).all()) and float(array.min()) >= 0 for array in arrays)


def write_importance(path: Path, importance: Importance) -> int:
    """Write an importance matrix, as llama.cpp's tools read it; gives the size in bytes."""
    tensors = []
    for name in sorted(importance.sums):
        tensors.append(TensorToWrite.from_array(name + _SUMS, "f32", importance.sums[name]))
        tensors.append(TensorToWrite.from_array(name + _COUNTS, "f32", importance.counts[name][:, None]))
    metadata: dict[str, object] = {
        "general.type": "imatrix",
        _DATASETS: list(importance.datasets),
        _CHUNKS: importance.chunks,
        _CHUNK_TOKENS: importance.chunk_tokens,
    }
    return write_gguf(path, metadata, tensors, metadata_types={_DATASETS: "array[string]"})


class InputTap:
    """Stands in for a model in an engine, and adds up the squares of what its weights multiply."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, int] = {}

    @property
    def config(self) -> Model:
        """The configuration of the model."""
        return self._model.config

    def forward(self, batch: RaggedBatch, arena: Pools) -> Floats:
        """The model's logits, whose products are seen."""
        return self.project(self.forward_hidden(batch, arena))

    def forward_hidden(self, batch: RaggedBatch, arena: Pools) -> Floats:
        """The model's states, whose products are seen on the way."""
        return self._model.forward_seen(batch, arena, self._see)

    def project(self, hidden: Floats, adapters: Sequence[Adapter | None] = ()) -> Floats:
        """The model's logits of such states."""
        return self._model.project(hidden, adapters)

    def _see(self, weight: LinearWeight, x: Floats) -> None:
        squares = np.einsum("tc,tc->c", x, x, dtype=np.float64)
        for name in weight.names:
            self._sums[name] = squares + self._sums.get(name, 0.0)
            self._counts[name] = len(x) + self._counts.get(name, 0)

    def collect(self, model: SourceModel, dataset: str, chunk_tokens: int) -> Importance:
        """Return the sums over chunks of so many tokens, by the names that the model's file has."""
        sums, counts = dict[str, Floats](), dict[str, Floats]()
        for stored, source in model.tensors.items():
            parts = _list_parts(model.config, from_gguf_name(stored, model.config), source.shape)
            if parts and any(part in self._sums for part in parts):
                none = np.zeros(source.shape[-1])
                sums[stored] = np.array([self._sums.get(part, none) for part in parts], np.float32)
                counts[stored] = np.array([self._counts.get(part, 0) for part in parts], np.float32)
        return Importance(sums, counts, (dataset,), max(self._counts.values(), default=0) // chunk_tokens, chunk_tokens)


def _list_parts(model: Model, name: str, shape: tuple[int, ...]) -> list[str]:
    """The weight that layers multiply by, of a tensor by its canonical name, or the matrices of a stack of experts."""
    if len(shape) == 2 and name.startswith("blk.") and name.endswith(".weight"):
        return list(split_rows(model, name, number_rows(name, shape[0])))[:1]
    if len(shape) == 3:
        return [next(iter(part_stack(name, expert, number_rows(name, shape[1]))), "") for expert in range(shape[0])]
    return []
