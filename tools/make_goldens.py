"""Write the golden logits of tests/models: `.venv-peers/bin/python tools/make_goldens.py [CASE ...]`.

Every case (`goldens`) is a tiny random model that `transformers` runs in float32 over one prompt. Only the
configuration and the logits are stored (tests/models/goldens/CASE/); the weights come from the case's seed on both
sides.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    Mistral4ForCausalLM,
)

from goldens import CASES

TESTS = Path(__file__).parents[1] / "tests" / "models"
sys.path.insert(0, str(TESTS))

from random_model import count_experts, make_head_weights, make_tokens, make_weights  # noqa: E402 -- needs the path

GOLDENS = TESTS / "goldens"
PROMPT_TOKENS = 48
DEEPSEEK = {  # transformers has no class for the first DeepSeek MoE
    "model_type": "qwen2_moe",
    "num_experts": 8,
    "shared_expert_intermediate_size": 128,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
}
OWN_CLASSES = {"mistral4": Mistral4ForCausalLM, "glm5_next": Glm5NextForConditionalGeneration}
HEADS = ("qwen35", "qwen35moe", "glm4moe")  # cases with a layer that drafts


def as_transformers_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration for `transformers`: fixed ntk scaling becomes its dynamic one, at a length where both agree.

    For a Phi-3.5-MoE, whose prompt is longer than its original context, the short factors are replaced by the long
    ones, as release 5.24 ignores the length of the text and would take the short ones (modeling_phimoe.py).
    """
    scaling = config.get("rope_scaling")
    if config["model_type"] == "bailing_moe":  # Sarvam has its layers and names
        return config | {"model_type": "sarvam_moe", "norm_topk_prob": True}
    if config["model_type"] == "deepseek":
        return config | DEEPSEEK
    if config["model_type"].startswith("qwen3_vl"):  # its text model is Qwen3, as all axes of a text agree
        rope = {key: value for key, value in config["rope_parameters"].items() if "mrope" not in key}
        kind = config["model_type"].replace("_vl", "").removesuffix("_text")
        return config | {"model_type": kind, "rope_parameters": rope}
    if "kv_lora_rank" in config:  # null in folders; a missing key would get another default
        return {"q_lora_rank": None, "num_nextn_predict_layers": 0} | config
    if config["model_type"] == "phimoe" and scaling is not None:
        assert scaling["original_max_position_embeddings"] < PROMPT_TOKENS
        return config | {"rope_scaling": scaling | {"short_factor": scaling["long_factor"]}}
    if scaling is None or scaling.get("rope_type") != "ntk":
        return config
    # dynamic: base * ((f * T / M) - (f - 1)) ** ..., so with f = 2 and T / M = 3 / 2 the factor is 2
    assert scaling["factor"] == 2.0
    original = PROMPT_TOKENS * 2 // 3
    return config | {
        "max_position_embeddings": original,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    }


