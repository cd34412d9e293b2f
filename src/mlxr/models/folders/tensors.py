"""The tensors of a folder as those of a GGUF file: by its names, with its values, rows and columns in its order.

Nothing is read before it is asked for but a few small vectors. What a folder keeps in pieces (a tensor for each expert)
stays so, as in old GGUF files; `weights.arrange_tensors` joins them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from mlxr.core.errors import ModelError
from mlxr.kernels.sources import Columns, add_one, pick_columns, pick_rows, scale_rows, take_rates
from mlxr.kernels.tensor import TensorSource
from mlxr.models.components import GatedDelta, Layer
from mlxr.models.components.attention import QKV
from mlxr.models.components.encoder import POSITIONS
from mlxr.models.components.feed_forward import part_alternating, turn_stacks
from mlxr.models.draft_layer import PRODUCT
from mlxr.models.families import find_layout
from mlxr.models.folders.config import Statement
from mlxr.models.model import Model
from mlxr.models.weights import gguf_name

Tensor = TypeVar("Tensor")
NO_NAMES: Mapping[str, str] = {}

MODEL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "model.embeddings.weight": "token_embd.weight",
    "model.norm_f.weight": "output_norm.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "model.final_layernorm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",  # the rows of gate, then those of up, as in GGUF
    "mlp.down_proj": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "router.proj": "ffn_gate_inp",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "eh_proj": "nextn.eh_proj",  # of layers at the end that draft tokens
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
} | {
    f"mlp.{module}.{part}_proj": f"ffn_{part}_shexp"
    for module in ("shared_expert", "shared_experts")
    for part in ("gate", "up", "down")
}
_HEAD_NORM = re.compile(r"self_attn\.([qk])_layernorm\.norms\.(0|[1-9][0-9]{0,3})")  # a tensor for each head
WHOLE_NAMES = {  # without .weight or .bias at their end
    "layer_scalar": "layer_output_scale.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "mlp.expert_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.expert_bias": "exp_probs_b.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.D": "ssm_d",
    "mixer.A_log": "ssm_a",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.D": "ssm_d",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
} | {f"hc_{block}_{part}": f"hc_{block}_{part}.weight" for block in ("attn", "ffn") for part in ("fn", "base", "scale")}
_EXPERT_NAMES = {
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "gate_up_proj": "ffn_gate_up",
    "w1": "ffn_gate",
    "w3": "ffn_up",
    "w2": "ffn_down",
}
_BLOCK = r"(?:mlp|mixer|feed_forward|block_sparse_moe)\."
_EXPERT = re.compile(_BLOCK + r"experts\.(0|[1-9][0-9]{0,3})\.(\w+)")
# Stacks of all experts: MLX's have a module for each, transformers' are parameters.
_STACKED = re.compile(rf"(?:{_BLOCK})?(?:switch_mlp|experts\.switch_glu|experts)\.(\w+_proj)(_bias)?")
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,4})\.(.+)\.(weight|bias)")
_LAYER_PREFIX = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,4})\.(.+)")
# Models that also see images have their text's tensors below one of two prefixes, and others that text does not need;
# Nemotron has a prefix of its own.
_TEXT_PREFIXES = {
    "language_model.": "",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "backbone.": "model.",
}
_OTHER_PARTS = "vision_tower|vision_model|visual|multi_modal_projector|connector|embed_vision|vision_embedder"
_OTHER_PARTS += "|audio_tower|embed_audio"
_NOT_TEXT = re.compile(
    rf"(model\.)?({_OTHER_PARTS})\..+"
    r"|(bert\.|roberta\.)?embeddings\.position_ids|cls\.(predictions|seq_relationship)\..+"  # of masked words
)
_OTHER_LAYER = re.compile(
    r"^(encoder\.(layers?|block)|(model\.)?transformer_encoder|(transformer\.)?(h|blocks)|gpt_neox\.layers)\."
)
_BARE = re.compile(r"^(layers\.[0-9]|embed_tokens\.|norm\.).+")  # names in models without a head
_ENCODER_PREFIXES = ("bert.", "roberta.")
# A layer that drafts tokens, where it stands apart from the others, and what stands around it (Qwen3.5).
_DRAFTING = re.compile(r"(?:model\.)?mtp\.(?:layers\.([0-9])\.)?(.+)")
_DRAFTING_NAMES = {
    "fc.weight": "nextn.eh_proj.weight",
    "pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
}
# What GGUF has no tensor for: old files store what theta says, or masks, and numbers of activations are metadata.
_NO_TENSOR = re.compile(
    r"model\.layers\.[0-9]+\.(self_attn\.rotary_emb\.inv_freq|attn\.(masked_)?bias|mlp\.act_fn\.(alpha_[np]|beta|eps)"
    r"|ple\.ple_embedding\.(layer_multipliers|ngram_heads_(offsets|vocab_sizes)))"
)


def canonical_name(hf_name: str, names: Mapping[str, str] = NO_NAMES) -> str | None:
    """Return the canonical name of a tensor of a Hugging Face folder, or None for one that holds nothing of its own, or
    is for images. `names` maps modules that have another meaning in this family.

    Layers that draft tokens and stand apart from the others are called mtp.0, mtp.1 and so on, as a name alone does not
    tell how many layers come before them. Raises ModelError for a name that is not known.
    """
    if _NOT_TEXT.fullmatch(hf_name):
        return None
    for prefix in _ENCODER_PREFIXES:
        hf_name = hf_name.removeprefix(prefix)
    hf_name = _OTHER_LAYER.sub("model.layers.", hf_name)
    hf_name = _BARE.sub(r"model.\g<0>", hf_name)
    if hf_name in names:
        return names[hf_name] or None
    for prefix, plain in _TEXT_PREFIXES.items():
        if hf_name.startswith(prefix):
            hf_name = plain + hf_name.removeprefix(prefix)
    drafting = _DRAFTING.fullmatch(hf_name)
    if drafting is not None:
        return _name_drafting(drafting[1], drafting[2], names)
    if hf_name in MODEL_NAMES:
        return MODEL_NAMES[hf_name]
    layer = _LAYER.fullmatch(hf_name)
    whole = _LAYER_PREFIX.fullmatch(hf_name)
    own = None if layer is None else names.get(layer[2], LAYER_NAMES.get(layer[2]))
    if layer is not None and own is not None:
        return f"blk.{layer[1]}.{own}.{layer[3]}"
    head_norm = None if layer is None else _HEAD_NORM.fullmatch(layer[2])
    if layer is not None and head_norm is not None:
        return f"blk.{layer[1]}.attn_{head_norm[1]}_norm.{head_norm[2]}.{layer[3]}"
    entire = None if whole is None else names.get(whole[2], WHOLE_NAMES.get(whole[2]))
    if whole is not None and entire is not None:
        return f"blk.{whole[1]}.{entire}"
    if layer is not None:
        part = _name_expert(layer[2], layer[3])
    else:
        part = None if whole is None else _name_expert(whole[2], "weight")
    if whole is not None and part is not None:
        return f"blk.{whole[1]}.{part}"
    if _NO_TENSOR.fullmatch(hf_name):
        return None
    raise ModelError(f"tensor {hf_name} is not one of a supported model")


def _name_drafting(layer: str | None, part: str, names: Mapping[str, str]) -> str | None:
    """Return the canonical name of a tensor of a layer that drafts, None for one that no family here has."""
    if layer is None:
        return f"mtp.0.{_DRAFTING_NAMES[part]}" if part in _DRAFTING_NAMES else None
    try:
        name = canonical_name(f"model.layers.{layer}.{part}", names)
    except ModelError:
        return None
    return None if name is None else f"mtp.{name.removeprefix('blk.')}"


def _name_expert(module: str, part: str) -> str | None:
    """Return the canonical name of a tensor of one expert, as old GGUF files spell it, or of a stack of all."""
    expert, stack = _EXPERT.fullmatch(module), _STACKED.fullmatch(module)
    if expert is not None and expert[2] in _EXPERT_NAMES:
        return f"{_EXPERT_NAMES[expert[2]]}.{expert[1]}.{part}"
    if stack is not None and stack[1] in _EXPERT_NAMES:
        return f"{_EXPERT_NAMES[stack[1]]}_exps.{'bias' if stack[2] else part}"
    return None


def rename_hf_tensors(tensors: Mapping[str, Tensor], names: Mapping[str, str] = NO_NAMES) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face folder by canonical name, without those that hold nothing of their own."""
    named = {canonical_name(name, names): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in named.items() if name is not None}


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
    if stated.layout.columns_first:
        turn_stacks(named)
    is_parted = f"{model.architecture}.attention.key_length_mla" in stated.values
    for index, layer in enumerate((*model.layers, *filter(None, [model.draft_layer]))):
        if layer.latent is not None and is_parted:
            layer.latent.arrange(named, f"blk.{index}.")
    if stated.factors:
        _check_layout(named, model)
        if _TABLE in named:  # the output reads it, too, if it has no weight of its own, with another factor
            named.setdefault(_OUTPUT, named[_TABLE])
    changed = {name: _change(name, tensor, stated, model) for name, tensor in named.items()}
    return {gguf_name(name, model): tensor for name, tensor in changed.items()} | stated.list_vectors()


