"""Cases of families with latent attention; no two sizes of a head are equal."""

from __future__ import annotations

from typing import Any

from goldens.config import Config, make_config
from goldens.llama import make_longrope

_HEADS: dict[str, Any] = {
    "hidden_size": 128,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
}
_EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
}
_INDEXER: dict[str, Any] = {
    "max_position_embeddings": 256,
    "q_lora_rank": 96,
    "index_topk": 160,
    "index_n_heads": 2,
    "index_head_dim": 32,
}
_YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8, "beta_slow": 1}

CASES: dict[str, Config] = {
    "deepseek2": make_config(
        "deepseek_v2",
        4,
        4,
        None,
        **_HEADS | _EXPERTS | {"n_shared_experts": 2},
        topk_method="greedy",
        routed_scaling_factor=1.3,
        norm_topk_prob=False,
        rope_scaling=_YARN | {"type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek3": make_config(
        "deepseek_v3",
        4,
        4,
        None,
        **_HEADS | _EXPERTS | {"kv_lora_rank": 40, "qk_rope_head_dim": 8},
        q_lora_rank=96,
        n_group=4,
        topk_group=2,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        rope_scaling=_YARN | {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek32": make_config(
        "deepseek_v32",
        4,
        4,
        None,
        **_HEADS | _EXPERTS | _INDEXER,
        n_group=4,
        topk_group=2,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        rope_scaling=_YARN | {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm-dsa": make_config(
        "glm_moe_dsa",
        4,
        4,
        None,
        **_HEADS | _EXPERTS | _INDEXER,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "glm4moelite": make_config(
        "glm4_moe_lite",
        5,
        5,
        None,
        **_HEADS | _EXPERTS | {"first_k_dense_replace": None},
        q_lora_rank=64,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.8,
        norm_topk_prob=True,
        mlp_layer_types=["dense", "sparse", "sparse"],
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0},
    ),
    "mistral4": make_config(
        "mistral4",
        4,
        4,
        None,
        **_HEADS | _EXPERTS | {"first_k_dense_replace": 0},
        q_lora_rank=96,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        rope_theta=None,
        rope_parameters=_YARN
        | {
            "type": "yarn",
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 1 / 3,
        },
    ),
    "minicpm3": make_config(
        "minicpm3",
        4,
        4,
        None,
        **_HEADS,
        q_lora_rank=96,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=256,
        max_position_embeddings=128,
        rope_scaling=make_longrope(8) | {"original_max_position_embeddings": 32},
        tie_word_embeddings=True,
    ),
}
