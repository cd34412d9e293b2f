"""Hunyuan (dense): Llama's layers, of which queries and keys are normed by head after they are rotated."""

from __future__ import annotations

from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family, FolderFamily
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_TENSORS = TensorLayout({"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"})


def state(c: FolderConfig) -> None:
    """State the sizes of a model, whose rotation is dynamic by name and stretched once, by `alpha`."""
    c.state_model(kv_heads=c.heads, biases="block")
    c.state_width()
    state_rotation(c, has_alpha=True)
    c.note(("use_qk_norm",))  # heads are normed whatever it says
    c.fields.refuse_unless(("num_experts",), (0, 1), "mixture of experts is not supported there")


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps), m.rope()
    return m.model(
        Layer(m.attention(rope, window=window, head_norms="turned"), m.feed_forward(), norms) for window in m.windows()
    )


FOLDERS = (FolderFamily("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "hunyuan-dense", state, _TENSORS),)
FAMILIES = (Family("hunyuan-dense", build),)
