"""The architectures we run: one row each. They share one decoder and differ in what a row says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mlxr.core.errors import ModelError
from mlxr.kernels.activate import Activation
from mlxr.kernels.layers.block import NormKind
from mlxr.models import families
from mlxr.models.mixture import MixtureRow
from mlxr.models.recurrence_config import FALCON_KEYS, GRANITE_KEYS, NEMOTRON_KEYS, Mamba2Keys
from mlxr.models.recurrent import RecurrenceKind
from mlxr.models.specs import LayerSpec

if TYPE_CHECKING:
    from mlxr.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family.

    `name` is its `model_type` in `config.json`; `gguf_name` its `general.architecture` and key prefix in GGUF;
    `hf_class` its entry in `architectures`. `gguf_interleaved`: GGUF files have the rows of q and k in an order that
    rotates neighbouring pairs. `qkv_bias`: always has biases on q, k and v; `bias_key`: `attention_bias` in
    `config.json` gives q, k, v and o biases, `mlp_bias` gate, up and down; `qkv_bias_key` q, k and v alone; `use_bias`
    there, true if it is not stated, all of them. `qk_norm`: queries and keys are normed; `head_norm_key` there says
    whether they are, in GGUF their norms. `parallel_key` there says whether the blocks of a layer stand side by side,
    in GGUF whether the second one has a norm. `window_switch`: the sliding window counts only with
    `use_sliding_window`; `window_default` is what `config.json` means that does not state one, 0 for none. `build`
    makes the layers.

    `activation` is the one that GGUF files of this family mean. Of every `full_every` layers the last has no window;
    `window_rope_theta` is the base of the others' rotation, and with `plain_windows` theirs is not stretched.
    `scales_embeddings`: by the root of the hidden size.
    `softcaps`: files state caps of scores and logits. `norms_from_one`: Hugging Face stores norms less one. A model
    of `by_width_layers` layers scales scores by hidden / heads instead of the head size. `multipliers`: files state
    Granite's four; `logit_multiplier`: Cohere's. Of every `nope_every` layers the last rotates nothing, or with
    `nope_in_full` those without a window. `hf_interleaved`: neighbouring pairs rotate in Hugging Face folders, too.
    `attention_scale` is what scores are multiplied by in all files. `two_sizes`: layers with and without windows have
    heads of their own sizes, later layers may read the keys and values of earlier ones, and all may have embeddings of
    their own (Gemma 4).
    `rotary_default`: the part of a head that rotates where `config.json` does not say. `context_keys` there state the
    longest context; the first one counts. `tied_default`: what `tie_word_embeddings` is where it is not stated.
    `output_norm` is what GGUF files call the norm before the output. `recurrence`: some layers have such a mixer;
    where none has, the model is one of the architectures of these names, `attending`, without and with experts.
    `state_keys`: what `config.json` calls the sizes of Mamba-2. `rope_key` there says whether layers that attend
    rotate. `dense_key` is what it calls the features of a feed-forward block in a model without experts, and
    `gguf_experts_name` the `general.architecture` of one with them, where that is another one. `single_blocks`: each
    layer is one block, and GGUF files say so by feed-forward blocks without features. `beside`: the recurrent mixer
    stands beside the attention of each layer, and `config.json` states what results are multiplied by.
    `gated_attention`: what attention gives is gated, by rows of the queries' weight. `gguf_tiled`: GGUF files have the
    value heads of gated delta nets in another order, the first of each key head, then the second.
    `eps_key` is what `config.json` calls what norms add to the variance, where its name is a rare one, and
    `theta_default` the base of rotations that it does not state.
    `is_joined`: files keep q, k and v as one tensor, and gate and up. `layer_names` are names of tensors in Hugging
    Face folders that mean something else than elsewhere, `gguf_names` what GGUF files call those of layers, and
    `gguf_bare` the weights whose names do not end in `.weight` there.
    `truncates_yarn`: yarn's range is rounded to whole pairs, of which GGUF says nothing. `mixture` says how files state
    experts.
    """

    name: str
    gguf_name: str
    hf_class: str
    gguf_interleaved: bool = False
    qkv_bias: bool = False
    bias_key: bool = False
    use_bias: bool = False
    qkv_bias_key: str = "use_qkv_bias"
    qk_norm: bool = False
    head_norm_key: str | None = None
    parallel_key: str | None = None
    windowed: bool = False
    window_switch: bool = False
    window_default: int = 4096
    kv_heads_default: bool = False  # old llama configurations leave num_key_value_heads out when all heads have one
    build: Callable[[ModelConfig], tuple[LayerSpec, ...]] = families.build_llama
    activation: Activation = "silu"
    full_every: int | None = None
    window_rope_theta: float | None = None
    plain_windows: bool = False
    scales_embeddings: bool = False
    softcaps: bool = False
    norms_from_one: bool = False
    by_width_layers: int | None = None
    multipliers: bool = False
    logit_multiplier: bool = False
    nope_every: int | None = None
    nope_in_full: bool = False
    attention_scale: float | None = None
    two_sizes: bool = False
    norm_kind: NormKind = "rms"
    hf_interleaved: bool = False
    rotary_default: float = 1.0
    context_keys: tuple[str, ...] = ("max_position_embeddings",)
    tied_default: bool = False
    is_joined: bool = False
    output_norm: str = "output_norm"
    recurrence: RecurrenceKind | None = None
    attending: tuple[str, str] | None = None
    state_keys: Mamba2Keys = GRANITE_KEYS
    dense_key: str = "intermediate_size"
    gguf_experts_name: str | None = None
    single_blocks: bool = False
    beside: bool = False
    rope_key: str | None = None
    gated_attention: bool = False
    gguf_tiled: bool = False
    eps_key: str | None = None
    theta_default: float = 10000.0
    layer_names: dict[str, str] = field(default_factory=dict, hash=False)
    gguf_names: dict[str, str] = field(default_factory=dict, hash=False)
    gguf_bare: tuple[str, ...] = ()
    truncates_yarn: bool = True
    mixture: MixtureRow | None = None


