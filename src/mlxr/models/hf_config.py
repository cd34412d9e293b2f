"""Model configuration out of a Hugging Face `config.json`, both in the older spelling (`rope_theta`, `rope_scaling`)
and in the newer one (`rope_parameters`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mlxr.core.errors import ModelError
from mlxr.kernels.activate import Activation
from mlxr.kernels.rope import QueryTemperature, RopeScaling, longrope_attention_factor, yarn_attention_factor
from mlxr.models import config as limits
from mlxr.models.architectures import Architecture, by_hf_class, by_name, default_rope_layers
from mlxr.models.config import ModelConfig
from mlxr.models.fields import Fields
from mlxr.models.mixture import read_hf_mixture
from mlxr.models.multipliers import read_multipliers
from mlxr.models.recurrence_config import BlockKind, read_block_kinds, read_hf_recurrence
from mlxr.models.specs import Mixture, Recurrence

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu_squared",
}
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_WINDOWED, _FULL = "sliding_attention", "full_attention"

_REFUSED = (
    # keys, harmless values, why
    (_EXPERTS, (0,), "mixture of experts is not supported there"),
    (_SOFTCAPS, (0,), "logit soft-capping is not supported"),
    (_MULTIPLIERS, (1,), "not supported"),
    (("use_qk_norm",), (False,), "layer norms of queries and keys are not supported"),
    (("qk_layernorm",), (False,), "layer norms of queries and keys are not supported"),
    (("swiglu_limit",), (7,), "only activations that are clamped at 7 are supported"),
    (("swiglu_alpha",), (1.702,), "only activations with 1.702 are supported"),
    (("moe_latent_size",), (0,), "experts that read fewer columns than the stream has are not supported"),
    (("clip_qkv",), (), "queries, keys and values that are clipped are not supported"),
    (("use_parallel_residual",), (False,), "parallel residual is not supported"),
    (("is_encoder_decoder", "add_cross_attention"), (False,), "only decoder models are supported"),
)
_REFUSED_TWO_SIZES = ((("use_bidirectional_attention",), ("vision",), "only causal attention is supported"),)
_DEFAULT_FULL_LAYERS = 28
_INPUT_FEATURES, _DEFAULT_INPUT_FEATURES = "hidden_size_per_layer_input", 256
_LONGROPE = ("longrope", "su")  # its name, and the one in older files
_REFUSED_SCALING = {
    "dynamic": "it would turn cached keys by other angles as a text grows; use type ntk with a fixed factor, or yarn",
    "mrope": "it is for images",
}


def config_from_hf(config: Mapping[str, object]) -> ModelConfig:
    """The configuration of a model folder. Raises ModelError naming a key that is missing, absurd or not supported.

    Of a model that also sees images it is that of `text_config`, the part that reads and writes text.
    """
    whole = Fields(config)
    fields = whole.mapping("text_config") or whole
    row = _find_architecture(fields)
    read: list[tuple[str, ...]] = [_SOFTCAPS] * row.softcaps + [_EXPERTS] * (row.mixture is not None)
    read += [_MULTIPLIERS] * (row.multipliers or row.beside)
    for names, harmless, why in _REFUSED:
        if names not in read and names not in ((row.head_norm_key,), (row.parallel_key,)):
            fields.refuse_unless(names, harmless, why)
    quantization = whole.mapping("quantization_config") if isinstance(whole.get("quantization_config"), dict) else None
    is_mxfp4 = quantization is not None and quantization.get("quant_method") == "mxfp4"
    if whole.get("quantization") is None and not is_mxfp4:  # MLX states its own under both names
        whole.refuse_unless(
            ("quantization_config",), (), "quantised like this is not supported; convert the original weights"
        )
    hidden = fields.integer("hidden_size", 1, limits.MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 1, limits.MAX_HEADS)
    if fields.get("head_dim") is None and hidden % heads:
        fields.refuse("num_attention_heads", f"a divisor of the hidden size {hidden}")
    head_key = "attention_head_dim" if fields.get("head_dim") is None else "head_dim"  # the former in old Nemotrons
    head_dim = fields.integer(head_key, 2, limits.MAX_HEAD_DIM, default=hidden // heads)
    kv_heads = fields.integer(
        "num_key_value_heads", 1, limits.MAX_HEADS, default=heads if row.kv_heads_default else None
    )
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of the {heads} heads")
    window_heads: tuple[int | None, int | None] = None, None
    if row.two_sizes:
        window_heads = head_dim, kv_heads
        head_dim, kv_heads = _read_full_heads(fields, head_dim, kv_heads)
    context_key = next((key for key in row.context_keys if fields.get(key) is not None), row.context_keys[-1])
    context_length = fields.integer(context_key, 1, limits.MAX_CONTEXT)
    blocks = read_block_kinds(fields) if row.single_blocks else None
    layers = len(blocks) if blocks else fields.integer("num_hidden_layers", 1, limits.MAX_LAYERS)
    rope, window_rope = _find_rope(fields, row)
    stated_theta = fields.number("rope_theta", 1.0001, 1e15, row.theta_default)
    rope_theta = rope.number("rope_theta", 1.0001, 1e15, default=stated_theta)
    flags = (True,) * layers if row.beside else _flag_blocks(blocks, "recurrent")
    recurrence, recurrent = read_hf_recurrence(fields, row.recurrence, layers, hidden, row.state_keys, flags)
    window, window_layers = _read_window(fields, row, layers)
    scaling = _read_scaling(fields, rope, context_length)
    activation = _read_activation(fields, row)
    has_mixture = blocks is None or "experts" in blocks
    mixture, mixture_layers = read_hf_mixture(fields, row.mixture if has_mixture else None, layers, activation)
    attention_bias = row.bias_key and fields.flag("attention_bias", False)
    mlp_bias = row.bias_key and fields.flag("mlp_bias", False)
    if row.use_bias:
        attention_bias = mlp_bias = fields.flag("use_bias", True)
    return ModelConfig(
        architecture=_name_architecture(row, recurrence, mixture),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=_read_ffn(fields, row, mixture, mixture_layers is not None, blocks),
        vocab_size=fields.integer("vocab_size", 1, limits.MAX_VOCABULARY),
        context_length=_extend_context(context_length, scaling),
        rms_eps=fields.number(_find_eps(fields, row), 1e-30, 0.5),
        rope_theta=rope_theta,
        rope_dim=_read_rope_dim(fields, rope, head_dim, row.rotary_default),
        rope_interleaved=row.hf_interleaved,
        rope_scaling=scaling,
        query_temperature=_read_temperature(rope, context_length),
        sliding_window=window,
        window_layers=window_layers,
        window_rope_theta=_read_window_theta(fields, row, window_rope, None if window is None else rope_theta),
        rope_layers=_read_rope_layers(fields, row, window_layers, layers),
        attention_scale=_read_scale(fields, row, head_dim),
        residual_scale=_read_multiplier(fields, row, "residual_multiplier"),
        logit_scale=_read_logit_scale(fields, row),
        attention_softcap=_read_softcap(fields, row, _SOFTCAPS[0]),
        final_softcap=_read_softcap(fields, row, _SOFTCAPS[1]),
        embedding_scale=math.sqrt(hidden)
        if row.scales_embeddings
        else _read_multiplier(fields, row, "embedding_multiplier"),
        qkv_bias=row.qkv_bias or attention_bias or fields.flag(row.qkv_bias_key, False),
        output_bias=attention_bias,
        ffn_bias=mlp_bias,
        qk_norm=row.qk_norm or (row.head_norm_key is not None and fields.flag(row.head_norm_key, False)),
        parallel_blocks=row.parallel_key is not None and fields.flag(row.parallel_key, False),
        tied_embeddings=not row.beside  # multiplied by other numbers, the output has a weight of its own
        and whole.flag(
            "tie_word_embeddings",
            fields.flag("tie_word_embeddings", fields.flag("tie_embedding", row.tied_default)),
        ),
        activation=activation,
        mixture=mixture,
        mixture_layers=_flag_blocks(blocks, "experts") if has_mixture and blocks else mixture_layers,
        window_head_dim=window_heads[0],
        window_kv_heads=window_heads[1],
        gated_attention=row.gated_attention,
        recurrence=recurrence,
        recurrent_layers=recurrent,
        mixer_layers=_flag_blocks(blocks, "recurrent", "attention"),
        multipliers=read_multipliers(fields) if row.beside else None,
        **(_read_two_sizes(fields, layers) if row.two_sizes else {}),
    )


def _name_architecture(row: Architecture, recurrence: Recurrence | None, mixture: Mixture | None) -> str:
    """What a model is by its layers: one of a family with recurrent layers may have none of them."""
    return row.name if row.attending is None or recurrence is not None else row.attending[mixture is not None]


def _flag_blocks(blocks: tuple[BlockKind, ...] | None, *kinds: BlockKind) -> tuple[bool, ...] | None:
    """Which of the layers that are one block each are of these kinds."""
    return None if blocks is None else tuple(block in kinds for block in blocks)


def _read_ffn(
    fields: Fields, row: Architecture, mixture: Mixture | None, mixed: bool, blocks: tuple[BlockKind, ...] | None
) -> int:
    """Features of the feed-forward blocks; `mixed`: not all of these are mixtures. LFM2 states how many a block without
    a gate would have."""
    if mixture is not None and blocks is not None and "dense" not in blocks:
        return mixture.features
    if mixture is not None:  # where every layer has one, folders may state no other features
        return fields.integer("intermediate_size", 1, limits.MAX_WIDTH, default=None if mixed else mixture.features)
    if row.recurrence != "short_conv":
        return fields.integer(row.dense_key, 1, limits.MAX_WIDTH)
    stated = fields.integer("intermediate_size", 1, limits.MAX_WIDTH, default=12288)
    stated = fields.integer("block_ff_dim", 1, limits.MAX_WIDTH, default=stated)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return stated
    factor = fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, default=1.0)
    multiple = fields.integer("block_multiple_of", 1, limits.MAX_WIDTH, default=256)
    return -(-int(factor * int(2 * stated / 3)) // multiple) * multiple


def _read_full_heads(fields: Fields, head_dim: int, kv_heads: int) -> tuple[int, int]:
    """Head size and key heads of layers without a window: stated for all of them, or for each by its number."""
    full = fields
    names = "global_head_dim", "num_global_key_value_heads"
    layers = fields.mapping("per_layer_config")
    if layers is not None:
        names = "head_dim", "num_key_value_heads"
        stated = {repr(fields.get("per_layer_config")[number]): number for number in layers.names()}  # type: ignore[index]
        if len(stated) != 1:
            fields.refuse("per_layer_config", "the same of all layers without a window")
        full = layers.mapping(next(iter(stated.values()))) or fields
    full_dim = full.integer(names[0], 2, limits.MAX_HEAD_DIM, default=512 if layers is None else head_dim)
    if layers is None and not fields.flag("attention_k_eq_v", False):
        return full_dim, kv_heads
    return full_dim, full.integer(names[1], 1, limits.MAX_HEADS, default=kv_heads)


def _read_two_sizes(fields: Fields, layers: int) -> dict[str, Any]:
    """Which values are keys, which layers read the keys and values of others, and whether all have embeddings."""
    for names, harmless, why in _REFUSED_TWO_SIZES:
        fields.refuse_unless(names, harmless, why)
    shared = fields.integer("num_kv_shared_layers", 0, layers, default=0)
    is_wide = shared and fields.flag("use_double_wide_mlp", False)
    unstated = 0 if fields.has(_INPUT_FEATURES) else _DEFAULT_INPUT_FEATURES  # null says: none
    return {
        "input_features": fields.integer(_INPUT_FEATURES, 0, limits.MAX_WIDTH, default=unstated) or None,
        "keys_as_values": fields.flag("attention_k_eq_v", False),
        "shared_layers": shared,
        "shared_ffn": 2 * fields.integer("intermediate_size", 1, limits.MAX_WIDTH // 2) if is_wide else None,
    }


def _find_architecture(fields: Fields) -> Architecture:
    """By class where `architectures` names one, else by `model_type`; they must agree."""
    classes = fields.get("architectures")
    model_type = fields.text("model_type", default="")
    if classes is None:
        return by_name(model_type)
    if not isinstance(classes, list) or len(classes) != 1 or not isinstance(classes[0], str):
        fields.refuse("architectures", "a list of one class")
    row = by_hf_class(classes[0])
    if model_type not in ("", row.name):
        fields.refuse("model_type", f"{row.name}, as architectures is {classes}")
    return row


def _find_eps(fields: Fields, row: Architecture) -> str:
    """The key of what norms add to the variance."""
    if row.eps_key is not None:
        return row.eps_key
    if row.norm_kind == "rms":
        return "rms_norm_eps"
    return "norm_epsilon" if fields.has("norm_epsilon") else "layer_norm_eps"


def _find_rope(fields: Fields, row: Architecture) -> tuple[Fields, Fields]:
    """The objects with the rotation's parameters, of all layers and of those with windows, possibly empty."""
    for name in ("rope_parameters", "rope_scaling"):
        found = fields.mapping(name)
        if found is not None:
            full, windowed = found.mapping(_FULL), found.mapping(_WINDOWED)
            return full or found, windowed or Fields({}, f"{name}.{_WINDOWED}.")
    unstated: dict[str, object] = {}
    if row.two_sizes:
        unstated = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    return Fields(unstated), Fields({}, "rope_scaling.")


