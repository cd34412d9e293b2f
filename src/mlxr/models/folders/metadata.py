"""A `config.json` as the metadata of a GGUF file: sizes, names of activations, biases and scales, and what is refused.

Rotations and windows are the matter of `rotations`, recurrent mixers and experts of `mixers`. Every error names the key
of `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxr.kernels.activate import Activation
from mlxr.models import limits
from mlxr.models.architecture import EPS_KEYS, Architecture
from mlxr.models.architectures import by_gguf_name, by_hf_class, by_name, name_gguf
from mlxr.models.config import ModelConfig
from mlxr.models.fields import Fields
from mlxr.models.folders.mixers import BlockKind, Flags, read_block_kinds, state_mixture, state_recurrence
from mlxr.models.folders.multipliers import state_multipliers
from mlxr.models.folders.rotations import Turned, state_rotation
from mlxr.models.folders.sizes import Heads, read_full_heads, state_sizes
from mlxr.models.folders.statement import Statement
from mlxr.models.gguf_config import config_from_gguf
from mlxr.models.scale_config import LOGIT_SCALE, SOFTCAPS, default_scale

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu_squared",
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_MULTIPLIERS = {  # what GGUF calls Granite's
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": LOGIT_SCALE[0],
}
_MULTIPLIER_KEYS = tuple(_MULTIPLIERS)

_REFUSED = (
    # keys, harmless values, why
    (_EXPERTS, (0,), "mixture of experts is not supported there"),
    (SOFTCAPS, (0,), "logit soft-capping is not supported"),
    (_MULTIPLIER_KEYS, (1,), "not supported"),
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
    """Return the configuration of a model folder: that of its metadata. Raises as `read_folder` does."""
    return read_config(read_folder(config))


def read_config(stated: Statement) -> ModelConfig:
    """Return the configuration that a folder's metadata state; errors name keys of `config.json`."""
    return config_from_gguf(stated.values, stated.list_vectors(), stated.origins)


def read_folder(config: Mapping[str, object]) -> Statement:
    """Return what a folder amounts to. Raises ModelError naming a key that is missing, absurd or not supported.

    Of a model that also sees images it is that of `text_config`, the part that reads and writes text.
    """
    whole = Fields(config)
    fields = whole.mapping("text_config") or whole
    row = _find_architecture(fields)
    _refuse_others(whole, fields, row)
    out = Statement(row)
    _state_model(out, whole, fields)
    fields.refuse_unless(("is_causal",), (True,), "only causal attention is supported")
    fields.refuse_unread(_CHANGING, _CHANGES)
    return out