_MIXTRAL = MixtureRow(("num_local_experts",), "intermediate_size", renormalises=True)
_GRANITE = MixtureRow(
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

ROPE_SWITCH = "rope.scaling.finetuned"  # of Granite's GGUF files: whether layers rotate
EPS_KEYS = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}  # of GGUF

_GEMMA: dict[str, Any] = {
    "build": families.build_gemma,
    "activation": "gelu_tanh",
    "scales_embeddings": True,
    "tied_default": True,
    "norms_from_one": True,
    "layer_names": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}

_COHERE: dict[str, Any] = {
    "build": families.build_cohere,
    "gguf_interleaved": True,
    "hf_interleaved": True,
    "bias_key": True,
    "logit_multiplier": True,
    "norm_kind": "layer",
    "tied_default": True,
}

_OLMO: dict[str, Any] = {
    "build": families.build_olmo,
    "qk_norm": True,
    "bias_key": True,
    "full_every": 4,
    "plain_windows": True,
    "layer_names": {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}

_LFM2: dict[str, Any] = {
    "qk_norm": True,
    "tied_default": True,
    "output_norm": "token_embd_norm",
    "recurrence": "short_conv",
    "eps_key": "norm_eps",
    "theta_default": 1e6,
    "layer_names": {
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
}

_QWEN35: dict[str, Any] = {
    "build": families.build_qwen35,
    "qk_norm": True,
    "norms_from_one": True,
    "rotary_default": 0.25,
    "recurrence": "gated_delta",
    "gated_attention": True,
    "layer_names": {
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
}

ARCHITECTURES = (
    Architecture("llama", "llama", "LlamaForCausalLM", gguf_interleaved=True, bias_key=True, kv_heads_default=True),
    Architecture(
        "mixtral",
        "llama",
        "MixtralForCausalLM",
        gguf_interleaved=True,
        windowed=True,
        window_default=0,
        mixture=_MIXTRAL,
    ),
    Architecture("mistral", "llama", "MistralForCausalLM", gguf_interleaved=True, windowed=True),
    Architecture(
        "ministral3", "mistral3", "Ministral3ForCausalLM", gguf_interleaved=True, windowed=True, window_default=0
    ),
    Architecture(
        "phi3", "phi3", "Phi3ForCausalLM", windowed=True, window_default=0, kv_heads_default=True, is_joined=True
    ),
    Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", qkv_bias=True, windowed=True, window_switch=True),
    Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", bias_key=True, qk_norm=True, windowed=True, window_switch=True),
    Architecture(
        "qwen2_moe",
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        qkv_bias=True,
        windowed=True,
        window_switch=True,
        mixture=MixtureRow(shared_key="shared_expert_intermediate_size", shared_gate=True),
    ),
    Architecture(
        "qwen3_moe",
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        bias_key=True,
        qk_norm=True,
        windowed=True,
        window_switch=True,
        mixture=MixtureRow(renormalises=True),
    ),
    Architecture(
        "gemma2",
        "gemma2",
        "Gemma2ForCausalLM",
        bias_key=True,
        windowed=True,
        full_every=2,
        softcaps=True,
        by_width_layers=46,
        **_GEMMA,
    ),
    Architecture(
        "gemma3_text",
        "gemma3",
        "Gemma3ForCausalLM",
        bias_key=True,
        qk_norm=True,
        windowed=True,
        full_every=6,
        window_rope_theta=10000.0,
        by_width_layers=62,
        **_GEMMA,
    ),
    Architecture(
        "gemma4_text",
        "gemma4",
        "Gemma4ForCausalLM",
        qk_norm=True,
        windowed=True,
        window_default=512,
        full_every=6,
        window_rope_theta=10000.0,
        softcaps=True,
        attention_scale=1.0,
        two_sizes=True,
        mixture=MixtureRow(
            renormalises=True, switch_key="enable_moe_block", used_key="top_k_experts", expert_scales=True
        ),
        **_GEMMA | {"build": families.build_gemma4, "norms_from_one": False},
    ),
    Architecture("olmo2", "olmo2", "Olmo2ForCausalLM", **_OLMO),
    Architecture("olmo3", "olmo2", "Olmo3ForCausalLM", windowed=True, **_OLMO),
    Architecture(
        "olmoe",
        "olmoe",
        "OlmoeForCausalLM",
        build=families.build_olmoe,
        qk_norm=True,
        bias_key=True,
        kv_heads_default=True,
        mixture=MixtureRow(features_key="intermediate_size"),
    ),
    Architecture(
        "granite",
        "granite",
        "GraniteForCausalLM",
        gguf_interleaved=True,
        bias_key=True,
        multipliers=True,
        layer_names=_GRANITE_NAMES,
    ),
    Architecture(
        "granitemoe",
        "granitemoe",
        "GraniteMoeForCausalLM",
        gguf_interleaved=True,
        bias_key=True,
        multipliers=True,
        mixture=_GRANITE,
        layer_names=_GRANITE_NAMES,
    ),
    Architecture(
        "granitemoeshared",
        "granitemoe",
        "GraniteMoeSharedForCausalLM",
        gguf_interleaved=True,
        bias_key=True,
        multipliers=True,
        mixture=_GRANITE,
        layer_names=_GRANITE_NAMES,
    ),
    Architecture(
        "granitemoehybrid",
        "granitehybrid",
        "GraniteMoeHybridForCausalLM",
        gguf_interleaved=True,
        bias_key=True,
        multipliers=True,
        rope_key="position_embedding_type",
        mixture=replace(_GRANITE, optional=True),
        recurrence="mamba2",
        attending=("granite", "granitemoeshared"),
        dense_key="shared_intermediate_size",
        layer_names=_GRANITE_NAMES
        | {
            "mamba.in_proj": "ssm_in",
            "mamba.conv1d": "ssm_conv1d",
            "mamba.norm": "ssm_norm",
            "mamba.out_proj": "ssm_out",
        },
    ),
    Architecture(
        "gpt_oss",
        "gpt-oss",
        "GptOssForCausalLM",
        build=families.build_gpt_oss,
        bias_key=True,
        windowed=True,
        window_default=128,
        full_every=2,
        truncates_yarn=False,
        gguf_names={"ffn_norm": "post_attention_norm"},
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
        qkv_bias_key="attention_bias",
        head_norm_key="use_qk_norm",
        rotary_default=0.5,
        gguf_names={"ffn_norm": "post_attention_norm"},
        mixture=MixtureRow(
            ("n_routed_experts", "num_local_experts"),
            scoring="sigmoid",
            renormalises=True,
            floor=1e-20,
            states_rule=True,
            shared_key="n_shared_experts",
            shared="count",
            choice_bias=True,
        ),
    ),
    Architecture(
        "smollm3",
        "smollm3",
        "SmolLM3ForCausalLM",
        gguf_interleaved=True,
        bias_key=True,
        nope_every=4,
        tied_default=True,
    ),
    Architecture(
        "cohere",
        "command-r",
        "CohereForCausalLM",
        kv_heads_default=True,
        context_keys=("model_max_length", "max_position_embeddings"),
        head_norm_key="use_qk_norm",
        **_COHERE,
    ),
    Architecture("cohere2", "cohere2", "Cohere2ForCausalLM", windowed=True, full_every=4, nope_in_full=True, **_COHERE),
    Architecture(
        "stablelm",
        "stablelm",
        "StableLmForCausalLM",
        build=families.build_stablelm,
        head_norm_key="qk_layernorm",
        parallel_key="use_parallel_residual",
        norm_kind="layer",
        rotary_default=0.25,
    ),
    Architecture(
        "starcoder2",
        "starcoder2",
        "Starcoder2ForCausalLM",
        build=families.build_starcoder,
        activation="gelu_tanh",
        use_bias=True,
        windowed=True,
        window_default=0,
        norm_kind="layer",
        tied_default=True,
    ),
    Architecture("lfm2", "lfm2", "Lfm2ForCausalLM", **_LFM2),
    Architecture(
        "lfm2_moe",
        "lfm2moe",
        "Lfm2MoeForCausalLM",
        mixture=MixtureRow(
            scoring="sigmoid",
            renormalises=True,
            floor=1e-6,
            states_rule=True,
            first_key="num_dense_layers",
            choice_bias=True,
        ),
        **_LFM2,
    ),
    Architecture(
        "falcon_h1",
        "falcon-h1",
        "FalconH1ForCausalLM",
        build=families.build_falcon,
        recurrence="mamba2",
        state_keys=FALCON_KEYS,
        beside=True,
        layer_names={
            "pre_ff_layernorm": "ffn_norm",
            "mamba.in_proj": "ssm_in",
            "mamba.conv1d": "ssm_conv1d",
            "mamba.norm": "ssm_norm",
            "mamba.out_proj": "ssm_out",
            "feed_forward.gate_proj": "ffn_gate",
            "feed_forward.up_proj": "ffn_up",
            "feed_forward.down_proj": "ffn_down",
        },
        gguf_bare=("ffn_norm",),
    ),
    Architecture(
        "nemotron_h",
        "nemotron_h",
        "NemotronHForCausalLM",
        build=families.build_nemotron,
        activation="relu_squared",
        bias_key=True,
        nope_every=1,
        recurrence="mamba2",
        state_keys=NEMOTRON_KEYS,
        eps_key="layer_norm_epsilon",
        gguf_experts_name="nemotron_h_moe",
        single_blocks=True,
        mixture=MixtureRow(
            ("n_routed_experts",),
            scoring="sigmoid",
            renormalises=True,
            floor=1e-20,
            states_rule=True,
            optional=True,
            gated=False,
            shared_key="moe_shared_expert_intermediate_size",
            choice_bias=True,
        ),
        layer_names={
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
        },
    ),
    Architecture("qwen3_5_text", "qwen35", "Qwen3_5ForCausalLM", gguf_tiled=True, **_QWEN35),
    Architecture(
        "qwen3_5_moe_text",
        "qwen35moe",
        "Qwen3_5MoeForCausalLM",
        gguf_tiled=True,
        mixture=MixtureRow(renormalises=True, shared_key="shared_expert_intermediate_size", shared_gate=True),
        **_QWEN35,
    ),
    Architecture(
        "qwen3_next",
        "qwen3next",
        "Qwen3NextForCausalLM",
        bias_key=True,
        mixture=MixtureRow(renormalises=True, shared_key="shared_expert_intermediate_size", shared_gate=True),
        **_QWEN35,
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


def default_window_layers(row: Architecture, window: int | None, layers: int) -> tuple[bool, ...] | None:
    """Which layers have the window where a file does not say so; None if all have it."""
    if window is None or row.full_every is None:
        return None
    return tuple((index + 1) % row.full_every != 0 for index in range(layers))


def default_rope_layers(
    row: Architecture, window_layers: tuple[bool, ...] | None, layers: int
) -> tuple[bool, ...] | None:
    """Which layers rotate where a file does not say so; None if all do."""
    if row.nope_in_full:
        return window_layers
    if row.nope_every is None:
        return None
    return tuple((index + 1) % row.nope_every != 0 for index in range(layers))


def default_scale(row: Architecture, layers: int, hidden: int, heads: int) -> float | None:
    """What scores are multiplied by where a file does not say so; None for 1 / sqrt(head_dim).

    GGUF has no key for it; llama.cpp knows the large Gemmas by their number of layers.
    """
    return float((hidden / heads) ** -0.5) if layers == row.by_width_layers else row.attention_scale


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
        if row.hf_class == name:
            return row
    known = _listed({row.hf_class for row in ARCHITECTURES})
    raise ModelError(f"architectures is [{name!r}], which is not supported; supported are {known}")


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
