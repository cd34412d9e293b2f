"""The tensors of a folder as those of a GGUF file: by its names, with its values, rows and columns in its order.

Nothing is read before it is asked for but a few small vectors. What a folder keeps in pieces (a tensor for each expert)
stays so, as in old GGUF files; `weights.arrange_tensors` joins them.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxr.core.errors import ModelError
from mlxr.kernels.converted import add_one, pick_columns, pick_rows, take_rates
from mlxr.kernels.scaled import scale_rows
from mlxr.kernels.tensor import TensorSource
from mlxr.models.components import GatedDelta, Layer
from mlxr.models.components.experts import part_alternating
from mlxr.models.draft_layer import PRODUCT
from mlxr.models.families import find_layout
from mlxr.models.folders.names import rename_hf_tensors
from mlxr.models.folders.statement import Statement
from mlxr.models.model import Model
from mlxr.models.names import gguf_name

_TABLE, _OUTPUT = "token_embd.weight", "output.weight"


def convert_tensors(tensors: Mapping[str, TensorSource], stated: Statement, model: Model) -> dict[str, TensorSource]:
    """Return the tensors of a folder, by its own names, as those of a GGUF file; `model` is that of `stated`.

    Raises ModelError, naming the tensor, for a name that is not known and for a layout that is not supported.
    """
    return arrange_folder(rename_hf_tensors(tensors, stated.layout.names), stated, model)


def arrange_folder(tensors: Mapping[str, TensorSource], stated: Statement, model: Model) -> dict[str, TensorSource]:
    """Return the tensors of a folder, by canonical name, as those of a GGUF file."""
    named = _place_drafting(tensors, model)
    if stated.layout.alternates:
        part_alternating(named)
    if stated.factors:
        _check_layout(named, model)
        if _TABLE in named:  # which the output reads, too, if it has no weight of its own: by another number
            named.setdefault(_OUTPUT, named[_TABLE])
    changed = {name: _change(name, tensor, stated, model) for name, tensor in named.items()}
    return {gguf_name(name, model): tensor for name, tensor in changed.items()} | stated.list_vectors()


def state_drafting(stated: Statement, model: Model, tensors: Mapping[str, TensorSource]) -> dict[str, object]:
    """Return the metadata of a model with these tensors, of which one more block may draft tokens."""
    if f"blk.{len(model.layers)}.{PRODUCT}" not in tensors:
        return stated.values
    prefix = f"{stated.values['general.architecture']}."
    return stated.values | {f"{prefix}block_count": len(model.layers) + 1, f"{prefix}nextn_predict_layers": 1}


def _place_drafting(tensors: Mapping[str, TensorSource], model: Model) -> dict[str, TensorSource]:
    """Name the first layer that drafts as one more block, and leave out others, and those of families without."""
    prefix, placed = f"blk.{len(model.layers)}.", {}
    drafts = f"mtp.0.{PRODUCT}" in tensors and model.draft_layer is not None
    for name, tensor in tensors.items():
        if name.startswith("mtp.0.") and drafts:
            placed[prefix + name.removeprefix("mtp.0.")] = tensor
        elif not name.startswith("mtp."):
            placed[name] = tensor
    return placed


def _check_layout(tensors: Mapping[str, TensorSource], model: Model) -> None:
    """Raise ModelError for a folder that MLX wrote: depending on the version all of its weights are multiplied already,
    or some, and nothing says which."""
    for index in range(len(model.layers)):
        conv = tensors.get(f"blk.{index}.ssm_conv1d.weight")
        if conv is not None and len(conv.shape) == 3 and conv.shape[2] == 1:  # channels last
            raise ModelError(
                f"tensor {conv.name} is laid out as MLX does, whose folders of {model.architecture} do not say which "
                "weights they have multiplied; take the original folder, or a GGUF file"
            )


def _change(name: str, tensor: TensorSource, stated: Statement, model: Model) -> TensorSource:
    """Return a tensor with the values, rows and columns that it has in GGUF."""
    if name.endswith(".ssm_a"):
        tensor = take_rates(tensor)
    if stated.layout.norms_from_one and _counts_from_one(name):
        tensor = add_one(tensor)
    factors = stated.factors.get(name) or stated.factors.get(name.split(".", 2)[-1])
    if factors is not None and len(tensor.shape) == 2:  # others have no place in the model
        counts = factors.counts or tensor.shape[:1]
        if sum(counts) == tensor.shape[0]:
            tensor = scale_rows(tensor, factors.factors, counts)
    rows, columns = order_rows(name, model), order_columns(name, model)
    if rows is not None and len(rows) == tensor.shape[0]:
        tensor = pick_rows(tensor, rows)
    if columns is not None and tensor.shape[1:] == (len(columns),):
        tensor = pick_columns(tensor, columns)
    return tensor


def _counts_from_one(name: str) -> bool:
    """Return true for a norm of those that some folders store less one."""
    return name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")


def order_rows(name: str, model: Model) -> list[int] | None:
    """Return which row of a folder's tensor becomes row i in GGUF, for each i; None when rows stay as they are.

    Files of architecture llama rotate neighbouring elements of a head, where folders rotate halves; so the rows (and
    biases) of q and k are reordered: pair i of a head, (i, i + dim / 2), becomes rows (2i, 2i + 1). Gated delta nets
    have their value heads in another order there.
    """
    layer, part = _find_layer(name, model)
    if layer is None:
        return None
    if isinstance(layer.recurrence, GatedDelta):
        return layer.recurrence.order_rows(part) if layer.recurrence.tiled else None
    attention, dim = layer.attention, model.interleaved_dim
    if attention is None or not dim or find_layout(model).turns_neighbours:
        return None
    heads = {"attn_q": attention.heads, "attn_k": attention.kv_heads}.get(part.rsplit(".", 1)[0])
    if heads is None:
        return None
    half = dim // 2
    head = [i + side * half for i in range(half) for side in (0, 1)] + list(range(dim, attention.head_dim))
    return [number * attention.head_dim + row for number in range(heads) for row in head]


def order_columns(name: str, model: Model) -> list[int] | None:
    """Return which column of a folder's tensor becomes column i in GGUF; None when they stay as they are."""
    layer, part = _find_layer(name, model)
    mixer = None if layer is None else layer.recurrence
    if not isinstance(mixer, GatedDelta) or not mixer.tiled or part != "ssm_out.weight":
        return None
    return mixer.order_output()


def _find_layer(name: str, model: Model) -> tuple[Layer | None, str]:
    """Return the layer of a tensor, None of one outside the layers, and what the layer calls it."""
    prefix, number, part = [*name.split(".", 2), "", ""][:3]
    is_of_layer = prefix == "blk" and number.isdecimal()
    if not is_of_layer or int(number) > len(model.layers):
        return None, part
    return model.draft_layer if int(number) == len(model.layers) else model.layers[int(number)], part
