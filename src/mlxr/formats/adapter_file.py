"""Files of low-rank adapters (LoRA): a folder as PEFT writes it, or a GGUF file as llama.cpp reads it.

Knows the containers, the names of the pairs of matrices, and the scale of their product; not the weights of a model. An
option that would change the update and is not supported is refused by name.
Formats: https://huggingface.co/docs/peft/developer_guides/checkpoint and llama.cpp's convert_lora_to_gguf.py.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection
from dataclasses import field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import FormatError, NotFound
from mlxr.core.frozen import frozen
from mlxr.formats.gguf import open_gguf
from mlxr.formats.safetensors import SafetensorsFolder, read_json_object
from mlxr.formats.tensor import TensorSource

_WRAPPED = ".base_layer"
_ORDER = ("gate_up_proj", "down_proj")  # the order in which modules of experts have them
_EXPERTS = "experts"  # the module of a parameter that is named alone
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})")
_UNTURNED = (0, 19)  # from this version on PEFT has inputs and outputs of a stack's matrices the right way round


@frozen
class Parameter:
    """A parameter: its `key`, and the `name` of its weight (the module's name for the parameter `weight`)."""

    key: str
    name: str


@frozen
class TargetParameters:
    """The `target_parameters` of an adapter's configuration; `may_be_turned` is True if it is from a PEFT that
    exchanged inputs and outputs of stacks."""

    targets: tuple[str, ...]
    may_be_turned: bool

    def find(self, path: Path, module: str, modules: Collection[str]) -> Parameter | None:
        """The parameter whose matrices are under `module`, one of the file's `modules`; None for a plain module.

        Raises FormatError if matrices of the module's other target parameters are missing.
        """
        plain, depth = module, 0
        while plain.endswith(_WRAPPED):
            plain, depth = plain.removesuffix(_WRAPPED), depth + 1
        names = self._list_names(plain)
        if not names:
            return None
        there = [other for other in range(len(names)) if plain + other * _WRAPPED in modules]
        if depth >= len(names) or len(there) != len(names) or (len(names) > 1 and not set(names) <= set(_ORDER)):
            reason = f"has matrices of {len(there)} parameters, and {', '.join(names)} are its targets"
            raise FormatError(path, f"adapter of {plain[:120]!r}", None, reason)
        name = names[len(names) - 1 - depth]
        return Parameter(f"{plain}.{name}", plain if name == "weight" else f"{plain}.{name}")

    def _list_names(self, module: str) -> list[str]:
        """The target parameters of a module, in the module's order."""
        names = set()
        for target in self.targets:
            prefix, _, name = target.rpartition(".")
            if f".{module}".endswith(f".{prefix}" if prefix else f".{_EXPERTS}"):
                names.add(name)
        return sorted(names, key=lambda name: (_ORDER.index(name) if name in _ORDER else -1, name))


def read_target_parameters(path: Path, config: dict[str, object]) -> TargetParameters:
    """Read the field of an adapter_config.json. Raises FormatError unless it is a list of names."""
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise FormatError(path, "target_parameters", None, f"is {targets!r:.80}, not a list of names")
    return TargetParameters(tuple(targets), _read_version(config.get("peft_version")) < _UNTURNED)


def _read_version(version: object) -> tuple[int, ...]:
    """Major and minor number; (0, 0) if there is none, as before PEFT 0.18."""
    found = _VERSION.match(version) if isinstance(version, str) else None
    return (0, 0) if found is None else (int(found[1]), int(found[2]))


MAX_RANK = 256
MAX_EXPERTS = 4096
CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PEFT_KEY = re.compile(
    r"(?P<module>.+)\.lora_(?:(?P<side>[AB])(?:\.default)?\.weight|embedding_(?P<table>[AB])(?:\.default)?)"
)
_PEFT_BASE = re.compile(r"(?P<module>.+)\.base_layer\.weight")  # tables of embeddings, which PEFT saves unchanged
_GGUF_KEY = re.compile(
    r"(?P<module>.+)\.weight\.lora_(?:(?<=^token_embd\.weight\.lora_)(?P<table>[ab])|(?P<side>[ab]))"
)
_FLOATS = ("f32", "f16", "bf16")
_WITHOUT: dict[str, tuple[object, ...]] = {  # fields of adapter_config.json, and their values without effect
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "ensure_weight_tying": (False, None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # other values change the base's weights
}
_PATTERN = re.compile(r"(?:\w|\\?\.|\\d|[$^*+|-]){1,200}")
_MAX_QUANTIFIERS = 3
MAX_PATTERNS = 2048


@frozen(eq=False)
class LowRankPair:
    """One update, scale * b a, of the weight with the file's `name`: `a` (rank, in), `b` (out, rank), float32.

    A table of embeddings is a weight (vocabulary, hidden). If the weight is a stack of matrices, as of experts,
    `expert` is the number of one of them and their count. With `may_be_turned` the file may have exchanged in and out.
    """

    name: str
    a: NDArray[np.float32] = field(repr=False)
    b: NDArray[np.float32] = field(repr=False)
    scale: float
    expert: tuple[int, int] | None = None
    may_be_turned: bool = False


@frozen(eq=False)
class AdapterFile:
    """The contents of an adapter's file; names and row orders are GGUF's if `is_gguf`, else those of Hugging Face."""

    path: Path
    is_gguf: bool
    pairs: tuple[LowRankPair, ...]


def read_adapter(path: str | os.PathLike[str]) -> AdapterFile:
    """Read a PEFT folder or a GGUF adapter. NotFound: there is none; FormatError: it is broken or not supported."""
    place = find_adapter_files(path)[-1]
    return _read_peft(place.parent) if place.suffix == ".safetensors" else _read_gguf(place)


def measure_adapter(path: str | os.PathLike[str]) -> int:
    """The bytes of an adapter's matrices in its file, read from headers alone; raises as `read_adapter` does."""
    place = find_adapter_files(path)[-1]
    opened = SafetensorsFolder([place], {}) if place.suffix == ".safetensors" else open_gguf(place)
    with opened as file:
        return sum(tensor.nbytes for tensor in file.tensors.values())


def find_adapter_files(path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """The files of an adapter, the one with its matrices last. Raises NotFound if there is none at `path`."""
    place = Path(path)
    folder = place if place.is_dir() else place.parent if place.suffix == ".safetensors" else None
    files = (place,) if folder is None else (folder / CONFIG_NAME, folder / WEIGHTS_NAME)
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise NotFound(
            f"{missing}: no such adapter; give a folder with {CONFIG_NAME} and {WEIGHTS_NAME}, or a GGUF file"
        )
    return files


def _read_gguf(path: Path) -> AdapterFile:
    with open_gguf(path) as file:
        for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
            value = file.metadata.get(key)
            if value != wanted:
                raise FormatError(path, f"metadata {key!r}", None, f"is {value!r:.80}, and an adapter has {wanted!r}")
        alpha = _read_alpha(path, "adapter.lora.alpha", file.metadata.get("adapter.lora.alpha"))
        sides = _sort_sides(path, file.tensors, _GGUF_KEY)
        # llama.cpp takes an alpha of 0 for a scale of 1
        pairs = [
            made
            for name, pair in sides.items()
            for made in _make_pairs(path, f"{name}.weight", pair, lambda rank: alpha / rank if alpha else 1.0)
        ]
    return AdapterFile(path, is_gguf=True, pairs=tuple(pairs))


def _read_peft(folder: Path) -> AdapterFile:
    config_path, weights_path = folder / CONFIG_NAME, folder / WEIGHTS_NAME
    config = read_json_object(config_path)
    _check_config(config_path, config)
    parameters = read_target_parameters(config_path, config)
    alphas, ranks = _Patterns(config_path, config, "alpha_pattern"), _Patterns(config_path, config, "rank_pattern")
    with SafetensorsFolder([weights_path], {}) as file:
        tensors = {name: tensor for name, tensor in file.tensors.items() if not _is_base(name, file.tensors)}
        sides, pairs = _sort_sides(weights_path, tensors, _PEFT_KEY, _PREFIX), []
        for module, pair in sides.items():
            parameter = parameters.find(weights_path, module, sides)
            scale = _Scale(config_path, config, module if parameter is None else parameter.key, alphas, ranks)
            if parameter is None:
                pairs += _make_pairs(weights_path, module, pair, scale)
            else:
                made = _make_pairs(weights_path, parameter.name, _stack_sides(pair, scale.rank), scale)
                pairs += [replace(one, may_be_turned=parameters.may_be_turned) for one in made]
    return AdapterFile(folder, is_gguf=False, pairs=tuple(pairs))


def _check_config(path: Path, config: dict[str, object]) -> None:
    if config.get("peft_type") != "LORA":
        raise FormatError(path, "peft_type", None, f"is {config.get('peft_type')!r:.80}; only 'LORA' is supported")
    for name, silent in _WITHOUT.items():
        value = config.get(name)
        if not any(value is none or (type(value) is type(none) and value == none) for none in silent):
            raise FormatError(path, name, None, f"is {value!r:.80}, which is not supported")


class _Scale:
    """The factor of the product of a module's matrices, given their rank."""

    def __init__(self, path: Path, config: dict[str, object], module: str, alphas: _Patterns, ranks: _Patterns) -> None:
        self._alpha = alphas.find(module)
        if self._alpha is None:
            self._alpha = _read_alpha(path, "lora_alpha", config.get("lora_alpha"))
        rank = ranks.find(module)
        self._rank = config.get("r") if rank is None else rank
        self._path, self._module = path, module
        self._is_rooted = config.get("use_rslora") is True

    @property
    def rank(self) -> int:
        """The rank in the configuration, 0 if it is missing or invalid."""
        return int(self._rank) if isinstance(self._rank, int | float) and 1 <= self._rank <= MAX_RANK else 0

    def __call__(self, rank: int) -> float:
        """Return the scale; raises FormatError if the configuration has another rank."""
        if self._rank != rank:
            reason = f"says {self._rank!r:.40}, and the matrices of {self._module[:80]} have {rank}"
            raise FormatError(self._path, "r", None, reason)
        assert self._alpha is not None
        return self._alpha / (math.sqrt(rank) if self._is_rooted else rank)


class _Patterns:
    """A table of the configuration from patterns of module names to numbers, such as `rank_pattern`, compiled once."""

    def __init__(self, path: Path, config: dict[str, object], name: str) -> None:
        self._path, self._name = path, name
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict):
            raise FormatError(path, name, None, "is no object")
        if len(patterns) > MAX_PATTERNS:
            raise FormatError(path, name, None, f"has {len(patterns)} patterns, at most {MAX_PATTERNS} are read")
        self._rows = [(*self._compile(pattern), value) for pattern, value in patterns.items()]

    def find(self, module: str) -> float | None:
        """The number of the first pattern that matches the module; as in PEFT, at the end of its name, after a dot."""
        for ending, pattern, value in self._rows:
            if module.endswith(ending) and pattern.match(module):
                return _read_alpha(self._path, self._name, value)
        return None

    def _compile(self, pattern: str) -> tuple[str, re.Pattern[str]]:
        """The common ending of all names that match, which is quick to compare, and the compiled pattern."""
        quantifiers = pattern.count("*") + pattern.count("+")
        if not _PATTERN.fullmatch(pattern) or quantifiers > _MAX_QUANTIFIERS:
            raise FormatError(self._path, self._name, None, f"has the pattern {pattern!r:.80}, which is not supported")
        try:
            compiled = re.compile(rf"(.*\.)?({pattern})$")
        except re.error as error:
            raise FormatError(self._path, self._name, None, f"has the pattern {pattern!r:.80}: {error}") from error
        is_plain = re.fullmatch(r"[\w.-]+", pattern) is not None
        return pattern.rpartition(".")[2] if is_plain else "", compiled


def _read_alpha(path: Path, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise FormatError(path, name, None, f"is {value!r:.80}, not a finite number")
    return float(value)


def _is_base(name: str, tensors: Collection[str]) -> bool:
    """Return True if a tensor is a copy of the base's, which PEFT saves for embeddings and outputs that it updates."""
    match, sides = _PEFT_BASE.fullmatch(name), ("embedding_A", "A.weight")
    return match is not None and any(f"{match['module']}.lora_{side}" in tensors for side in sides)


@frozen
class _Sides:
    """Both matrices of a module in the file's form, or stacks of them, and whether it is a table of embeddings.

    With `experts` above 1 PEFT joins the matrices of all experts: `a` has the rows of one expert after another, and the
    columns of `b` have all experts of a rank side by side.
    """

    a: TensorSource
    b: TensorSource
    is_table: bool
    is_gguf: bool
    experts: int = 1


def _stack_sides(sides: _Sides, rank: int) -> _Sides:
    """Return a parameter's sides with `experts` set: the joined rank divided by the rank of one."""
    rows = sides.a.shape[0]
    return replace(sides, experts=rows // rank) if 0 < rank < rows and rows % rank == 0 else sides


def _sort_sides(
    path: Path, tensors: dict[str, TensorSource], key: re.Pattern[str], prefix: str = ""
) -> dict[str, _Sides]:
    """The two matrices of each module."""
    sides: dict[str, dict[str, TensorSource]] = {}
    tables = set()
    for name, tensor in tensors.items():
        match = key.fullmatch(name)
        if match is None:
            raise FormatError(
                path, f"tensor {name[:120]!r}", None, "is no pair of matrices of LoRA, which alone are read"
            )
        module, side = match["module"].removeprefix(prefix), (match["side"] or match["table"]).lower()
        own = sides.setdefault(module, {})
        if side in own:
            raise FormatError(path, f"tensor {name[:120]!r}", None, "is there twice")
        own[side] = tensor
        if match["table"]:
            tables.add(module)
    for module, own in sides.items():
        if len(own) != 2:
            raise FormatError(path, f"adapter of {module[:120]!r}", None, f"has {', '.join(own)} alone, not a and b")
    if not sides:
        raise FormatError(path, "file", None, "holds no matrices of an adapter")
    is_gguf = key is _GGUF_KEY
    return {module: _Sides(own["a"], own["b"], module in tables, is_gguf) for module, own in sides.items()}


def _make_pairs(path: Path, name: str, sides: _Sides, scale: Callable[[int], float]) -> list[LowRankPair]:
    """Return the pair of a weight, or the pairs of all matrices of a stack."""
    a, b, dimensions = sides.a, sides.b, (2, 3) if sides.is_gguf else (2,)
    for tensor in (a, b):
        if tensor.type_name not in _FLOATS or len(tensor.shape) not in dimensions:
            reason = f"is {tensor.type_name} {tensor.shape}; matrices of {', '.join(_FLOATS)} are read"
            raise FormatError(path, f"tensor {tensor.name[:120]!r}", None, reason)
    is_stack, experts = len(a.shape) == 3, a.shape[0] if len(a.shape) == 3 else sides.experts
    # GGUF has a column of `a` for each token of a table as a row
    rank = a.shape[1] if is_stack or (sides.is_table and sides.is_gguf) else a.shape[0] // experts
    fits = len(a.shape) == len(b.shape) and b.shape[-1] == (rank if is_stack else rank * experts)
    if not fits or (is_stack and b.shape[0] != experts) or not 1 <= rank <= MAX_RANK or experts > MAX_EXPERTS:
        reason = f"has a of shape {a.shape} and b of {b.shape}; ranks are equal and from 1 to {MAX_RANK}"
        raise FormatError(path, f"adapter of {name[:120]!r}", None, reason)
    first, second = (np.ascontiguousarray(tensor.to_float32()) for tensor in (a, b))
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise FormatError(path, f"adapter of {name[:120]!r}", None, "holds numbers that are not finite")
    if sides.is_table:
        first, second = np.ascontiguousarray(second.T), first if sides.is_gguf else np.ascontiguousarray(first.T)
    if not is_stack and experts == 1:
        return [LowRankPair(name, first, second, scale(rank))]
    if not is_stack:
        first, second = first.reshape(experts, rank, -1), second.reshape(-1, rank, experts).transpose(2, 0, 1)
    own = scale(rank)
    return [
        LowRankPair(name, first[expert], np.ascontiguousarray(second[expert]), own, (expert, experts))
        for expert in range(experts)
    ]
