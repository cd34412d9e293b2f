"""Model configuration out of the metadata of a GGUF file, or of a folder, which `folders` maps to such metadata.

Keys are those of the GGUF specification (`llama.block_count`, ...), and a few of our own (`own_keys`). Without these
the names of a file's tensors tell whether the model has biases or an output matrix of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sized
from typing import cast

from mlxr.core.errors import ModelError
from mlxr.kernels.activate import ACTIVATIONS, Activation
from mlxr.kernels.tensor import TensorSource
from mlxr.models import limits
from mlxr.models.architecture import EPS_KEYS, Architecture
from mlxr.models.architectures import by_gguf_name
from mlxr.models.bias_config import find_gguf_biases
from mlxr.models.config import ModelConfig
from mlxr.models.fields import NO_ORIGINS, Fields, Origin, says_nothing
from mlxr.models.mixture import read_gguf_mixture
from mlxr.models.own_keys import open_own_keys
from mlxr.models.recurrence_config import read_counts, read_gguf_recurrence
from mlxr.models.rope_config import read_gguf_rope_layers, read_gguf_scaling, read_gguf_temperature
from mlxr.models.scale_config import GGUF_MULTIPLIERS, LOGIT_SCALE, SOFTCAPS, read_gguf_scales
from mlxr.models.two_sizes import read_gguf_sizes
from mlxr.models.window_config import PATTERN, WINDOW_THETA, read_gguf_window_layers, read_gguf_window_theta

_UNUSED = (0,)
_PATTERN, _WINDOW_THETA = (PATTERN,), (WINDOW_THETA,)
_PARALLEL = ("use_parallel_residual",)
_SECTIONS = ("rope.dimension_sections",)
_REFUSED = (
    # keys, harmless values, why
    (SOFTCAPS, _UNUSED, "logit soft-capping is not supported"),
    (GGUF_MULTIPLIERS, (0, 1), "not supported"),
    (LOGIT_SCALE, (0, 1), "not supported"),
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


# Keys that answers do not depend on, or only together with others, where their readers ask for them.
_HARMLESS = frozenset(
    (
        *("vocab_size", "pooling_type", "nextn_predict_layers", "leading_dense_block_count", "n_deepstack_layers"),
        *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.relative_buckets_count"),
        *("rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
        *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_beta_fast"),
        *("rope.scaling.yarn_beta_slow", "rope.scale_linear", "attention.temperature_length", "rope.freq_base"),
        *("rope.dimension_count", "feed_forward_length", "expert_feed_forward_length", "expert_shared_count"),
        *("expert_shared_feed_forward_length", "full_attention_interval", "classifier.output_labels"),
    )
)
# Keys of other families that would change answers, with the values by which they do not.
_CHANGING: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("moe_every_n_layers", "interleave_moe_layer_step", "expert_group_scale"), (1,)),
    **dict.fromkeys(("expert_chunk_feed_forward_length", "experts_per_group", "router_logit_softcapping"), ()),
    **dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp", "activation_sparsity_scale"), ()),
    **dict.fromkeys(("altup.num_inputs", "embedding_length_per_layer_input", "swin_norm", "token_shift_count"), ()),
    **dict.fromkeys(("attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla"), ()),
    **dict.fromkeys(("attention.value_length_mla", "attention.shared_kv_layers", "attention.group_norm_groups"), ()),
    **dict.fromkeys(("attention.chunk_size", "attention.sinks", "kda.head_dim", "wkv.head_size"), ()),
    **dict.fromkeys(("attention.output_scale", "attention.value_scale"), (1,)),
    **dict.fromkeys((f"dense_{place}_feat_{side}" for place in (2, 3) for side in ("in", "out")), ()),
}
_CHANGES = "it changes answers, and mlxr does not know it in this family; take another file of the model"
# Files whose weights stand in another basis say so, wherever they do, in a key with one of these words.
_ROTATED = re.compile(r"(^|[._])(hadamard|rotations?|rotated|quarot|spinquant|flatquant|ostquant)([._]|$)")
_OTHER_COMPUTATIONS = ("diffusion.shift_logits", "xielu.")
_EXTENSIONS = ("prism.",)  # of which unknown keys are told


def config_from_gguf(
    metadata: Mapping[str, object], tensors: Mapping[str, TensorSource], origins: Mapping[str, Origin] = NO_ORIGINS
) -> ModelConfig:
    """The configuration of a GGUF file. Raises ModelError naming the key that is missing, absurd or not supported, or
    its origin.

    So it does for keys that nobody here reads and that are known to change answers. Of the `tensors` only the factors
    of longrope are read.
    """
    return _read_config(metadata, tensors, origins)[0]


def list_unknown_keys(metadata: Mapping[str, object], tensors: Mapping[str, TensorSource]) -> list[str]:
    """The keys of a file that state something of the model and that nothing here reads; raises as the configuration."""
    _, fields = _read_config(metadata, tensors, NO_ORIGINS)
    unread = [fields.key(name) for name in fields.list_unread() if name not in _HARMLESS]
    return unread + [name for name in metadata if name.startswith(_EXTENSIONS)]


def _read_config(
    metadata: Mapping[str, object], tensors: Mapping[str, TensorSource], origins: Mapping[str, Origin]
) -> tuple[ModelConfig, Fields]:
    """The configuration, and the fields that were asked for it."""
    name = Fields(metadata).text("general.architecture")
    fields = Fields(metadata, f"{name}.", origins)
    own = open_own_keys(metadata, origins)
    _refuse_other_bases(metadata)
    config = _make_config(metadata, fields, own, tensors, name)
    fields.refuse_unread(_CHANGING, _CHANGES)
    return config, fields


def _refuse_other_bases(metadata: Mapping[str, object]) -> None:
    """Refuse files whose weights, or whose whole computation, are others than the family's."""
    for key, value in metadata.items():
        if key.startswith(("general.", "tokenizer.")) or says_nothing(value):
            continue
        if _ROTATED.search(key.lower()):
            raise ModelError(f"{key} is there: the weights are rotated, which mlxr does not undo; take another file")
        if key.startswith(_OTHER_COMPUTATIONS):
            raise ModelError(f"{key} is there: it changes answers, and mlxr does not know it")


