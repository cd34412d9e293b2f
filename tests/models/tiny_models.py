"""Tiny models for the tests: from random weights, in either layout and any type, and a way to run them.

`TinyRun` is a cache and its bookkeeping in a few lines: pages in a scattered order, several sequences, any chunks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf_models import make
from numpy.typing import NDArray
from random_model import Config, Weights, make_head_weights, make_weights
from weight_blocks import make_blocks

from mlxr.cache.arena import Arena, ModelArena, PoolSet, StateArena
from mlxr.cache.shapes import StatesShape, form_groups
from mlxr.formats import TensorSource, by_name, encode_tensor
from mlxr.formats.recipes import is_converted
from mlxr.formats.tensor import MappedFile
from mlxr.kernels.attend import KVType
from mlxr.kernels.context import Context
from mlxr.kernels.layers import prepare_layers
from mlxr.kernels.layers.operators import Attend, Operator, RopeAndWriteKV
from mlxr.kernels.ragged import NO_STATE, RaggedBatch
from mlxr.models import Decoder, Model, list_unknown_keys, model_from_folder, model_from_gguf
from mlxr.models.adapter import Adapter
from mlxr.models.components import Layer
from mlxr.models.draft_head import DraftHead, EagleHead
from mlxr.models.draft_layer import take_draft_layer
from mlxr.models.families import read_folder, read_model
from mlxr.models.folders.tensors import arrange_folder, rename_hf_tensors, state_drafting
from mlxr.models.weights import arrange_tensors, gguf_name

GOLDENS = Path(__file__).parent / "goldens"
CASES = sorted(path.name for path in GOLDENS.iterdir())
PAGE_SIZE = 32
Floats = NDArray[np.float32]


def read_golden(case: str) -> tuple[dict[str, Any], int, NDArray[np.int32], Floats]:
    """config.json, seed, token ids (T,) and logits (T, vocab) of a golden case."""
    config = json.loads((GOLDENS / case / "config.json").read_text())
    with np.load(GOLDENS / case / "logits.npz") as stored:
        return config, int(stored["seed"]), stored["tokens"], stored["logits"]


def make_source(name: str, values: Floats, type_name: str = "f32") -> TensorSource:
    """A tensor in memory; vectors stay f32, as in real files."""
    is_float = not is_converted(name, values.shape) or values.shape[-1] % by_name(type_name).block_size
    kind = "f32" if is_float else type_name
    return TensorSource(name, kind, values.shape, encode_tensor(kind, values))


def make_random_source(name: str, shape: tuple[int, ...], type_name: str, seed: int) -> TensorSource:
    """A tensor of random but valid blocks of a type that has no encoder here."""
    random = np.random.RandomState(seed)
    if type_name != "q8_k":
        return TensorSource(name, type_name, shape, make_blocks(type_name, shape, random))
    blocks = np.zeros(int(np.prod(shape)) // 256, np.dtype([("d", "<f4"), ("qs", "i1", 256), ("sums", "<i2", 16)]))
    blocks["qs"] = random.randint(-127, 128, blocks["qs"].shape)
    blocks["sums"] = blocks["qs"].reshape(-1, 16, 16).sum(axis=2)
    blocks["d"] = random.uniform(0.5, 1.5, len(blocks)) / 74 / np.sqrt(shape[1])
    return TensorSource(name, type_name, shape, blocks.view(np.uint8).reshape(-1))


def make_hf_tensors(weights: Weights, config: Config, type_name: str = "f32") -> dict[str, TensorSource]:
    """Return the tensors of a Hugging Face folder with this `config.json` as they are read: as those of a GGUF file."""
    stated = read_folder(config, list_numbers(weights))
    named = rename_hf_tensors(weights, stated.layout.names)
    alternates = stated.layout.alternates or stated.layout.columns_first
    tensors = {
        name: _encode(name, values, "f32" if _stays(name) or (alternates and values.ndim == 3) else type_name)
        for name, values in named.items()
    }
    return arrange_folder(tensors, stated, read_model(stated))  # type: ignore[return-value,arg-type]


def _stays(name: str) -> bool:
    return name.endswith("attn_rel_b.weight")  # a small table, which converters leave as it is


def list_numbers(weights: Weights) -> dict[str, TensorSource]:
    """Return the tensors of a folder that are a single number, which may be metadata elsewhere."""
    return {name: make_source(name, values.reshape(-1)) for name, values in weights.items() if values.size == 1}


def map_tensors(tensors: Mapping[str, Any], path: Path) -> dict[str, TensorSource]:
    """The same tensors in a mapped file, which is written to `path`."""
    blocks = {name: tensor.data for name, tensor in tensors.items()}
    path.write_bytes(b"".join(data.tobytes() for data in blocks.values()))
    mapping, end, mapped = MappedFile(path), 0, {}
    for name, tensor in tensors.items():
        first, end = end, end + len(blocks[name])
        data = mapping.bytes[first:end]
        mapped[name] = TensorSource(tensor.name, tensor.type_name, tuple(tensor.shape), data, mapping)
    return mapped


def _encode(name: str, values: Floats, type_name: str) -> TensorSource:
    if values.ndim == 2 and "_norm" not in name and by_name(type_name).encode is None:
        return make_random_source(name, values.shape, type_name, len(name))
    return make_source(name, values, type_name)


def make_gguf(weights: Weights, config: Config) -> tuple[dict[str, object], dict[str, TensorSource]]:
    """Return metadata and f32 tensors as a converter would write them from a folder."""
    tensors, read = make_hf_tensors(weights, config), read_folder(config, list_numbers(weights))
    model = read_model(read)
    stated = state_drafting(read, model, tensors)
    arranged = {gguf_name(name, model): source for name, source in arrange_tensors(model, tensors).items()}
    return stated, {name: make_source(name, source.to_float32()) for name, source in arranged.items()}


def build_hf(ctx: Context, config: Config, seed: int, type_name: str = "f32") -> Decoder:
    """The model of a `config.json` with the weights of a seed."""
    weights = make_weights(config, seed)
    tensors = make_hf_tensors(weights, config, type_name)
    return Decoder(ctx, model_from_folder(config, list_numbers(weights)), tensors)


def build_gguf(ctx: Context, config: Config, seed: int) -> Decoder:
    """Build the same model from a file with GGUF's metadata, names and row order."""
    metadata, tensors = make_gguf(make_weights(config, seed), config)
    return Decoder(ctx, model_from_gguf(metadata, tensors), tensors)


