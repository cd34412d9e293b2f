"""Writes a trained model as a Hugging Face folder that `transformers` loads as `LlamaForCausalLM`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from network import Llama
from safetensors.torch import save_file
from tokenizer import BOS, IM_END, PAD, SPECIAL_TOKENS


def export_folder(model: Llama, tokenizer_folder: Path, out: Path) -> None:
    """config.json, generation_config.json, model.safetensors in float16, and the tokenizer's files."""
    out.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    ends = {
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(IM_END),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": shape.rms_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        **ends,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(
        json.dumps({**ends, "do_sample": False, "max_new_tokens": 256}, indent=2) + "\n"
    )
    tensors = {name: value.detach().to("cpu", torch.float16).contiguous() for name, value in model.named_parameters()}
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_folder / name, out / name)
