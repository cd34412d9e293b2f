"""Loading: from a path or a name to a model that can run. Here files, tokenizer and model meet.

`find_model` turns what the user typed into a path, `load` opens it, builds the decoder on a device and reads the
tokenizer and the chat template. `open_source` opens the same files to be written anew as GGUF, `inspect_adapter` checks
whether an adapter's files fit a model. Knows no engine and no conversation.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import DeviceError, ModelError
from mlxr.core.frozen import frozen
from mlxr.core.tables import WEIGHT_TYPES
from mlxr.core.types import Closes
from mlxr.formats import (
    AdapterFile,
    GGUFFile,
    SafetensorsFolder,
    TensorSource,
    find_adapter_files,
    hash_tensors,
    open_safetensors,
    read_adapter,
)
from mlxr.formats import measure_adapter as measure_adapter
from mlxr.formats.ggml_types import encode_tensor, make_random_blocks
from mlxr.kernels.attend import default_kv_type
from mlxr.kernels.choice import list_kernel_sources, list_native_operators
from mlxr.kernels.context import Context, choose_device
from mlxr.kernels.gpu.kernel import TARGETS as KERNEL_TARGETS
from mlxr.kernels.tensor import FloatArray
from mlxr.model_files.files import (
    ASSETS,
    NAMED_MODELS,
    ModelFiles,
    SourceModel,
    find_draft,
    find_model,
    find_near,
    is_for_text,
    is_mostly_quantized,
    list_files,
    name_in_errors,
    name_quantization,
    open_model_files,
    open_source,
    read_contents,
    read_eagle,
    read_footprint,
    read_gguf_pooling,
    read_sampling,
    read_template,
    read_unknown_keys,
)
from mlxr.model_files.text_rules import TextRules, TokenProduct
from mlxr.model_files.tower import TowerFile, find_tower
from mlxr.models import Decoder, Model
from mlxr.models.adapter import OUTPUT, TABLE, Adapter, add_adapters, list_experts, list_updates, make_adapter
from mlxr.models.decoder import Routing
from mlxr.models.draft_head import DraftHead, EagleHead
from mlxr.models.draft_layer import take_draft_layer
from mlxr.models.families import takes_pictures
from mlxr.models.footprint import ExpertsSummary, Footprint, summarise_experts
from mlxr.models.hearing import Ear, EarSpec
from mlxr.models.tower import Tower, TowerSpec
from mlxr.models.weights import from_gguf_name, split_joined
from mlxr.tokenizers import ChatTemplate, Tokenizer, refuse_chat

__all__ = [
    "ASSETS",
    "KERNEL_TARGETS",
    "NAMED_MODELS",
    "Adapter",
    "DraftHead",
    "EarSpec",
    "ExpertsSummary",
    "Footprint",
    "GGUFFile",
    "Group",
    "LoadedModel",
    "Model",
    "Progress",
    "Routing",
    "SourceModel",
    "TextRules",
    "TokenProduct",
    "TowerFile",
    "TowerSpec",
    "add_adapters",
    "check_vocabulary",
    "choose_device",
    "find_draft",
    "find_model",
    "find_near",
    "find_tower",
    "is_for_text",
    "is_mostly_quantized",
    "list_files",
    "list_kernel_sources",
    "list_native_operators",
    "load",
    "name_quantization",
    "open_source",
    "read_eagle",
    "read_footprint",
    "read_gguf_pooling",
    "read_sampling",
    "read_template",
    "read_unknown_keys",
    "takes_pictures",
]

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
Sense = TypeVar("Sense", Tower, Ear)


class Group(Protocol):
    """The other GPUs that have shares of a model."""

    @property
    def failure(self) -> str | None:
        """The reason that they compute nothing more, None as long as they do."""

    def close(self) -> None:
        """Release the other GPUs."""


@frozen
class LoadedModel(Closes):
    """A model ready to run. `weight_bytes` are what the weights take in memory, `file_bytes` what they take on disk;
    both include a tower.

    `fingerprint` (32 bytes) changes with everything that can change a bit of the model's results: its weights and
    configuration, the kind of device and the build of the kernels. It is the same for all instruction sets and numbers
    of threads, as these change no bit. `draft` is a model that guesses tokens for this one, `head` a layer of its own
    file that does; their weights count among the bytes in memory. `pooling` is the way in which texts become vectors by
    the files (`mean`, `last`, `cls`, ...), None if they do not say; `text_rules` are their rules for texts before that.
    `group` are the GPUs that compute it together, if there are several.
    """

    name: str
    path: Path
    ctx: Context
    model: Decoder
    config: Model
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    load_s: float
    weight_bytes: int
    file_bytes: int
    file: GGUFFile | SafetensorsFolder
    fingerprint: bytes
    pooling: str | None = None
    text_rules: TextRules = field(default_factory=TextRules)
    is_quantized: bool = False  # most of its weights
    draft: LoadedModel | None = None
    head: DraftHead | EagleHead | None = None
    group: Group | None = None
    tower: TowerFile | None = None  # if it sees
    blind: str = ""  # the reason that it does not see, if it has no tower

    def open_tower(self) -> Callable[[NDArray[Any]], Generator[None, None, FloatArray]]:
        """Return the encoder of pictures and sounds (see `Tower.encode`, `Ear.encode`), whose weights are prepared when
        the first one comes.

        It computes where the model does. For a model on a GPU the processor does what that has no kernels for.
        """
        towers: list[Tower] = []
        ears: list[Ear] = []

        def encode(*pictures: NDArray[Any]) -> Generator[None, None, FloatArray]:
            assert self.tower is not None
            if pictures[0].dtype == np.float32:
                ears.extend([] if ears else [self._prepare("ear", self.tower.load_ear)])
                return (yield from ears[0].encode(*pictures))
            towers.extend([] if towers else [self._prepare("tower", self.tower.load)])
            return (yield from towers[0].encode(*pictures))

        return encode

    def _prepare(self, what: str, load: Callable[[Context], Sense]) -> Sense:
        """Return `load` on the model's device, or on the CPU if a GPU has no kernels for what is loaded."""
        try:
            return load(self.ctx)
        except DeviceError as error:
            if self.ctx.gpu is None:
                raise
            logger.warning("%s: its %s runs on the processor: %s", self.name, what, error)
            return load(make_context("cpu"))

    @property
    def kv_type(self) -> str:
        """The type of numbers in pages for this model on its device, unless a setting chooses another."""
        return default_kv_type(self.ctx, is_causal=self.config.is_causal, is_quantized=self.is_quantized)

    @property
    def experts(self) -> ExpertsSummary | None:
        """The model's experts, if it has some."""
        return summarise_experts(self.config)

    def load_adapter(self, path: str | Path) -> Adapter:
        """Read a low-rank adapter for this model: a PEFT folder or a GGUF file.

        Raises NotFound, FormatError for a broken file, ModelError for one of another model, DeviceError if several GPUs
        compute the model.
        """
        if self.group is not None:
            raise DeviceError("several GPUs as one run no adapters; use one of them, or device 'cpu'")
        file = read_adapter(path)
        with name_in_errors(file.path):
            return make_adapter(
                file.path.name,
                file.pairs,
                self.ctx,
                self.model.linear_weights(),
                self.config,
                is_gguf=file.is_gguf,
            )

    def load_head(self) -> DraftHead | None:
        """Prepare the layer of the file that drafts, if any; ModelError, naming the tensor, if it does not fit."""
        with name_in_errors(self.path):
            layer = take_draft_layer(self.config, read_contents(self.file).tensors)
            return None if layer is None else DraftHead(self.model, layer)

    def load_eagle(self, path: Path) -> EagleHead:
        """Prepare the EAGLE-3 head of a folder for this model; raises ModelError, naming what does not fit."""
        with name_in_errors(path):
            folder = open_safetensors(path)  # stays open with the tensors
            return EagleHead(self.model, folder.config, folder.tensors)

    def close(self) -> None:
        """Close the model's files."""
        self.file.close()
        if self.tower is not None:
            self.tower.close()
        if self.draft is not None:
            self.draft.close()
        if self.group is not None:
            self.group.close()


