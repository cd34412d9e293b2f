"""Cases of Llama and of the families that differ from it in a few numbers: Mistral, Ministral, Phi and Qwen."""

from __future__ import annotations

from goldens.config import SHOWN, Config, make_config


def make_longrope(pairs: int) -> Config:
    """Factors for each of so many pairs: short ones near 1 and long ones that grow, all of them exact as f32."""
    return {
        "type": "longrope",
        "short_factor": [1.0 + (7 * pair % 5) / 64 for pair in range(pairs)],
        "long_factor": [1.0 + 1.5 * pair + (3 * pair % 4) / 8 for pair in range(pairs)],
    }


CASES: dict[str, Config] = {
    "llama-mha": make_config("llama", 2, 2, None, hidden_size=128, vocab_size=259),
    "llama-gqa-80-tied": make_config("llama", 6, 2, 80, tie_word_embeddings=True),
    "llama-mqa-96": make_config("llama", 4, 1, 96, num_hidden_layers=3, vocab_size=97),
    "llama-gqa-64": make_config("llama", 4, 2, 64, hidden_size=128, intermediate_size=256, vocab_size=256),
    "llama-128": make_config("llama", 2, 1, 128),
    "llama-256": make_config("llama", 2, 1, 256),
    "llama-bias-gelu": make_config(
        "llama", 4, 2, 64, attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh"
    ),
    "llama-linear": make_config("llama", 4, 2, 64, rope_scaling={"type": "linear", "factor": 4.0}),
    "llama-ntk": make_config("llama", 4, 2, 64, rope_scaling={"rope_type": "ntk", "factor": 2.0}),
    "llama-llama3": make_config(
        "llama",
        4,
        2,
        64,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama-yarn": make_config(
        "llama",
        4,
        2,
        64,
        rope_theta=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 20000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama-yarn-mscale": make_config(
        "llama",
        4,
        2,
        64,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "mscale": 1.4,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
    ),
    "mistral": make_config("mistral", 4, 2, 64, sliding_window=None),
    "mistral-window": make_config("mistral", 4, 2, 64, sliding_window=11),
    "ministral3": make_config(
        "ministral3",
        4,
        2,
        64,
        rope_theta=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 20000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 10,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 0.6,
            "llama_4_scaling_beta": 0.25,
        },
        sliding_window=None,
    ),
    # the text is longer than the original context, so the long factors apply
    "phi3-long": make_config(
        "phi3",
        4,
        2,
        None,
        hidden_size=192,
        num_hidden_layers=3,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=32,
        rope_scaling=make_longrope(18),
        tie_word_embeddings=True,
        pad_token_id=0,
    ),
    # the whole context is the original one, so the short factors apply
    "phi3-short": make_config(
        "phi3",
        4,
        1,
        None,
        hidden_size=256,
        max_position_embeddings=64,
        original_max_position_embeddings=64,
        rope_scaling=make_longrope(32) | {"factor": 8.0},
        sliding_window=11,
        pad_token_id=0,
    ),
    "qwen2": make_config("qwen2", 6, 2, 64, tie_word_embeddings=True, rope_theta=1000000.0, vocab_size=151),
    "qwen2-window": make_config(
        "qwen2", 4, 4, 64, use_sliding_window=True, sliding_window=9, max_window_layers=0, rms_norm_eps=1e-6
    ),
    "qwen3": make_config("qwen3", 4, 2, 64, rope_theta=1000000.0, rms_norm_eps=1e-6),
    "qwen3vl": make_config("qwen3_vl_text", 4, 2, 64, rms_norm_eps=1e-6, **SHOWN),
    "qwen3-128-tied": make_config("qwen3", 4, 1, 128, tie_word_embeddings=True, attention_bias=True),
}
