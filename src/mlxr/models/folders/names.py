"""What the tensors of Hugging Face folders are called, by the canonical names, which are GGUF's but for a few."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from mlxr.core.errors import ModelError

Tensor = TypeVar("Tensor")
NO_NAMES: Mapping[str, str] = {}

_MODEL_NAMES = {
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
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
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
_WHOLE_NAMES = {  # without .weight or .bias at their end
    "layer_scalar": "layer_output_scale.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.D": "ssm_d",
    "mixer.A_log": "ssm_a",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.D": "ssm_d",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
}
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
_TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model.", "backbone.": "model."}
_OTHER_PARTS = "vision_tower|visual|multi_modal_projector|embed_vision|audio_tower|embed_audio"
_NOT_TEXT = re.compile(rf"(model\.)?({_OTHER_PARTS})\..+")
# A layer that drafts tokens, where it stands apart from the others, and what stands around it (Qwen3.5).
_DRAFTING = re.compile(r"(?:model\.)?mtp\.(?:layers\.([0-9])\.)?(.+)")
_DRAFTING_NAMES = {
    "fc.weight": "nextn.eh_proj.weight",
    "pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
}
_DERIVED = re.compile(r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq")  # old files store what theta says


def canonical_name(hf_name: str, names: Mapping[str, str] = NO_NAMES) -> str | None:
    """Return the canonical name of a tensor of a Hugging Face folder, or None for one that holds nothing of
    its own, or is for images. `names` are those of modules that mean something else in the family than elsewhere.

    Layers that draft tokens and stand apart from the others are called mtp.0, mtp.1 and so on, as a name alone does
    not tell how many layers stand before them. Raises ModelError for a name that is not known.
    """
    if _NOT_TEXT.fullmatch(hf_name):
        return None
    for prefix, plain in _TEXT_PREFIXES.items():
        if hf_name.startswith(prefix):
            hf_name = plain + hf_name.removeprefix(prefix)
    drafting = _DRAFTING.fullmatch(hf_name)
    if drafting is not None:
        return _name_drafting(drafting[1], drafting[2], names)
    if hf_name in _MODEL_NAMES:
        return _MODEL_NAMES[hf_name]
    layer = _LAYER.fullmatch(hf_name)
    whole = _LAYER_PREFIX.fullmatch(hf_name)
    own = None if layer is None else names.get(layer[2], _LAYER_NAMES.get(layer[2]))
    if layer is not None and own is not None:
        return f"blk.{layer[1]}.{own}.{layer[3]}"
    head_norm = None if layer is None else _HEAD_NORM.fullmatch(layer[2])
    if layer is not None and head_norm is not None:
        return f"blk.{layer[1]}.attn_{head_norm[1]}_norm.{head_norm[2]}.{layer[3]}"
    if whole is not None and whole[2] in _WHOLE_NAMES:
        return f"blk.{whole[1]}.{_WHOLE_NAMES[whole[2]]}"
    if layer is not None:
        part = _name_expert(layer[2], layer[3])
    else:
        part = None if whole is None else _name_expert(whole[2], "weight")
    if whole is not None and part is not None:
        return f"blk.{whole[1]}.{part}"
    if _DERIVED.fullmatch(hf_name):
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
    """The tensors of a Hugging Face folder by canonical name; those that hold nothing of their own are left out."""
    named = {canonical_name(name, names): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in named.items() if name is not None}
