"""EAGLE-3 heads in NumPy: random weights, and their logits, after vLLM's `llama_eagle3.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Weights = dict[str, NDArray[Any]]
SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "draft_vocab_size": 40,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}


def make_eagle(target: Mapping[str, Any], seed: int, **changes: Any) -> tuple[dict[str, Any], Weights]:
    """`config.json` and weights of a random head with a table, an output and a map of its own."""
    config = {**SIZES, "vocab_size": target["vocab_size"], "target_hidden_size": target["hidden_size"], **changes}
    random, hidden, ffn = np.random.RandomState(seed), config["hidden_size"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * 16, config["num_key_value_heads"] * 16
    taps = len(config["eagle_aux_hidden_state_layer_ids"]) * target["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (ffn, hidden),
        "midlayer.mlp.up_proj.weight": (ffn, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, ffn),
        "embed_tokens.weight": (target["vocab_size"], hidden),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    weights: Weights = {name: random.standard_normal(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    norms = [f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    for name in [*norms, "norm.weight"]:
        weights[name] = 1 + 0.2 * random.standard_normal(hidden)
    if config.get("norm_before_fc"):
        weights["input_norm.weight"] = 1 + 0.2 * random.standard_normal(taps)
    weights = {name: values.astype(np.float32) for name, values in weights.items()}
    chosen = np.sort(random.permutation(target["vocab_size"])[: config["draft_vocab_size"]])
    weights["d2t"] = (chosen - np.arange(len(chosen))).astype(np.int64)
    weights["t2d"] = np.isin(np.arange(target["vocab_size"]), chosen)
    return config, weights


def compute_eagle(config: Mapping[str, Any], weights: Weights, tokens: Floats, taps: Floats) -> tuple[Floats, Floats]:
    """Return the logits (T, own vocabulary) of all pairs, and the states that a next guess begins with."""
    if "input_norm.weight" in weights:
        taps = _norm(config, taps, weights["input_norm.weight"])
    return run_layer(config, weights, tokens, taps @ weights["fc.weight"].T)


def run_layer(config: Mapping[str, Any], weights: Weights, tokens: Floats, states: Floats) -> tuple[Floats, Floats]:
    """Compute the same from states that are already fused."""
    own = {name.removeprefix("midlayer."): values for name, values in weights.items()}
    normed = _norm(config, states, own["hidden_norm.weight"])
    joined = np.concatenate(
        [_norm(config, own["embed_tokens.weight"][tokens], own["input_layernorm.weight"]), normed], 1
    )
    stream = (normed if config.get("norm_before_residual") else states) + _attend(config, own, joined)
    x = _norm(config, stream, own["post_attention_layernorm.weight"])
    gate = x @ own["mlp.gate_proj.weight"].T
    stream = stream + (gate / (1 + np.exp(-gate)) * (x @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    return _norm(config, stream, own["norm.weight"]) @ own["lm_head.weight"].T, stream


def _norm(config: Mapping[str, Any], x: Floats, weight: Floats) -> Floats:
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + config["rms_norm_eps"]) * weight


def _attend(config: Mapping[str, Any], own: Weights, joined: Floats) -> Floats:
    rows, dim = len(joined), config["head_dim"]
    q, k, v = (
        (joined @ own[f"self_attn.{name}_proj.weight"].T).reshape(rows, -1, dim).transpose(1, 0, 2) for name in "qkv"
    )
    q, k = _rotate(config, q), _rotate(config, k)
    k, v = (np.repeat(x, len(q) // len(x), axis=0) for x in (k, v))
    scores = q @ k.transpose(0, 2, 1) / dim**0.5
    scores = np.where(np.tril(np.ones((rows, rows), bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = (shares / shares.sum(axis=-1, keepdims=True)) @ v
    return mixed.transpose(1, 0, 2).reshape(rows, -1) @ own["self_attn.o_proj.weight"].T


def _rotate(config: Mapping[str, Any], x: Floats) -> Floats:
    half = config["head_dim"] // 2
    angles = np.arange(x.shape[1])[:, None] * config["rope_theta"] ** (-np.arange(half) / half)
    cos, sin, a, b = np.cos(angles), np.sin(angles), x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
