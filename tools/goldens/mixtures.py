"""Cases of families with experts."""

from __future__ import annotations

from typing import Any

from goldens.config import Config, make_config
from goldens.gemma import make_gemma4
from goldens.llama import make_longrope

_GRANITE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.05,
    "logits_scaling": 2.5,
    "tie_word_embeddings": True,
}
_GLM: dict[str, Any] = {
    "num_hidden_layers": 3,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}

CASES: dict[str, Config] = {
    "qwen3moe": make_config(
        "qwen3_moe",
        4,
        2,
        32,
        num_hidden_layers=3,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen2moe": make_config(
        "qwen2_moe",
        4,
        2,
        None,
        hidden_size=128,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
        norm_topk_prob=False,
    ),
    "mixtral": make_config(
        "mixtral",
        4,
        2,
        None,
        hidden_size=128,
        intermediate_size=96,
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_theta=1e6,
        sliding_window=None,
    ),
    # jitter so large that several experts are near the chosen one, and a text longer than the original context
    "phimoe": make_config(
        "phimoe",
        4,
        2,
        None,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=3,
        num_local_experts=8,
        num_experts_per_tok=2,
        router_jitter_noise=0.2,
        attention_bias=True,
        lm_head_bias=True,
        rope_scaling=make_longrope(16)
        | {"original_max_position_embeddings": 32, "short_mscale": 1.3, "long_mscale": 1.3},
        sliding_window=None,
    ),
    "olmoe": make_config(
        "olmoe", 4, 2, None, hidden_size=128, intermediate_size=64, num_experts=8, num_experts_per_tok=3
    ),
    "granitemoe": make_config("granitemoe", 4, 2, None, **_GRANITE),
    "granitemoe-shared": make_config("granitemoeshared", 4, 2, None, shared_intermediate_size=96, **_GRANITE),
    "dots1": make_config("dots1", 4, 2, 32, n_group=1, topk_group=1, **_GLM | {"partial_rotary_factor": None}),
    "ernie-moe": make_config(
        "ernie4_5_moe",
        4,
        2,
        32,
        hidden_size=128,
        num_hidden_layers=3,
        moe_num_experts=8,
        moe_k=2,
        moe_intermediate_size=64,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=-1,
        moe_layer_interval=1,
        use_bias=False,
    ),
    "hunyuan-moe": make_config(
        "hunyuan_v1_moe",
        4,
        2,
        48,
        intermediate_size=64,
        num_experts=8,
        moe_topk=2,
        rope_scaling={"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
        tie_word_embeddings=True,
    ),
    "glm4moe": make_config("glm4_moe", 4, 2, 32, n_group=1, topk_group=1, **_GLM),
    "glm4moe-groups": make_config(
        "glm4_moe", 4, 2, 32, use_qk_norm=True, n_group=4, topk_group=2, **_GLM | {"n_shared_experts": 2}
    ),
    "gemma4moe": make_gemma4(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=64,
    ),
    # of its range the pairs are no whole numbers, so that rounding them would be seen
    "gpt-oss": make_config(
        "gpt_oss",
        4,
        2,
        32,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=4,
        num_local_experts=8,
        num_experts_per_tok=3,
        attention_bias=True,
        sliding_window=7,
        swiglu_limit=7.0,
        rope_theta=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 20000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "truncate": False,
        },
    ),
}