def build_file(ctx: Context, name: str, **changes: Any) -> Decoder:
    """A model of gguf_models, with these keys besides."""
    stated, arrays = make(name)
    tensors = {key: make_source(key, values) for key, values in arrays.items()}
    metadata = {f"{name}.{key}": value for key, value in (stated | changes).items()} | {"general.architecture": name}
    assert list_unknown_keys(metadata, tensors) == []
    return Decoder(ctx, model_from_gguf(metadata, tensors), tensors)


def build_head(ctx: Context, config: Config, seed: int, type_name: str = "f32") -> tuple[Decoder, DraftHead]:
    """Build the model of a `config.json` with the weights of a seed, and its draft layer."""
    weights = make_weights(config, seed) | make_head_weights(config, seed)
    tensors = make_hf_tensors(weights, config, type_name)
    model = Decoder(ctx, model_from_folder(config), tensors)
    layer = take_draft_layer(model.config, tensors)
    assert layer is not None
    return model, DraftHead(model, layer)


Windows = tuple[int | None, ...]  # of each layer


def change_layers(model: Model, layers: Sequence[Layer]) -> Model:
    """The model with these layers."""
    return replace(model, layers=tuple(layers))


def give_windows(model: Decoder, windows: Windows) -> None:
    """Give the layers of `model` these windows, and so groups of their own, which one configuration could not."""
    pairs = zip(model.config.layers, windows, strict=True)
    changed = [replace(layer, mixer=replace(layer.mixer, window=window)) for layer, window in pairs]  # type: ignore[arg-type]
    model.config = change_layers(model.config, changed)
    places = form_groups(model.config.cache_layers).places

    def change(operator: Operator, window: int | None, group: int) -> Operator:
        if not isinstance(operator, RopeAndWriteKV | Attend):
            return operator
        return replace(operator, heads=replace(operator.heads, window=window, group=group))

    layers = [
        replace(layer, operators=tuple(change(operator, window, place.group) for operator in layer.operators))
        for layer, window, place in zip(model._weights.layers.layers, windows, places, strict=True)
        if place is not None
    ]
    model._weights = replace(model._weights, layers=prepare_layers(model.ctx, layers))


