"""From a path or a name to a model that can run: the one place where files, tokenizer and model meet.

`find_model` turns what the user typed into a path, `load` opens it, builds the decoder on a device and reads the
tokenizer and the chat template. `open_source` opens the same files to be written anew as GGUF. Knows no engine and no
conversation.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import DeviceError, ModelError, NotFound, TemplateError, TokenizerError
from mlxr.core.sampling import read_file_defaults
from mlxr.formats import (
    AffineTensor,
    GGUFFile,
    SafetensorsFolder,
    TensorSource,
    WeightSource,
    hash_tensors,
    join_quantised,
    open_gguf,
    open_safetensors,
    read_adapter,
)
from mlxr.formats.json_file import read_json_object
from mlxr.formats.recipes import RECIPES
from mlxr.kernels.attend import default_kv_type
from mlxr.kernels.context import Context
from mlxr.kernels.context import choose_device as choose_device
from mlxr.kernels.gpu.kernel import TARGETS
from mlxr.kernels.listing import list_kernel_sources as list_kernel_sources
from mlxr.kernels.listing import list_native_operators as list_native_operators
from mlxr.kernels.sources import Reordered
from mlxr.kernels.tensor import TensorSource as WeightTensor
from mlxr.models import Decoder, config_from_gguf, config_from_hf
from mlxr.models import ModelConfig as ModelConfig
from mlxr.models.adapter import Adapter as Adapter
from mlxr.models.adapter import make_adapter
from mlxr.models.architecture import Architecture
from mlxr.models.architectures import by_name
from mlxr.models.draft_head import DraftHead as DraftHead
from mlxr.models.draft_layer import DraftLayer, add_draft_layer, describe_draft_layer, take_draft_layer
from mlxr.models.eagle import EagleHead, is_eagle, read_eagle_config
from mlxr.models.experts import part_alternating
from mlxr.models.footprint import ExpertsSummary as ExpertsSummary
from mlxr.models.footprint import Footprint as Footprint
from mlxr.models.footprint import measure_footprint, summarise_experts
from mlxr.models.gguf_metadata import gguf_metadata, gguf_rope_factors
from mlxr.models.names import (
    adds_one,
    gguf_column_order,
    gguf_name,
    gguf_row_order,
    rename_hf_tensors,
)
from mlxr.models.routing import Routing as Routing
from mlxr.models.weights import arrange_tensors, check_tensors
from mlxr.tokenizers import (
    ChatTemplate,
    Tokenizer,
    chat_template_from_folder,
    chat_template_from_gguf,
    from_folder,
    from_gguf,
    refuse_chat,
    to_gguf_metadata,
)
from mlxr.tokenizers.folder_config import DEFAULT_TEMPLATE, FolderConfig

logger = logging.getLogger(__name__)
ASSETS = Path(__file__).parent / "assets"
KERNEL_TARGETS = TARGETS  # what the GPU kernels can be printed for
MAX_SHOWN_CHARACTERS = 200
NAMED_MODELS: Mapping[str, str] = {"demo": "demo.gguf", "demo-draft": "demo-draft.gguf"}
DRAFT_MODELS: Mapping[str, str] = {"demo.gguf": "demo-draft"}  # that guess tokens for a named model, by its file
FOLDER_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt"})  # what is read of a folder beside its weights
Progress = Callable[[int, int], None]


class Group(Protocol):
    """The other GPUs that have shares of a model."""

    @property
    def failure(self) -> str | None:
        """Why they compute nothing more, None as long as they do."""

    def close(self) -> None:
        """Let go of them."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `weight_bytes` are what the weights take in memory, `file_bytes` what they take on disk.

    `fingerprint` (32 bytes) changes with everything that can change a bit of what the model computes: its weights and
    configuration, the kind of device and the build of the kernels. It is the same for all instruction sets and
    numbers of threads, as these change no bit. `draft` is a model that guesses tokens for this one, `head` a layer of
    its own file that does; their weights count among the bytes in memory.
    `group` are the GPUs that compute it together, if there are several.
    """

    name: str
    path: Path
    ctx: Context
    model: Decoder
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    load_s: float
    weight_bytes: int
    file_bytes: int
    file: GGUFFile | SafetensorsFolder
    fingerprint: bytes
    draft: LoadedModel | None = None
    head: DraftHead | EagleHead | None = None
    group: Group | None = None

    @property
    def kv_type(self) -> str:
        """How pages of this model's device keep numbers unless a setting says otherwise."""
        return default_kv_type(self.ctx)

    @property
    def experts(self) -> ExpertsSummary | None:
        """The model's experts, if it has some."""
        return summarise_experts(self.config)

    def load_adapter(self, path: str | Path, factor: float = 1.0) -> Adapter:
        """Read a low-rank adapter for this model: a PEFT folder or a GGUF file; `factor` times what it says.

        Raises NotFound, FormatError for a broken file, ModelError for one of another model, DeviceError where several
        GPUs compute the model.
        """
        if self.group is not None:
            raise DeviceError("several GPUs as one run no adapters; use one of them, or device 'cpu'")
        file = read_adapter(path)
        with _name_in_errors(file.path):
            return make_adapter(
                file.path.name,
                file.scale(factor),
                self.ctx,
                self.model.linear_weights(),
                self.config,
                is_gguf=file.is_gguf,
                base_is_gguf=isinstance(self.file, GGUFFile),
            )

    def load_head(self) -> DraftHead | None:
        """Prepare the layer of the file that drafts, if any; ModelError, naming the tensor, where it does not fit."""
        with _name_in_errors(self.path):
            layer = take_draft_layer(self.config, _read_tensors(self.file, self.config))
            return None if layer is None else DraftHead(self.model, layer)

    def load_eagle(self, path: Path) -> EagleHead:
        """Prepare the EAGLE-3 head of a folder for this model; ModelError, naming what does not fit."""
        with _name_in_errors(path):
            folder = open_safetensors(path)  # stays open with the tensors
            return EagleHead(self.model, folder.config, folder.tensors)

    def close(self) -> None:
        """Let go of the files."""
        self.file.close()
        if self.draft is not None:
            self.draft.close()
        if self.group is not None:
            self.group.close()

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a file format gives: tensors under their canonical names, and what stands beside them."""

    file: GGUFFile | SafetensorsFolder
    tensors: Mapping[str, WeightTensor]
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


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
) -> LoadedModel:
    """Open a model and make it ready on `device` ("auto": see `choose_device`) for contexts of up to `context_tokens`.

    With a `ctx`, the model shares the threads of whoever has it.

    Of its experts `expert_bytes` are in memory at most; see `Decoder`.

    With `needs_chat_template`, a model without one is refused with TemplateError before its weights are prepared.
    `progress(done, total)` is called while weights are prepared. Raises NotFound, FormatError, ModelError,
    TokenizerError, TemplateError or DeviceError.
    """
    start_s = time.perf_counter()
    path = find_model(path_or_name)
    ctx = ctx or Context(choose_device(device), threads, isa)
    parts = _open_folder(path) if path.is_dir() else _open_gguf(path)
    parts = replace(parts, config=parts.config.limit_context(context_tokens))
    if parts.chat_template is not None:
        parts.chat_template.prepare()
    try:
        if needs_chat_template and parts.chat_template is None:
            raise refuse_chat(str(path_or_name))
        with _name_in_errors(path):
            model = Decoder(ctx, parts.config, parts.tensors, progress, expert_bytes)
        fingerprint = _fingerprint(ctx, parts)
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
        weight_bytes=model.weight_bytes,
        file_bytes=sum(tensor.nbytes for tensor in parts.file.tensors.values()),
        file=parts.file,
        fingerprint=fingerprint,
    )


def _tell_residency(name: str, model: Decoder) -> None:
    """Say so where not all experts are in memory, as answers are slower then."""
    held, total = (nbytes / 2**30 for nbytes in model.expert_memory)
    if held < total:
        logger.warning(
            "%s: experts: %.1f of %.1f GiB resident, the rest is read from the file as it is used", name, held, total
        )


def find_model(path_or_name: str | Path) -> Path:
    """The file or folder of a model given by name or path; raises NotFound with what is near."""
    file_name = NAMED_MODELS.get(str(path_or_name))
    path = _expand_home(Path(path_or_name)) if file_name is None else ASSETS / file_name
    if not _holds(path.exists):
        if file_name is not None:
            raise NotFound(f"the model {path_or_name} is missing from this installation ({path}); install mlxr again")
        name = str(path_or_name)
        shown = name if len(name) <= MAX_SHOWN_CHARACTERS else name[:MAX_SHOWN_CHARACTERS] + "…"
        raise NotFound(f"{shown}: no such file, folder or named model{_suggest(path)}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise NotFound(f"{path}: the folder has no config.json, so it is no model{_list_models(path)}")
    if path.suffix == ".safetensors":
        raise NotFound(f"{path}: give the folder that holds it, with config.json and the tokenizer: {path.parent}")
    return path


def find_draft(path: Path) -> str | None:
    """The named model that guesses tokens for the model in a file, if mlxr comes with one."""
    return DRAFT_MODELS.get(path.name) if path.parent == ASSETS else None


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
    with _name_in_errors(path):
        return _open_source(path)


def _open_source(path: Path) -> SourceModel:
    if not path.is_dir():
        file = open_gguf(path)
        config = config_from_gguf(file.metadata, file.tensors)
        check_tensors(config, arrange_tensors(config, file.tensors))
        head_config = describe_draft_layer(config, file.tensors)
        return SourceModel(config, file.metadata, file.metadata_types, file.tensors, {}, {}, file, head_config)
    folder = open_safetensors(path)
    config = config_from_hf(folder.config)
    named = _read_tensors(folder, config)
    tensors = arrange_tensors(config, named)
    check_tensors(config, tensors)
    layer = _find_draft_layer(path, config, named)
    if config.tied_embeddings:  # a stored copy would say the contrary in GGUF
        tensors.pop("output.weight", None)
    metadata = gguf_metadata(config)
    if layer is not None:
        tensors, metadata = add_draft_layer(layer, config, tensors, metadata)
    tensors = {name: _order_columns(name, tensor, config) for name, tensor in tensors.items()}
    orders = {name: gguf_row_order(name, config) for name in tensors}
    return SourceModel(
        config=config,
        metadata={"general.name": path.resolve().name} | metadata | to_gguf_metadata(path),
        metadata_types={},
        tensors={gguf_name(name, config): tensor for name, tensor in tensors.items()},
        row_orders={name: order for name, order in orders.items() if order is not None},
        extra=gguf_rope_factors(config),
        file=folder,
        head_config=None if layer is None else layer.config,
    )


def _find_draft_layer(path: Path, config: ModelConfig, tensors: Mapping[str, WeightTensor]) -> DraftLayer | None:
    """The layer that drafts; one that does not fit is left out, as the model runs without."""
    try:
        return take_draft_layer(config, tensors)
    except ModelError as error:
        logger.warning("%s: %s; it is left out", path, error)
        return None


def read_footprint(path_or_name: str | Path) -> Footprint:
    """What a model's files say of its weights; no tensor is read. Raises as `load` does for models that do not run."""
    path = find_model(path_or_name)
    with _name_in_errors(path), open_safetensors(path) if path.is_dir() else open_gguf(path) as file:
        if isinstance(file, GGUFFile):
            config = config_from_gguf(file.metadata, file.tensors)
        else:
            config = config_from_hf(file.config)
        tensors = _read_tensors(file, config)
        layer = _find_draft_layer(path, config, tensors)
        return measure_footprint(config, arrange_tensors(config, tensors), 0 if layer is None else layer.nbytes)


