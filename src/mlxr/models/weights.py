"""The tensors that a model has, and their shapes: checked completely before any of them is read.

Canonical names are GGUF's, except that all weights of layers end in `.weight`, which some files leave out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from mlxr.core.errors import ModelError
from mlxr.kernels.sources import pick_rows, take_halves
from mlxr.kernels.tensor import TensorSource
from mlxr.models.components import NO_ROPE, FeedForward, GatedDelta, Layer, Rope
from mlxr.models.components.attention import GATE, QKV, QKV_OF_HEADS
from mlxr.models.components.feed_forward import GATE_AND_UP, ROUTER
from mlxr.models.components.recurrent import BETAS_AND_ALPHAS, PARTED_BETAS, is_convolution
from mlxr.models.components.weights import Shape
from mlxr.models.families import find_family
from mlxr.models.model import Model
from mlxr.models.rotations import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

_LAYER = re.compile(r"blk\.[0-9]+\.(.+)")


def gguf_name(name: str, model: Model) -> str:
    """Return the name of the tensor of that canonical name in GGUF files of the model's architecture."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name
    family = find_family(model.architecture)
    is_bare = layer[1].removesuffix(".weight") in family.bare_names
    return family.prefix + (name.removesuffix(".weight") if is_bare else name)


def from_gguf_name(name: str, model: Model) -> str:
    """Return the canonical name of a tensor by its name in GGUF files."""
    family = find_family(model.architecture)
    name = name.removeprefix(family.prefix) if name.startswith(f"{family.prefix}blk.") else name
    layer = _LAYER.fullmatch(name)
    is_bare = layer is not None and layer[1] in family.bare_names
    return f"{name}.weight" if is_bare else name


_DERIVED_SUFFIX = ".attn_rot_embd.weight"  # old GGUF files store the frequencies of rope.freq_base


def list_matrices(tensors: Mapping[str, TensorSource]) -> Iterator[TensorSource]:
    """List the matrices that may choose how results travel: all but routers, norms and convolutions, which are f32."""
    for name, tensor in tensors.items():
        is_wide = len(tensor.shape) >= 2 and name.endswith(".weight")
        if is_wide and ROUTER not in name and "_norm." not in name and not is_convolution(name):
            yield tensor


def expected_tensors(model: Model, tensors: Collection[str] = ()) -> dict[str, Shape]:
    """Return canonical name and shape of every tensor that a file of the model with these names must have."""
    expected: dict[str, Shape] = dict(model.end_tensors())
    inputs = model.layers[0].inputs
    if inputs is not None:
        expected |= inputs.model_tensors(len(model.layers), model.hidden, model.vocab_size)
    if model.layers[0].streams is not None:
        expected |= model.layers[0].streams.model_tensors(model.hidden)
    for index, layer in enumerate(model.layers):
        expected |= {} if layer.ngrams is None else layer.ngrams.model_tensors()
        for part, shape in _list_stored(layer, model, index, tensors).items():
            expected[f"blk.{index}.{part}"] = shape
    return expected


def _list_stored(layer: Layer, model: Model, index: int, tensors: Collection[str]) -> dict[str, Shape]:
    """Return name and shape of each tensor of a layer, as the file has them."""
    stored = dict(layer.tensors(model.hidden))
    for name, parts in _list_joined(layer, model, index, tensors).items():
        shapes = [stored.pop(part) for part in parts]
        stored[name] = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    if f"blk.{index}.{BETAS_AND_ALPHAS}" in tensors and isinstance(layer.recurrence, GatedDelta):
        stored[BETAS_AND_ALPHAS] = (sum(stored.pop(part)[0] for part in PARTED_BETAS), model.hidden)
    return stored