def make_context(device: str = "auto", threads: int | None = None, isa: str | None = None) -> Context:
    """Return the context on the device of that name, or for "auto" on the best one here. Raises DeviceError."""
    return Context(choose_device(device), threads, isa)


def make_random_tensor(type_name: str, rows: int, columns: int, seed: int) -> TensorSource:
    """Return a weight of random blocks, to check and measure products with; a large one repeats at most 4 Mi values."""
    row = next(row for row in WEIGHT_TYPES if row.name == type_name)
    random, values = np.random.default_rng([seed, rows, columns]), rows * columns
    held = min(values, 1 << 22) // row.block_size
    if row.block_size == 1:
        blocks = encode_tensor(
            type_name, random.standard_normal((1, held)).astype(np.float32) / np.sqrt(columns, dtype=np.float32)
        )
    else:
        blocks = make_random_blocks(row, held, random).reshape(-1)
    return TensorSource("w", type_name, (rows, columns), np.resize(blocks, values // row.block_size * row.block_bytes))


def load(
    path_or_name: str | Path,
    *,
    device: str = "auto",
    threads: int | None = None,
    isa: str | None = None,
    context_tokens: int | None = None,
    expert_bytes: int | None = None,
    needs_chat_template: bool = False,
    progress: Progress | None = None,
    ctx: Context | None = None,
    mmproj: str | Path | None = None,
    tower: Path | None = None,
) -> LoadedModel:
    """Open a model and make it ready on `device` ("auto": see `choose_device`) for contexts of up to `context_tokens`.

    With a `ctx`, the model shares that context and its threads. Its tower comes from the file `mmproj`, else from its
    folder, from the file `tower` that a registry has for it, or from a file mmproj*.gguf beside it. At most
    `expert_bytes` of its experts are in memory; see `Decoder`.

    With `needs_chat_template`, a model without one is refused with TemplateError before its weights are prepared.
    `progress(done, total)` is called while weights are prepared. Raises NotFound, FormatError, ModelError,
    TokenizerError, TemplateError or DeviceError.
    """
    start_s = time.perf_counter()
    path = find_model(path_or_name)
    ctx = ctx or make_context(device, threads, isa)
    parts = open_model_files(path)
    try:
        parts = replace(parts, config=parts.config.limit_context(context_tokens))
        if parts.chat_template is not None:
            parts.chat_template.prepare()
        if needs_chat_template and parts.chat_template is None:
            raise refuse_chat(str(path_or_name))
        with name_in_errors(path):
            model = Decoder(ctx, parts.config, parts.tensors, progress, expert_bytes)
        fingerprint = _fingerprint(ctx, parts)
        seen_by, blind = find_tower(path, parts.file, parts.config, mmproj, tower)
        _tell_residency(str(path_or_name), model)
    except BaseException:
        parts.file.close()
        raise
    return LoadedModel(
        name=str(path_or_name),
        path=path,
        ctx=ctx,
        model=model,
        config=parts.config,
        tokenizer=parts.tokenizer,
        chat_template=parts.chat_template,
        load_s=time.perf_counter() - start_s,
        weight_bytes=model.weight_bytes + (0 if seen_by is None else seen_by.weight_bytes),
        file_bytes=sum(tensor.nbytes for tensor in parts.file.tensors.values()),
        file=parts.file,
        fingerprint=fingerprint,
        pooling=parts.pooling,
        is_quantized=is_mostly_quantized(parts.tensors),
        tower=seen_by,
        blind=blind,
        text_rules=parts.text_rules,
    )


def _tell_residency(name: str, model: Decoder) -> None:
    """Log a warning if not all experts are in memory, as answers are slower then."""
    held, total = (nbytes / 2**30 for nbytes in model.expert_memory)
    if held < total:
        logger.warning(
            "%s: experts: %.1f of %.1f GiB resident, the rest is read from the file as it is used", name, held, total
        )


def check_vocabulary(model: LoadedModel, draft: LoadedModel) -> None:
    """Raise ModelError, with the first token that differs, unless the tokens that both have are the same."""
    own, other = model.tokenizer, draft.tokenizer
    for token_id in range(min(own.vocab_size, other.vocab_size)):
        here, there = own.token_text(token_id), other.token_text(token_id)
        if here != there:
            raise ModelError(
                f"{draft.name} has another vocabulary than {model.name}: token {token_id} is {there!r} instead of "
                f"{here!r}; take a draft model of the same family"
            )


def _fingerprint(ctx: Context, parts: ModelFiles) -> bytes:
    """Return the fingerprint; see LoadedModel. Weights are read once prepared, while the system still caches the
    file."""
    digest = hashlib.blake2b(repr(parts.config).encode(), digest_size=32)
    types = {name: (tensor.type_name, tensor.shape) for name, tensor in parts.tensors.items()}
    digest.update(repr(sorted(types.items())).encode())
    digest.update(hash_tensors(parts.file.tensors, parts.file.paths))
    if ctx.gpu is not None:
        digest.update(ctx.gpu.describe().encode())
    elif ctx.module is None:
        digest.update(f"{ctx.device}: numpy {np.__version__}".encode())
    else:
        digest.update(_hash_file(ctx.module.__file__))
    return digest.digest()


@cache
def _hash_file(path: str) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()


@frozen
class AdapterSummary:
    """An adapter's `format` ("gguf" or "safetensors"), largest `rank`, number of updated `weights`, and files."""

    format: str
    rank: int
    weights: int
    files: tuple[Path, ...]


def inspect_adapter(path: Path, base: Path) -> AdapterSummary:
    """Check that an adapter's files fit the model at `base`, reading only its headers, and sum them up.

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
    """Return outputs and inputs of a model's matrices as adapters name them; joined ones are listed one by one."""
    config = source.config
    tensors: dict[str, Any] = {from_gguf_name(name, config): one for name, one in source.tensors.items()}
    whole = (config.vocab_size, config.hidden)
    shapes = {TABLE: whole, OUTPUT: whole}
    for name, tensor in split_joined(config, tensors).items():
        if len(tensor.shape) == 2:
            shapes[name] = (tensor.shape[0], tensor.shape[1])
    return shapes | list_experts(config)