def state_drafting(stated: Statement, model: Model, tensors: Mapping[str, TensorSource]) -> dict[str, object]:
    """Return the metadata of a model with these tensors, one block of which may draft tokens."""
    if f"blk.{len(model.layers)}.{PRODUCT}" not in tensors:
        return stated.values
    prefix = f"{stated.values['general.architecture']}."
    return stated.values | {f"{prefix}block_count": len(model.layers) + 1, f"{prefix}nextn_predict_layers": 1}


def _place_drafting(tensors: Mapping[str, TensorSource], model: Model) -> dict[str, TensorSource]:
    """Name the first layer that drafts as one more block; leave out further ones, and all in families without."""
    prefix, placed = f"blk.{len(model.layers)}.", {}
    drafts = f"mtp.0.{PRODUCT}" in tensors and model.draft_layer is not None
    for name, tensor in tensors.items():
        if name.startswith("mtp.0.") and drafts:
            placed[prefix + name.removeprefix("mtp.0.")] = tensor
        elif not name.startswith("mtp."):
            placed[name] = tensor
    return placed


def _check_layout(tensors: Mapping[str, TensorSource], model: Model) -> None:
    """Raise ModelError for a folder that MLX wrote: depending on the version all or some of its weights have been
    multiplied already, and nothing says which."""
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
    if name.endswith("exp_probs_b.bias") and tensor.shape[:-1] == (1,):  # a row of its own in ERNIE's folders
        tensor = tensor.take_matrix(0)
    if stated.layout.exchanges and name.startswith("blk.") and len(tensor.shape) == 2:
        tensor = Columns(tensor, range(tensor.shape[1]))
    if stated.layout.norms_from_one and _counts_from_one(name):
        tensor = add_one(tensor)
    if name == POSITIONS and len(tensor.shape) == 2 and tensor.shape[0] > stated.skipped_positions:
        tensor = tensor.take_rows(stated.skipped_positions, tensor.shape[0]) if stated.skipped_positions else tensor
    factors = stated.factors.get(name) or stated.factors.get(name.split(".", 2)[-1])
    if factors is not None and len(tensor.shape) == 2:  # others do not belong to the model
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
    """Return True for a norm that some folders store minus one."""
    return (name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")) or ".ple_norm_" in name


def order_rows(name: str, model: Model) -> list[int] | None:
    """Return which row of a folder's tensor becomes row i in GGUF, for each i; None when rows stay as they are.

    Files of architecture llama rotate neighbouring elements of a head, folders rotate halves; so the rows (and biases)
    of q and k are reordered: pair i of a head, (i, i + dim / 2), becomes rows (2i, 2i + 1). If folders rotate
    neighbours and files halves, it is the other way round. Gated delta nets have their value heads in another order
    there.
    """
    layer, part = _find_layer(name, model)
    if layer is None:
        return None
    if isinstance(layer.recurrence, GatedDelta):
        return layer.recurrence.order_rows(part) if layer.recurrence.tiled else None
    attention, dim, layout = layer.attention, model.interleaved_dim, find_layout(model)
    if attention is not None and layout.joins_heads and part.startswith(f"{QKV}."):
        return attention.order_joined()
    is_apart = attention is not None and attention.rope.sections is not None and layout.turns_neighbours and not dim
    if attention is None or not (is_apart or (dim and not layout.turns_neighbours)):
        return None
    heads = {"attn_q": attention.heads, "attn_k": attention.kv_heads}.get(part.rsplit(".", 1)[0])
    if heads is None:
        return None
    half, count = dim // 2, attention.rope.dim
    if dim:
        head = [i + side * half for i in range(half) for side in (0, 1)] + list(range(dim, attention.head_dim))
    else:
        head = [*range(0, count, 2), *range(1, count, 2), *range(count, attention.head_dim)]
    return [number * attention.head_dim + row for number in range(heads) for row in head]


def order_columns(name: str, model: Model) -> list[int] | None:
    """Return which column of a folder's tensor becomes column i in GGUF; None when they stay as they are."""
    layer, part = _find_layer(name, model)
    mixer = None if layer is None else layer.recurrence
    if not isinstance(mixer, GatedDelta) or not mixer.tiled or part != "ssm_out.weight":
        return None
    return mixer.order_output()


def _find_layer(name: str, model: Model) -> tuple[Layer | None, str]:
    """Return the layer of a tensor, None for one outside the layers, and the tensor's name in the layer."""
    prefix, number, part = [*name.split(".", 2), "", ""][:3]
    is_of_layer = prefix == "blk" and number.isdecimal()
    if not is_of_layer or int(number) > len(model.layers):
        return None, part
    return model.draft_layer if int(number) == len(model.layers) else model.layers[int(number)], part
