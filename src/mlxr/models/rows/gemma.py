"""Folders of Gemma 2 and 3, whose norms are stored less one."""

from __future__ import annotations

from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.family import FolderFamily
from mlxr.models.folders.rotations import state_rotation, state_window_theta, state_windows
from mlxr.models.folders.statement import TensorLayout

NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm": "ffn_norm",
}
_TENSORS = TensorLayout(NORM_NAMES, norms_from_one=True)


def state_gemma2(c: FolderConfig) -> None:
    """State the sizes of a Gemma 2."""
    c.state_model(activation="gelu_tanh", biases="block", tied=True)
    c.state_width()
    state_rotation(c)
    state_windows(c, full_every=2)
    c.state_score_size(by_width_layers=46)
    c.state_softcaps()


def state_gemma3(c: FolderConfig) -> None:
    """State the sizes of a Gemma 3."""
    c.state_model(activation="gelu_tanh", biases="block", tied=True)
    c.state_width()
    state_rotation(c)
    state_windows(c, full_every=6)
    state_window_theta(c, 10000.0)
    c.state_score_size(by_width_layers=62)


FOLDERS = (
    FolderFamily("gemma2", "Gemma2ForCausalLM", "gemma2", state_gemma2, _TENSORS),
    FolderFamily("gemma3_text", "Gemma3ForCausalLM", "gemma3", state_gemma3, _TENSORS),
)
