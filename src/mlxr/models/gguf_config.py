"""Model configuration out of the metadata of a GGUF file; `names.gguf_metadata` goes the other way.

Keys are those of the GGUF specification (`llama.block_count`, ...). Whether a model has biases or an output matrix of
its own is seen from the names of its tensors, as the metadata does not say.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sized
from typing import Any

from mlxr.core.errors import ModelError
from mlxr.kernels.rope import QueryTemperature, RopeScaling, yarn_attention_factor
from mlxr.kernels.tensor import TensorSource
from mlxr.models import config as limits
from mlxr.models.architectures import (
    EPS_KEYS,
    ROPE_SWITCH,
    Architecture,
    by_gguf_name,
    default_rope_layers,
    default_scale,
    default_window_layers,
)
from mlxr.models.config import ModelConfig
from mlxr.models.fields import Fields
from mlxr.models.mixture import read_gguf_mixture
from mlxr.models.names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from mlxr.models.recurrence_config import read_counts, read_gguf_recurrence
from mlxr.models.weights import read_rope_factors

_UNUSED = (0,)
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_WINDOW_THETA = ("rope.freq_base_swa",)
_MULTIPLIERS = ("embedding_scale", "residual_scale", "attention.scale")
_LOGIT_SCALE = ("logit_scale",)
_PATTERN = ("attention.sliding_window_pattern",)
_PARALLEL = ("use_parallel_residual",)
_SECTIONS = ("rope.dimension_sections",)
_REFUSED = (
    # keys, harmless values, why
    (_SOFTCAPS, _UNUSED, "logit soft-capping is not supported"),
    (_MULTIPLIERS, (0, 1), "not supported"),
    (_LOGIT_SCALE, (0, 1), "not supported"),
    (("attention.clamp_kqv", "attention.max_alibi_bias"), _UNUSED, "not supported"),
    (("attention.causal",), (True,), "only causal attention is supported"),
    (_PARALLEL, (False,), "parallel residual is not supported"),
    (("rope.scaling.alpha",), (0, 1), "not supported; convert the model with its frequency base scaled"),
    (("rope.scaling.yarn_ext_factor",), (1,), "only full yarn extrapolation (1) is supported"),
    (_SECTIONS, (), "not supported"),
    (_WINDOW_THETA, (), "not supported"),
    (_PATTERN, (), "windows that differ by layer are not supported"),
    (("moe_latent_size",), _UNUSED, "experts that read fewer columns than the stream has are not supported"),
    (("tensor_data_layout",), ("Meta AI original pth",), "not a known layout"),
)


def config_from_gguf(metadata: Mapping[str, object], tensors: Mapping[str, TensorSource]) -> ModelConfig:
    """The configuration of a GGUF file. Raises ModelError naming the key that is missing, absurd or not supported.

    Of the `tensors` only the factors of longrope are read.
    """
    name = Fields(metadata).text("general.architecture")
    fields = Fields(metadata, f"{name}.")
    row = by_gguf_name(name, fields.integer("expert_count", 0, 1 << 16, default=0) > 0)
    read: list[tuple[str, ...]] = [_SOFTCAPS] * row.softcaps + [_WINDOW_THETA, _PATTERN] * (row.full_every is not None)
    read += [_MULTIPLIERS] * row.multipliers + [_LOGIT_SCALE] * (row.multipliers or row.logit_multiplier)
    # converters wrote true for StableLM whose configuration says nothing; blocks in a row have a norm each
    is_parallel = row.parallel_key is not None and "blk.0.ffn_norm.weight" not in tensors
    read += [_PARALLEL] * (row.parallel_key is not None or "blk.0.ffn_norm.weight" in tensors)
    read += [_SECTIONS] * row.gated_attention  # of a text all sections turn by the same position
    for names, harmless, why in _REFUSED:
        if names not in read:
            fields.refuse_unless(names, harmless, why)
    hidden = fields.integer("embedding_length", 1, limits.MAX_WIDTH)
    heads = fields.integer("attention.head_count", 1, limits.MAX_HEADS)
    head_dim = _read_head_dim(fields, hidden, heads)
    layers = _read_layers(fields)
    window = fields.integer("attention.sliding_window", 0, limits.MAX_CONTEXT, default=0) or None
    window_layers = _read_window_layers(fields, row, window, layers)
    windowed = window_layers or (window is not None,) * layers
    differing = _read_two_sizes(fields, windowed, tensors) if row.two_sizes else {}
    kv_heads, ffn = differing.pop("kv_heads", None), differing.pop("ffn", None)
    if row.single_blocks:
        ffn, differing["mixer_layers"] = _read_blocks(fields, layers)
    recurrence, recurrent = read_gguf_recurrence(fields, row.recurrence, layers, hidden, tensors, tiled=row.gguf_tiled)
    if row.beside:
        recurrent = (True,) * layers
    kv_heads = kv_heads or _read_kv_heads(fields, None if recurrent is None else layers, heads)
    if heads % kv_heads:
        fields.refuse("attention.head_count_kv", f"a divisor of the {heads} heads")
    rope_dim = fields.integer("rope.dimension_count", 2, limits.MAX_HEAD_DIM, default=head_dim)
    if rope_dim % 2 or rope_dim > head_dim:
        fields.refuse("rope.dimension_count", f"an even number up to the head size {head_dim}")
    context_length = fields.integer("context_length", 1, limits.MAX_CONTEXT)
    rope_theta = fields.number("rope.freq_base", 1.0001, 1e15, default=10000.0)
    mixture, mixture_layers = read_gguf_mixture(fields, row.mixture, tensors, layers, row.activation)
    unstated_ffn = (
        mixture.features if mixture is not None and mixture_layers is None else None
    )  # none has another block
    return ModelConfig(
        architecture=row.name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn or fields.integer("feed_forward_length", 1, limits.MAX_WIDTH, default=unstated_ffn),
        vocab_size=_read_vocab_size(metadata, fields),
        context_length=context_length,
        rms_eps=fields.number(EPS_KEYS[row.norm_kind], 1e-30, 0.5),
        rope_theta=rope_theta,
        rope_dim=rope_dim,
        rope_interleaved=row.gguf_interleaved,
        rope_scaling=_read_scaling(fields, row, context_length, tensors),
        query_temperature=_read_temperature(fields, context_length),
        sliding_window=window,
        window_layers=window_layers,
        window_rope_theta=_read_window_theta(fields, row, window, rope_theta),
        rope_layers=_read_rope_layers(fields, row, window_layers, layers),
        attention_scale=_read_scale(fields, row, "attention.scale") or default_scale(row, layers, hidden, heads),
        residual_scale=_read_scale(fields, row, "residual_scale") or 1.0,
        logit_scale=_read_logit_scale(fields, row),
        attention_softcap=_read_softcap(fields, row, "attn_logit_softcapping"),
        final_softcap=_read_softcap(fields, row, "final_logit_softcapping"),
        embedding_scale=_read_scale(fields, row, "embedding_scale")
        or (math.sqrt(hidden) if row.scales_embeddings else 1.0),
        activation=row.activation,
        qkv_bias=row.qkv_bias or _has_any(tensors, "attn_q.bias", layers),
        output_bias=_has_any(tensors, "attn_output.bias", layers),
        ffn_bias=_has_any(tensors, "ffn_down.bias", layers),
        qk_norm=row.qk_norm or (row.head_norm_key is not None and "blk.0.attn_q_norm.weight" in tensors),
        parallel_blocks=is_parallel,
        tied_embeddings="output.weight" not in tensors,
        mixture=mixture,
        mixture_layers=mixture_layers,
        gated_attention=row.gated_attention,
        recurrence=recurrence,
        recurrent_layers=recurrent,
        **differing,
    )


def _has_any(tensors: Container[str], part: str, layers: int) -> bool:
    """Whether a layer has that tensor; not all layers attend."""
    return any(f"blk.{index}.{part}" in tensors for index in range(layers))


def _read_layers(fields: Fields) -> int:
    """Layers, without those at the end that only draft tokens."""
    blocks = fields.integer("block_count", 1, limits.MAX_LAYERS)
    return blocks - fields.integer("nextn_predict_layers", 0, blocks - 1, default=0)


def _read_blocks(fields: Fields, layers: int) -> tuple[int, tuple[bool, ...]]:
    """Features of the feed-forward blocks, and which layers are mixers instead, which have 0 of them."""
    widths = read_counts(fields, "feed_forward_length", layers, limits.MAX_WIDTH)
    if len({*widths} - {0}) != 1:
        fields.refuse("feed_forward_length", "one number for all layers that are no mixers, and 0 for these")
    return max(widths), tuple(width == 0 for width in widths)


def _read_kv_heads(fields: Fields, layers: int | None, heads: int) -> int:
    """Key heads of the layers that attend; files with recurrent layers may state 0 of the others."""
    name = "attention.head_count_kv"
    if layers is None:
        return fields.integer(name, 1, limits.MAX_HEADS, default=heads)
    counts = {*read_counts(fields, name, layers, limits.MAX_HEADS)} - {0}
    if len(counts) != 1:
        fields.refuse(name, "one number for all layers that attend, of which there must be one")
    return counts.pop()


def _read_two_sizes(fields: Fields, windowed: tuple[bool, ...], tensors: Mapping[str, TensorSource]) -> dict[str, Any]:
    """How layers with windows differ from the others, those that share keys and values from those before, and whether
    all have embeddings of their own."""
    if ROPE_FACTORS not in tensors:
        raise ModelError(f"tensor {ROPE_FACTORS} is missing, which says how much of a head turns; convert it anew")
    layers = len(windowed)
    shared = fields.integer("attention.shared_kv_layers", 0, layers, default=0)
    counts = fields.integers("attention.head_count_kv", layers, 1, limits.MAX_HEADS)
    widths = fields.integers("feed_forward_length", layers, 1, limits.MAX_WIDTH)
    kv_heads = {flag: {n for n, one in zip(counts, windowed, strict=True) if one == flag} for flag in (False, True)}
    if max(map(len, kv_heads.values())) > 1:
        fields.refuse("attention.head_count_kv", "as many for all layers with a window, and for all without")
    own, others = set(widths[: layers - shared]), set(widths[layers - shared :])
    if max(len(own), len(others)) > 1:
        fields.refuse("feed_forward_length", "as many for all layers with keys of their own, and for all others")
    window_dim = fields.integer("attention.key_length_swa", 2, limits.MAX_HEAD_DIM)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if fields.integer(name, 2, limits.MAX_HEAD_DIM, default=window_dim) != window_dim:
            fields.refuse(name, f"the key length {window_dim}")
    full = next((index for index, flag in enumerate(windowed) if not flag), None)
    has_values = full is None or f"blk.{full}.attn_v.weight" in tensors
    joined = None if full is None else tensors.get(f"blk.{full}.attn_qkv.weight")
    if joined is not None:  # of queries and keys alone where values are keys
        queries = fields.integer("attention.head_count", 1, limits.MAX_HEADS)
        columns = fields.integer("attention.key_length", 2, limits.MAX_HEAD_DIM)
        has_values = joined.shape[0] != (queries + min(kv_heads[False])) * columns
    window_kv_heads = kv_heads[True] or kv_heads[False]
    return {
        "kv_heads": min(kv_heads[False] or window_kv_heads),
        "ffn": min(own or others),
        "window_head_dim": window_dim,
        "window_kv_heads": min(window_kv_heads),
        "keys_as_values": not has_values,
        "shared_layers": shared,
        "input_features": fields.integer("embedding_length_per_layer_input", 0, limits.MAX_WIDTH, default=0) or None,
        "shared_ffn": None if own == others or not others else min(others),
    }


def _read_rope_layers(
    fields: Fields, row: Architecture, window_layers: tuple[bool, ...] | None, layers: int
) -> tuple[bool, ...] | None:
    """Which layers rotate; files of Granite say whether they do. None if all do."""
    if row.multipliers and not fields.flag(ROPE_SWITCH, True):
        return (False,) * layers
    return default_rope_layers(row, window_layers, layers)


def _read_window_layers(fields: Fields, row: Architecture, window: int | None, layers: int) -> tuple[bool, ...] | None:
    """Which layers have the window: one flag for each, a number of layers of which the last has none, or the usual."""
    pattern = fields.get(_PATTERN[0])
    if pattern is None or row.full_every is None or window is None:
        return default_window_layers(row, window, layers)
    if isinstance(pattern, Iterable) and not isinstance(pattern, str):
        flags = tuple(pattern)
        if len(flags) != layers or any(flag not in (0, 1) for flag in flags):
            fields.refuse(_PATTERN[0], f"{layers} flags")
        return tuple(bool(flag) for flag in flags)
    every = fields.integer(_PATTERN[0], 1, limits.MAX_LAYERS)
    return tuple((index + 1) % every != 0 for index in range(layers))


def _read_scale(fields: Fields, row: Architecture, name: str) -> float | None:
    """One of the multipliers; 0 and absent say: none."""
    return (fields.number(name, 0.0, limits.MAX_SCALE, default=0.0) or None) if row.multipliers else None


def _read_logit_scale(fields: Fields, row: Architecture) -> float:
    if not (row.multipliers or row.logit_multiplier):
        return 1.0
    scale = fields.number(_LOGIT_SCALE[0], 0.0, limits.MAX_SCALE, default=0.0) or 1.0
    return 1.0 / scale if row.multipliers else scale  # Granite states what logits are divided by


def _read_window_theta(fields: Fields, row: Architecture, window: int | None, theta: float) -> float | None:
    if row.plain_windows:
        return None if window is None else theta
    if row.window_rope_theta is None:
        return None
    return fields.number(_WINDOW_THETA[0], 1.0001, 1e15, default=row.window_rope_theta)


def _read_softcap(fields: Fields, row: Architecture, name: str) -> float | None:
    return (fields.number(name, 0.0, limits.MAX_SCALE, default=0.0) or None) if row.softcaps else None


def _read_head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if fields.get("attention.key_length") is None and hidden % heads:
        fields.refuse("attention.head_count", f"a divisor of the embedding length {hidden}")
    head_dim = fields.integer("attention.key_length", 2, limits.MAX_HEAD_DIM, default=hidden // heads)
    if fields.integer("attention.value_length", 1, limits.MAX_HEAD_DIM, default=head_dim) != head_dim:
        fields.refuse("attention.value_length", f"the key length {head_dim}")
    return head_dim


def _read_vocab_size(metadata: Mapping[str, object], fields: Fields) -> int:
    """Stated, or the number of tokens in the vocabulary; they must agree when both are there."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, Sized) and not isinstance(tokens, str) and len(tokens) else None
    stated = fields.integer("vocab_size", 1, limits.MAX_VOCABULARY, default=count)
    if count is not None and stated != count:
        fields.refuse("vocab_size", f"the {count} tokens of tokenizer.ggml.tokens")
    return stated


