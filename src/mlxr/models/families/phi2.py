"""Phi-1, 1.5 and 2: both blocks from one layer norm, side by side, biases everywhere, and no gate."""

from __future__ import annotations

from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_TENSORS = TensorLayout({"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"})


def state(c: FolderConfig) -> None:
    """State the sizes of a model, of which all products have biases, the output's, too."""
    c.state_model(kv_heads=c.heads, eps=(LAYER_EPS,), eps_key="layer_norm_eps", activation="gelu_tanh", biases="use")
    c.out.put_own("output_bias", True)
    c.state_width()
    state_rotation(c, part=0.5)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.layer_eps, kind="layer", bias=True), m.rope()
    return m.model(
        Layer(m.attention(rope), m.feed_forward("gelu_tanh", gated=False), norms, is_parallel=True)
        for _ in range(m.layers)
    )


FAMILIES = (Family("phi2", build, (Folder("phi", "PhiForCausalLM", state, _TENSORS),)),)