def as_qwen2_moe(weights: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Turn weights of a first DeepSeek MoE into those of a Qwen2 MoE: a gate of 0 halves the output of the shared
    block, which is doubled, and biases are 0."""
    made = {}
    for name, values in weights.items():
        twice = 2 if ".shared_experts.down_proj." in name else 1
        made[name.replace(".shared_experts.", ".shared_expert.")] = values * twice
        if ".shared_experts.down_proj." in name:
            layer = name.split(".shared_experts.")[0]
            made[f"{layer}.shared_expert_gate.weight"] = torch.zeros(1, config["hidden_size"])
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            made[f"{name.removesuffix('weight')}bias"] = torch.zeros(len(values))
    return made


def load_folder(hf_config: Any, weights: dict[str, torch.Tensor]) -> tuple[Any, list[str], list[str]]:
    """Load a model from a folder, as only that reader knows all names and stacks experts of one tensor each."""
    with tempfile.TemporaryDirectory() as folder:
        hf_config.save_pretrained(folder)
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        # 5.24 has no causal model of it
        kind = OWN_CLASSES.get(hf_config.model_type, AutoModelForCausalLM)
        model, info = kind.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    return model, sorted(info["missing_keys"]), sorted(info["unexpected_keys"])


def build_model(config: dict[str, Any], arrays: dict[str, np.ndarray]) -> Any:
    """The model with these weights."""
    hf_config = AutoConfig.for_model(**copy.deepcopy(as_transformers_config(config)))  # it changes nested ones
    hf_config._attn_implementation = "eager"
    weights = {name: torch.from_numpy(value) for name, value in arrays.items()}
    weights = as_qwen2_moe(weights, config) if config["model_type"] == "deepseek" else weights
    if config["model_type"] == "glm5_next_text":  # it runs only with a tower
        tower = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 128}
        hf_config = Glm5NextConfig(text_config=hf_config.to_dict(), vision_config=tower)
        weights = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    if count_experts(config) or config["model_type"] == "nemotron_h":
        model, missing, unexpected = load_folder(hf_config, weights)
    else:
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
        missing, unexpected = model.load_state_dict(weights, strict=False)
    model.eval()
    # the former follow from the configuration
    missing = [name for name in missing if ".ple_embedding." not in name and ".visual." not in name]
    if unexpected or [name for name in missing if not (config["tie_word_embeddings"] and name == "lm_head.weight")]:
        raise SystemExit(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    largest = config.get("attn_config", {}).get("alibi_bias_max")
    if largest is not None:  # MosaicML's own code reads it, 5.24 does not
        made = model.transformer.build_mpt_alibi_tensor
        model.transformer.build_mpt_alibi_tensor = partial(made, alibi_bias_max=largest)
    return model


def compute_logits(config: dict[str, Any], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (T,) and logits (T, vocab) of one case."""
    model = build_model(config, make_weights(config, seed))
    tokens = make_tokens(config, PROMPT_TOKENS, seed)
    with torch.no_grad():
        inputs = torch.from_numpy(tokens.astype(np.int64))[None]
        # rows are listed, as Gemma 4 fails with a number if layers share keys and have no embeddings of their own
        logits = model(inputs, use_cache=False, logits_to_keep=torch.arange(PROMPT_TOKENS)).logits[0]
    return tokens, logits.numpy().astype(np.float32)


def compute_head(config: dict[str, Any], seed: int) -> np.ndarray:
    """Logits (T, vocab) of the layer that drafts: after each pair of a state and the next token, and one guess further.

    `transformers` leaves such layers out. The layer's input is as in vLLM (qwen3_5_mtp.py, glm4_moe_mtp.py) and
    llama.cpp (src/models/qwen35.cpp, glm4-moe.cpp): a product of the token's embedding and the state, each normed.
    The rest is a model of one layer, which `transformers` runs on these products. The last row follows the likeliest
    token of the row before it, and the model's own state there, after the norm.
    """
    weights, head = make_weights(config, seed), make_head_weights(config, seed)
    layer = next(name.split(".self_attn.")[0] for name in head if ".self_attn.q_proj." in name)
    names = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    if layer.startswith("model."):
        names = tuple(f"{layer}.{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
    product, token_norm, state_norm, head_norm = (head.pop(f"{name}.weight") for name in names)
    table = head.pop(f"{layer}.embed_tokens.weight", weights["model.embed_tokens.weight"])
    output = head.pop(f"{layer}.shared_head.head.weight", weights["lm_head.weight"])
    alone = config | {"num_hidden_layers": 1}
    alone |= {"layer_types": ["full_attention"]} if "layer_types" in config else {}
    alone |= {"first_k_dense_replace": 0} if "first_k_dense_replace" in config else {}
    own = {name.replace(layer, "model.layers.0"): value for name, value in head.items()}
    own |= {"model.embed_tokens.weight": table, "model.norm.weight": head_norm, "lm_head.weight": output}
    model, target = build_model(alone, own), build_model(config, weights)
    from_one = float(config["model_type"].startswith("qwen3_5"))

    def norm(x: torch.Tensor, weight: np.ndarray) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"])
        return scaled * (torch.from_numpy(weight) + from_one)

    def join(tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        embedded = torch.from_numpy(table)[tokens]
        return torch.cat([norm(embedded, token_norm), norm(states, state_norm)], -1) @ torch.from_numpy(product).T

    tokens = torch.from_numpy(make_tokens(config, PROMPT_TOKENS, seed).astype(np.int64))
    with torch.no_grad():
        states = target.model(tokens[None]).last_hidden_state[0]
        joined = join(tokens[1:], states[:-1])
        made = model.model(inputs_embeds=joined[None]).last_hidden_state[0]
        guess = model.lm_head(made[-1]).argmax()[None]
        further = torch.cat([joined, join(guess, made[-1:])])
        logits = model(inputs_embeds=further[None], use_cache=False).logits[0]
    return logits.numpy().astype(np.float32)


def write_case(name: str) -> None:
    """Compute and store one case."""
    config, seed = CASES[name], zlib.crc32(name.encode())
    tokens, logits = compute_logits(config, seed)
    folder = GOLDENS / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    np.savez(folder / "logits.npz", seed=np.int64(seed), tokens=tokens, logits=logits)
    if name in HEADS:
        np.savez(folder / "head.npz", logits=compute_head(config, seed))
    print(f"{name}: {logits.shape}, largest {abs(logits).max():.2f}")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        write_case(case)
