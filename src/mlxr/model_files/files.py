"""The files of a model: finds them by a path or a name, opens and reads them, and describes them as GGUF for writing.

`read_contents` returns metadata and tensors by GGUF's names from any kind of model files. The pooling of a text's
states into one vector is read, from a number in GGUF or the modules of sentence-transformers, but never refused: a
model that pools in its own way may still answer.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mlxr.core.errors import ModelError, NotFound, TemplateError, TokenizerError
from mlxr.core.frozen import frozen
from mlxr.core.sampling import read_file_defaults
from mlxr.formats import (
    AffineBlocks,
    Float4Tensor,
    Float8Tensor,
    FloatGroups,
    GGUFFile,
    LevelsTensor,
    SafetensorsFolder,
    WeightSource,
    join_factors,
    join_quantised,
    open_gguf,
    open_safetensors,
)
from mlxr.formats.ggml_types import by_name
from mlxr.formats.recipes import RECIPES
from mlxr.formats.safetensors import read_json_list, read_json_object
from mlxr.kernels.sources import Decoded
from mlxr.kernels.tensor import TensorSource
from mlxr.model_files.text_rules import TextRules, read_folder_rules, read_gguf_rules
from mlxr.models import Model, list_unknown_keys, model_from_gguf
from mlxr.models.components.encoder import DENSE
from mlxr.models.draft_head import is_eagle, read_eagle_config
from mlxr.models.draft_layer import (
    DraftLayer,
    describe_draft_layer,
    drop_draft_layer,
    name_draft_layer,
    take_draft_layer,
)
from mlxr.models.families import read_folder, read_model
from mlxr.models.fields import OWN, Fields
from mlxr.models.folders.config import Statement
from mlxr.models.folders.tensors import convert_tensors, state_drafting
from mlxr.models.footprint import Footprint, measure_footprint
from mlxr.models.limits import MAX_WIDTH
from mlxr.models.weights import arrange_tensors, check_tensors, gguf_name
from mlxr.tokenizers import (
    ChatTemplate,
    Tokenizer,
    chat_template_from_folder,
    chat_template_from_gguf,
    from_folder,
    from_gguf,
    to_gguf_metadata,
)
from mlxr.tokenizers.folder import DEFAULT_TEMPLATE, FolderConfig

ASSETS = Path(__file__).parents[1] / "assets"
NAMED_MODELS: Mapping[str, str] = {"demo": "demo.gguf", "demo-draft": "demo-draft.gguf"}
_DRAFT_MODELS: Mapping[str, str] = {"demo.gguf": "demo-draft"}  # by the file of the model for which they guess
_MAX_SHOWN_CHARACTERS = 200


def find_model(path_or_name: str | Path) -> Path:
    """Return the file or folder of a model given by name or path; raises NotFound with names that are alike."""
    file_name = NAMED_MODELS.get(str(path_or_name))
    path = _expand_home(Path(path_or_name)) if file_name is None else ASSETS / file_name
    if not _holds(path.exists):
        if file_name is not None:
            raise NotFound(f"the model {path_or_name} is missing from this installation ({path}); install mlxr again")
        name = str(path_or_name)
        shown = name if len(name) <= _MAX_SHOWN_CHARACTERS else name[:_MAX_SHOWN_CHARACTERS] + "…"
        raise NotFound(f"{shown}: no such file, folder or named model{_suggest(path)}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise NotFound(f"{path}: the folder has no config.json, so it is no model{_list_models(path)}")
    if path.suffix == ".safetensors":
        raise NotFound(f"{path}: give the folder that holds it, with config.json and the tokenizer: {path.parent}")
    return path


def find_draft(path: Path) -> str | None:
    """Return the named model that guesses tokens for the model in a file, if mlxr comes with one."""
    return _DRAFT_MODELS.get(path.name) if path.parent == ASSETS else None


def _expand_home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # ~name without such a user: it is meant as written
        return path


def _holds(question: Callable[[], bool]) -> bool:
    """Return the answer to a question about a path; False for one that is too long to be a path."""
    try:
        return question()
    except OSError:
        return False


def _suggest(path: Path) -> str:
    """Return the end of a NotFound message: names and neighbouring models that look alike."""
    if not _holds(path.parent.is_dir):
        return f"; the folder {str(path.parent)[:_MAX_SHOWN_CHARACTERS]} does not exist either"
    near = find_near(path)
    return f"; did you mean {' or '.join(near)}?" if near else "; give a .gguf file, a Hugging Face folder, or demo"


def find_near(path: Path) -> list[str]:
    """Return names, spelt like that of `path`, of models beside it and of those that mlxr brings; endings are
    ignored."""
    if not _holds(path.parent.is_dir):
        return []
    names = {name.removesuffix(".gguf").lower(): name for name in NAMED_MODELS}
    names |= {
        entry.name.removesuffix(".gguf").lower(): entry.name
        for entry in path.parent.iterdir()
        if _looks_like_model(entry)
    }
    wanted = path.name.removesuffix(".gguf").lower()
    return [names[near] for near in difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)]


def _list_models(folder: Path) -> str:
    found = sorted(str(entry) for entry in folder.iterdir() if _looks_like_model(entry))
    return f"; did you mean {' or '.join(found[:3])}?" if found else ""


def _looks_like_model(path: Path) -> bool:
    return path.suffix == ".gguf" or (path / "config.json").is_file()


GGUF_POOLINGS = ("none", "mean", "cls", "last", "rank")  # by their numbers in GGUF
GGUF_KEY = "pooling_type"
_MODULES, _POOLING, _WEIGHTS = "modules.json", "1_Pooling/config.json", "model.safetensors"
_FOLDER_POOLINGS = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}
_FOLDER_WORDS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_DENSE_MODULE = "Dense"  # at most two of them, behind the pooling
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize", _DENSE_MODULE)  # vectors get the length 1 in any case
_DENSE_ACTIVATIONS: Mapping[str, str] = {"Identity": "none", "Tanh": "tanh", "GELU": "gelu_erf", "SiLU": "silu"}


def read_gguf_pooling(metadata: Mapping[str, object]) -> str | None:
    """Return the pooling that a GGUF file states: `mean`, `cls`, `last`, `rank`, `none` or another; None without
    one."""
    value = metadata.get(f"{metadata.get('general.architecture')}.{GGUF_KEY}")
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(GGUF_POOLINGS):
        return GGUF_POOLINGS[value]
    return f"{GGUF_KEY} {value!r:.40}"


def is_for_text(config: Model, pooling: str | None) -> bool:
    """True if a model is made to write text: no encoder, and none whose files state how it makes vectors or ranks."""
    return config.has_output and pooling not in GGUF_POOLINGS[1:]


def read_folder_pooling(folder: Path) -> str | None:
    """Return the pooling that a folder states, as for a GGUF file. Raises FormatError for files that are no JSON."""
    place, others = _read_modules(folder)
    if others:
        return f"a module {others[0]}"
    if not (folder / place).is_file():
        return None
    stated = read_json_object(folder / place)
    if isinstance(word := stated.get("pooling_mode"), str):
        return _FOLDER_WORDS.get(word, word)
    names = [
        str(key).removeprefix("pooling_mode_") for key, value in stated.items() if "pooling_mode_" in key and value
    ]
    if not names:
        return None
    return _FOLDER_POOLINGS.get(names[0], names[0]) if len(names) == 1 else " and ".join(names)


def _read_modules(folder: Path) -> tuple[str, list[str]]:
    """Return the place of the pooling's configuration, and the modules that change vectors in other ways."""
    if not (folder / _MODULES).is_file():
        return _POOLING, []
    kinds = _list_modules(folder)
    place = next((f"{path}/config.json" for kind, path in kinds if kind == "Pooling" and _is_below(path)), _POOLING)
    return place, [kind for kind, _ in kinds if kind not in _KNOWN_MODULES]