def _state_model(out: Statement, whole: Fields, fields: Fields) -> None:
    row = out.row
    hidden = fields.integer("hidden_size", 1, limits.MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 1, limits.MAX_HEADS)
    blocks = read_block_kinds(fields) if row.single_blocks else None
    own = window_heads = _read_heads(fields, row, hidden, heads)
    if row.two_sizes:
        own = read_full_heads(fields, window_heads)
    context_key = next((key for key in row.context_keys if fields.get(key) is not None), row.context_keys[-1])
    context_tokens = fields.integer(context_key, 1, limits.MAX_CONTEXT)
    layers = len(blocks) if blocks else fields.integer("num_hidden_layers", 1, limits.MAX_LAYERS)
    recurrent = state_recurrence(out, fields, row.recurrence, layers, hidden, _flag_blocks(blocks, "recurrent"))
    mixture = state_mixture(out, fields, row.mixture, layers, blocks)
    name = _name_architecture(row, recurrent is not None, mixture is not None)
    target = by_gguf_name(name, mixture is not None)
    out.put("block_count", layers)
    out.put("embedding_length", hidden, fields, "hidden_size")
    out.put("vocab_size", fields.integer("vocab_size", 1, limits.MAX_VOCABULARY), fields, "vocab_size")
    out.put("attention.head_count", heads, fields, "num_attention_heads")
    attends = _find_attending(row, layers, recurrent, blocks)
    counts = own.kv_heads if all(attends) else [own.kv_heads if flag else 0 for flag in attends]
    out.put("attention.head_count_kv", counts, own.fields, own.kv_key)
    for length in ("attention.key_length", "attention.value_length"):
        out.put(length, own.head_dim, own.fields, own.dim_key)
    eps_key = _find_eps(fields, row)
    for key in dict.fromkeys((EPS_KEYS[row.norm_kind], EPS_KEYS["layer" if blocks else row.norm_kind])):
        out.put(key, fields.number(eps_key, 1e-30, 0.5), fields, eps_key)
    ffn = _read_ffn(fields, row, mixture, blocks)
    widths = [ffn if block in ("dense", "experts") else 0 for block in blocks or ()]
    out.put("feed_forward_length", widths or ffn)
    windowed = state_rotation(out, fields, Turned(row, target, layers, own.head_dim, context_tokens))
    if row.two_sizes:
        state_sizes(out, fields, windowed, own, window_heads, ffn)
    _state_switches(out, whole, fields, target)
    _state_biases(out, fields)
    _state_scales(out, fields, target, (layers, hidden, heads, own.head_dim))
    if row.recurrence.beside:
        state_multipliers(out, fields)
    out.name(name)


def _state_switches(out: Statement, whole: Fields, fields: Fields, target: Architecture) -> None:
    """State the activation, and what a family has or not."""
    row = out.row
    activation = _read_activation(fields, row)
    if activation != target.activation:
        out.put_own("activation", activation)
    if row.head_norm_key is not None:
        out.put_own("attention.head_norms", fields.flag(row.head_norm_key, False))
    if row.parallel_key is not None:
        is_parallel = fields.flag(row.parallel_key, False)
        out.put("use_parallel_residual", is_parallel)
        out.put_own("parallel_blocks", is_parallel)
    if row.gated_attention:
        pairs = int(str(out.values["rope.dimension_count"])) // 2
        out.put("rope.dimension_sections", [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0])
    tied = fields.flag("tie_word_embeddings", fields.flag("tie_embedding", row.tied_default))
    # multiplied by other numbers, the output has a weight of its own
    out.put_own("tied_embeddings", whole.flag("tie_word_embeddings", tied) and not row.recurrence.beside)


def _state_biases(out: Statement, fields: Fields) -> None:
    """State which products have biases."""
    row = out.row.biases
    if row.by_use:
        attention = feed_forward = fields.flag("use_bias", True)
    else:
        attention = row.by_block and fields.flag("attention_bias", False)
        feed_forward = row.by_block and fields.flag("mlp_bias", False)
    out.put_own("attention.qkv_bias", fields.flag(row.qkv_key, False) or row.qkv or attention)
    out.put_own("attention.output_bias", attention)
    out.put_own("feed_forward_bias", feed_forward)
    out.put_own("output_bias", fields.flag("lm_head_bias", False))


def _state_scales(out: Statement, fields: Fields, target: Architecture, shape: tuple[int, int, int, int]) -> None:
    """State what numbers are multiplied by and capped at; `shape`: layers, hidden size, heads and their size."""
    row = out.row.scales
    layers, hidden, heads, head_dim = shape
    if row.multipliers:
        for key, name in _MULTIPLIERS.items():
            out.put(name, fields.number(key, 1e-9, limits.MAX_SCALE, default=1.0), fields, key)
    elif row.embeddings and row.attention is None:  # the family states by which head size scores are scaled
        size = fields.number("query_pre_attn_scalar", 1e-6, limits.MAX_SCALE, default=float(head_dim))
        if size**-0.5 != (default_scale(target.scales, layers, hidden, heads) or head_dim**-0.5):
            out.put_own("attention.scale", size**-0.5, fields, "query_pre_attn_scalar")
    if row.logits:
        scale = fields.number(LOGIT_SCALE[0], 1e-9, limits.MAX_SCALE, default=0.0625)
        out.put(LOGIT_SCALE[0], scale, fields, LOGIT_SCALE[0])
    if row.softcaps:
        for name in SOFTCAPS:
            cap = fields.number(name, 0.0, limits.MAX_SCALE, default=0.0)
            if cap:
                out.put(name, cap, fields, name)


