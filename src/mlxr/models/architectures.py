"""The architectures we run: one row each. They share one decoder and differ in what a row says."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mlxr.core.errors import ModelError
from mlxr.models import families
from mlxr.models.architecture import Architecture, TensorRow
from mlxr.models.bias_config import BiasRow
from mlxr.models.mixture import MixtureRow
from mlxr.models.recurrence_config import FALCON_KEYS, NEMOTRON_KEYS, RecurrenceRow
from mlxr.models.rope_config import RopeRow
from mlxr.models.scale_config import ScaleRow
from mlxr.models.specs import LayerSpec
from mlxr.models.window_config import WindowRow

if TYPE_CHECKING:
    from mlxr.models.config import ModelConfig

_BY_BLOCK = BiasRow(by_block=True)
_LLAMA_ROPE = RopeRow(gguf_interleaved=True)
_MAYBE_WINDOWS = WindowRow(in_folders=True, default=0)
_QWEN_WINDOWS = WindowRow(in_folders=True, switch=True)
_FFN_NORM = {"ffn_norm": "post_attention_norm"}
_BOTH_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_MAMBA_NAMES = {
    f"mamba.{part}": f"ssm_{name}"
    for part, name in (("in_proj", "in"), ("conv1d", "conv1d"), ("norm", "norm"), ("out_proj", "out"))
}

_GEMMA: dict[str, Any] = {
    "build": families.build_gemma,
    "activation": "gelu_tanh",
    "tied_default": True,
}
_GEMMA_NAMES = _BOTH_NORMS | {"pre_feedforward_layernorm": "ffn_norm"}
_GEMMA_TENSORS = TensorRow(_GEMMA_NAMES, norms_from_one=True)

_COHERE: dict[str, Any] = {
    "build": families.build_cohere,
    "norm_kind": "layer",
    "tied_default": True,
    "biases": _BY_BLOCK,
    "scales": ScaleRow(logits=True),
}
_COHERE_ROPE = RopeRow(gguf_interleaved=True, hf_interleaved=True)

_OLMO: dict[str, Any] = {
    "build": families.build_olmo,
    "qk_norm": True,
    "biases": _BY_BLOCK,
    "tensors": TensorRow(_BOTH_NORMS),
}
_OLMO_WINDOWS = WindowRow(full_every=4, plain=True)

_GRANITE_MIXTURE = MixtureRow(
    ("num_local_experts",), "intermediate_size", renormalises=True, shared_key="shared_intermediate_size"
)
_GRANITE_NAMES = {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.input_linear": "ffn_gate_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "shared_mlp.input_linear": "ffn_gate_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
_GRANITE_ROPE = RopeRow(gguf_interleaved=True, gguf_switch=True)
_GRANITE: dict[str, Any] = {
    "biases": _BY_BLOCK,
    "rope": _GRANITE_ROPE,
    "scales": ScaleRow(multipliers=True),
    "tensors": TensorRow(_GRANITE_NAMES),
}

_LFM2: dict[str, Any] = {
    "qk_norm": True,
    "eps_key": "norm_eps",
    "tied_default": True,
    "rope": RopeRow(theta=1e6),
    "recurrence": RecurrenceRow("short_conv"),
    "tensors": TensorRow(
        {
            "operator_norm": "attn_norm",
            "ffn_norm": "ffn_norm",
            "self_attn.q_layernorm": "attn_q_norm",
            "self_attn.k_layernorm": "attn_k_norm",
            "self_attn.out_proj": "attn_output",
            "conv.in_proj": "shortconv.in_proj",
            "conv.conv": "shortconv.conv",
            "conv.out_proj": "shortconv.out_proj",
            "feed_forward.gate": "ffn_gate_inp",
            "feed_forward.w1": "ffn_gate",
            "feed_forward.w3": "ffn_up",
            "feed_forward.w2": "ffn_down",
        },
        output_norm="token_embd_norm",
    ),
}

_QWEN35: dict[str, Any] = {
    "build": families.build_qwen35,
    "qk_norm": True,
    "gated_attention": True,
    "rope": RopeRow(part=0.25),
    "recurrence": RecurrenceRow("gated_delta", gguf_tiled=True),
    "tensors": TensorRow(
        {
            "post_attention_layernorm": "post_attention_norm",
            "linear_attn.in_proj_qkv": "attn_qkv",
            "linear_attn.in_proj_z": "attn_gate",
            "linear_attn.in_proj_b": "ssm_beta",
            "linear_attn.in_proj_a": "ssm_alpha",
            "linear_attn.in_proj_qkvz": "ssm_in",
            "linear_attn.in_proj_ba": "ssm_ba",
            "linear_attn.conv1d": "ssm_conv1d",
            "linear_attn.norm": "ssm_norm",
            "linear_attn.out_proj": "ssm_out",
        },
        norms_from_one=True,
    ),
}
_QWEN35_MIXTURE = MixtureRow(renormalises=True, shared_key="shared_expert_intermediate_size", shared_gate=True)

# Of DeepSeek's kind: sigmoids, shares that are divided by their sum, a bias for the choice alone.
_SIGMOID: dict[str, Any] = {"scoring": "sigmoid", "renormalises": True, "states_rule": True, "choice_bias": True}

ARCHITECTURES = (
    Architecture("llama", "llama", "LlamaForCausalLM", kv_heads_default=True, biases=_BY_BLOCK, rope=_LLAMA_ROPE),
    Architecture(
        "mixtral",
        "llama",
        "MixtralForCausalLM",
        rope=_LLAMA_ROPE,
        windows=_MAYBE_WINDOWS,
        mixture=MixtureRow(("num_local_experts",), "intermediate_size", renormalises=True),
    ),
    Architecture("mistral", "llama", "MistralForCausalLM", rope=_LLAMA_ROPE, windows=WindowRow(in_folders=True)),
    Architecture("ministral3", "mistral3", "Ministral3ForCausalLM", rope=_LLAMA_ROPE, windows=_MAYBE_WINDOWS),
    Architecture(
        "phi3",
        "phi3",
        "Phi3ForCausalLM",
        kv_heads_default=True,
        windows=_MAYBE_WINDOWS,
        tensors=TensorRow(is_joined=True),
    ),
    Architecture(  # files state what its layer norms add to the variance as if these were RMS norms
        "phimoe",
        "phimoe",
        "PhimoeForCausalLM",
        older_class="PhiMoEForCausalLM",
        build=families.build_phi_moe,
        biases=_BY_BLOCK,
        rope=RopeRow(theta=1e6, has_mscales=True),
        windows=_MAYBE_WINDOWS,
        mixture=MixtureRow(
            ("num_local_experts",),
            "intermediate_size",
            scoring="softmax_chosen",
            jitter_key="router_jitter_noise",
        ),
    ),
    Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", biases=BiasRow(qkv=True), windows=_QWEN_WINDOWS),
    Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", qk_norm=True, biases=_BY_BLOCK, windows=_QWEN_WINDOWS),
    Architecture(
        "qwen2_moe",
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        biases=BiasRow(qkv=True),
        windows=_QWEN_WINDOWS,
        mixture=MixtureRow(shared_key="shared_expert_intermediate_size", shared_gate=True),
    ),
    Architecture(
        "qwen3_moe",
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        biases=_BY_BLOCK,
        windows=_QWEN_WINDOWS,
        mixture=MixtureRow(renormalises=True),
    ),
    Architecture(
        "gemma2",
        "gemma2",
        "Gemma2ForCausalLM",
        biases=_BY_BLOCK,
        windows=WindowRow(in_folders=True, full_every=2),
        scales=ScaleRow(embeddings=True, softcaps=True, by_width_layers=46),
        tensors=_GEMMA_TENSORS,
        **_GEMMA,
    ),
    Architecture(
        "gemma3_text",
        "gemma3",
        "Gemma3ForCausalLM",
        qk_norm=True,
        biases=_BY_BLOCK,
        windows=WindowRow(in_folders=True, full_every=6, theta=10000.0),
        scales=ScaleRow(embeddings=True, by_width_layers=62),
        tensors=_GEMMA_TENSORS,
        **_GEMMA,
    ),
    Architecture(
        "gemma4_text",
        "gemma4",
        "Gemma4ForCausalLM",
        qk_norm=True,
        two_sizes=True,
        rope=RopeRow(
            unstated={"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            states_factors=True,
        ),
        windows=WindowRow(in_folders=True, default=512, full_every=6, last_full=True, theta=10000.0),
        scales=ScaleRow(embeddings=True, softcaps=True, attention=1.0),
        tensors=TensorRow(_GEMMA_NAMES),
        mixture=MixtureRow(
            renormalises=True, switch_key="enable_moe_block", used_key="top_k_experts", expert_scales=True
        ),
        **_GEMMA | {"build": families.build_gemma4},
    ),
    Architecture("olmo2", "olmo2", "Olmo2ForCausalLM", windows=_OLMO_WINDOWS, **_OLMO),
    Architecture("olmo3", "olmo2", "Olmo3ForCausalLM", windows=replace(_OLMO_WINDOWS, in_folders=True), **_OLMO),
    Architecture(
        "olmoe",
        "olmoe",
        "OlmoeForCausalLM",
        build=families.build_olmoe,
        qk_norm=True,
        kv_heads_default=True,
        biases=_BY_BLOCK,
        mixture=MixtureRow(features_key="intermediate_size"),
    ),
    Architecture("granite", "granite", "GraniteForCausalLM", **_GRANITE),
    Architecture("granitemoe", "granitemoe", "GraniteMoeForCausalLM", mixture=_GRANITE_MIXTURE, **_GRANITE),
    Architecture("granitemoeshared", "granitemoe", "GraniteMoeSharedForCausalLM", mixture=_GRANITE_MIXTURE, **_GRANITE),
    Architecture(
        "granitemoehybrid",
        "granitehybrid",
        "GraniteMoeHybridForCausalLM",
        dense_key="shared_intermediate_size",
        recurrence=RecurrenceRow("mamba2", attending=("granite", "granitemoeshared")),
        mixture=replace(_GRANITE_MIXTURE, optional=True),
        **_GRANITE
        | {
            "rope": replace(_GRANITE_ROPE, switch_key="position_embedding_type"),
            "tensors": TensorRow(_GRANITE_NAMES | _MAMBA_NAMES),
        },
    ),
    Architecture(
        "gpt_oss",
        "gpt-oss",
        "GptOssForCausalLM",
        build=families.build_gpt_oss,
        biases=_BY_BLOCK,
        rope=RopeRow(truncates_yarn=False),
        windows=WindowRow(in_folders=True, default=128, full_every=2),
        tensors=TensorRow(gguf_names=_FFN_NORM),
        mixture=MixtureRow(
            ("num_local_experts", "num_experts"),
            "intermediate_size",
            scoring="softmax_chosen",
            activation="clamped_swiglu",
            bias=True,
            interleaved=True,
        ),
    ),
    Architecture(
        "glm4_moe",
        "glm4moe",
        "Glm4MoeForCausalLM",
        head_norm_key="use_qk_norm",
        biases=BiasRow(qkv_key="attention_bias"),
        rope=RopeRow(part=0.5),
        tensors=TensorRow(gguf_names=_FFN_NORM),
        mixture=MixtureRow(
            ("n_routed_experts", "num_local_experts"),
            floor=1e-20,
            shared_key="n_shared_experts",
            shared="count",
            **_SIGMOID,
        ),
    ),
    Architecture(
        "smollm3",
        "smollm3",
        "SmolLM3ForCausalLM",
        tied_default=True,
        biases=_BY_BLOCK,
        rope=RopeRow(gguf_interleaved=True, still_every=4),
    ),
    Architecture(
        "cohere",
        "command-r",
        "CohereForCausalLM",
        kv_heads_default=True,
        context_keys=("model_max_length", "max_position_embeddings"),
        head_norm_key="use_qk_norm",
        rope=_COHERE_ROPE,
        **_COHERE,
    ),
    Architecture(
        "cohere2",
        "cohere2",
        "Cohere2ForCausalLM",
        rope=replace(_COHERE_ROPE, only_windows=True),
        windows=WindowRow(in_folders=True, full_every=4),
        **_COHERE,
    ),
    Architecture(
        "stablelm",
        "stablelm",
        "StableLmForCausalLM",
        build=families.build_stablelm,
        head_norm_key="qk_layernorm",
        parallel_key="use_parallel_residual",
        norm_kind="layer",
        rope=RopeRow(part=0.25),
    ),
    Architecture(
        "starcoder2",
        "starcoder2",
        "Starcoder2ForCausalLM",
        build=families.build_starcoder,
        activation="gelu_tanh",
        norm_kind="layer",
        tied_default=True,
        biases=BiasRow(by_use=True),
        windows=_MAYBE_WINDOWS,
    ),
    Architecture("lfm2", "lfm2", "Lfm2ForCausalLM", **_LFM2),
    Architecture(
        "lfm2_moe",
        "lfm2moe",
        "Lfm2MoeForCausalLM",
        mixture=MixtureRow(floor=1e-6, first_key="num_dense_layers", **_SIGMOID),
        **_LFM2,
    ),
    Architecture(
        "falcon_h1",
        "falcon-h1",
        "FalconH1ForCausalLM",
        build=families.build_falcon,
        recurrence=RecurrenceRow("mamba2", keys=FALCON_KEYS, beside=True),
        tensors=TensorRow(
            _MAMBA_NAMES
            | {"pre_ff_layernorm": "ffn_norm"}
            | {f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
            gguf_bare=("ffn_norm",),
        ),
    ),
    Architecture(
        "nemotron_h",
        "nemotron_h",
        "NemotronHForCausalLM",
        gguf_experts_name="nemotron_h_moe",
        build=families.build_nemotron,
        activation="relu_squared",
        single_blocks=True,
        eps_key="layer_norm_epsilon",
        biases=_BY_BLOCK,
        rope=RopeRow(still_every=1),
        recurrence=RecurrenceRow("mamba2", keys=NEMOTRON_KEYS),
        tensors=TensorRow(
            {
                "norm": "attn_norm",
                "mixer.q_proj": "attn_q",
                "mixer.k_proj": "attn_k",
                "mixer.v_proj": "attn_v",
                "mixer.o_proj": "attn_output",
                "mixer.in_proj": "ssm_in",
                "mixer.conv1d": "ssm_conv1d",
                "mixer.norm": "ssm_norm",
                "mixer.out_proj": "ssm_out",
                "mixer.up_proj": "ffn_up",
                "mixer.down_proj": "ffn_down",
                "mixer.gate": "ffn_gate_inp",
                "mixer.shared_experts.up_proj": "ffn_up_shexp",
                "mixer.shared_experts.down_proj": "ffn_down_shexp",
            }
        ),
        mixture=MixtureRow(
            ("n_routed_experts",),
            floor=1e-20,
            optional=True,
            gated=False,
            shared_key="moe_shared_expert_intermediate_size",
            **_SIGMOID,
        ),
    ),
    Architecture("qwen3_5_text", "qwen35", "Qwen3_5ForCausalLM", **_QWEN35),
    Architecture("qwen3_5_moe_text", "qwen35moe", "Qwen3_5MoeForCausalLM", mixture=_QWEN35_MIXTURE, **_QWEN35),
    Architecture(
        "qwen3_next",
        "qwen3next",
        "Qwen3NextForCausalLM",
        biases=_BY_BLOCK,
        mixture=_QWEN35_MIXTURE,
        **_QWEN35 | {"recurrence": RecurrenceRow("gated_delta")},
    ),
)


def by_name(name: str) -> Architecture:
    """Return the row that `ModelConfig.architecture` names; ModelError when there is none."""
    for row in ARCHITECTURES:
        if row.name == name:
            return row
    raise ModelError(
        f"architecture {name!r} is not supported; supported are {_listed({r.name for r in ARCHITECTURES})}"
    )


@lru_cache(maxsize=16)
def build_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """The layers of a configuration."""
    return by_name(config.architecture).build(config)


def by_gguf_name(name: str, has_experts: bool = False) -> Architecture:
    """The row of a GGUF file's `general.architecture`; "llama" there means Mistral, too, and with experts Mixtral."""
    rows = [row for row in ARCHITECTURES if name in (row.gguf_name, row.gguf_experts_name)]
    for row in rows:
        if (row.mixture is not None) == has_experts:
            return row
    if rows:
        return rows[0]
    names = {name for row in ARCHITECTURES for name in (row.gguf_name, row.gguf_experts_name)}
    known = _listed({name for name in names if name is not None})
    raise ModelError(f"general.architecture is {name!r}, which is not supported; supported are {known}")


def name_gguf(row: Architecture, has_experts: bool) -> str:
    """The `general.architecture` of a GGUF file of this row."""
    return row.gguf_experts_name if has_experts and row.gguf_experts_name is not None else row.gguf_name


def by_hf_class(name: str) -> Architecture:
    """The row of an entry of `architectures` in `config.json`."""
    for row in ARCHITECTURES:
        if name in (row.hf_class, row.older_class):
            return row
    known = _listed({row.hf_class for row in ARCHITECTURES})
    raise ModelError(f"architectures is [{name!r}], which is not supported; supported are {known}")


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