def _list_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the kinds of the modules of sentence-transformers, and the places of their files."""
    if not (folder / _MODULES).is_file():
        return []
    modules = [one for one in read_json_list(folder / _MODULES) if isinstance(one, Mapping)]
    return [(str(one.get("type")).rpartition(".")[2], str(one.get("path"))) for one in modules]


def _read_dense(folder: Path, stated: Statement) -> dict[str, TensorSource]:
    """Read the products of vectors in a folder's modules, and state them. Raises ModelError, naming the module."""
    found: dict[str, TensorSource] = {}
    paths = [path for kind, path in _list_modules(folder) if kind == _DENSE_MODULE]
    if len(paths) > len(DENSE):
        raise ModelError(f"{_MODULES} has {len(paths)} modules {_DENSE_MODULE}, expected at most {len(DENSE)}")
    for name, path in zip(DENSE, paths, strict=False):
        if not _is_below(path) or not (folder / path / _WEIGHTS).is_file():
            raise ModelError(f"{path}/{_WEIGHTS} of {_MODULES} is missing; save the model with safetensors")
        config = read_json_object(folder / path / "config.json")
        fields = Fields({f"{path}.{key}": value for key, value in config.items()}, f"{path}.")
        inputs, outputs = (fields.integer(f"{side}_features", 1, MAX_WIDTH) for side in ("in", "out"))
        kind = fields.text("activation_function", default="Tanh").rpartition(".")[2]
        if kind not in _DENSE_ACTIVATIONS:
            fields.refuse("activation_function", f"one of {', '.join(_DENSE_ACTIVATIONS)}")
        has_bias = fields.flag("bias", True)
        architecture = stated.values["general.architecture"]
        stated.values[f"{architecture}.{name}_feat_in"] = inputs
        stated.values[f"{architecture}.{name}_feat_out"] = outputs
        stated.put_own(f"{name}.bias", has_bias)
        if _DENSE_ACTIVATIONS[kind] != "none":
            stated.put_own(f"{name}.activation", _DENSE_ACTIVATIONS[kind])
        with open_safetensors(folder / path / _WEIGHTS) as weights:
            for end in ("weight", "bias") if has_bias else ("weight",):
                if f"linear.{end}" not in weights.tensors:
                    raise ModelError(f"{path}/{_WEIGHTS} has no tensor linear.{end}")
                values = np.array(weights.tensors[f"linear.{end}"].to_float32())
                found[f"{name}.{end}"] = Decoded(f"{name}.{end}", values)
    return found


