"""Folders of Command R and R+, and of Cohere 2, whose logits are scaled."""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.folders.config import LAYER_EPS, FolderConfig
from mlxr.models.folders.family import FolderFamily
from mlxr.models.folders.rotations import state_rotation, state_windows
from mlxr.models.folders.statement import TensorLayout

_TENSORS = TensorLayout(turns_neighbours=True)


def _state_common(c: FolderConfig, kv_heads: int | None, *context_keys: str) -> None:
    eps_key = c.find_key("norm_epsilon", "layer_norm_eps")
    c.state_model(
        kv_heads=kv_heads, eps=(LAYER_EPS,), eps_key=eps_key, context_keys=context_keys, biases="block", tied=True
    )
    c.state_width()
    scale = c.fields.number("logit_scale", 1e-9, limits.MAX_SCALE, default=0.0625)
    c.out.put("logit_scale", scale, c.fields, "logit_scale")
    state_rotation(c)


def state_cohere(c: FolderConfig) -> None:
    """State a Command R or R+; published ones state the longest context in two fields."""
    _state_common(c, c.heads, "model_max_length", "max_position_embeddings")
    c.state_head_norms("use_qk_norm")


def state_cohere2(c: FolderConfig) -> None:
    """State a Cohere 2; layers without a window rotate nothing."""
    _state_common(c, None, "max_position_embeddings")
    state_windows(c, full_every=4)


FOLDERS = (
    FolderFamily("cohere", "CohereForCausalLM", "command-r", state_cohere, _TENSORS),
    FolderFamily("cohere2", "Cohere2ForCausalLM", "cohere2", state_cohere2, _TENSORS),
)