def _read_window_theta(fields: Fields, row: Architecture, rope: Fields, theta: float | None) -> float | None:
    """The base of the rotation of layers with windows, where it is another one; `theta` is that of the others."""
    if row.plain_windows:
        return theta
    if row.window_rope_theta is None:
        return None
    stated = fields.number("rope_local_base_freq", 1.0001, 1e15, default=row.window_rope_theta)
    return rope.number("rope_theta", 1.0001, 1e15, default=stated)


def _read_scale(fields: Fields, row: Architecture, head_dim: int) -> float | None:
    """What scores are multiplied by, where the family states by which head size."""
    if row.attention_scale is not None:
        return row.attention_scale
    if row.multipliers:
        return _read_multiplier(fields, row, "attention_multiplier")
    if not row.scales_embeddings:
        return None
    size = fields.number("query_pre_attn_scalar", 1e-6, limits.MAX_SCALE, default=float(head_dim))
    return None if size == head_dim else size**-0.5


def _read_multiplier(fields: Fields, row: Architecture, name: str) -> float:
    return fields.number(name, 1e-9, limits.MAX_SCALE, default=1.0) if row.multipliers else 1.0


def _read_logit_scale(fields: Fields, row: Architecture) -> float:
    if row.logit_multiplier:
        return fields.number("logit_scale", 1e-9, limits.MAX_SCALE, default=0.0625)
    return 1.0 / _read_multiplier(fields, row, "logits_scaling")


