"""Write the golden logits of adapters: `PYTHON tools/make_adapter_goldens.py [CASE ...]`, with `peft` installed.

Every case is an adapter of one of the tiny models of `make_goldens.py`, which `peft` makes, fills with random numbers,
saves and runs. Its files and the logits are stored (tests/models/adapter_goldens/CASE/), without the copies of the
base's tables that it adds. Adapters with a pair of matrices for each expert, the form of older versions whose experts
were modules (PER_EXPERT), are written here, and `peft` reads and runs them.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from make_goldens import GOLDENS, TESTS, as_transformers_config, load_folder

sys.path.insert(0, str(TESTS))

from random_model import count_experts, make_tokens, make_weights

PROMPT_TOKENS = 16
ADAPTERS = TESTS / "adapter_goldens"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
# Each case: the model, the type of the stored weights, and the fields of peft's configuration.
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
    "parameters": (
        "qwen3moe",
        "bf16",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
            "rank_pattern": {"mlp.experts.gate_up_proj": 3},
            "alpha_pattern": {"mlp.experts.gate_up_proj": 9},
        },
    ),
    "parameters-one": (
        "qwen2moe",
        "f16",
        {"r": 4, "lora_alpha": 8, "target_modules": [], "target_parameters": ["experts.down_proj", "gate.weight"]},
    ),
    "parameters-turned": (
        "gpt-oss",
        "bf16",
        {
            "r": 2,
            "lora_alpha": 3,
            "use_rslora": True,
            "target_modules": ["o_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
    ),
    "convolution": ("lfm2", "bf16", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
}
PER_EXPERT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "experts": ("qwen3moe", "bf16", {"r": 4, "lora_alpha": 8, "target_modules": LINEAR}),
    "experts-numbered": ("mixtral", "bf16", {"r": 3, "lora_alpha": 8, "target_modules": ["q_proj", "w1", "w2", "w3"]}),
}
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def load_model(config: dict[str, Any], seed: int) -> Any:
    """The tiny model that both sides make from a seed."""
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
    """Fill all matrices of the adapter with random numbers that a file of `kind` holds exactly."""
    chance = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=chance) * 0.1
            parameter.data = values.to(TYPES[kind]).to(torch.float32)


def write_per_expert(
    folder: Path, weights: dict[str, np.ndarray], kind: str, fields: dict[str, Any], seed: int
) -> None:
    """Write the adapter in the form in which `peft` saved it for a model whose experts are modules."""
    chance, tensors = torch.Generator().manual_seed(seed), {}
    for name, values in weights.items():
        module = name.removesuffix(".weight")
        is_dense = ".mlp." in module and ".experts." not in module  # `peft` leaves these out beside experts
        if is_dense or module.rpartition(".")[2] not in fields["target_modules"]:
            continue
        for side, shape in (("A", (fields["r"], values.shape[1])), ("B", (values.shape[0], fields["r"]))):
            drawn = (torch.randn(shape, generator=chance) * 0.1).to(TYPES[kind])
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = drawn
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "peft_version": "0.17.1", **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")


def save_peft(model: Any, folder: Path, kind: str, seed: int) -> None:
    """Fill and save an adapter that `peft` made."""
    fill(model, seed, kind)
    model.peft_config["default"].base_model_name_or_path = None  # that folder no longer exists
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}, indent=2))
    saved = load_file(folder / "adapter_model.safetensors")
    saved = {
        key: values.to(TYPES[kind]).contiguous() for key, values in saved.items() if "base_layer.weight" not in key
    }
    save_file(saved, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def write_case(name: str) -> None:
    """Make, store and run one adapter."""
    base, kind, fields = (CASES | PER_EXPERT)[name]
    folder, seed = ADAPTERS / name, zlib.crc32(name.encode())
    config = json.loads((GOLDENS / base / "config.json").read_text())
    with np.load(GOLDENS / base / "logits.npz") as stored:
        base_seed = int(stored["seed"])
    model = load_model(config, base_seed)
    if name in PER_EXPERT:
        write_per_expert(folder, make_weights(config, base_seed), kind, fields, seed)
        model = PeftModel.from_pretrained(model, folder)
    else:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **fields))
        save_peft(model, folder, kind, seed)
    tokens = make_tokens(config, PROMPT_TOKENS, base_seed)
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0].numpy()
    np.savez(folder / "logits.npz", base=base, tokens=tokens, logits=logits.astype(np.float32))
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: {size} bytes, largest logit {abs(logits).max():.2f}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for case in sys.argv[1:] or CASES | PER_EXPERT:
        write_case(case)
