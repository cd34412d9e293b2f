"""Recurrent mixers and mixtures of experts in a `config.json`, stated as GGUF's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from mlxr.core.frozen import frozen
from mlxr.kernels.moe import Scoring
from mlxr.models import limits
from mlxr.models.fields import Fields
from mlxr.models.folders.config import EXPERTS, Flags, FolderConfig
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import SCORING_NUMBERS

_BLOCKS = ("dense", "sparse")  # names in `mlp_layer_types` of layers without experts, and with some
ATTENDS = ("full_attention", "attention")  # names in `layer_types` of layers that attend, newer spellings first
_INDEXED = "indexed_attention"  # the same, if an indexer chooses positions
Shared = Literal["features", "count"]


def read_recurrent_layers(c: FolderConfig, *recurs: str) -> Flags:
    """Return for each layer True if it is recurrent: its type is one of `recurs`, or its number is not listed."""
    types = c.fields.get("layer_types")
    if types is None:
        attend = c.fields.get("full_attn_idxs")
        if not isinstance(attend, list) or any(not isinstance(index, int) for index in attend):
            c.fields.refuse("layer_types", f"a list of {c.layers} types, or full_attn_idxs")
        return tuple(index not in attend for index in range(c.layers))
    if not isinstance(types, list) or len(types) != c.layers or not {*map(str, types)} <= {*recurs, *ATTENDS, _INDEXED}:
        c.fields.refuse("layer_types", f"a list of {c.layers}, each one {recurs[0]} or {ATTENDS[0]}")
    return tuple(kind in recurs for kind in types)


def read_divisor(fields: Fields, name: str, heads: int, what: str, default: int | None = None) -> int:
    """Return a number that divides the heads of a mixer."""
    parts = fields.integer(name, 1, limits.MAX_HEADS, default=default)
    if heads % parts:
        fields.refuse(name, f"a divisor of the {heads} {what}")
    return parts


def state_latent_attention(
    c: FolderConfig, *, is_parted: bool = True, tied: bool = False, rotates: bool = True
) -> None:
    """State the sizes of a model with latent attention, and its rotation, if it `rotates`.

    In files of families in which it `is_parted`, keys and values have matrices of their own; the usual keys have the
    sizes of what is kept of a token, and other keys the sizes of heads.
    """
    fields, out = c.fields, c.out
    fields.refuse_unless(("attention_bias", "mlp_bias"), (False,), "biases are not supported there")
    rank = fields.integer("kv_lora_rank", 1, limits.MAX_HEAD_DIM)
    dim = fields.integer("qk_rope_head_dim", 2 if rotates else 0, limits.MAX_HEAD_DIM)
    if dim % 2:
        fields.refuse("qk_rope_head_dim", "an even number")
    plain = fields.integer("qk_nope_head_dim", 1, limits.MAX_HEAD_DIM)
    values = fields.integer("v_head_dim", 1, limits.MAX_HEAD_DIM, default=c.hidden // c.heads)
    c.state_model(kv_heads=c.heads, head_dim=dim + rank, tied=tied)
    end = "_mla" if is_parted else ""
    if is_parted:
        out.put("attention.head_count_kv", 1, fields, "num_key_value_heads")
        out.put("attention.key_length", dim + rank, fields, "kv_lora_rank")
        out.put("attention.value_length", rank, fields, "kv_lora_rank")
    out.put(f"attention.key_length{end}", plain + dim, fields, "qk_nope_head_dim")
    out.put(f"attention.value_length{end}", values, fields, "v_head_dim")
    out.put("attention.kv_lora_rank", rank, fields, "kv_lora_rank")
    query_rank = fields.integer("q_lora_rank", 0, limits.MAX_WIDTH, default=0)
    if query_rank:
        out.put("attention.q_lora_rank", query_rank, fields, "q_lora_rank")
    out.put("rope.dimension_count", dim, fields, "qk_rope_head_dim")
    fields.note(("partial_rotary_factor", "head_dim"))
    if rotates:
        state_rotation(c, rope_dim=dim, scales_scores=True)


@frozen
class MambaKeys:
    """The names of Mamba's sizes in a family's `config.json`."""

    taps: str = "mamba_d_conv"
    state_dim: str = "mamba_d_state"
    rank: str = "mamba_dt_rank"  # "auto": a sixteenth of the stream's columns
    expand: str = "mamba_expand"  # its channels are so many times these columns
    channels: str | None = None  # or so many, where there is such a key
    conv_bias: str = "mamba_conv_bias"
    bias: str = "mamba_proj_bias"


def state_mamba(c: FolderConfig, keys: MambaKeys) -> None:
    """State the sizes of Mamba."""
    fields, out = c.fields, c.out
    fields.refuse_unless((keys.conv_bias,), (True,), "not supported")
    fields.refuse_unless((keys.bias,), (False,), "not supported")
    fields.refuse_unless(("hidden_act",), ("silu",), "not supported")
    usual = c.hidden * fields.integer(keys.expand, 1, limits.MAX_STATED, default=2)
    channels = usual if keys.channels is None else fields.integer(keys.channels, 1, limits.MAX_WIDTH, default=usual)
    is_stated = fields.get(keys.rank) not in (None, "auto")
    rank = fields.integer(keys.rank, 1, limits.MAX_HEAD_DIM) if is_stated else -(-c.hidden // 16)
    out.put("ssm.conv_kernel", fields.integer(keys.taps, 2, limits.MAX_TAPS, default=4), fields, keys.taps)
    out.put(
        "ssm.state_size", fields.integer(keys.state_dim, 1, limits.MAX_HEAD_DIM, default=16), fields, keys.state_dim
    )
    out.put("ssm.time_step_rank", rank, fields, keys.rank)
    out.put("ssm.inner_size", channels, fields, keys.channels or keys.expand)


@frozen
class Mamba2Keys:
    """The names of Mamba-2's sizes in a family's `config.json`."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state_dim: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    expand: str | None = "mamba_expand"  # all heads have so many times the columns of the stream
    columns: str | None = None  # or so many columns, where there is such a key
    norm: str | None = None  # says whether the result is normed; without that key it is
    needed: tuple[tuple[str, object], ...] = (("mamba_proj_bias", False), ("mamba_conv_bias", True))  # all we support


