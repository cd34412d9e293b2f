"""Families whose layers attend, with experts: one row each."""

from __future__ import annotations

from mlxr.models import families
from mlxr.models.architecture import Architecture, TensorRow
from mlxr.models.bias_config import BiasRow
from mlxr.models.mixture import MixtureRow
from mlxr.models.rope_config import RopeRow
from mlxr.models.rows.shared_parts import GRANITE, GRANITE_MIXTURE, LLAMA_ROPE, SIGMOID
from mlxr.models.window_config import WindowRow

_FFN_NORM = {"ffn_norm": "post_attention_norm"}

MIXTURES = (
    Architecture("mixtral", "llama", rope=LLAMA_ROPE, mixture=MixtureRow(renormalises=True)),
    Architecture(  # files state what its layer norms add to the variance as if these were RMS norms
        "phimoe",
        "phimoe",
        build=families.build_phi_moe,
        mixture=MixtureRow(scoring="softmax_chosen", jitter_key="router_jitter_noise"),
    ),
    Architecture(
        "qwen2_moe", "qwen2moe", biases=BiasRow(qkv=True), mixture=MixtureRow(shared="features", shared_gate=True)
    ),
    Architecture("qwen3_moe", "qwen3moe", qk_norm=True, mixture=MixtureRow(renormalises=True)),
    Architecture("olmoe", "olmoe", build=families.build_olmoe, qk_norm=True, mixture=MixtureRow()),
    Architecture("granitemoe", "granitemoe", mixture=GRANITE_MIXTURE, **GRANITE),
    Architecture(
        "gpt_oss",
        "gpt-oss",
        build=families.build_gpt_oss,
        rope=RopeRow(truncates_yarn=False),
        windows=WindowRow(full_every=2),
        tensors=TensorRow(gguf_names=_FFN_NORM),
        mixture=MixtureRow(scoring="softmax_chosen", activation="clamped_swiglu", bias=True),
    ),
    Architecture(
        "glm4_moe",
        "glm4moe",
        head_norms=True,
        tensors=TensorRow(gguf_names=_FFN_NORM),
        mixture=MixtureRow(floor=1e-20, shared="count", **SIGMOID),
    ),
)