def _read_rope_layers(
    fields: Fields, row: Architecture, window_layers: tuple[bool, ...] | None, layers: int
) -> tuple[bool, ...] | None:
    """Which layers rotate: all or none, stated one by one (1 means that it does), or the usual; None if all do."""
    if row.rope_key is not None:
        kind = fields.text(row.rope_key, default="nope")
        if kind not in ("nope", "rope"):
            fields.refuse(row.rope_key, "rope or nope")
        return None if kind == "rope" else (False,) * layers
    stated = None if row.nope_every is None else fields.get("no_rope_layers")
    if stated is None:
        return default_rope_layers(row, window_layers, layers)
    if not isinstance(stated, list) or len(stated) != layers or any(flag not in (0, 1) for flag in stated):
        fields.refuse("no_rope_layers", f"a list of {layers}, each one 0 or 1")
    return tuple(map(bool, stated))


def _read_softcap(fields: Fields, row: Architecture, name: str) -> float | None:
    return (fields.number(name, 0.0, limits.MAX_SCALE, default=0.0) or None) if row.softcaps else None


def _read_rope_dim(fields: Fields, rope: Fields, head_dim: int, usual: float) -> int:
    if rope.get("rope_type") == "proportional":  # of all pairs, of which some turn by nothing
        return head_dim
    default = fields.number("partial_rotary_factor", 0.0, 1.0, default=usual)
    factor = rope.number("partial_rotary_factor", 0.0, 1.0, default=default)
    rope_dim = int(head_dim * factor)
    if rope_dim < 2 or rope_dim % 2:
        raise ModelError(
            f"head_dim {head_dim} with partial_rotary_factor {factor:g} rotates {rope_dim} elements, expected an even "
            "number from 2"
        )
    return rope_dim


