"""Write the golden logits of tests/models: `.venv-peers/bin/python tools/make_goldens.py [CASE ...]`.

Every case is a tiny random model that `transformers` runs in float32 over one prompt. Only the configuration and the
logits are stored (tests/models/goldens/CASE/); the weights come from the case's seed on both sides.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

TESTS = Path(__file__).parents[1] / "tests" / "models"
sys.path.insert(0, str(TESTS))

from random_model import make_tokens, make_weights  # noqa: E402 -- needs the path above

GOLDENS = TESTS / "goldens"
PROMPT_TOKENS = 48

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}


def make_config(model_type: str, heads: int, kv_heads: int, head_dim: int | None, **changes: Any) -> dict[str, Any]:
    """A `config.json` of a tiny model."""
    config: dict[str, Any] = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 131,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    # a null window is something else than none stated
    return {key: value for key, value in (config | changes).items() if value is not None or key == "sliding_window"}


def make_longrope(pairs: int) -> dict[str, Any]:
    """Factors for each of so many pairs: short ones near 1 and long ones that grow, all of them exact as f32."""
    return {
        "type": "longrope",
        "short_factor": [1.0 + (7 * pair % 5) / 64 for pair in range(pairs)],
        "long_factor": [1.0 + 1.5 * pair + (3 * pair % 4) / 8 for pair in range(pairs)],
    }


def make_gemma4(**changes: Any) -> dict[str, Any]:
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


# One row a case. Scaling rules get original contexts shorter than the prompt, so that they show.
CASES: dict[str, dict[str, Any]] = {
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
    # the text is longer than the original context: the long factors are for it
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
    # all that the model can see is its original context: the short factors
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
    "olmo2": make_config("olmo2", 6, 2, None, hidden_size=192, rope_theta=50000.0),
    "olmo3": make_config(
        "olmo3",
        4,
        2,
        None,
        hidden_size=192,
        num_hidden_layers=5,
        sliding_window=7,
        rope_theta=None,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 20000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
    ),
    "granite": make_config(
        "granite",
        4,
        2,
        None,
        hidden_size=256,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.05,
        logits_scaling=2.5,
        tie_word_embeddings=True,
    ),
    "smollm3": make_config(
        "smollm3", 4, 2, None, hidden_size=256, num_hidden_layers=5, tie_word_embeddings=True, pad_token_id=0
    ),
    "cohere": make_config(
        "cohere",
        4,
        2,
        None,
        hidden_size=256,
        num_hidden_layers=3,
        rms_norm_eps=None,
        layer_norm_eps=1e-5,
        rope_theta=50000.0,
        logit_scale=0.25,
        pad_token_id=0,
        tie_word_embeddings=True,
    ),
    "stablelm": make_config(
        "stablelm",
        6,
        2,
        None,
        hidden_size=192,
        num_hidden_layers=3,
        rms_norm_eps=None,
        layer_norm_eps=1e-4,
        rope_theta=50000.0,
        partial_rotary_factor=0.75,
        use_qkv_bias=True,
    ),
    "starcoder2": make_config(
        "starcoder2",
        6,
        2,
        None,
        hidden_size=192,
        num_hidden_layers=3,
        rms_norm_eps=None,
        norm_epsilon=1e-4,
        rope_theta=50000.0,
        sliding_window=11,
        use_bias=True,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    ),
    "cohere2": make_config(
        "cohere2",
        4,
        2,
        64,
        num_hidden_layers=5,
        rms_norm_eps=None,
        layer_norm_eps=1e-5,
        logit_scale=0.25,
        pad_token_id=0,
        sliding_window=7,
        tie_word_embeddings=True,
    ),
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
    "qwen3-128-tied": make_config("qwen3", 4, 1, 128, tie_word_embeddings=True, attention_bias=True),
}


def as_transformers_config(config: dict[str, Any]) -> dict[str, Any]:
    """What `transformers` is given: fixed ntk scaling is its dynamic one at the length where both agree."""
    scaling = config.get("rope_scaling")
    if scaling is None or scaling.get("rope_type") != "ntk":
        return config
    # dynamic: base * ((f * T / M) - (f - 1)) ** ..., so with f = 2 and T / M = 3 / 2 the factor is 2
    assert scaling["factor"] == 2.0
    original = PROMPT_TOKENS * 2 // 3
    return config | {
        "max_position_embeddings": original,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    }


def load_folder(hf_config: Any, weights: dict[str, torch.Tensor]) -> tuple[Any, list[str], list[str]]:
    """A model by way of a folder, as only its reader knows how experts of one tensor each are stacked."""
    with tempfile.TemporaryDirectory() as folder:
        hf_config.save_pretrained(folder)
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    return model, sorted(info["missing_keys"]), sorted(info["unexpected_keys"])


def compute_logits(config: dict[str, Any], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (T,) and logits (T, vocab) of one case."""
    hf_config = AutoConfig.for_model(**copy.deepcopy(as_transformers_config(config)))  # it adds to nested ones
    hf_config._attn_implementation = "eager"
    weights = {name: torch.from_numpy(value) for name, value in make_weights(config, seed).items()}
    if any(".experts." in name for name in weights):
        model, missing, unexpected = load_folder(hf_config, weights)
    else:
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
        missing, unexpected = model.load_state_dict(weights, strict=False)
    model.eval()
    if unexpected or [name for name in missing if not (config["tie_word_embeddings"] and name == "lm_head.weight")]:
        raise SystemExit(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    tokens = make_tokens(config, PROMPT_TOKENS, seed)
    with torch.no_grad():
        inputs = torch.from_numpy(tokens.astype(np.int64))[None]
        # rows are named, as Gemma 4 fails at a number where layers share keys and have no embeddings of their own
        logits = model(inputs, use_cache=False, logits_to_keep=torch.arange(PROMPT_TOKENS)).logits[0]
    return tokens, logits.numpy().astype(np.float32)


def write_case(name: str) -> None:
    """Compute and store one case."""
    config, seed = CASES[name], zlib.crc32(name.encode())
    tokens, logits = compute_logits(config, seed)
    folder = GOLDENS / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    np.savez(folder / "logits.npz", seed=np.int64(seed), tokens=tokens, logits=logits)
    print(f"{name}: {logits.shape}, largest {abs(logits).max():.2f}")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        write_case(case)
