"""The layer at the end of some models that drafts tokens, and its tensors in a file.

Such a layer (multi-token prediction) reads the state of a position after the final norm and the token that follows, and
predicts the token after that. It is one of its family's layers, after a product of both inputs, each normed; then come
a norm of its own, or the model's, and the model's output. Its tensors count as those of one more block in GGUF files
(`blk.N.nextn.*`, llama.cpp's src/models/qwen35.cpp and glm4-moe.cpp). No file so far has several such layers, of which
each would draft one place further: the first one drafts for all places then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.kernels.tensor import TensorSource
from mlxr.models.components import Layer
from mlxr.models.components.weights import Shape
from mlxr.models.model import Model
from mlxr.models.weights import arrange_tensors, split_joined

PRODUCT, TOKEN_NORM, STATE_NORM = "nextn.eh_proj.weight", "nextn.enorm", "nextn.hnorm"  # norms without .weight
HEAD_NORM, TABLE, OUTPUT = "nextn.shared_head_norm", "nextn.embed_tokens.weight", "nextn.shared_head_head.weight"


@frozen
class DraftLayer:
    """The layer of a file that drafts: `tensors` by name, those of the layer itself as if it were a model's first.

    `model` is a model of this layer alone.
    """

    model: Model
    tensors: Mapping[str, TensorSource]

    @property
    def layer(self) -> Layer:
        """The layer itself, without the parts around it."""
        return self.model.layers[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def describe_draft_layer(model: Model, tensors: Collection[str]) -> Model | None:
    """Return the layer that drafts, as a model of it alone; None if tensors of these names have none.

    Nothing else is looked at: the tensors may still not fit.
    """
    return None if _find_prefix(model, tensors) is None else _describe_alone(model)


def take_draft_layer(model: Model, tensors: Mapping[str, TensorSource]) -> DraftLayer | None:
    """Return the layer that drafts, from all tensors of a file; None without one.

    Raises ModelError, naming the tensor, for a layer that lacks one, or whose tensors do not fit.
    """
    prefix = _find_prefix(model, tensors)
    if prefix is None:
        return None
    own = {name.removeprefix(prefix + "."): tensor for name, tensor in tensors.items() if name.startswith(prefix + ".")}
    alone = _describe_alone(model)
    around = {name: tensor for name, tensor in own.items() if name.startswith("nextn.")}
    block = {f"blk.0.{name}": tensor for name, tensor in own.items() if name not in around}
    arranged = split_joined(alone, arrange_tensors(alone, block))
    expected = {f"blk.0.{name}": shape for name, shape in alone.layers[0].tensors(model.hidden)}
    _check(prefix, arranged, expected, optional={})
    hidden, table = model.hidden, (model.vocab_size, model.hidden)
    needed: dict[str, Shape] = {
        PRODUCT: (hidden, 2 * hidden),
        f"{TOKEN_NORM}.weight": (hidden,),
        f"{STATE_NORM}.weight": (hidden,),
    }
    _check(prefix, around, needed, optional={f"{HEAD_NORM}.weight": (hidden,), TABLE: table, OUTPUT: table})
    return DraftLayer(alone, {**arranged, **around})


def name_draft_layer(layer: DraftLayer, model: Model) -> dict[str, TensorSource]:
    """Return the tensors of a layer that drafts by their names as one more block of a model."""
    return {f"blk.{len(model.layers)}.{name.removeprefix('blk.0.')}": tensor for name, tensor in layer.tensors.items()}


def drop_draft_layer(metadata: Mapping[str, object]) -> dict[str, object]:
    """Return the metadata of a file without its layer that drafts, if it has one."""
    prefix = f"{metadata['general.architecture']}."
    kept = dict(metadata)
    drafting = kept.pop(f"{prefix}nextn_predict_layers", 0)
    blocks = kept[f"{prefix}block_count"]
    assert isinstance(drafting, int)
    assert isinstance(blocks, int)
    return kept | {f"{prefix}block_count": blocks - drafting}


def _find_prefix(model: Model, tensors: Collection[str]) -> str | None:
    """Return the prefix of the names of the layer's tensors, None without one."""
    if model.draft_layer is None:
        return None  # Nemotron's read fewer columns than the stream has
    prefix = f"blk.{len(model.layers)}"
    return prefix if f"{prefix}.{PRODUCT}" in tensors else None


def _describe_alone(model: Model) -> Model:
    """Return a model of the layer alone."""
    assert model.draft_layer is not None
    rotated = None if model.rotated is None else model.rotated.of_layer(len(model.layers))
    return replace(model, layers=(model.draft_layer,), rotated=rotated)


def _check(
    prefix: str, tensors: Mapping[str, TensorSource], needed: Mapping[str, Shape], optional: Mapping[str, Shape]
) -> None:
    for name in needed:
        if name not in tensors:
            raise ModelError(f"tensor {prefix}.{name.removeprefix('blk.0.')} is missing, of the layer that drafts")
    known = {**needed, **optional}
    for name, tensor in tensors.items():
        wanted, shown = known.get(name), f"{prefix}.{name.removeprefix('blk.0.')}"
        if wanted is None:
            raise ModelError(f"tensor {shown} has no place in the layer that drafts")
        if tensor.shape != wanted:
            raise ModelError(f"tensor {shown} has shape {tensor.shape}, expected {wanted} in the layer that drafts")