def _read_scaling(fields: Fields, rope: Fields, context_length: int) -> RopeScaling | None:
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        return None
    if kind in _REFUSED_SCALING:
        raise ModelError(f"{rope.key('rope_type')} {kind!r} is not supported: {_REFUSED_SCALING[kind]}")
    if kind == "proportional":
        rotated = rope.number("partial_rotary_factor", 1e-6, 1.0, default=1.0)
        return RopeScaling("proportional", rope.number("factor", 1e-6, 1e6, default=1.0), rotated=rotated)
    if kind not in ("linear", "ntk", "yarn", "llama3", *_LONGROPE):
        raise ModelError(
            f"{rope.key('rope_type')} is {kind!r}, expected default, linear, longrope, ntk, proportional, yarn "
            "or llama3"
        )
    key = "original_max_position_embeddings"  # Phi states it beside the scaling
    original = rope.integer(key, 1, limits.MAX_CONTEXT, fields.integer(key, 1, limits.MAX_CONTEXT, context_length))
    if kind in _LONGROPE:
        return _read_longrope(rope, original, context_length)
    rope.refuse_unless(("short_factor", "long_factor"), (), "only known with rope_type longrope")
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            rope.number("factor", 1.0, 1e6),
            original_context=original,
            low_freq_factor=rope.number("low_freq_factor", 1e-6, 1e6),
            high_freq_factor=rope.number("high_freq_factor", 1e-6, 1e6),
        )
    if kind == "yarn":
        return _read_yarn(rope, original, context_length)
    return RopeScaling("linear" if kind == "linear" else "ntk", rope.number("factor", 1.0, 1e6))


