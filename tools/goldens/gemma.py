"""Cases of the Gemma families."""

from __future__ import annotations

from typing import Any

from goldens.config import Config, make_config


def make_gemma4(**changes: Any) -> Config:
    """A Gemma 4 whose layers without a window have larger heads, of which 3 pairs in 8 turn."""
    return make_config(
        "gemma4_text",
        4,
        2,
        48,
        hidden_act=None,
        hidden_activation="gelu_pytorch_tanh",
        rope_theta=None,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "rope_theta": 20000.0, "partial_rotary_factor": 0.375},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        sliding_window=7,
        final_logit_softcapping=20.0,
        tie_word_embeddings=True,
        pad_token_id=0,
        **{"global_head_dim": 64, "hidden_size_per_layer_input": 0} | changes,
    )


EMBEDDED = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 131,
    "rms_norm_eps": 0.02,  # so large that it shows in the norm of the layers' inputs
}

CASES: dict[str, Config] = {
    "gemma": make_config("gemma", 4, 1, 48, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True, pad_token_id=0),
    "gemma2": make_config(
        "gemma2",
        6,
        2,
        48,
        num_hidden_layers=3,
        hidden_act=None,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=11,
        query_pre_attn_scalar=48,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
        tie_word_embeddings=True,
    ),
    "gemma3": make_config(
        "gemma3_text",
        4,
        1,
        72,
        num_hidden_layers=7,
        hidden_act=None,
        hidden_activation="gelu_pytorch_tanh",
        rope_theta=None,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        sliding_window=7,
        query_pre_attn_scalar=72,
        tie_word_embeddings=True,
    ),
    "gemma3-scale": make_config(
        "gemma3_text",
        4,
        2,
        64,
        num_hidden_layers=3,
        hidden_act=None,
        hidden_activation="gelu_pytorch_tanh",
        rope_theta=20000.0,
        rope_local_base_freq=300.0,
        sliding_window=9,
        sliding_window_pattern=2,
        query_pre_attn_scalar=20,
        rms_norm_eps=1e-6,
    ),
    "gemma3n": make_config(
        "gemma3n_text",
        4,
        2,
        24,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        hidden_act=None,
        hidden_activation="gelu_pytorch_tanh",
        rope_theta=None,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        sliding_window=7,
        final_logit_softcapping=20.0,
        activation_sparsity_pattern=[0.6, 0.7, 0.0, 0.0, 0.5, 0.0],
        laurel_rank=16,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=131,
        tie_word_embeddings=True,
    ),
    "gemma4": make_gemma4(num_global_key_value_heads=1, attention_k_eq_v=True, num_hidden_layers=7),
    "gemma4-values": make_gemma4(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention", "full_attention", "full_attention"],
        global_head_dim=None,
        per_layer_config={str(layer): {"head_dim": 80, "num_key_value_heads": 4} for layer in (1, 2, 3)},
    ),
    "gemma4-shared": make_gemma4(
        num_hidden_layers=8,
        layer_types=["sliding_attention", "full_attention"] * 4,
        num_kv_shared_layers=4,
        use_double_wide_mlp=True,
    ),
    "gemma4e": make_gemma4(layer_types=["sliding_attention", "full_attention"] * 3, **EMBEDDED),
}
