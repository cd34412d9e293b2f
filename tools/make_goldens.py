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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from goldens import CASES

TESTS = Path(__file__).parents[1] / "tests" / "models"
sys.path.insert(0, str(TESTS))

from random_model import count_experts, make_tokens, make_weights  # noqa: E402 -- needs the path above

GOLDENS = TESTS / "goldens"
PROMPT_TOKENS = 48


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
    """A model by way of a folder, as only its reader knows all names and how experts of one tensor each are stacked."""
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
    if count_experts(config) or config["model_type"] == "nemotron_h":
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
