"""Llama, Mistral, and Mixtral, whose feed-forward blocks are mixtures of experts: one architecture in GGUF. Llama 4
(text): the share of a token's only expert multiplies the expert's input. Layers that rotate see chunks; the others see
everything, and their queries grow with their position. Heads that rotate are normed without weights, except in
Maverick.

Source of Llama 4: llama.cpp, src/models/llama4.cpp; transformers, models/llama4.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.kernels.rope import QueryTemperature
from mlxr.models import limits
from mlxr.models.components import NO_ROPE, Experts, Layer, Norms
from mlxr.models.families.pixtral import PIXTRAL
from mlxr.models.families.siglip import IDEFICS3
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_turning_layers, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_DENSE = {f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
_SHARED = {f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
_LLAMA4 = TensorLayout(
    _DENSE | _SHARED | {"feed_forward.router": "ffn_gate_inp"}, columns_first=True, turns_neighbours=True
)
_CHUNK, _BETA, _PERIOD = "attention.chunk_size", "attention.temperature_scale", "attention.temperature_length"
_STEP, _WITHOUT_NORMS = "interleave_moe_layer_step", 128  # experts of the model whose heads are not normed


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


def state_llama4(c: FolderConfig) -> None:
    """State the sizes of a model; only the last layer of each step has experts."""
    c.state_model(biases="block")
    c.state_width("intermediate_size_mlp")
    step = c.fields.integer(_STEP, 1, c.layers, default=1)
    usual = [index for index in range(c.layers) if (index + 1) % step == 0]
    layers = c.fields.get("moe_layers") or usual
    flags = [isinstance(layers, list) and index in layers for index in range(c.layers)]
    state_experts(c, count_keys=("num_local_experts",), features_key="intermediate_size", layers=flags)
    c.out.put(_STEP, step, c.fields, _STEP)
    c.out.put_own("attention.head_norms", c.fields.flag("use_qk_norm", True), c.fields, "use_qk_norm")
    state_rotation(c, theta=500000.0)
    every = c.fields.integer("no_rope_layer_interval", 1, limits.MAX_LAYERS, default=4)
    turning = c.fields.flags("no_rope_layers", c.layers) if c.fields.get("no_rope_layers") else None
    rotates = turning or tuple((index + 1) % every != 0 for index in range(c.layers))
    state_turning_layers(c, rotates, tuple((index + 1) % 4 != 0 for index in range(c.layers)))
    kinds = ["chunked_attention" if turns else "full_attention" for turns in rotates]
    if (c.fields.get("layer_types") or kinds) != kinds:
        c.fields.refuse("layer_types", "chunked_attention of layers that rotate, else full_attention")
    c.out.put(_CHUNK, c.fields.integer("attention_chunk_size", 1, limits.MAX_CONTEXT, default=8192))
    beta = c.fields.number("attn_scale", 0.0, limits.MAX_SCALE, default=0.1)
    tunes = c.fields.get("attn_temperature_tuning") not in (False, 0)
    c.out.put(_BETA, beta if tunes else 0.0, c.fields, "attn_scale")
    c.out.put(_PERIOD, c.fields.integer("floor_scale", 1, limits.MAX_CONTEXT, default=8192))


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


def build_llama4(m: Metadata) -> Model:
    """Return the model of these metadata; files of llama.cpp's converter state neither chunks nor temperatures."""
    if m.fields.get("attention.sliding_window") is not None:
        m.fields.refuse("attention.sliding_window", "none: models without chunks are not supported")
    m.fields.note((_STEP,))
    norms, rope = Norms(m.rms_eps), replace(m.rope(interleaved=True), temperature=None)
    beta, period = m.number(_BETA, 0.0, 1e6, default=0.1), m.integer(_PERIOD, 1, limits.MAX_CONTEXT, default=8192)
    still = replace(NO_ROPE, temperature=QueryTemperature(beta, period, offset=1) if beta else None)
    chunk = m.integer(_CHUNK, 1, limits.MAX_CONTEXT, default=8192)
    normed = m.own.flag("attention.head_norms", m.experts != _WITHOUT_NORMS)
    turning = m.attention(rope, window=chunk if chunk < m.context else None, head_norms="turned" if normed else None)
    turning = replace(turning, chunked=turning.window is not None, bare_norms=True)
    kind, width = m.activation(), m.expert_features
    experts = Experts(m.experts, width, kind, m.routing("sigmoid"), shared_features=width, weighs_inputs=True)
    return m.model(
        Layer(turning if turns else m.attention(still), experts if has_experts else m.feed_forward(), norms)
        for turns, has_experts in zip(m.rotates(m.all_but_last_of(4)), m.has_experts, strict=True)
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
    Family("llama4", build_llama4, (Folder("llama4_text", "Llama4ForCausalLM", state_llama4, _LLAMA4),)),
)