def state_mamba2(c: FolderConfig, keys: Mamba2Keys) -> None:
    """State the sizes of Mamba-2."""
    fields, out = c.fields, c.out
    for name, harmless in keys.needed:
        fields.refuse_unless((name,), (harmless,), "not supported")
    limit = fields.get("time_step_limit")
    if limit is not None and (not isinstance(limit, list) or [*map(_untag, limit)] != [0.0, math.inf]):
        fields.refuse("time_step_limit", "none: 0 to infinity")
    heads = fields.integer(keys.heads, 1, limits.MAX_HEADS)
    if keys.expand is None:
        head_dim = fields.integer(keys.head_dim, 1, limits.MAX_STATED)
    else:
        head_dim = _read_part(fields, keys, heads, _read_columns(c, keys))
    out.put("ssm.group_count", read_divisor(fields, keys.groups, heads, "heads", default=1), fields, keys.groups)
    out.put("ssm.conv_kernel", fields.integer(keys.taps, 2, limits.MAX_TAPS, default=4), fields, keys.taps)
    normed = keys.norm is None or fields.flag(keys.norm, False)
    if keys.norm is not None and normed:
        fields.refuse_unless(("mamba_norm_before_gate",), (False,), "norms before gates are not supported")
    out.put_own("ssm.norm", normed)
    out.put("ssm.state_size", fields.integer(keys.state_dim, 1, limits.MAX_STATED), fields, keys.state_dim)
    out.put("ssm.time_step_rank", heads, fields, keys.heads)
    out.put("ssm.inner_size", heads * head_dim, fields, keys.head_dim)


def _read_columns(c: FolderConfig, keys: Mamba2Keys) -> int:
    """Return the columns of all heads."""
    if keys.columns is not None and c.fields.get(keys.columns) is not None:
        return c.fields.integer(keys.columns, 1, limits.MAX_WIDTH)
    return c.hidden * c.fields.integer(keys.expand or "", 1, limits.MAX_STATED, default=2)


def _read_part(fields: Fields, keys: Mamba2Keys, heads: int, columns: int) -> int:
    """Return the columns of each head, from those of all heads."""
    is_stated = fields.get(keys.head_dim) not in (None, "auto")
    head_dim = fields.integer(keys.head_dim, 1, limits.MAX_STATED) if is_stated else columns // heads
    if heads * head_dim != columns:
        fields.refuse(keys.head_dim, f"so many that {heads} heads have the {columns} columns of all")
    return head_dim


def _untag(number: object) -> object:
    """Return the number; infinity is an object in newer folders."""
    is_infinite = isinstance(number, Mapping) and number.get("__float__") == "Infinity"
    return math.inf if is_infinite else number


