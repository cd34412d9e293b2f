"""A tiny Hugging Face model folder, made on the spot: random weights, a trained tokenizer, a chat template."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers

from mlxr.formats import TensorToWrite, open_gguf, write_gguf

WORDS = "the quick brown fox jumps over the lazy dog and then it sleeps for a while in the warm sun of the garden "
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def train_tokenizer(folder: Path, *more_special: str) -> int:
    """Write a byte-level BPE tokenizer with chat tokens, and `more_special` ones; return the size of its vocabulary."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>", *more_special],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "add_bos_token": True,
        "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()


def make_weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random weights under their Hugging Face names."""
    random = np.random.default_rng(7)
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], 16
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def draw(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)

    weights = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden), "model.norm.weight": 1 + draw(hidden)}
    weights["lm_head.weight"] = draw(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes = {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        for name, shape in shapes.items():
            weights[f"{prefix}.{name}.weight"] = draw(*shape)
            if config["attention_bias"] and "attn" in name:
                weights[f"{prefix}.{name}.bias"] = draw(shape[0])
        weights[f"{prefix}.input_layernorm.weight"] = 1 + draw(hidden)
        weights[f"{prefix}.post_attention_layernorm.weight"] = 1 + draw(hidden)
    return weights


def make_folder(folder: Path, **changes: object) -> Path:
    """A Hugging Face model folder; `changes` replace fields of its config.json."""
    folder.mkdir(exist_ok=True)
    size = train_tokenizer(folder)
    config = {**HF_CONFIG, "vocab_size": size, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(make_weights(config), str(folder / "model.safetensors"))
    return folder


def write_with(source: Path, path: Path, **keys: object) -> Path:
    """A copy of a GGUF file at `path` with further metadata, `__` for each dot of a key."""
    with open_gguf(source) as file:
        metadata = {**file.metadata, **{name.replace("__", "."): value for name, value in keys.items()}}
        tensors = [
            TensorToWrite(one.name, one.type_name, one.shape, partial(list, [one.data]))
            for one in file.tensors.values()
        ]
        write_gguf(path, metadata, tensors)
    return path
