"""BitNet: the results of attention and of a feed-forward block's gate are normed before the last product.

Its weights are ternary; files keep them in types such as TQ2_0. Source: llama.cpp, src/models/bitnet.cpp; transformers,
models/bitnet.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_TENSORS = TensorLayout({"self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"})


def state(c: FolderConfig) -> None:
    """State the sizes of a model whose weights are stored as they are multiplied; weights to be rounded first are
    refused."""
    c.state_model(kv_heads=c.heads, biases="block")
    c.state_width()
    state_rotation(c, theta=500000.0)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    attention, block = replace(m.attention(m.rope()), inner_norm=True), replace(m.feed_forward(), inner_norm=True)
    return m.model([Layer(attention, block, Norms(m.rms_eps))] * m.layers)


FAMILIES = (Family("bitnet", build, (Folder("bitnet", "BitNetForCausalLM", state, _TENSORS),)),)