def _is_below(path: str) -> bool:
    return bool(path) and "/" not in path and "\\" not in path and path not in (".", "..")


@frozen
class Contents:
    """The metadata and tensors in a model's files, with GGUF's names, and the model that they describe."""

    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorSource]
    config: Model


def read_contents(file: GGUFFile | SafetensorsFolder) -> Contents:
    """Return what the files of a model hold. Raises FormatError and ModelError, in the words of those files."""
    if isinstance(file, GGUFFile):
        found = join_factors(file.tensors)
        return Contents(file.metadata, found, model_from_gguf(file.metadata, found))
    stated = read_folder(file.config, file.tensors)
    dense = _read_dense(file.paths[0].parent, stated)
    config = read_model(stated)
    tensors = convert_tensors(join_quantised(file.tensors, file.config), stated, config) | dense
    return Contents(state_drafting(stated, config, tensors), tensors, config)


logger = logging.getLogger(__name__)
MAX_SHOWN_KEYS = 8


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Prefix errors about the contents of a model's files with its path, unless they name it already."""
    try:
        yield
    except (ModelError, TokenizerError, TemplateError) as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


@frozen
class ModelFiles:
    """An opened model: its tensors by their names in GGUF, its configuration and its tokenizer.

    `pooling` is the way in which texts become vectors by its files, None if they do not say; `text_rules` are their
    rules for texts before that.
    """

    file: GGUFFile | SafetensorsFolder
    tensors: Mapping[str, TensorSource]
    config: Model
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    pooling: str | None
    text_rules: TextRules


