"""Llama, Mistral, and Mixtral, whose feed-forward blocks are mixtures of experts: one architecture in GGUF."""

from __future__ import annotations

from mlxr.models.components import Experts, Layer, Norms
from mlxr.models.families.pixtral import PIXTRAL
from mlxr.models.families.siglip import IDEFICS3
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def state_llama(c: FolderConfig) -> None:
    """State the sizes of a Llama."""
    c.state_model(kv_heads=c.heads, biases="block")
    c.state_width()
    state_rotation(c)


def state_mistral(c: FolderConfig) -> None:
    """State the sizes of a Mistral."""
    c.state_model()
    c.state_width()
    state_rotation(c)
    state_windows(c)


def state_mixtral(c: FolderConfig) -> None:
    """State the sizes of a Mixtral."""
    c.state_model()
    experts = state_experts(c, count_keys=("num_local_experts",), features_key="intermediate_size", renormalises=True)
    state_expert_width(c, experts)
    state_rotation(c)
    state_windows(c, default=0)


def build(m: Metadata) -> Model:
    """Return the model: RMS norm before each block, neighbouring pairs rotate."""
    norms, rope, windows = Norms(m.rms_eps), m.rope(interleaved=True), m.windows()
    mixture = None
    if m.experts:
        mixture = Experts(m.experts, m.expert_features, m.activation(), m.routing(renormalises=True))
    return m.model(
        Layer(m.attention(rope, window=window), mixture if mixture and has_experts else m.feed_forward(), norms)
        for window, has_experts in zip(windows, m.has_experts, strict=True)
    )


TOWERS = (IDEFICS3, PIXTRAL)
FAMILIES = (
    Family(
        "llama",
        build,
        (
            Folder("llama", "LlamaForCausalLM", state_llama, older_class="VLlama3ForCausalLM"),
            Folder("mistral", "MistralForCausalLM", state_mistral),
            Folder("mixtral", "MixtralForCausalLM", state_mixtral),
        ),
    ),
)
