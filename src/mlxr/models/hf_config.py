"""Model configuration out of a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping

from mlxr.kernels.activate import Activation
from mlxr.models import limits
from mlxr.models.architecture import Architecture
from mlxr.models.architectures import by_hf_class, by_name
from mlxr.models.bias_config import read_hf_biases
from mlxr.models.components import Experts, Recurrence
from mlxr.models.config import ModelConfig
from mlxr.models.fields import Fields
from mlxr.models.mixture import read_hf_mixture
from mlxr.models.multipliers import read_multipliers
from mlxr.models.recurrence_config import BlockKind, read_block_kinds, read_hf_recurrence
from mlxr.models.rope_config import (
    extend_context,
    find_hf_rope,
    read_hf_rope_dim,
    read_hf_rope_layers,
    read_hf_scaling,
    read_hf_temperature,
    read_hf_theta,
)
from mlxr.models.scale_config import HF_MULTIPLIERS, SOFTCAPS, read_hf_scales
from mlxr.models.two_sizes import read_hf_full_heads, read_hf_sizes
from mlxr.models.window_config import read_hf_window, read_hf_window_theta

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu_squared",
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

_REFUSED = (
    # keys, harmless values, why
    (_EXPERTS, (0,), "mixture of experts is not supported there"),
    (SOFTCAPS, (0,), "logit soft-capping is not supported"),
    (HF_MULTIPLIERS, (1,), "not supported"),
    (("use_qk_norm",), (False,), "layer norms of queries and keys are not supported"),
    (("qk_layernorm",), (False,), "layer norms of queries and keys are not supported"),
    (("swiglu_limit",), (7,), "only activations that are clamped at 7 are supported"),
    (("swiglu_alpha",), (1.702,), "only activations with 1.702 are supported"),
    (("moe_latent_size",), (0,), "experts that read fewer columns than the stream has are not supported"),
    (("clip_qkv",), (), "queries, keys and values that are clipped are not supported"),
    (("use_parallel_residual",), (False,), "parallel residual is not supported"),
    (("is_encoder_decoder", "add_cross_attention"), (False,), "only decoder models are supported"),
)


# Keys that would change answers where the family has no reader for them, with the values by which they do not.
_CHANGING: dict[str, tuple[object, ...]] = {
    "use_bidirectional_attention": ("vision",),
    **dict.fromkeys(("bidirectional", "use_alibi", "alibi", "scale_attn_by_inverse_layer_idx"), ()),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_percent"), (1,)),
    **dict.fromkeys(("attention_chunk_size", "attn_temperature_tuning", "use_attention_sinks", "attention_sinks"), ()),
    **dict.fromkeys(("no_rope_layer_interval", "router_logit_softcapping", "embedding_dense", "altup_num_inputs"), ()),
    **dict.fromkeys(("hadamard", "online_hadamard", "quarot", "spinquant", "rotation_config", "rotated_weights"), ()),
}
_CHANGES = "it changes answers, and mlxr does not know it in this family"


def config_from_hf(config: Mapping[str, object]) -> ModelConfig:
    """The configuration of a model folder. Raises ModelError naming a key that is missing, absurd or not supported.

    Of a model that also sees images it is that of `text_config`, the part that reads and writes text.
    """
    whole = Fields(config)
    fields = whole.mapping("text_config") or whole
    made = _make_config(whole, fields)
    fields.refuse_unless(("is_causal",), (True,), "only causal attention is supported")
    fields.refuse_unread(_CHANGING, _CHANGES)
    return made


def _make_config(whole: Fields, fields: Fields) -> ModelConfig:
    row = _find_architecture(fields)
    _refuse_others(whole, fields, row)
    hidden = fields.integer("hidden_size", 1, limits.MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 1, limits.MAX_HEADS)
    head_dim, kv_heads = _read_heads(fields, row, hidden, heads)
    window_heads: tuple[int | None, int | None] = None, None
    if row.two_sizes:
        window_heads = head_dim, kv_heads
        head_dim, kv_heads = read_hf_full_heads(fields, head_dim, kv_heads)
    context_key = next((key for key in row.context_keys if fields.get(key) is not None), row.context_keys[-1])
    context_length = fields.integer(context_key, 1, limits.MAX_CONTEXT)
    blocks = read_block_kinds(fields) if row.single_blocks else None
    layers = len(blocks) if blocks else fields.integer("num_hidden_layers", 1, limits.MAX_LAYERS)
    rope, window_rope = find_hf_rope(fields, row.rope)
    rope_theta = read_hf_theta(fields, row.rope, rope)
    flags = _flag_blocks(blocks, "recurrent")
    recurrence, recurrent = read_hf_recurrence(fields, row.recurrence, layers, hidden, flags)
    window, window_layers = read_hf_window(fields, row.windows, layers)
    scaling = read_hf_scaling(fields, row.rope, rope, context_length)
    activation = _read_activation(fields, row)
    has_mixture = blocks is None or "experts" in blocks
    mixture, mixture_layers = read_hf_mixture(fields, row.mixture if has_mixture else None, layers, activation)
    return ModelConfig(
        architecture=_name_architecture(row, recurrence, mixture),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=_read_ffn(fields, row, mixture, mixture_layers is not None, blocks),
        vocab_size=fields.integer("vocab_size", 1, limits.MAX_VOCABULARY),
        context_length=extend_context(context_length, scaling),
        rms_eps=fields.number(_find_eps(fields, row), 1e-30, 0.5),
        rope_theta=rope_theta,
        rope_dim=read_hf_rope_dim(fields, row.rope, rope, head_dim),
        rope_interleaved=row.rope.hf_interleaved,
        rope_scaling=scaling,
        query_temperature=read_hf_temperature(rope, context_length),
        sliding_window=window,
        window_layers=window_layers,
        window_rope_theta=read_hf_window_theta(
            fields, row.windows, window_rope, None if window is None else rope_theta
        ),
        rope_layers=read_hf_rope_layers(fields, row.rope, window_layers, layers),
        qk_norm=row.qk_norm or (row.head_norm_key is not None and fields.flag(row.head_norm_key, False)),
        parallel_blocks=row.parallel_key is not None and fields.flag(row.parallel_key, False),
        tied_embeddings=not row.recurrence.beside  # multiplied by other numbers, the output has a weight of its own
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
        multipliers=read_multipliers(fields) if row.recurrence.beside else None,
        **read_hf_biases(fields, row.biases),
        **read_hf_scales(fields, row.scales, hidden, head_dim),
        **(read_hf_sizes(fields, layers) if row.two_sizes else {}),
    )


def _refuse_others(whole: Fields, fields: Fields, row: Architecture) -> None:
    """Refuse what a file states that neither all families have nor this one."""
    read: list[tuple[str, ...]] = [SOFTCAPS] * row.scales.softcaps + [_EXPERTS] * (row.mixture is not None)
    read += [HF_MULTIPLIERS] * (row.scales.multipliers or row.recurrence.beside)
    for names, harmless, why in _REFUSED:
        if names not in read and names not in ((row.head_norm_key,), (row.parallel_key,)):
            fields.refuse_unless(names, harmless, why)
    quantization = whole.mapping("quantization_config") if isinstance(whole.get("quantization_config"), dict) else None
    is_mxfp4 = quantization is not None and quantization.get("quant_method") == "mxfp4"
    if whole.get("quantization") is None and not is_mxfp4:  # MLX states its own under both names
        whole.refuse_unless(
            ("quantization_config",), (), "quantised like this is not supported; convert the original weights"
        )


def _read_heads(fields: Fields, row: Architecture, hidden: int, heads: int) -> tuple[int, int]:
    """The size of a head and the number of key heads."""
    if fields.get("head_dim") is None and hidden % heads:
        fields.refuse("num_attention_heads", f"a divisor of the hidden size {hidden}")
    head_key = "attention_head_dim" if fields.get("head_dim") is None else "head_dim"  # the former in old Nemotrons
    head_dim = fields.integer(head_key, 2, limits.MAX_HEAD_DIM, default=hidden // heads)
    kv_heads = fields.integer(
        "num_key_value_heads", 1, limits.MAX_HEADS, default=heads if row.kv_heads_default else None
    )
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of the {heads} heads")
    return head_dim, kv_heads


def _name_architecture(row: Architecture, recurrence: Recurrence | None, mixture: Experts | None) -> str:
    """What a model is by its layers: one of a family with recurrent layers may have none of them."""
    attending = row.recurrence.attending
    return row.name if attending is None or recurrence is not None else attending[mixture is not None]


def _flag_blocks(blocks: tuple[BlockKind, ...] | None, *kinds: BlockKind) -> tuple[bool, ...] | None:
    """Which of the layers that are one block each are of these kinds."""
    return None if blocks is None else tuple(block in kinds for block in blocks)


def _read_ffn(
    fields: Fields, row: Architecture, mixture: Experts | None, mixed: bool, blocks: tuple[BlockKind, ...] | None
) -> int:
    """Features of the feed-forward blocks; `mixed`: not all of these are mixtures. LFM2 states how many a block without
    a gate would have."""
    if mixture is not None and blocks is not None and "dense" not in blocks:
        return mixture.features
    if mixture is not None:  # where every layer has one, folders may state no other features
        return fields.integer("intermediate_size", 1, limits.MAX_WIDTH, default=None if mixed else mixture.features)
    if row.recurrence.kind != "short_conv":
        return fields.integer(row.dense_key, 1, limits.MAX_WIDTH)
    stated = fields.integer("intermediate_size", 1, limits.MAX_WIDTH, default=12288)
    stated = fields.integer("block_ff_dim", 1, limits.MAX_WIDTH, default=stated)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return stated
    factor = fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, default=1.0)
    multiple = fields.integer("block_multiple_of", 1, limits.MAX_WIDTH, default=256)
    return -(-int(factor * int(2 * stated / 3)) // multiple) * multiple


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


def _read_activation(fields: Fields, row: Architecture) -> Activation:
    keys = ("hidden_activation", "mlp_hidden_act", "hidden_act")
    key = next((key for key in keys if fields.get(key) is not None), "hidden_act")
    if fields.get(key) is None:
        return row.activation
    name = fields.text(key)
    if name not in _ACTIVATIONS:
        fields.refuse(key, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]
