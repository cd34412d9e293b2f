"""Families whose layers attend, with experts: one row each."""

from __future__ import annotations

from mlxr.models import families
from mlxr.models.architecture import Architecture, TensorRow
from mlxr.models.bias_config import BiasRow
from mlxr.models.mixture import MixtureRow
from mlxr.models.rope_config import RopeRow
from mlxr.models.rows.shared_parts import (
    BY_BLOCK,
    GRANITE,
    GRANITE_MIXTURE,
    LLAMA_ROPE,
    MAYBE_WINDOWS,
    QWEN_WINDOWS,
    SIGMOID,
)
from mlxr.models.window_config import WindowRow

_FFN_NORM = {"ffn_norm": "post_attention_norm"}

MIXTURES = (
    Architecture(
        "mixtral",
        "llama",
        "MixtralForCausalLM",
        rope=LLAMA_ROPE,
        windows=MAYBE_WINDOWS,
        mixture=MixtureRow(("num_local_experts",), "intermediate_size", renormalises=True),
    ),
    Architecture(  # files state what its layer norms add to the variance as if these were RMS norms
        "phimoe",
        "phimoe",
        "PhimoeForCausalLM",
        older_class="PhiMoEForCausalLM",
        build=families.build_phi_moe,
        biases=BY_BLOCK,
        rope=RopeRow(theta=1e6, has_mscales=True),
        windows=MAYBE_WINDOWS,
        mixture=MixtureRow(
            ("num_local_experts",),
            "intermediate_size",
            scoring="softmax_chosen",
            jitter_key="router_jitter_noise",
        ),
    ),
    Architecture(
        "qwen2_moe",
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        biases=BiasRow(qkv=True),
        windows=QWEN_WINDOWS,
        mixture=MixtureRow(shared_key="shared_expert_intermediate_size", shared_gate=True),
    ),
    Architecture(
        "qwen3_moe",
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        biases=BY_BLOCK,
        windows=QWEN_WINDOWS,
        mixture=MixtureRow(renormalises=True),
    ),
    Architecture(
        "olmoe",
        "olmoe",
        "OlmoeForCausalLM",
        build=families.build_olmoe,
        qk_norm=True,
        kv_heads_default=True,
        biases=BY_BLOCK,
        mixture=MixtureRow(features_key="intermediate_size"),
    ),
    Architecture("granitemoe", "granitemoe", "GraniteMoeForCausalLM", mixture=GRANITE_MIXTURE, **GRANITE),
    Architecture("granitemoeshared", "granitemoe", "GraniteMoeSharedForCausalLM", mixture=GRANITE_MIXTURE, **GRANITE),
    Architecture(
        "gpt_oss",
        "gpt-oss",
        "GptOssForCausalLM",
        build=families.build_gpt_oss,
        biases=BY_BLOCK,
        rope=RopeRow(truncates_yarn=False),
        windows=WindowRow(in_folders=True, default=128, full_every=2),
        tensors=TensorRow(gguf_names=_FFN_NORM),
        mixture=MixtureRow(
            ("num_local_experts", "num_experts"),
            "intermediate_size",
            scoring="softmax_chosen",
            activation="clamped_swiglu",
            bias=True,
            interleaved=True,
        ),
    ),
    Architecture(
        "glm4_moe",
        "glm4moe",
        "Glm4MoeForCausalLM",
        head_norm_key="use_qk_norm",
        biases=BiasRow(qkv_key="attention_bias"),
        rope=RopeRow(part=0.5),
        tensors=TensorRow(gguf_names=_FFN_NORM),
        mixture=MixtureRow(
            ("n_routed_experts", "num_local_experts"),
            floor=1e-20,
            shared_key="n_shared_experts",
            shared="count",
            **SIGMOID,
        ),
    ),
)