def read_eagle(path: Path) -> ModelConfig | None:
    """The sizes of the EAGLE-3 head in a folder; None for other models. Raises FormatError and ModelError."""
    if not path.is_dir():
        return None
    config = read_json_object(path / "config.json")
    with _name_in_errors(path):
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


def list_files(model: SourceModel) -> tuple[Path, ...]:
    """All files that make up a model: the weights, and of a folder what is read beside them."""
    if isinstance(model.file, GGUFFile):
        return tuple(model.file.paths)
    weights = tuple(model.file.paths)
    beside = [path for path in weights[0].parent.iterdir() if path.suffix in FOLDER_SUFFIXES and path.is_file()]
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


@contextmanager
def _name_in_errors(path: Path) -> Iterator[None]:
    """Errors about what a model's files say begin with its path, unless they name it already."""
    try:
        yield
    except (ModelError, TokenizerError, TemplateError) as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


def _open_gguf(path: Path) -> _Parts:
    file = open_gguf(path)
    try:
        with _name_in_errors(path):
            config = config_from_gguf(file.metadata, file.tensors)
            tokenizer = from_gguf(file.metadata)
            return _Parts(file, file.tensors, config, tokenizer, chat_template_from_gguf(file.metadata, tokenizer))
    except BaseException:
        file.close()
        raise


