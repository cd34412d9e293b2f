"""Families with recurrent layers."""

from __future__ import annotations

from typing import Any

from goldens.config import Config, make_config

# Three heads of Mamba-2 share a group; prompts are three of its chunks long.
_GRANITE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "mamba_n_heads": 6,
    "mamba_d_head": "auto",
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "position_embedding_type": "nope",
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.05,
    "logits_scaling": 2.5,
    "tie_word_embeddings": True,
}

CASES: dict[str, Config] = {
    # a feed-forward block of 160 features: two thirds of 160, times 1.3, in multiples of 32
    "lfm2": make_config(
        "lfm2",
        4,
        2,
        None,
        num_hidden_layers=4,
        rms_norm_eps=None,
        norm_eps=1e-4,
        rope_theta=50000.0,
        hidden_act=None,
        tie_word_embeddings=True,
        pad_token_id=0,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=True,
        block_ffn_dim_multiplier=1.3,
        block_multiple_of=32,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
    ),
    "qwen35": make_config(
        "qwen3_5_text",
        4,
        2,
        48,
        num_hidden_layers=4,
        rms_norm_eps=1e-4,
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.25},
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
    ),
    "granite4h": make_config(
        "granitemoehybrid",
        4,
        2,
        None,
        intermediate_size=64,
        shared_intermediate_size=160,
        num_local_experts=0,
        num_experts_per_tok=0,
        **_GRANITE,
    ),
    "granite4h-moe": make_config(
        "granitemoehybrid",
        4,
        2,
        None,
        intermediate_size=64,
        shared_intermediate_size=96,
        num_local_experts=8,
        num_experts_per_tok=3,
        **_GRANITE | {"position_embedding_type": "rope", "mamba_n_groups": 1, "mamba_d_head": 32},
    ),
    # all layers attend: a Granite 4 without H
    "granite4": make_config(
        "granitemoehybrid",
        4,
        2,
        None,
        intermediate_size=64,
        shared_intermediate_size=160,
        num_local_experts=0,
        num_experts_per_tok=0,
        **_GRANITE | {"position_embedding_type": "rope", "layer_types": ["attention"] * 4},
    ),
}