def _refuse_others(whole: Fields, fields: Fields, row: Architecture) -> None:
    """Refuse what a file states that neither all families have nor this one."""
    read: list[tuple[str, ...]] = [SOFTCAPS] * row.scales.softcaps + [_EXPERTS] * (row.mixture is not None)
    read += [_MULTIPLIER_KEYS] * (row.scales.multipliers or row.recurrence.beside)
    for names, harmless, why in _REFUSED:
        if names not in read and names not in ((row.head_norm_key,), (row.parallel_key,)):
            fields.refuse_unless(names, harmless, why)
    quantization = whole.mapping("quantization_config") if isinstance(whole.get("quantization_config"), dict) else None
    is_mxfp4 = quantization is not None and quantization.get("quant_method") == "mxfp4"
    if whole.get("quantization") is None and not is_mxfp4:  # MLX states its own under both names
        whole.refuse_unless(
            ("quantization_config",), (), "quantised like this is not supported; convert the original weights"
        )


def _read_heads(fields: Fields, row: Architecture, hidden: int, heads: int) -> Heads:
    """Return the size of a head and the number of key heads."""
    if fields.get("head_dim") is None and hidden % heads:
        fields.refuse("num_attention_heads", f"a divisor of the hidden size {hidden}")
    head_key = "attention_head_dim" if fields.get("head_dim") is None else "head_dim"  # the former in old Nemotrons
    head_dim = fields.integer(head_key, 2, limits.MAX_HEAD_DIM, default=hidden // heads)
    kv_heads = fields.integer(
        "num_key_value_heads", 1, limits.MAX_HEADS, default=heads if row.kv_heads_default else None
    )
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of the {heads} heads")
    return Heads(head_dim, kv_heads, fields, head_key, "num_key_value_heads")


def _name_architecture(row: Architecture, has_recurrent: bool, has_experts: bool) -> str:
    """Return GGUF's name of a model by its layers: one of a family with recurrent layers may have none of them."""
    attending = row.recurrence.attending
    model = row if attending is None or has_recurrent else by_name(attending[has_experts])
    return name_gguf(model, has_experts)


def _flag_blocks(blocks: tuple[BlockKind, ...] | None, kind: BlockKind) -> Flags | None:
    """Return which of the layers that are one block each are of this kind."""
    return None if blocks is None else tuple(block == kind for block in blocks)


def _find_attending(
    row: Architecture, layers: int, recurrent: Flags | None, blocks: tuple[BlockKind, ...] | None
) -> Flags:
    """Return which layers GGUF files state heads of keys of."""
    if blocks is not None:
        return tuple(block == "attention" for block in blocks)
    if recurrent is None or row.recurrence.beside or row.recurrence.kind == "gated_delta":
        return (True,) * layers
    return tuple(not flag for flag in recurrent)


def _read_ffn(
    fields: Fields, row: Architecture, mixture: tuple[int, Flags] | None, blocks: tuple[BlockKind, ...] | None
) -> int:
    """Return the features of the feed-forward blocks. LFM2 states how many a block without a gate would have."""
    if mixture is not None:
        features, flags = mixture
        if blocks is not None and "dense" not in blocks:
            return features
        # where every layer has experts, folders may state no other features
        return fields.integer("intermediate_size", 1, limits.MAX_WIDTH, default=features if all(flags) else None)
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
    """Return the row by class where `architectures` names one, else by `model_type`; they must agree."""
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
    """Return the key of what norms add to the variance."""
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
