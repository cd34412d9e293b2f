"""The common parts of the cases of all families."""

from __future__ import annotations

from typing import Any

from mlxr.models.families import FOLDERS

Config = dict[str, Any]

_CLASSES = {folder.model_type: folder.hf_class for _, folder in FOLDERS}


SHOWN = {  # a rotation that turns pictures by three axes
    "rope_theta": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
}


def make_config(model_type: str, heads: int, kv_heads: int | None, head_dim: int | None, **changes: Any) -> Config:
    """A `config.json` of a tiny model."""
    config: Config = {
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
    # a null window differs from a missing one
    return {key: value for key, value in (config | changes).items() if value is not None or key == "sliding_window"}