def _read_tensors(file: GGUFFile | SafetensorsFolder, config: ModelConfig) -> Mapping[str, WeightTensor]:
    """The tensors of a file by canonical name, or by GGUF's."""
    if isinstance(file, GGUFFile):
        return file.tensors
    return _name_tensors(join_quantised(file.tensors, file.config), config)


def _name_tensors(tensors: Mapping[str, WeightTensor], config: ModelConfig) -> dict[str, WeightTensor]:
    """The tensors of a folder by canonical name, with the values that they have in GGUF."""
    row = by_name(config.architecture)
    named = rename_hf_tensors(tensors, row)
    if row.mixture is not None and row.mixture.interleaved:
        part_alternating(named)
    return {name: _arrange(name, tensor, row) for name, tensor in named.items()}


def _arrange(name: str, tensor: WeightTensor, row: Architecture) -> WeightTensor:
    """A tensor of a folder with the values and the shape that it has in GGUF."""
    if name.endswith(".ssm_a"):  # folders have the logarithm of what states decay by
        return _make_floats(tensor, -np.exp(tensor.to_float32()))
    if adds_one(name, row):
        return _add_one(tensor)
    return tensor


def _add_one(tensor: WeightTensor) -> TensorSource:
    return _make_floats(tensor, tensor.to_float32() + np.float32(1.0))


