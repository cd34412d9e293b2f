"""Which tensors a model has, and in which shapes: checked completely before any of them is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mlxr.core.errors import ModelError
from mlxr.kernels.sources import stack_vectors, take_halves
from mlxr.kernels.tensor import TensorSource
from mlxr.models.architectures import by_name
from mlxr.models.config import ModelConfig
from mlxr.models.experts import arrange_mixture, part_shared, rename_shared
from mlxr.models.layer_tensors import ATTENTION_GATE, PROJECTIONS, Shape, list_inputs_tensors, list_tensors
from mlxr.models.multipliers import multiply_weights
from mlxr.models.names import from_gguf_name
from mlxr.models.recurrent import BETAS_AND_ALPHAS, PARTED_BETAS, fold_tensors, part_betas
from mlxr.models.rope_factors import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from mlxr.models.specs import FeedForward, GatedDelta, LayerSpec

# What files of some families keep as one tensor, and the parts whose rows it holds one after the other.
_QKV = "attn_qkv.weight"
_JOINED: dict[str, tuple[str, ...]] = {
    _QKV: ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "ffn_up.weight": ("ffn_gate.weight", "ffn_up.weight"),
}
_DERIVED_SUFFIX = ".attn_rot_embd.weight"  # old GGUF files store what rope.freq_base says


def expected_tensors(config: ModelConfig, tensors: Collection[str] = ()) -> dict[str, Shape]:
    """Canonical name and shape of every tensor that a file of the model must have, which has those of these names."""
    table = (config.vocab_size, config.hidden)
    norm = by_name(config.architecture).tensors.output_norm
    expected: dict[str, Shape] = {"token_embd.weight": table, f"{norm}.weight": (config.hidden,)}
    if config.layer_specs[-1].norms.bias:
        expected[f"{norm}.bias"] = (config.hidden,)
    if not config.tied_embeddings:
        expected["output.weight"] = table
    if config.logit_bias:
        expected["output.bias"] = (config.vocab_size,)
    inputs = config.layer_specs[0].inputs
    if inputs is not None:
        expected |= list_inputs_tensors(inputs, config.layers, config.hidden, config.vocab_size)
    for index, layer in enumerate(config.layer_specs):
        for part, shape in _list_stored(layer, config, index, tensors).items():
            expected[f"blk.{index}.{part}"] = shape
    return expected


def _list_stored(layer: LayerSpec, config: ModelConfig, index: int, tensors: Collection[str]) -> dict[str, Shape]:
    """Name and shape of each tensor of a layer, as the file has them."""
    stored = dict(list_tensors(layer, config.hidden))
    for name, parts in _list_joined(layer, config, index, tensors).items():
        stored[name] = (sum(stored.pop(part)[0] for part in parts), config.hidden)
    if f"blk.{index}.{BETAS_AND_ALPHAS}" in tensors and isinstance(layer.recurrence, GatedDelta):
        stored[BETAS_AND_ALPHAS] = (sum(stored.pop(part)[0] for part in PARTED_BETAS), config.hidden)
    return stored


def _list_joined(
    layer: LayerSpec, config: ModelConfig, index: int, tensors: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """What a file has as one tensor of a layer, and the parts of these: all that its family joins, or q, k and v."""
    joined = _JOINED if by_name(config.architecture).tensors.is_joined else {}
    attention = layer.attention
    if attention is not None and f"blk.{index}.{_QKV}" in tensors:
        joined = joined | {_QKV: tuple(f"{name}.weight" for name in PROJECTIONS[attention.projected])}
    return joined


def arrange_tensors(config: ModelConfig, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The tensors by canonical name, with those of all experts of a layer as one stack (experts, rows, columns).

    Files may have a tensor for each expert, or gate and up of each expert as one; nothing is copied. The norms of all
    heads are one tensor (heads, head_dim), too, and small tensors of recurrent mixers have the shapes of GGUF files.
    Weights are multiplied by what a folder says beside them.
    Layers at the end that draft tokens are left out. Raises ModelError for an expert or a norm that is missing and
    for experts of different shapes.
    """
    drafting = find_drafting(config, tensors)
    arranged = {
        from_gguf_name(name, config): tensor for name, tensor in tensors.items() if _name_layer(name) not in drafting
    }
    if config.multipliers is not None:
        multiply_weights(arranged, config)
    for index, layer in enumerate(config.layer_specs):
        attention, prefix = layer.attention, f"blk.{index}."
        if attention is not None and attention.head_norms == "layer":
            for name, heads in (("attn_q_norm", attention.heads), ("attn_k_norm", attention.kv_heads)):
                _stack_norms(arranged, prefix + name, heads)
        if layer.mixture is not None:
            arrange_mixture(arranged, prefix, layer.mixture)
        elif isinstance(layer.feed_forward, FeedForward):
            rename_shared(arranged, prefix, layer.feed_forward)
        if layer.recurrence is not None:
            fold_tensors(arranged, prefix, layer.recurrence, config.hidden)
    return arranged


def find_drafting(config: ModelConfig, tensors: Collection[str]) -> set[str]:
    """The prefixes of the layers of a file that draft tokens, such as blk.40 or mtp.0; `draft_layer` reads them."""
    drafting = {_name_layer(name) for name in tensors if ".nextn." in name or name.startswith("mtp.")}
    return drafting - {f"blk.{index}" for index in range(config.layers)}


def _name_layer(name: str) -> str:
    return ".".join(name.split(".", 2)[:2])


