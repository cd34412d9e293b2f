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
from mlxr.models.architectures import by_name
from mlxr.models.components import GatedDelta
from mlxr.models.components.experts import part_alternating
from mlxr.models.config import ModelConfig
from mlxr.models.draft_layer import PRODUCT
from mlxr.models.folders.names import rename_hf_tensors
from mlxr.models.folders.registry import find_layout
from mlxr.models.folders.statement import Statement
from mlxr.models.names import gguf_name

_TABLE, _OUTPUT = "token_embd.weight", "output.weight"


def convert_tensors(
    tensors: Mapping[str, TensorSource], stated: Statement, config: ModelConfig
) -> dict[str, TensorSource]:
    """Return the tensors of a folder, by its own names, as those of a GGUF file; `config` is that of `stated`.

    Raises ModelError, naming the tensor, for a name that is not known and for a layout that is not supported.
    """
    return arrange_folder(rename_hf_tensors(tensors, stated.layout.names), stated, config)


def arrange_folder(
    tensors: Mapping[str, TensorSource], stated: Statement, config: ModelConfig
) -> dict[str, TensorSource]:
    """Return the tensors of a folder, by canonical name, as those of a GGUF file."""
    named = _place_drafting(tensors, config)
    if stated.layout.alternates:
        part_alternating(named)
    if stated.factors:
        _check_layout(named, config)
        if _TABLE in named:  # which the output reads, too, if it has no weight of its own: by another number
            named.setdefault(_OUTPUT, named[_TABLE])
    changed = {name: _change(name, tensor, stated, config) for name, tensor in named.items()}
    return {gguf_name(name, config): tensor for name, tensor in changed.items()} | stated.list_vectors()


def state_drafting(stated: Statement, config: ModelConfig, tensors: Mapping[str, TensorSource]) -> dict[str, object]:
    """Return the metadata of a model with these tensors, of which one more block may draft tokens."""
    if f"blk.{config.layers}.{PRODUCT}" not in tensors:
        return stated.values
    prefix = f"{stated.values['general.architecture']}."
    return stated.values | {f"{prefix}block_count": config.layers + 1, f"{prefix}nextn_predict_layers": 1}


def _place_drafting(tensors: Mapping[str, TensorSource], config: ModelConfig) -> dict[str, TensorSource]:
    """Name the first layer that drafts as one more block, and leave out others, and those of families without."""
    prefix, placed = f"blk.{config.layers}.", {}
    drafts = f"mtp.0.{PRODUCT}" in tensors and not by_name(config.architecture).single_blocks
    for name, tensor in tensors.items():
        if name.startswith("mtp.0.") and drafts:
            placed[prefix + name.removeprefix("mtp.0.")] = tensor
        elif not name.startswith("mtp."):
            placed[name] = tensor
    return placed


def _check_layout(tensors: Mapping[str, TensorSource], config: ModelConfig) -> None:
    """Raise ModelError for a folder that MLX wrote: depending on the version all of its weights are multiplied already,
    or some, and nothing says which."""
    for index in range(config.layers):
        conv = tensors.get(f"blk.{index}.ssm_conv1d.weight")
        if conv is not None and len(conv.shape) == 3 and conv.shape[2] == 1:  # channels last
            raise ModelError(
                f"tensor {conv.name} is laid out as MLX does, whose folders of {config.architecture} do not say which "
                "weights they have multiplied; take the original folder, or a GGUF file"
            )


def _change(name: str, tensor: TensorSource, stated: Statement, config: ModelConfig) -> TensorSource:
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
    rows, columns = order_rows(name, config), order_columns(name, config)
    if rows is not None and len(rows) == tensor.shape[0]:
        tensor = pick_rows(tensor, rows)
    if columns is not None and tensor.shape[1:] == (len(columns),):
        tensor = pick_columns(tensor, columns)
    return tensor


def _counts_from_one(name: str) -> bool:
    """Return true for a norm of those that some folders store less one."""
    return name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")


def order_rows(name: str, config: ModelConfig) -> list[int] | None:
    """Return which row of a folder's tensor becomes row i in GGUF, for each i; None when rows stay as they are.

    Files of architecture llama rotate neighbouring elements of a head, where folders rotate halves; so the rows (and
    biases) of q and k are reordered: pair i of a head, (i, i + rope_dim / 2), becomes rows (2i, 2i + 1). Gated delta
    nets have their value heads in another order there.
    """
    part = name.split(".", 2)[-1]
    row = by_name(config.architecture)
    if isinstance(config.recurrence, GatedDelta):
        return config.recurrence.order_rows(part) if row.recurrence.gguf_tiled else None
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads}.get(part.rsplit(".", 1)[0])
    if heads is None or not row.rope.gguf_interleaved or find_layout(config).turns_neighbours:
        return None
    half = config.rope_dim // 2
    head = [i + side * half for i in range(half) for side in (0, 1)] + list(range(config.rope_dim, config.head_dim))
    return [h * config.head_dim + row for h in range(heads) for row in head]


def order_columns(name: str, config: ModelConfig) -> list[int] | None:
    """Return which column of a folder's tensor becomes column i in GGUF; None when they stay as they are."""
    mixer = config.recurrence
    if not isinstance(mixer, GatedDelta) or not by_name(config.architecture).recurrence.gguf_tiled:
        return None
    return mixer.order_output() if name.endswith("ssm_out.weight") else None
