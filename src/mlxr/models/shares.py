"""The share of a model that one of several ranks has, each of which computes its share of every product.

A rank has some of the attention heads, with their keys and values, some of the features of each feed-forward block, and
some of the vocabulary. Its layers say so. The shapes of these layers determine how tensors are cut: by rows if the rank
makes fewer outputs, by columns if it reads fewer inputs. In the latter case its result is a part of a sum, and the
first rank alone adds a bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.kernels.context import Context
from mlxr.kernels.sources import cut_columns, cut_vector
from mlxr.kernels.tensor import TensorSource
from mlxr.models.components import Attention, FeedForward, LatentAttention, Layer
from mlxr.models.components.weights import Shape
from mlxr.models.model import Model

BLOCKS = 256, 32, 1  # features and tokens are cut at multiples of the first of these of which there are enough
OUTPUT, OUTPUT_BIAS, TABLE = "output.weight", "output.bias", "token_embd.weight"


@frozen
class Share:
    """A rank's share of a model: its layers, and its tensors.

    `summed` names the weights whose products are parts of sums over all ranks; `columns` has the number of logits of
    each rank, and is empty if there is only one.
    """

    model: Model
    tensors: Mapping[str, TensorSource]
    summed: frozenset[str] = frozenset()
    columns: tuple[int, ...] = ()


@frozen
class Place:
    """One of several ranks: `rank` of `count`."""

    rank: int
    count: int


def take_share(ctx: Context, model: Model, tensors: Mapping[str, TensorSource]) -> Share:
    """Return the share of the context's rank, from the tensors that layers are made of; with one rank it is all.

    Raises ModelError, with the reason, for a model that cannot be shared.
    """
    ranks = None if ctx.gpu is None else ctx.gpu.ranks
    if ranks is None:
        return Share(model, tensors)
    return make_share(model, tensors, Place(ranks.rank, ranks.count))


def make_share(model: Model, tensors: Mapping[str, TensorSource], place: Place) -> Share:
    """Return the share of one of several ranks. Raises as above."""
    own, summed = share_tensors(model, tensors, place)
    return Share(share_model(model, place), own, summed, tuple(share_out(model.vocab_size, place.count)))


def share_model(model: Model, place: Place) -> Model:
    """Return the layers of one rank. Raises ModelError, with the reason, for a model that cannot be shared."""
    why = _find_obstacle(model, place.count)
    if why is not None:
        raise ModelError(f"the model cannot be shared by {place.count} GPUs: {why}")
    return replace(model, layers=tuple(_share_layer(layer, place) for layer in model.layers))


def _share_layer(layer: Layer, place: Place) -> Layer:
    attention, block = layer.mixer, layer.feed_forward
    assert isinstance(attention, Attention)
    assert isinstance(block, FeedForward)
    heads, kv_heads = attention.heads // place.count, attention.kv_heads // place.count
    return replace(
        layer,
        mixer=replace(attention, heads=heads, kv_heads=kv_heads),
        feed_forward=replace(block, features=share_out(block.features, place.count)[place.rank]),
    )


def share_out(features: int, count: int) -> list[int]:
    """Divide features, or tokens of a vocabulary, among the ranks: in whole blocks, as evenly as possible."""
    block = next(size for size in BLOCKS if size == 1 or features >= size * count)
    blocks = -(-features // block)
    ends = [min(features, blocks * (rank + 1) // count * block) for rank in range(count)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def share_tensors(
    model: Model, tensors: Mapping[str, TensorSource], place: Place
) -> tuple[dict[str, TensorSource], frozenset[str]]:
    """Return the tensors of one rank, from those that layers are made of, and the names of those that make summands.

    Raises ModelError if a share would cut blocks of quantised weights.
    """
    shared, parts = dict(tensors), set()
    models = [share_model(model, Place(rank, place.count)) for rank in range(place.count)]
    for index, layer in enumerate(model.layers):
        shapes = [dict(one.layers[index].tensors(model.hidden)) for one in models]
        for name, whole in layer.tensors(model.hidden):
            own, full = [shape[name] for shape in shapes], f"blk.{index}.{name}"
            if own[0] == whole or full not in tensors:
                continue
            shared[full] = _cut(tensors[full], whole, own, place.rank)
            if len(whole) == 2 and own[0][1] != whole[1]:
                parts.add(full)
                bias = f"{full.removesuffix('.weight')}.bias"
                if place.rank:
                    shared.pop(bias, None)
    rows = share_out(model.vocab_size, place.count)
    source = tensors[TABLE if model.is_tied else OUTPUT]
    start, stop = sum(rows[: place.rank]), sum(rows[: place.rank + 1])
    shared[OUTPUT] = source.take_rows(start, stop)
    if model.has_output_bias:
        shared[OUTPUT_BIAS] = cut_vector(tensors[OUTPUT_BIAS], start, stop)
    return shared, frozenset(parts)


def _cut(tensor: TensorSource, whole: Shape, own: Sequence[Shape], rank: int) -> TensorSource:
    """Return the part of rank `rank` along the one axis in which the ranks' shapes differ from that of the whole."""
    axis = next(number for number, size in enumerate(whole) if own[0][number] != size)
    lengths = [shape[axis] for shape in own]
    start, stop = sum(lengths[:rank]), sum(lengths[: rank + 1])
    if len(whole) == 1:
        return cut_vector(tensor, start, stop)
    return tensor.take_rows(start, stop) if axis == 0 else cut_columns(tensor, start, stop)


def _find_obstacle(model: Model, count: int) -> str | None:
    if not model.is_causal or model.dense or model.classifier:
        return "it is an encoder, or has products behind its layers"
    if model.rotated is not None:
        return "its weights are rotated"
    for index, layer in enumerate(model.layers):
        mixer, block = layer.mixer, layer.feed_forward
        if not isinstance(mixer, Attention):
            latent = isinstance(mixer, LatentAttention)
            kind = "has latent attention" if latent else "has no attention" if mixer is None else "is recurrent"
            return f"layer {index} {kind}"
        if not isinstance(block, FeedForward) or layer.beside is not None:
            return f"layer {index} has experts" if block is not None else f"layer {index} has no feed-forward block"
        if mixer.heads % count or mixer.kv_heads % count:
            return f"layer {index} has {mixer.heads} heads with {mixer.kv_heads} of keys, which {count} does not divide"
        if mixer.biases is not None:
            return f"layer {index} has scores that depend on the distance of keys, by the number of all heads"
        if mixer.head_norms == "joint" or mixer.inner_norm:
            return f"layer {index} norms all its heads together"
        if layer.inputs is not None:
            return "its layers have inputs of their own"
        if min(block.features, model.vocab_size) < count:
            return f"it has {block.features} features in layer {index}, and {model.vocab_size} tokens"
    return None