def open_model_files(path: Path) -> ModelFiles:
    """Open the files of a model; raises FormatError, ModelError or TokenizerError, naming the path."""
    return _open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_gguf(path: Path) -> ModelFiles:
    file = open_gguf(path)
    try:
        with name_in_errors(path):
            contents = read_contents(file)
            unknown = list_unknown_keys(file.metadata, file.tensors)
            if unknown:
                shown = ", ".join([*unknown[:MAX_SHOWN_KEYS], *["..."] * (len(unknown) > MAX_SHOWN_KEYS)])
                logger.warning("%s: has keys that mlxr does not know and that have no effect: %s", path, shown)
            tokenizer = from_gguf(file.metadata)
            template = chat_template_from_gguf(file.metadata, tokenizer)
            pooling, rules = read_gguf_pooling(file.metadata), read_gguf_rules(file.metadata)
            return ModelFiles(file, contents.tensors, contents.config, tokenizer, template, pooling, rules)
    except BaseException:
        file.close()
        raise


def _open_folder(path: Path) -> ModelFiles:
    file = open_safetensors(path)
    try:
        with name_in_errors(path):
            contents = read_contents(file)
            tokenizer = from_folder(path)
            template = chat_template_from_folder(path, tokenizer)
            pooling = read_folder_pooling(path) or ("rank" if contents.config.classifier else None)
            rules = read_folder_rules(path, _read_modules(path)[0], contents.config.hidden)
            return ModelFiles(file, contents.tensors, contents.config, tokenizer, template, pooling, rules)
    except BaseException:
        file.close()
        raise


# What llama.cpp wants of encoders: bytes as such, and how many types of tokens there are.
_CHARSMAP, _TYPE_COUNT = "tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.token_type_count"
_FOLDER_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt"})  # of files that are read beside a folder's weights


@frozen
class SourceModel:
    """A model as it would be written to GGUF: its tensors by their names there, in the order of the file."""

    config: Model
    metadata: Mapping[str, object]
    metadata_types: Mapping[str, str]  # of keys in the source file
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
    tokenizer = to_gguf_metadata(path)
    return SourceModel(
        config=config,
        metadata={"general.name": path.resolve().name}
        | dict(metadata)
        | _state_pooling(path, metadata)
        | read_folder_rules(path, _read_modules(path)[0], config.hidden).to_metadata()
        | tokenizer
        | ({_TYPE_COUNT: types} if (types := metadata.get(f"{OWN}token_types")) else {}),
        metadata_types={_CHARSMAP: "array[u8]"} if _CHARSMAP in tokenizer else {},
        tensors={gguf_name(name, config): tensor for name, tensor in tensors.items()},
        file=folder,
        head_config=None if layer is None else layer.model,
    )


def _state_pooling(path: Path, metadata: Mapping[str, object]) -> dict[str, object]:
    """Return the key for the folder's pooling, if it states one and GGUF has a number for it."""
    has_classifier = metadata.get(f"{OWN}classifier", "none") != "none"
    pooling = read_folder_pooling(path) or ("rank" if has_classifier else None)
    if pooling is not None and pooling not in GGUF_POOLINGS:
        logger.warning("%s: its vectors are made with %s, which GGUF cannot state; it is left out", path, pooling)
    key = f"{metadata['general.architecture']}.{GGUF_KEY}"
    return {key: GGUF_POOLINGS.index(pooling)} if pooling in GGUF_POOLINGS else {}


def find_draft_layer(path: Path, config: Model, tensors: Mapping[str, TensorSource]) -> DraftLayer | None:
    """Return the layer that drafts; one that does not fit is left out, as the model runs without."""
    try:
        return take_draft_layer(config, tensors)
    except ModelError as error:
        logger.warning("%s: %s; it is left out", path, error)
        return None


