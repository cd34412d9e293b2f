"""MiniCPM3 and PLM: latent attention in small dense models.

In MiniCPM3 embeddings, blocks and logits have factors, for which GGUF has no keys: they are those of MiniCPM3-4B. PLM's
queries are made directly, and its feed-forward blocks have squared ReLU and no gate. Source: llama.cpp,
src/models/minicpm3.cpp and plm.cpp.
"""

from __future__ import annotations

from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.mixers import state_latent_attention
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_EMBEDDING_SCALE, _DEPTH_SCALE, _BASE_COLUMNS = 12.0, 1.4, 256


def state_minicpm3(c: FolderConfig) -> None:
    """State the sizes of a model."""
    for name, value in (
        ("scale_emb", _EMBEDDING_SCALE),
        ("scale_depth", _DEPTH_SCALE),
        ("dim_model_base", _BASE_COLUMNS),
    ):
        c.fields.refuse_unless((name,), (value,), f"only {value:g} is supported")
    state_latent_attention(c, is_parted=False, tied=True)
    c.state_width()


def build_minicpm3(m: Metadata) -> Model:
    """Return the model: halves of the numbers that rotate are pairs."""
    norms, attention = Norms(m.rms_eps), m.latent_attention(interleaved=False)
    residual_scale = _DEPTH_SCALE / m.layers**0.5
    return m.model(
        (Layer(attention, m.feed_forward(), norms, residual_scale=residual_scale) for _ in range(m.layers)),
        embedding_scale=_EMBEDDING_SCALE,
        logit_scale=_BASE_COLUMNS / m.hidden,
    )


def build_plm(m: Metadata) -> Model:
    """Return the model of these metadata."""
    attention, block = m.latent_attention(interleaved=True), m.feed_forward("relu_squared", gated=False)
    return m.model([Layer(attention, block, Norms(m.rms_eps))] * m.layers)


FAMILIES = (
    Family("minicpm3", build_minicpm3, (Folder("minicpm3", "MiniCPM3ForCausalLM", state_minicpm3),)),
    Family("plm", build_plm),
)
