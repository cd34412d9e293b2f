"""Families whose layers attend, with feed-forward blocks (Gemma 4 may have experts beside these): one row each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxr.models import families
from mlxr.models.architecture import Architecture, TensorRow
from mlxr.models.bias_config import BiasRow
from mlxr.models.mixture import MixtureRow
from mlxr.models.rope_config import RopeRow
from mlxr.models.rows.shared_parts import GRANITE, LLAMA_ROPE
from mlxr.models.scale_config import ScaleRow
from mlxr.models.window_config import WindowRow

_GEMMA: dict[str, Any] = {"build": families.build_gemma, "activation": "gelu_tanh"}
_COHERE: dict[str, Any] = {"build": families.build_cohere, "norm_kind": "layer", "scales": ScaleRow(logits=True)}

DENSE = (
    Architecture("llama", "llama", rope=LLAMA_ROPE),
    Architecture("ministral3", "mistral3", rope=LLAMA_ROPE),
    Architecture("phi3", "phi3", tensors=TensorRow(is_joined=True)),
    Architecture("qwen2", "qwen2", biases=BiasRow(qkv=True)),
    Architecture("qwen3", "qwen3", qk_norm=True),
    Architecture(
        "gemma2",
        "gemma2",
        windows=WindowRow(full_every=2),
        scales=ScaleRow(embeddings=True, softcaps=True, by_width_layers=46),
        **_GEMMA,
    ),
    Architecture(
        "gemma3_text",
        "gemma3",
        qk_norm=True,
        windows=WindowRow(full_every=6, theta=10000.0),
        scales=ScaleRow(embeddings=True, by_width_layers=62),
        **_GEMMA,
    ),
    Architecture(
        "gemma4_text",
        "gemma4",
        qk_norm=True,
        two_sizes=True,
        windows=WindowRow(full_every=6, theta=10000.0),
        scales=ScaleRow(embeddings=True, softcaps=True, attention=1.0),
        mixture=MixtureRow(renormalises=True, optional=True, expert_scales=True),
        **_GEMMA | {"build": families.build_gemma4},
    ),
    Architecture(
        "olmo2", "olmo2", build=families.build_olmo, qk_norm=True, windows=WindowRow(full_every=4, plain=True)
    ),
    Architecture("granite", "granite", **GRANITE),
    Architecture("smollm3", "smollm3", rope=RopeRow(gguf_interleaved=True, still_every=4)),
    Architecture("cohere", "command-r", head_norms=True, rope=LLAMA_ROPE, **_COHERE),
    Architecture(
        "cohere2",
        "cohere2",
        rope=replace(LLAMA_ROPE, only_windows=True),
        windows=WindowRow(full_every=4),
        **_COHERE,
    ),
    Architecture(
        "stablelm",
        "stablelm",
        build=families.build_stablelm,
        head_norms=True,
        may_be_parallel=True,
        norm_kind="layer",
    ),
    Architecture("starcoder2", "starcoder2", build=families.build_starcoder, activation="gelu_tanh", norm_kind="layer"),
)