def _make_config(
    metadata: Mapping[str, object], fields: Fields, own: Fields, tensors: Mapping[str, TensorSource], name: str
) -> ModelConfig:
    row = by_gguf_name(name, fields.integer("expert_count", 0, 1 << 16, default=0) > 0)
    read: list[tuple[str, ...]] = [SOFTCAPS] * row.scales.softcaps + [_WINDOW_THETA, _PATTERN] * (
        row.windows.full_every is not None
    )
    read += [GGUF_MULTIPLIERS] * row.scales.multipliers
    read += [LOGIT_SCALE] * (row.scales.multipliers or row.scales.logits)
    # converters wrote true for StableLM whose configuration says nothing; blocks in a row have a norm each
    is_parallel = row.may_be_parallel and "blk.0.ffn_norm.weight" not in tensors
    read += [_PARALLEL] * (row.may_be_parallel or "blk.0.ffn_norm.weight" in tensors)
    read += [_SECTIONS] * row.gated_attention  # of a text all sections turn by the same position
    for names, harmless, why in _REFUSED:
        if names not in read:
            fields.refuse_unless(names, harmless, why)
        fields.note(names)
    has_head_norms = "blk.0.attn_q_norm.weight" in tensors
    hidden = fields.integer("embedding_length", 1, limits.MAX_WIDTH)
    heads = fields.integer("attention.head_count", 1, limits.MAX_HEADS)
    head_dim = _read_head_dim(fields, hidden, heads)
    layers = _read_layers(fields)
    window = fields.integer("attention.sliding_window", 0, limits.MAX_CONTEXT, default=0) or None
    window_layers = read_gguf_window_layers(fields, own, row.windows, window, layers)
    windowed = window_layers or (window is not None,) * layers
    differing = read_gguf_sizes(fields, own, windowed, tensors) if row.two_sizes else {}
    kv_heads, ffn = differing.pop("kv_heads", None), differing.pop("ffn", None)
    if row.single_blocks:
        ffn, differing["mixer_layers"] = _read_blocks(fields, layers)
    recurrence, recurrent = read_gguf_recurrence(fields, own, row.recurrence, layers, hidden, tensors)
    kv_heads = kv_heads or _read_kv_heads(fields, None if recurrent is None else layers, heads)
    if heads % kv_heads:
        fields.refuse("attention.head_count_kv", f"a divisor of the {heads} heads")
    rope_dim = fields.integer("rope.dimension_count", 2, limits.MAX_HEAD_DIM, default=head_dim)
    if rope_dim % 2 or rope_dim > head_dim:
        fields.refuse("rope.dimension_count", f"an even number up to the head size {head_dim}")
    context_length = fields.integer("context_length", 1, limits.MAX_CONTEXT)
    rope_theta = fields.number("rope.freq_base", 1.0001, limits.MAX_THETA, default=10000.0)
    activation = _read_activation(own, row)
    mixture, mixture_layers = read_gguf_mixture(fields, own, row.mixture, tensors, layers, activation)
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
        rope_interleaved=row.rope.gguf_interleaved,
        rope_scaling=read_gguf_scaling(fields, own, row.rope, context_length, tensors),
        query_temperature=read_gguf_temperature(fields, context_length),
        sliding_window=window,
        window_layers=window_layers,
        window_rope_theta=read_gguf_window_theta(fields, row.windows, window, rope_theta),
        rope_layers=read_gguf_rope_layers(fields, own, row.rope, window_layers, layers),
        activation=activation,
        qk_norm=row.qk_norm or (row.head_norms and own.flag("attention.head_norms", has_head_norms)),
        parallel_blocks=own.flag("parallel_blocks", is_parallel),
        tied_embeddings=own.flag("tied_embeddings", "output.weight" not in tensors),
        mixture=mixture,
        mixture_layers=mixture_layers,
        gated_attention=row.gated_attention,
        recurrence=recurrence,
        recurrent_layers=recurrent,
        **find_gguf_biases(own, tensors, row.biases, layers),
        **read_gguf_scales(fields, own, row.scales, layers, hidden, heads),
        **differing,
    )


def _read_activation(own: Fields, row: Architecture) -> Activation:
    name = own.text("activation", default=row.activation)
    if name not in ACTIVATIONS:
        own.refuse("activation", f"one of {', '.join(ACTIVATIONS)}")
    return cast(Activation, name)


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