class TinyRun:
    """Sequences over one arena; each owns a fixed set of pages, dealt out back to front so that order matters."""

    def __init__(
        self,
        model: Decoder | DraftHead | EagleHead,
        sequences: int = 1,
        longest: int = 64,
        kv_type: KVType = "f32",
        adapters: Sequence[Adapter | None] = (),
    ) -> None:
        config = model.config
        self.model = model
        self.adapters = adapters  # of each sequence, if there are any
        self.pages_each = -(-longest // PAGE_SIZE)
        pages = sequences * self.pages_each + 1
        groups = form_groups(config.cache_layers)
        arenas: list[PoolSet] = [
            StateArena(model.ctx, shape, 2 * sequences + 1, PAGE_SIZE)
            if isinstance(shape, StatesShape)
            else Arena(
                model.ctx, count, pages, shape.kv_heads, PAGE_SIZE, shape.head_dim, kv_type, value_dim=shape.value_dim
            )
            for shape, count in zip(groups.shapes, groups.pools, strict=True)
        ]
        self.has_states = len(groups.paged) < len(groups.shapes)
        self.states = [NO_STATE] * sequences  # the slot of each one's state; it has this one and the one beside it
        self.arena = ModelArena(arenas, groups)
        ids = np.arange(pages - 1, 0, -1, dtype=np.int32)
        self.page_table = np.ascontiguousarray(ids.reshape(self.pages_each, sequences).T)
        self.lengths = [0] * sequences

    def step(self, chunks: Mapping[int, Sequence[int] | NDArray[np.int32]]) -> Floats:
        """Append a chunk of tokens to each of some sequences; logits of every token, in the order given."""
        assert isinstance(self.model, Decoder)
        return self.model.forward(self.append(chunks), self.arena)

    def append(self, chunks: Mapping[int, Sequence[int] | NDArray[np.int32]]) -> RaggedBatch:
        """Return the batch of such chunks; all of its rows are wanted."""
        order = list(chunks)
        counts = [len(chunks[s]) for s in order]
        positions = np.concatenate([np.arange(self.lengths[s], self.lengths[s] + len(chunks[s])) for s in order])
        owners = np.repeat(order, counts)
        slots = self.page_table[owners, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        for sequence, count in zip(order, counts, strict=True):
            self.lengths[sequence] += count
        batch = RaggedBatch(
            token_ids=np.concatenate([np.asarray(chunks[s]) for s in order]).astype(np.int32),
            positions=positions.astype(np.int32),
            slots=slots.astype(np.int32),
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            context_lengths=np.array([self.lengths[s] for s in order], np.int32),
            page_table=np.ascontiguousarray(self.page_table[order]),
            output_rows=np.arange(len(positions), dtype=np.int32),
        )
        others = len(form_groups(self.model.config.cache_layers).paged) - 1  # groups that have the same pages here
        batch = batch.with_groups([(batch.slots, batch.page_table)] * others)
        if self.has_states:
            reads = [self.states[s] for s in order]
            for sequence in order:
                self.states[sequence] = 2 * sequence + (self.states[sequence] + 1) % 2
            writes = [self.states[s] for s in order]
            batch = batch.with_states(np.array(reads, np.int32), np.array(writes, np.int32))
        return batch.with_adapters(tuple(self.adapters[s] for s in order)) if self.adapters else batch

    def run(self, tokens: NDArray[np.int32], chunk_tokens: int | None = None, sequence: int = 0) -> Floats:
        """Logits of a whole prompt, fed in chunks."""
        step = chunk_tokens or len(tokens)
        pieces = [self.step({sequence: tokens[at : at + step]}) for at in range(0, len(tokens), step)]
        return np.concatenate(pieces)
