"""Families with recurrent layers, with experts or without: one row each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxr.models import families
from mlxr.models.architecture import Architecture, TensorRow
from mlxr.models.mixture import MixtureRow
from mlxr.models.recurrence_config import FALCON_KEYS, NEMOTRON_KEYS, RecurrenceRow
from mlxr.models.rope_config import RopeRow
from mlxr.models.rows.shared_parts import BY_BLOCK, GRANITE, GRANITE_MIXTURE, GRANITE_NAMES, GRANITE_ROPE, SIGMOID

_MAMBA_NAMES = {
    f"mamba.{part}": f"ssm_{name}"
    for part, name in (("in_proj", "in"), ("conv1d", "conv1d"), ("norm", "norm"), ("out_proj", "out"))
}
_LFM2: dict[str, Any] = {
    "qk_norm": True,
    "eps_key": "norm_eps",
    "tied_default": True,
    "rope": RopeRow(theta=1e6),
    "recurrence": RecurrenceRow("short_conv"),
    "tensors": TensorRow(
        {
            "operator_norm": "attn_norm",
            "ffn_norm": "ffn_norm",
            "self_attn.q_layernorm": "attn_q_norm",
            "self_attn.k_layernorm": "attn_k_norm",
            "self_attn.out_proj": "attn_output",
            "conv.in_proj": "shortconv.in_proj",
            "conv.conv": "shortconv.conv",
            "conv.out_proj": "shortconv.out_proj",
            "feed_forward.gate": "ffn_gate_inp",
            "feed_forward.w1": "ffn_gate",
            "feed_forward.w3": "ffn_up",
            "feed_forward.w2": "ffn_down",
        },
        output_norm="token_embd_norm",
    ),
}
_QWEN35: dict[str, Any] = {
    "build": families.build_qwen35,
    "qk_norm": True,
    "gated_attention": True,
    "rope": RopeRow(part=0.25),
    "recurrence": RecurrenceRow("gated_delta", gguf_tiled=True),
    "tensors": TensorRow(
        {
            "post_attention_layernorm": "post_attention_norm",
            "linear_attn.in_proj_qkv": "attn_qkv",
            "linear_attn.in_proj_z": "attn_gate",
            "linear_attn.in_proj_b": "ssm_beta",
            "linear_attn.in_proj_a": "ssm_alpha",
            "linear_attn.in_proj_qkvz": "ssm_in",
            "linear_attn.in_proj_ba": "ssm_ba",
            "linear_attn.conv1d": "ssm_conv1d",
            "linear_attn.norm": "ssm_norm",
            "linear_attn.out_proj": "ssm_out",
        },
        norms_from_one=True,
    ),
}
_QWEN35_MIXTURE = MixtureRow(renormalises=True, shared_key="shared_expert_intermediate_size", shared_gate=True)

RECURRENT = (
    Architecture(
        "granitemoehybrid",
        "granitehybrid",
        "GraniteMoeHybridForCausalLM",
        dense_key="shared_intermediate_size",
        recurrence=RecurrenceRow("mamba2", attending=("granite", "granitemoeshared")),
        mixture=replace(GRANITE_MIXTURE, optional=True),
        **GRANITE
        | {
            "rope": replace(GRANITE_ROPE, switch_key="position_embedding_type"),
            "tensors": TensorRow(GRANITE_NAMES | _MAMBA_NAMES),
        },
    ),
    Architecture("lfm2", "lfm2", "Lfm2ForCausalLM", **_LFM2),
    Architecture(
        "lfm2_moe",
        "lfm2moe",
        "Lfm2MoeForCausalLM",
        mixture=MixtureRow(floor=1e-6, first_key="num_dense_layers", **SIGMOID),
        **_LFM2,
    ),
    Architecture(
        "falcon_h1",
        "falcon-h1",
        "FalconH1ForCausalLM",
        build=families.build_falcon,
        recurrence=RecurrenceRow("mamba2", keys=FALCON_KEYS, beside=True),
        tensors=TensorRow(
            _MAMBA_NAMES
            | {"pre_ff_layernorm": "ffn_norm"}
            | {f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
            gguf_bare=("ffn_norm",),
        ),
    ),
    Architecture(
        "nemotron_h",
        "nemotron_h",
        "NemotronHForCausalLM",
        gguf_experts_name="nemotron_h_moe",
        build=families.build_nemotron,
        activation="relu_squared",
        single_blocks=True,
        eps_key="layer_norm_epsilon",
        biases=BY_BLOCK,
        rope=RopeRow(still_every=1),
        recurrence=RecurrenceRow("mamba2", keys=NEMOTRON_KEYS),
        tensors=TensorRow(
            {
                "norm": "attn_norm",
                "mixer.q_proj": "attn_q",
                "mixer.k_proj": "attn_k",
                "mixer.v_proj": "attn_v",
                "mixer.o_proj": "attn_output",
                "mixer.in_proj": "ssm_in",
                "mixer.conv1d": "ssm_conv1d",
                "mixer.norm": "ssm_norm",
                "mixer.out_proj": "ssm_out",
                "mixer.up_proj": "ffn_up",
                "mixer.down_proj": "ffn_down",
                "mixer.gate": "ffn_gate_inp",
                "mixer.shared_experts.up_proj": "ffn_up_shexp",
                "mixer.shared_experts.down_proj": "ffn_down_shexp",
            }
        ),
        mixture=MixtureRow(
            ("n_routed_experts",),
            floor=1e-20,
            optional=True,
            gated=False,
            shared_key="moe_shared_expert_intermediate_size",
            **SIGMOID,
        ),
    ),
    Architecture("qwen3_5_text", "qwen35", "Qwen3_5ForCausalLM", **_QWEN35),
    Architecture("qwen3_5_moe_text", "qwen35moe", "Qwen3_5MoeForCausalLM", mixture=_QWEN35_MIXTURE, **_QWEN35),
    Architecture(
        "qwen3_next",
        "qwen3next",
        "Qwen3NextForCausalLM",
        biases=BY_BLOCK,
        mixture=_QWEN35_MIXTURE,
        **_QWEN35 | {"recurrence": RecurrenceRow("gated_delta")},
    ),
)