def _make_floats(tensor: WeightTensor, values: NDArray[np.float32]) -> TensorSource:
    return TensorSource(tensor.name, "f32", tensor.shape, values.view(np.uint8).reshape(-1))


def _order_columns(name: str, tensor: Any, config: ModelConfig) -> Any:
    """A tensor with its columns in the order that they have in GGUF."""
    order = gguf_column_order(name, config)
    return tensor if order is None else Reordered(tensor, np.array(order, np.int32))


def _open_folder(path: Path) -> _Parts:
    file = open_safetensors(path)
    try:
        with _name_in_errors(path):
            config = config_from_hf(file.config)
            tokenizer = from_folder(path)
            tensors = _read_tensors(file, config)
            return _Parts(file, tensors, config, tokenizer, chat_template_from_folder(path, tokenizer))
    except BaseException:
        file.close()
        raise


def _fingerprint(ctx: Context, parts: _Parts) -> bytes:
    """See LoadedModel. Weights are read after they were prepared, while the file is still in the system's memory."""
    digest = hashlib.blake2b(repr(parts.config).encode(), digest_size=32)
    types = {name: (tensor.type_name, tensor.shape) for name, tensor in parts.tensors.items()}
    digest.update(repr(sorted(types.items())).encode())
    digest.update(hash_tensors(parts.file.tensors, parts.file.paths))
    if ctx.gpu is not None:
        digest.update(ctx.gpu.describe().encode())
    elif ctx.module is None:
        digest.update(f"{ctx.device}: numpy {np.__version__}".encode())
    else:
        digest.update(Path(ctx.module.__file__).read_bytes())
    return digest.digest()


def _expand_home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # ~name without such a user: then it is meant as written
        return path


def _holds(question: Callable[[], bool]) -> bool:
    """The answer to a question about a path; no for one that is too long to be a path."""
    try:
        return question()
    except OSError:
        return False


def _suggest(path: Path) -> str:
    """The end of a NotFound message: names and neighbouring models that look alike."""
    if not _holds(path.parent.is_dir):
        return f"; the folder {str(path.parent)[:MAX_SHOWN_CHARACTERS]} does not exist either"
    names = {*NAMED_MODELS, *(entry.name for entry in path.parent.iterdir() if _looks_like_model(entry))}
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else "; give a .gguf file, a Hugging Face folder, or demo"


def _list_models(folder: Path) -> str:
    found = sorted(str(entry) for entry in folder.iterdir() if _looks_like_model(entry))
    return f"; did you mean {' or '.join(found[:3])}?" if found else ""


def _looks_like_model(path: Path) -> bool:
    return path.suffix == ".gguf" or (path / "config.json").is_file()