def _read_longrope(rope: Fields, original: int, context_length: int) -> RopeScaling:
    factor = rope.number("factor", 1e-6, 1e6, default=context_length / original)
    return RopeScaling(
        "longrope",
        1.0,
        original_context=original,
        attention_factor=rope.number(
            "attention_factor", 1e-6, 1e6, default=longrope_attention_factor(factor, original)
        ),
        short_factors=rope.numbers("short_factor", 1e-6, 1e6),
        long_factors=rope.numbers("long_factor", 1e-6, 1e6),
    )


def _read_yarn(rope: Fields, original: int, context_length: int) -> RopeScaling:
    factor = rope.number("factor", 1.0, 1e6, default=max(1.0, context_length / original))
    mscale = rope.number("mscale", 0.0, 1e6, default=0.0)
    mscale_all_dim = rope.number("mscale_all_dim", 0.0, 1e6, default=0.0)
    return RopeScaling(
        "yarn",
        factor,
        original_context=original,
        attention_factor=rope.number(
            "attention_factor", 1e-6, 1e6, default=yarn_attention_factor(factor, mscale, mscale_all_dim)
        ),
        beta_fast=rope.number("beta_fast", 1e-6, 1e6, default=32.0),
        beta_slow=rope.number("beta_slow", 1e-6, 1e6, default=1.0),
        truncate=rope.flag("truncate", True),
    )


def _read_temperature(rope: Fields, context_length: int) -> QueryTemperature | None:
    beta = rope.number("llama_4_scaling_beta", 0.0, limits.MAX_SCALE, default=0.0)
    period = rope.integer("original_max_position_embeddings", 1, limits.MAX_CONTEXT, default=context_length)
    return QueryTemperature(beta, period) if beta else None


def _extend_context(context_length: int, scaling: RopeScaling | None) -> int:
    """Yarn configurations often state the original length as `max_position_embeddings`."""
    if scaling is None or scaling.kind != "yarn" or scaling.original_context is None:
        return context_length
    return max(context_length, min(int(scaling.original_context * scaling.factor), limits.MAX_CONTEXT))


def _read_window(fields: Fields, row: Architecture, layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
    """The window, and which layers have it; None instead of flags that are all alike."""
    if not row.windowed or (row.window_switch and not fields.flag("use_sliding_window", False)):
        return None, None
    unstated = 0 if fields.has("sliding_window") else row.window_default  # null says: no window
    window = fields.integer("sliding_window", 0, limits.MAX_CONTEXT, default=unstated) or None
    if window is None:
        return None, None
    flags = _read_window_layers(fields, row, layers)
    if not any(flags):
        return None, None
    return window, None if all(flags) else flags


def _read_window_layers(fields: Fields, row: Architecture, layers: int) -> tuple[bool, ...]:
    """Which layers have a window: stated one by one, by a period, or (where there is a switch) from one layer on."""
    kinds = fields.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (_WINDOWED, _FULL) for kind in kinds):
            fields.refuse("layer_types", f"a list of {layers}, each one of {_FULL}, {_WINDOWED}")
        flags = tuple(kind == _WINDOWED for kind in kinds)
        return (*flags[:-1], False) if row.two_sizes else flags  # its last layer sees all, whatever the file says
    if row.full_every is not None:
        every = fields.integer("sliding_window_pattern", 1, limits.MAX_LAYERS, default=row.full_every)
        last = layers - 1 if row.two_sizes else layers
        return tuple((index + 1) % every != 0 and index != last for index in range(layers))
    first = fields.integer("max_window_layers", 0, 1 << 20, default=_DEFAULT_FULL_LAYERS) if row.window_switch else 0
    return tuple(index >= first for index in range(layers))


def _read_activation(fields: Fields, row: Architecture) -> Activation:
    keys = ("hidden_activation", "mlp_hidden_act", "hidden_act")
    key = next((key for key in keys if fields.get(key) is not None), "hidden_act")
    if fields.get(key) is None:
        return row.activation
    name = fields.text(key)
    if name not in _ACTIVATIONS:
        fields.refuse(key, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]
