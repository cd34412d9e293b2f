"""Seed-OSS: Llama's layers with biases of queries, keys and values, halves of a head rotate."""

from __future__ import annotations

from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_TENSORS = TensorLayout({"post_attention_layernorm": "post_attention_norm"})


def state(c: FolderConfig) -> None:
    """State the sizes of a model; each kind of product has a key for its biases."""
    c.state_model(kv_heads=c.heads)
    c.out.put_own("attention.qkv_bias", c.fields.flag("attention_bias", True))
    c.out.put_own("attention.output_bias", c.fields.flag("attention_out_bias", False))
    c.out.put_own("feed_forward_bias", c.fields.flag("mlp_bias", False))
    c.state_width()
    state_rotation(c)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps, feed_forward="post_attention_norm"), m.rope()
    return m.model(Layer(m.attention(rope, window=window), m.feed_forward(), norms) for window in m.windows())


FAMILIES = (Family("seed_oss", build, (Folder("seed_oss", "SeedOssForCausalLM", state, _TENSORS),)),)
