"""Mamba-2 (Codestral Mamba and others): all layers are the recurrence alone, which keeps of any text as much."""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import Layer, Norms
from mlxr.models.families.nemotron_h import NAMES
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import RMS_EPS, FolderConfig, TensorLayout
from mlxr.models.folders.mixers import Mamba2Keys, state_mamba2
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_KEYS = Mamba2Keys(
    "num_heads",
    "head_dim",
    "n_groups",
    "state_size",
    "conv_kernel",
    expand=None,
    needed=(("use_bias", False), ("use_conv_bias", True), ("hidden_act", "silu")),
)
_CONTEXT = 1 << 20  # which files state, as nothing in the model ends there


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    out, fields, eps_key = c.out, c.fields, c.find_key("rms_norm_eps", "layer_norm_epsilon")
    out.put("embedding_length", c.hidden, fields, "hidden_size")
    out.put("context_length", fields.integer("max_position_embeddings", 1, limits.MAX_CONTEXT, default=_CONTEXT))
    out.put("block_count", c.layers, fields, "num_hidden_layers")
    out.put("vocab_size", fields.integer("vocab_size", 1, limits.MAX_VOCABULARY), fields, "vocab_size")
    out.put("attention.head_count", 0)
    out.put("feed_forward_length", 0)
    out.put(RMS_EPS, fields.number(eps_key, 1e-30, 0.5), fields, eps_key)
    c.state_output(tied=False)
    state_mamba2(c, _KEYS)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    m.fields.note(("attention.head_count", "feed_forward_length"))
    return m.model([Layer(m.mamba2(), None, Norms(m.rms_eps))] * m.layers)


FAMILIES = (Family("mamba2", build, (Folder("mamba2", "Mamba2ForCausalLM", state, TensorLayout(NAMES)),)),)
