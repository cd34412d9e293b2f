"""Write the golden logits of adapters: `PYTHON tools/make_adapter_goldens.py [CASE ...]`, with `peft` installed.

Every case is an adapter of one of the tiny models of `make_goldens.py`, which `peft` makes, fills with random numbers,
saves and runs. What it saved and the logits are stored (tests/models/adapter_goldens/CASE/), without the copies of the
base's tables that it adds.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
import zlib
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from make_goldens import GOLDENS, TESTS, as_transformers_config, load_folder

sys.path.insert(0, str(TESTS))

from random_model import count_experts, make_tokens, make_weights

PROMPT_TOKENS = 16
ADAPTERS = TESTS / "adapter_goldens"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
# Each case: the model, what the weights are stored as, and the fields of peft's configuration.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rank-4": ("llama-gqa-64", "f32", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    "bf16": ("qwen2", "bf16", {"r": 4, "lora_alpha": 6, "target_modules": LINEAR}),
    "f16": ("qwen3", "f16", {"r": 3, "lora_alpha": 6, "target_modules": ATTENTION}),
    "rslora": ("qwen2", "bf16", {"r": 5, "lora_alpha": 4, "use_rslora": True, "target_modules": LINEAR}),
    "patterns": (
        "llama-gqa-64",
        "bf16",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": LINEAR,
            "rank_pattern": {"v_proj": 2, r"layers\.1\.mlp\.up_proj": 7},
            "alpha_pattern": {"o_proj": 3, "layers.0.self_attn.q_proj": 1},
        },
    ),
    "embeddings": ("llama-gqa-64", "bf16", {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "q_proj"]}),
    "scaled-embeddings": ("gemma3", "bf16", {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "o_proj"]}),
    "output": ("qwen3", "bf16", {"r": 4, "lora_alpha": 8, "target_modules": ["lm_head", "down_proj"]}),
    "output-only": ("mixtral", "f32", {"r": 2, "lora_alpha": 8, "target_modules": ["lm_head"]}),
    "joined": ("phi3-short", "bf16", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "mixture": (
        "qwen2moe",
        "bf16",
        {"r": 4, "lora_alpha": 8, "target_modules": [*LINEAR, "shared_expert_gate"]},
    ),
    "recurrent": ("qwen35", "bf16", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "mamba": ("granite4h", "bf16", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "convolution": ("lfm2", "bf16", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
}
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def load_model(config: dict[str, Any], seed: int) -> Any:
    """The tiny model that both sides make of a seed."""
    hf_config = AutoConfig.for_model(**copy.deepcopy(as_transformers_config(config)))
    hf_config._attn_implementation = "eager"
    weights = {name: torch.from_numpy(value) for name, value in make_weights(config, seed).items()}
    if count_experts(config) or config["model_type"] == "nemotron_h":
        model, _, _ = load_folder(hf_config, weights)
    else:
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
        model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model.eval()


def fill(model: Any, seed: int, kind: str) -> None:
    """Random numbers in all matrices of the adapter, which a file of `kind` holds exactly."""
    chance = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=chance) * 0.1
            parameter.data = values.to(TYPES[kind]).to(torch.float32)


def write_case(name: str) -> None:
    """Make, store and run one adapter."""
    base, kind, fields = CASES[name]
    config = json.loads((GOLDENS / base / "config.json").read_text())
    with np.load(GOLDENS / base / "logits.npz") as stored:
        base_seed = int(stored["seed"])
    model = get_peft_model(load_model(config, base_seed), LoraConfig(task_type="CAUSAL_LM", **fields))
    fill(model, zlib.crc32(name.encode()), kind)
    folder = ADAPTERS / name
    model.peft_config["default"].base_model_name_or_path = None  # a folder that is gone
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    saved = load_file(folder / "adapter_model.safetensors")
    saved = {key: values.to(TYPES[kind]).contiguous() for key, values in saved.items() if "base_layer" not in key}
    save_file(saved, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    tokens = make_tokens(config, PROMPT_TOKENS, base_seed)
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0].numpy()
    np.savez(folder / "logits.npz", base=base, tokens=tokens, logits=logits.astype(np.float32))
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: {len(saved)} tensors, {size} bytes, largest logit {abs(logits).max():.2f}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for case in sys.argv[1:] or CASES:
        write_case(case)