def list_files(model: SourceModel) -> tuple[Path, ...]:
    """Return all files that make up a model: the weights, and in a folder the files that are read beside them."""
    if isinstance(model.file, GGUFFile):
        return tuple(model.file.paths)
    weights = tuple(model.file.paths)
    beside = [path for path in weights[0].parent.iterdir() if path.suffix in _FOLDER_SUFFIXES and path.is_file()]
    return weights + tuple(sorted(set(beside) - set(weights)))


_NAMED = (AffineBlocks, Float4Tensor, Float8Tensor, FloatGroups, LevelsTensor)


def is_mostly_quantized(tensors: Mapping[str, WeightSource]) -> bool:
    """Return True if most weights are of types whose values share a scale."""
    sizes = Counter[bool]()
    for tensor in tensors.values():
        sizes[by_name(tensor.type_name).is_quantized] += math.prod(tensor.shape)
    return sizes[True] > sizes[False]


def name_quantization(model: SourceModel) -> str:
    """Return how the weights are stored, in ggml's words: the recipe that the file states, else the type of most bytes.

    A weight that a folder has quantised counts as its maker says: mlx_4bit, awq_4bit, gptq_3bit, int8, fp8.
    """
    file_type = model.metadata.get("general.file_type")
    recipe = next((recipe.name for recipe in RECIPES if recipe.file_type == file_type), None)
    if recipe is not None and isinstance(model.file, GGUFFile):
        return recipe.upper()
    sizes: dict[str, int] = {}
    for tensor in model.tensors.values():
        name = tensor.recipe if isinstance(tensor, _NAMED) else tensor.type_name
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return max(sizes, key=lambda name: sizes[name]).upper()


def read_footprint(path_or_name: str | Path) -> Footprint:
    """Return the sizes of a model's weights by its files; no tensor is read. Raises as `load` for models that do not
    run."""
    path = find_model(path_or_name)
    with name_in_errors(path), open_safetensors(path) if path.is_dir() else open_gguf(path) as file:
        contents = read_contents(file)
        config, tensors = contents.config, contents.tensors
        layer = find_draft_layer(path, config, tensors)
        return measure_footprint(config, arrange_tensors(config, tensors), 0 if layer is None else layer.nbytes)


def read_unknown_keys(path_or_name: str | Path) -> list[str]:
    """Return the keys of a GGUF file that describe the model but that mlxr does not read; none for a folder.

    Raises as `load` does for models that do not run.
    """
    path = find_model(path_or_name)
    if path.is_dir():
        return []
    with name_in_errors(path), open_gguf(path) as file:
        return list_unknown_keys(file.metadata, file.tensors)


def read_eagle(path: Path) -> Model | None:
    """Return the sizes of the EAGLE-3 head in a folder; None for other models. Raises FormatError and ModelError."""
    if not path.is_dir():
        return None
    config = read_json_object(path / "config.json")
    with name_in_errors(path):
        return read_eagle_config(config) if is_eagle(config) else None


def read_sampling(path_or_name: str | Path) -> dict[str, object]:
    """Return the sampling parameters that a model's files recommend, under Ollama's names for them.

    Raises NotFound if there is no such model, FormatError or TokenizerError for broken files.
    """
    path = find_model(path_or_name)
    if path.is_dir():
        return read_file_defaults(FolderConfig(path).name_sampling())
    if path.suffix != ".gguf":
        return {}
    with open_gguf(path) as file:
        return read_file_defaults(file.metadata)


def read_template(path_or_name: str | Path) -> str:
    """Return the source of a model's chat template, "" without one; raises as `read_sampling` does."""
    path = find_model(path_or_name)
    if path.is_dir():
        return FolderConfig(path).read_templates().get(DEFAULT_TEMPLATE, "")
    if path.suffix != ".gguf":
        return ""
    with open_gguf(path) as file:
        source = file.metadata.get("tokenizer.chat_template")
    return source if isinstance(source, str) else ""
