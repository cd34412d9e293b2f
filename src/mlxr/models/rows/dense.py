"""Families whose layers attend, with feed-forward blocks (Gemma 4 may have experts beside these): one row each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxr.models import families
from mlxr.models.architecture import Architecture, TensorRow
from mlxr.models.bias_config import BiasRow
from mlxr.models.mixture import MixtureRow
from mlxr.models.rope_config import RopeRow
from mlxr.models.rows.shared_parts import BY_BLOCK, GRANITE, LLAMA_ROPE, MAYBE_WINDOWS, QWEN_WINDOWS
from mlxr.models.scale_config import ScaleRow
from mlxr.models.window_config import WindowRow

_BOTH_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA: dict[str, Any] = {
    "build": families.build_gemma,
    "activation": "gelu_tanh",
    "tied_default": True,
}
_GEMMA_NAMES = _BOTH_NORMS | {"pre_feedforward_layernorm": "ffn_norm"}
_GEMMA_TENSORS = TensorRow(_GEMMA_NAMES, norms_from_one=True)
_COHERE: dict[str, Any] = {
    "build": families.build_cohere,
    "norm_kind": "layer",
    "tied_default": True,
    "biases": BY_BLOCK,
    "scales": ScaleRow(logits=True),
}
_COHERE_ROPE = RopeRow(gguf_interleaved=True, hf_interleaved=True)
_OLMO: dict[str, Any] = {
    "build": families.build_olmo,
    "qk_norm": True,
    "biases": BY_BLOCK,
    "tensors": TensorRow(_BOTH_NORMS),
}
_OLMO_WINDOWS = WindowRow(full_every=4, plain=True)

DENSE = (
    Architecture("llama", "llama", "LlamaForCausalLM", kv_heads_default=True, biases=BY_BLOCK, rope=LLAMA_ROPE),
    Architecture("mistral", "llama", "MistralForCausalLM", rope=LLAMA_ROPE, windows=WindowRow(in_folders=True)),
    Architecture("ministral3", "mistral3", "Ministral3ForCausalLM", rope=LLAMA_ROPE, windows=MAYBE_WINDOWS),
    Architecture(
        "phi3",
        "phi3",
        "Phi3ForCausalLM",
        kv_heads_default=True,
        windows=MAYBE_WINDOWS,
        tensors=TensorRow(is_joined=True),
    ),
    Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", biases=BiasRow(qkv=True), windows=QWEN_WINDOWS),
    Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", qk_norm=True, biases=BY_BLOCK, windows=QWEN_WINDOWS),
    Architecture(
        "gemma2",
        "gemma2",
        "Gemma2ForCausalLM",
        biases=BY_BLOCK,
        windows=WindowRow(in_folders=True, full_every=2),
        scales=ScaleRow(embeddings=True, softcaps=True, by_width_layers=46),
        tensors=_GEMMA_TENSORS,
        **_GEMMA,
    ),
    Architecture(
        "gemma3_text",
        "gemma3",
        "Gemma3ForCausalLM",
        qk_norm=True,
        biases=BY_BLOCK,
        windows=WindowRow(in_folders=True, full_every=6, theta=10000.0),
        scales=ScaleRow(embeddings=True, by_width_layers=62),
        tensors=_GEMMA_TENSORS,
        **_GEMMA,
    ),
    Architecture(
        "gemma4_text",
        "gemma4",
        "Gemma4ForCausalLM",
        qk_norm=True,
        two_sizes=True,
        rope=RopeRow(
            unstated={"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            states_factors=True,
        ),
        windows=WindowRow(in_folders=True, default=512, full_every=6, last_full=True, theta=10000.0),
        scales=ScaleRow(embeddings=True, softcaps=True, attention=1.0),
        tensors=TensorRow(_GEMMA_NAMES),
        mixture=MixtureRow(
            renormalises=True, switch_key="enable_moe_block", used_key="top_k_experts", expert_scales=True
        ),
        **_GEMMA | {"build": families.build_gemma4},
    ),
    Architecture("olmo2", "olmo2", "Olmo2ForCausalLM", windows=_OLMO_WINDOWS, **_OLMO),
    Architecture("olmo3", "olmo2", "Olmo3ForCausalLM", windows=replace(_OLMO_WINDOWS, in_folders=True), **_OLMO),
    Architecture("granite", "granite", "GraniteForCausalLM", **GRANITE),
    Architecture(
        "smollm3",
        "smollm3",
        "SmolLM3ForCausalLM",
        tied_default=True,
        biases=BY_BLOCK,
        rope=RopeRow(gguf_interleaved=True, still_every=4),
    ),
    Architecture(
        "cohere",
        "command-r",
        "CohereForCausalLM",
        kv_heads_default=True,
        context_keys=("model_max_length", "max_position_embeddings"),
        head_norm_key="use_qk_norm",
        rope=_COHERE_ROPE,
        **_COHERE,
    ),
    Architecture(
        "cohere2",
        "cohere2",
        "Cohere2ForCausalLM",
        rope=replace(_COHERE_ROPE, only_windows=True),
        windows=WindowRow(in_folders=True, full_every=4),
        **_COHERE,
    ),
    Architecture(
        "stablelm",
        "stablelm",
        "StableLmForCausalLM",
        build=families.build_stablelm,
        head_norm_key="qk_layernorm",
        parallel_key="use_parallel_residual",
        norm_kind="layer",
        rope=RopeRow(part=0.25),
    ),
    Architecture(
        "starcoder2",
        "starcoder2",
        "Starcoder2ForCausalLM",
        build=families.build_starcoder,
        activation="gelu_tanh",
        norm_kind="layer",
        tied_default=True,
        biases=BiasRow(by_use=True),
        windows=MAYBE_WINDOWS,
    ),
)