def _stack_norms(tensors: dict[str, TensorSource], name: str, heads: int) -> None:
    if f"{name}.0.weight" not in tensors:
        return
    parts = [tensors.pop(f"{name}.{head}.weight", None) for head in range(heads)]
    if None in parts:
        raise ModelError(f"tensor {name}.{parts.index(None)}.weight is missing, the norm of one of {heads} heads")
    tensors[f"{name}.weight"] = stack_vectors(f"{name}.weight", [part for part in parts if part is not None])


def split_joined(config: ModelConfig, tensors: Mapping[str, TensorSource]) -> Mapping[str, TensorSource]:
    """The tensors that layers are made of, out of those that `check_tensors` found right: views of joined ones."""
    split = dict(tensors)
    for index in range(len(config.layer_specs)):
        _split_layer(split, config, index)
    return split


def _split_layer(split: dict[str, TensorSource], config: ModelConfig, index: int) -> None:
    """Part what a file has as one tensor of a layer."""
    layer = config.layer_specs[index]
    shapes = dict(list_tensors(layer, config.hidden))
    names = [name for name in split if name.startswith(f"blk.{index}.")]
    for name, parts in _list_joined(layer, config, index, names).items():
        joined, stop = split.pop(f"blk.{index}.{name}", None), 0
        if joined is None:
            continue
        for part in parts:
            start, stop = stop, stop + shapes[part][0]
            split[f"blk.{index}.{part}"] = joined.take_rows(start, stop)
    both = split.pop(f"blk.{index}.{BETAS_AND_ALPHAS}", None)
    if both is not None and isinstance(layer.recurrence, GatedDelta):
        parted = part_betas(both, layer.recurrence)
        split |= {f"blk.{index}.{name}": part for name, part in zip(PARTED_BETAS, parted, strict=True)}


def split_rows(config: ModelConfig, name: str, tensor: TensorSource) -> dict[str, TensorSource]:
    """The rows of `tensor`, one for each output of the file's tensor `name`, by the weights that layers multiply by.

    Raises ModelError for another number of rows than the file's tensor has.
    """
    prefix, index = _place(name, len(config.layer_specs))
    if index is None:
        return {name: tensor}
    layer, split = config.layer_specs[index], {name: tensor}
    stored = _list_stored(layer, config, index, (name,)).get(name.removeprefix(prefix))
    rows = None if stored is None else stored[0] if len(stored) > 1 else 1  # a vector multiplies as one row
    if rows not in (None, tensor.shape[0]):
        raise ModelError(f"tensor {name} has {tensor.shape[0]} rows, expected {rows}")
    if isinstance(layer.feed_forward, FeedForward):
        rename_shared(split, prefix, layer.feed_forward)
    elif layer.mixture is not None:
        part_shared(split, prefix, layer.mixture)
    if layer.recurrence is not None:
        fold_tensors(split, prefix, layer.recurrence, config.hidden)
    _split_layer(split, config, index)
    query = split.get(f"{prefix}attn_q.weight")
    if query is not None and layer.attention is not None and layer.attention.gated:
        halves = take_halves(query, layer.attention.heads)
        split |= zip((f"{prefix}attn_q.weight", prefix + ATTENTION_GATE), halves, strict=True)
    return split


def _place(name: str, layers: int) -> tuple[str, int | None]:
    """The prefix of a tensor of a layer, and the layer's number; None for one of no layer."""
    number = name.removeprefix("blk.").partition(".")[0]
    is_of_layer = name.startswith("blk.") and number.isdecimal() and int(number) < layers
    return f"blk.{number}.", int(number) if is_of_layer else None


def check_tensors(config: ModelConfig, tensors: Mapping[str, TensorSource]) -> None:
    """Raise ModelError naming the first tensor that is missing, has another shape, or has no place in the model."""
    expected = expected_tensors(config, tensors)
    for name, shape in expected.items():
        if name not in tensors:
            raise ModelError(
                f"tensor {name} is missing, which a {config.architecture} model of {config.layers} layers needs"
            )
        _check_shape(name, tensors[name].shape, shape, config)
    unread = {  # some files have them in layers that read the keys and values of others
        f"blk.{index}.{name}.weight"
        for index, layer in enumerate(config.layer_specs)
        if layer.attention is not None and layer.attention.reads is not None
        for name in ("attn_k", "attn_v", "attn_k_norm")
    }
    has_longrope = config.rope_scaling is not None and config.rope_scaling.kind == "longrope"
    for name, tensor in tensors.items():
        if name == ROPE_FACTORS or (has_longrope and name in (LONG_FACTORS, SHORT_FACTORS)):
            _check_shape(name, tensor.shape, (config.rope_dim // 2,), config)
        elif name == "output.weight" and config.tied_embeddings:
            # some folders store the copy that the configuration calls tied; the table is what counts
            _check_shape(name, tensor.shape, expected["token_embd.weight"], config)
        elif name not in expected and name not in unread and not name.endswith(_DERIVED_SUFFIX):
            why = "; mixture of experts is not supported there" if "_exps" in name or "gate_inp" in name else ""
            why = "; norms of queries and keys are not supported there" if "_q_norm." in name else why
            raise ModelError(
                f"tensor {name} has no place in a {config.architecture} model of {config.layers} layers{why}"
            )


def _check_shape(name: str, has: tuple[int, ...], wants: tuple[int, ...], config: ModelConfig) -> None:
    if has != wants:
        raise ModelError(
            f"tensor {name} has shape {has}, expected {wants} by hidden {config.hidden}, heads {config.heads}, "
            f"kv_heads {config.kv_heads}, head_dim {config.head_dim}, ffn {config.ffn}, vocab_size {config.vocab_size}"
        )