def state_experts(
    c: FolderConfig,
    *,
    count_keys: Sequence[str] = ("num_experts",),
    features_key: str = "moe_intermediate_size",
    used_key: str = "num_experts_per_tok",
    first_key: str = "first_k_dense_replace",
    shared_key: str | None = None,
    shared: Shared = "features",
    scoring: Scoring | None = None,
    renormalises: bool = False,
    is_optional: bool = False,
    layers: Sequence[bool] | None = None,
) -> Flags:
    """State a mixture of experts and return which layers have it: `layers`, or as the folder says; none if it is
    optional and there are no experts.

    With a `scoring` GGUF files of the family state how experts are chosen. Otherwise they mean that shares are divided
    by their sum if it `renormalises`, and everything else that is unusual has a key of our own. `shared_key` gives the
    features of a block that all tokens go through, or the count of experts in it. `first_key`: the number of first
    layers without experts.
    """
    fields, out = c.fields, c.out
    c.note(EXPERTS)
    count_key = c.find_key(*count_keys) if any(fields.get(key) is not None for key in count_keys) else count_keys[0]
    count = fields.integer(count_key, 0 if is_optional else 1, limits.MAX_STATED)
    if not count:
        return ()
    out.put("expert_count", count, fields, count_key)
    out.put("expert_used_count", fields.integer(used_key, 1, limits.MAX_STATED), fields, used_key)
    _state_rule(c, scoring, renormalises=renormalises)
    out.put("expert_feed_forward_length", fields.integer(features_key, 1, limits.MAX_WIDTH), fields, features_key)
    shared_size = 0 if shared_key is None else fields.integer(shared_key, 0, limits.MAX_WIDTH, default=0)
    if shared_size and shared_key is not None:
        name = "expert_shared_count" if shared == "count" else "expert_shared_feed_forward_length"
        out.put(name, shared_size, fields, shared_key)
    flags = tuple(layers) if layers is not None else _read_expert_layers(c, first_key)
    out.put_own("expert_layers", list(flags))
    if scoring is not None and any(flags) and (layers is None or all(flags[flags.index(True) :])):
        out.put("leading_dense_block_count", flags.index(True))
    return flags


def read_expert_layers(c: FolderConfig) -> Flags | None:
    """Return which layers have experts, if the folder has a list of them."""
    kinds = c.fields.get("mlp_layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != c.layers or any(kind not in _BLOCKS for kind in kinds):
        c.fields.refuse("mlp_layer_types", f"a list of {c.layers}, each one of {', '.join(_BLOCKS)}")
    return tuple(kind == _BLOCKS[1] for kind in kinds)


def state_expert_width(c: FolderConfig, flags: Flags) -> None:
    """State the features of blocks without experts; folders in which every layer has experts may leave them out."""
    c.state_width(default=c.out.integer("expert_feed_forward_length") if all(flags) else None)


def _state_rule(c: FolderConfig, scoring: Scoring | None, *, renormalises: bool) -> None:
    """State the rule by which a token's experts are chosen and weighted."""
    fields = c.fields
    groups = fields.integer("n_group", 1, limits.MAX_STATED, default=1)
    used_groups = fields.integer("topk_group", 1, limits.MAX_STATED, default=groups)
    scale = fields.number("routed_scaling_factor", 0.0, limits.MAX_SCALE, default=1.0)
    norms = fields.flag("norm_topk_prob", renormalises)
    if scoring is not None:
        c.out.put("expert_gating_func", SCORING_NUMBERS[scoring])
    for name, key, value, usual in (
        ("expert_weights_norm", "norm_topk_prob", norms, renormalises),
        ("expert_weights_scale", "routed_scaling_factor", scale, 1.0),
        ("expert_group_count", "n_group", groups, 1),
        ("expert_group_used_count", "topk_group", used_groups, groups),
    ):
        if scoring is not None:
            c.out.put(name, value, fields, key)
        elif value != usual:
            c.out.put_own(name, value, fields, key)


def _read_expert_layers(c: FolderConfig, first_key: str) -> Flags:
    """Return which layers have experts: the last one of each step, except those that are named and the first ones."""
    step = c.fields.integer("decoder_sparse_step", 1, c.layers, default=1)
    first = c.fields.integer(first_key, 0, c.layers, default=0)
    dense = c.fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int or not 0 <= index < c.layers for index in dense):
        c.fields.refuse("mlp_only_layers", f"a list of layers below {c.layers}")
    return tuple((index + 1) % step == 0 and index not in dense and index >= first for index in range(c.layers))
