"""Folders of tiny models, and of everything that drafts for them, that guess alike: often right, and often wrong.

In each the likeliest next token is the successor in a permutation of short cycles: a token's row of the output is the
embedding of the token before it. The layers add so much to the stream that they decide now and then. A draft model and
heads know the same permutation, but have other layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import model_folder
import numpy as np
import safetensors.numpy
from eagle_reference import make_eagle
from model_folder import HF_CONFIG, train_tokenizer
from random_model import Weights, make_head_weights, make_weights
from tiny_models import read_golden

CONTEXT = 160
SHARPNESS = 0.2  # factor of the logits: a token drawn at temperature 1 is the successor every other time
NOISE = 0.6  # factor of the results of blocks
CYCLE = 7
BLOCK_ENDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")


def make_successors(vocabulary: int) -> np.ndarray:
    """Return the token that follows each: random cycles of tokens."""
    order = np.random.RandomState(3).permutation(vocabulary)
    following = np.empty(vocabulary, np.int64)
    for start in range(0, vocabulary, CYCLE):
        cycle = order[start : start + CYCLE]
        following[cycle] = np.roll(cycle, -1)
    return following


def follow(weights: Weights, table: np.ndarray, outputs: tuple[str, ...], steps: int = 1) -> None:
    """Set `outputs` so that after each token the one `steps` further in its cycle is the likeliest."""
    following = make_successors(len(table))
    rows = np.empty_like(table)
    target = np.arange(len(table))
    for _ in range(steps):
        target = following[target]
    rows[target] = table * np.float32(SHARPNESS)
    for name in outputs:
        weights[name] = rows.astype(np.float32)
    for name, values in weights.items():
        if name.endswith(BLOCK_ENDS):
            values *= np.float32(NOISE)


def make_target(folder: Path, case: str) -> Path:
    """Write the model of a golden case that has a draft layer in its folder."""
    folder.mkdir()
    config, seed, _, _ = read_golden(case)
    config |= {
        "vocab_size": train_tokenizer(folder),
        "max_position_embeddings": CONTEXT,
        "num_nextn_predict_layers": 1,
        "mtp_num_hidden_layers": 1,
    }
    weights = make_weights(config, seed) | make_head_weights(config, seed)
    adds_one = case.startswith("qwen35")
    for name, values in weights.items():
        if name.endswith(("norm.weight", "norm_embedding.weight", "norm_hidden.weight")) and "linear" not in name:
            values[:] = 0.0 if adds_one else 1.0
    table = weights["model.embed_tokens.weight"]
    table /= np.sqrt(np.square(table).mean(axis=1, keepdims=True))
    for name in weights:
        if name.endswith(".embed_tokens.weight"):
            weights[name] = table
        elif name.endswith((".fc.weight", ".eh_proj.weight")):
            weights[name][:] = np.eye(*weights[name].shape)  # of the token alone
    follow(
        weights, table, tuple(name for name in weights if name.endswith(("lm_head.weight", "shared_head.head.weight")))
    )
    return write(folder, config, weights)


def make_draft(folder: Path) -> Path:
    """A Llama with the same tokens."""
    folder.mkdir()
    config = {**HF_CONFIG, "vocab_size": train_tokenizer(folder), "max_position_embeddings": CONTEXT}
    weights = model_folder.make_weights(config)
    table = weights["model.embed_tokens.weight"]
    table /= np.sqrt(np.square(table).mean(axis=1, keepdims=True))
    weights["model.norm.weight"][:] = 1.0
    follow(weights, table, ("lm_head.weight",))
    return write(folder, config, weights)


def make_eagle_head(folder: Path, target: Path) -> Path:
    """An EAGLE-3 head that reads the stream before the first layer, which is the embedding of the token before."""
    folder.mkdir()
    sizes = json.loads((target / "config.json").read_text())
    table = safetensors.numpy.load_file(str(target / "model.safetensors"))["model.embed_tokens.weight"]
    vocabulary, hidden = table.shape
    layers = [0, 1, sizes["num_hidden_layers"]]
    own = {"hidden_size": hidden, "draft_vocab_size": vocabulary, "eagle_aux_hidden_state_layer_ids": layers}
    config, weights = make_eagle(sizes, 5, max_position_embeddings=CONTEXT, **own)
    weights["fc.weight"][:] = np.eye(hidden, len(layers) * hidden)
    weights["norm.weight"][:] = 1.0
    follow(weights, table, ("lm_head.weight",), steps=2)
    return write(folder, config, weights)


def write(folder: Path, config: dict[str, Any], weights: Weights) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(v) for name, v in weights.items()}, folder / "model.safetensors"
    )
    return folder