def _list_joined(layer: Layer, model: Model, index: int, tensors: Collection[str]) -> dict[str, tuple[str, ...]]:
    """List the tensors that a file has as one, and their parts: all that its family joins, or q, k and v."""
    joined, shapes = dict[str, tuple[str, ...]](), dict(layer.tensors(model.hidden))
    has_qkv = f"blk.{index}.{QKV}.weight" in tensors or not {QKV, QKV_OF_HEADS}.isdisjoint(model.joins)
    if layer.attention is not None and has_qkv:
        joined[QKV] = layer.attention.parts
    if isinstance(layer.feed_forward, FeedForward) and GATE_AND_UP in model.joins:
        joined[GATE_AND_UP] = layer.feed_forward.projections
    return {
        f"{name}.{end}": tuple(f"{part}.{end}" for part in parts)
        for name, parts in joined.items()
        for end in ("weight", "bias")
        if f"{parts[0]}.{end}" in shapes
    }


def arrange_tensors(model: Model, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the tensors by canonical name, with those of all experts of a layer as one stack (experts, rows, columns).

    Files may have a tensor for each expert, or gate and up of each expert as one; nothing is copied. The norms of all
    heads are one tensor (heads, head_dim), too, and small tensors of recurrent mixers have the shapes of GGUF files.
    Layers at the end that draft tokens are left out. Raises ModelError for an expert or a norm that is missing and
    for experts of different shapes.
    """
    drafting = find_drafting(model, tensors)
    arranged = {
        from_gguf_name(name, model): tensor for name, tensor in tensors.items() if _name_layer(name) not in drafting
    }
    for index, layer in enumerate(model.layers):
        layer.arrange(arranged, f"blk.{index}.", model.hidden)
    return arranged


def find_drafting(model: Model, tensors: Collection[str]) -> set[str]:
    """Return the prefixes of the layers of a file that draft tokens, such as blk.40; `draft_layer` reads them."""
    drafting = {_name_layer(name) for name in tensors if ".nextn." in name}
    return drafting - {f"blk.{index}" for index in range(len(model.layers))}


def _name_layer(name: str) -> str:
    return ".".join(name.split(".", 2)[:2])


def split_joined(model: Model, tensors: Mapping[str, TensorSource]) -> Mapping[str, TensorSource]:
    """Return the tensors that layers are made of, from those that `check_tensors` accepted: views of joined ones."""
    split = dict(tensors)
    for index in range(len(model.layers)):
        _split_layer(split, model, index)
    return split


def refuse_parted(model: Model, stored: Mapping[str, TensorSource], split: Mapping[str, TensorSource]) -> None:
    """Raise ModelError for a rotated tensor of a file if layers do not multiply by it as it is `stored`."""
    for name in () if model.rotated is None else sorted(model.rotated.names & stored.keys()):
        if name not in split or split[name].shape != stored[name].shape:
            raise ModelError(
                f"tensor {name} is rotated and has the weights of several products, which is not supported"
            )


def _split_layer(split: dict[str, TensorSource], model: Model, index: int) -> None:
    """Cut apart the tensors of a layer that a file has as one."""
    layer = model.layers[index]
    shapes = dict(layer.tensors(model.hidden))
    names = [name for name in split if name.startswith(f"blk.{index}.")]
    for name, parts in _list_joined(layer, model, index, names).items():
        joined, stop = split.pop(f"blk.{index}.{name}", None), 0
        if joined is None:
            continue
        if name.startswith(QKV) and layer.attention is not None and QKV_OF_HEADS in model.joins:
            joined = pick_rows(joined, layer.attention.order_joined())
        for part in parts:
            start, stop = stop, stop + shapes[part][0]
            split[f"blk.{index}.{part}"] = joined.take_rows(start, stop)
    both = split.pop(f"blk.{index}.{BETAS_AND_ALPHAS}", None)
    if both is not None and isinstance(layer.recurrence, GatedDelta):
        parted = layer.recurrence.part_betas(both)
        split |= {f"blk.{index}.{name}": part for name, part in zip(PARTED_BETAS, parted, strict=True)}


def split_rows(model: Model, name: str, tensor: TensorSource) -> dict[str, TensorSource]:
    """Return the rows of `tensor`, one for each output of the file's tensor `name`, by the weights that layers multiply
    by.

    Raises ModelError for another number of rows than the file's tensor has.
    """
    prefix, index = _place(name, len(model.layers))
    if index is None:
        return {name: tensor}
    layer, split = model.layers[index], {name: tensor}
    stored = _list_stored(layer, model, index, (name,)).get(name.removeprefix(prefix))
    rows = None if stored is None else stored[0] if len(stored) > 1 else 1  # a vector multiplies as one row
    if rows not in (None, tensor.shape[0]):
        raise ModelError(f"tensor {name} has {tensor.shape[0]} rows, expected {rows}")
    if isinstance(layer.feed_forward, FeedForward):
        layer.feed_forward.arrange(split, prefix)
    elif layer.experts is not None and layer.experts.shared is not None:
        layer.experts.shared.arrange(split, prefix)
    if layer.recurrence is not None:
        layer.recurrence.arrange(split, prefix, model.hidden)
    _split_layer(split, model, index)
    query = split.get(f"{prefix}attn_q.weight")
    if query is not None and layer.attention is not None and layer.attention.gated:
        halves = take_halves(query, layer.attention.heads)
        split |= zip((f"{prefix}attn_q.weight", prefix + GATE), halves, strict=True)
    return split


def _place(name: str, layers: int) -> tuple[str, int | None]:
    """Return the prefix of a tensor of a layer, and the layer's number; None for a tensor outside the layers."""
    number = name.removeprefix("blk.").partition(".")[0]
    is_of_layer = name.startswith("blk.") and number.isdecimal() and int(number) < layers
    return f"blk.{number}.", int(number) if is_of_layer else None


def check_tensors(model: Model, tensors: Mapping[str, TensorSource]) -> None:
    """Raise ModelError naming the first tensor that is missing, has another shape, or has no place in the model."""
    expected = expected_tensors(model, tensors)
    for name, shape in expected.items():
        if name not in tensors:
            raise ModelError(
                f"tensor {name} is missing, which a {model.architecture} model of {len(model.layers)} layers needs"
            )
        _check_shape(name, tensors[name].shape, shape, model)
    unread = {  # some files have them in layers that read the keys and values of others
        f"blk.{index}.{name}.weight"
        for index, layer in enumerate(model.layers)
        if layer.attention is not None and layer.attention.reads is not None
        for name in ("attn_k", "attn_v", "attn_k_norm")
    }
    rope = _find_rope(model)
    has_longrope = rope.scaling is not None and rope.scaling.kind == "longrope"
    for name, tensor in tensors.items():
        if name == ROPE_FACTORS or (has_longrope and name in (LONG_FACTORS, SHORT_FACTORS)):
            _check_shape(name, tensor.shape, (rope.dim // 2,), model)
        elif name == "output.weight" and model.is_tied:
            # some folders store the copy that the configuration calls tied; the table counts
            _check_shape(name, tensor.shape, expected["token_embd.weight"], model)
        elif name not in expected and name not in unread and not name.endswith(_DERIVED_SUFFIX):
            why = "; mixture of experts is not supported there" if "_exps" in name or "gate_inp" in name else ""
            why = "; norms of queries and keys are not supported there" if "_q_norm." in name else why
            raise ModelError(
                f"tensor {name} has no place in a {model.architecture} model of {len(model.layers)} layers{why}"
            )


def _find_rope(model: Model) -> Rope:
    """Return the rotation that the model's tensors of factors are for; one that turns nothing if no layer has it."""
    ropes = [layer.rope for layer in model.layers if layer.attention or layer.latent]
    return next((rope for rope in ropes if rope.has_factors), NO_ROPE)


def _check_shape(name: str, has: tuple[int, ...], wants: tuple[int, ...], model: Model) -> None:
    if has != wants:
        raise ModelError(
            f"tensor {name} has shape {has}, expected {wants} by hidden {model.hidden}, heads {model.heads}, "
            f"kv_heads {model.kv_heads}, vocab_size {model.vocab_size}"
        )