def _read_scaling(
    fields: Fields, row: Architecture, context_length: int, tensors: Mapping[str, TensorSource]
) -> RopeScaling | None:
    factor_key = "rope.scaling.factor" if fields.get("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = fields.number(factor_key, 0.0, 1e6, default=0.0)  # 0 is how writers say "none"
    kind = fields.text("rope.scaling.type", default="linear")
    is_plain = kind == "none" or (kind == "linear" and factor in (0.0, 1.0))
    if kind == "longrope" or (is_plain and LONG_FACTORS in tensors):
        if factor not in (0.0, 1.0):
            fields.refuse(factor_key, "none, as longrope has a factor for each pair")
        return RopeScaling(
            "longrope",
            1.0,
            original_context=_read_original_context(fields, context_length),
            attention_factor=fields.number("rope.scaling.attn_factor", 1e-6, 1e6, default=1.0),
            short_factors=tuple(read_rope_factors(tensors, SHORT_FACTORS)),
            long_factors=tuple(read_rope_factors(tensors, LONG_FACTORS)),
        )
    if is_plain:
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind != "yarn":
        fields.refuse("rope.scaling.type", "none, linear, longrope or yarn")
    if factor <= 0:
        fields.refuse(factor_key, "a factor above 0")
    stated = "rope.scaling.yarn_attn_factor"
    if fields.get(stated) is None:
        stated = "rope.scaling.attn_factor"
    log_multiplier = fields.number("rope.scaling.yarn_log_multiplier", 0.0, 1e6, default=0.0)
    return RopeScaling(
        "yarn",
        factor,
        original_context=_read_original_context(fields, context_length),
        # files state what the recommended factor is multiplied by
        attention_factor=fields.number(stated, 1e-6, 1e6, default=1.0)
        * yarn_attention_factor(factor, 1.0, log_multiplier),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 1e-6, 1e6, default=32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1e-6, 1e6, default=1.0),
        truncate=row.truncates_yarn,
    )


def _read_original_context(fields: Fields, context_length: int) -> int:
    return fields.integer("rope.scaling.original_context_length", 1, limits.MAX_CONTEXT, default=context_length)


def _read_temperature(fields: Fields, context_length: int) -> QueryTemperature | None:
    beta = fields.number("attention.temperature_scale", 0.0, limits.MAX_SCALE, default=0.0)
    return QueryTemperature(beta, _read_original_context(fields, context_length)) if beta else None
