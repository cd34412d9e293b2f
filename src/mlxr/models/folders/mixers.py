"""What a `config.json` says of recurrent mixers and of mixtures of experts, as GGUF's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from mlxr.models import limits
from mlxr.models.fields import Fields
from mlxr.models.folders.statement import Statement
from mlxr.models.mixture import SCORING_NUMBERS, SPARSE_USED, USUAL_JITTER, MixtureRow
from mlxr.models.recurrence_config import FULL_EVERY, Mamba2Keys, RecurrenceKind, RecurrenceRow, make_flags

Flags = tuple[bool, ...]  # of each layer
BlockKind = Literal["recurrent", "attention", "dense", "experts"]  # of a layer that is one block

_PATTERN = "hybrid_override_pattern"
_ATTENDS = ("full_attention", "attention")  # what `layer_types` call layers that attend, newer spellings first
_RECURS = {"short_conv": ("conv",), "gated_delta": ("linear_attention",), "mamba2": ("linear_attention", "mamba")}
_LETTERS: dict[str, BlockKind] = {"M": "recurrent", "*": "attention", "-": "dense", "E": "experts"}
_WORDS: dict[str, BlockKind] = {
    **dict.fromkeys(_RECURS["mamba2"], "recurrent"),
    **dict.fromkeys(_ATTENDS, "attention"),
    "mlp": "dense",
    "moe": "experts",
}


def read_block_kinds(fields: Fields) -> tuple[BlockKind, ...]:
    """Return the kind of the only block of each layer, which a letter for each says, or a word."""
    name = next((key for key in ("layers_block_type", "layer_types") if fields.get(key) is not None), _PATTERN)
    stated, known = fields.get(name), _LETTERS if name == _PATTERN else _WORDS
    wants = f"one of {', '.join(known)} for each layer, and a layer that attends"
    if not isinstance(stated, str if name == _PATTERN else list) or not 1 <= len(stated) <= limits.MAX_LAYERS:
        fields.refuse(name, wants)
    kinds = [known.get(str(item)) for item in stated]
    found = tuple(kind for kind in kinds if kind is not None)
    if len(found) != len(kinds) or "attention" not in found:
        fields.refuse(name, wants)
    return found


def state_recurrence(
    out: Statement, fields: Fields, row: RecurrenceRow, layers: int, hidden: int, flags: Flags | None
) -> Flags | None:
    """State the recurrent mixer of a family, and return the layers that have it: those of `flags`, or as the folder
    says; None if all of them attend."""
    kind = row.kind
    match kind:
        case None:
            return None
        case "short_conv":
            fields.refuse_unless(("conv_bias",), (False,), "biases of convolutions are not supported")
            out.put("shortconv.l_cache", fields.integer("conv_L_cache", 2, limits.MAX_TAPS, default=3))
            return _read_layer_types(fields, layers, kind)
        case "gated_delta":
            return _state_delta(out, fields, layers)
        case "mamba2":
            if row.beside:
                flags = (True,) * layers
            if flags is None:
                flags = _read_layer_types(fields, layers, kind)
                if all(flags):
                    fields.refuse("layer_types", "a layer that attends")
            if not any(flags):
                return None
            _state_mamba2(out, fields, row.keys, hidden)
            return flags


def _state_delta(out: Statement, fields: Fields, layers: int) -> Flags:
    heads = fields.integer("linear_num_value_heads", 1, limits.MAX_HEADS, default=32)
    value_dim = fields.integer("linear_value_head_dim", 1, limits.MAX_STATED, default=128)
    out.put("ssm.conv_kernel", fields.integer("linear_conv_kernel_dim", 2, limits.MAX_TAPS, default=4))
    out.put("ssm.state_size", fields.integer("linear_key_head_dim", 1, limits.MAX_STATED, default=128))
    out.put("ssm.group_count", _read_divisor(fields, "linear_num_key_heads", heads, "value heads"))
    out.put("ssm.time_step_rank", heads)
    out.put("ssm.inner_size", heads * value_dim)
    if fields.get("layer_types") is None:
        every = fields.integer("full_attention_interval", 1, layers, default=min(layers, FULL_EVERY))
        recurrent = make_flags(layers, every)
    else:
        recurrent = _read_layer_types(fields, layers, "gated_delta")
    regular = [count for count in range(1, layers + 1) if make_flags(layers, count) == recurrent]
    if regular:
        out.put("full_attention_interval", regular[0])
    else:
        out.put("attention.recurrent_layers", list(recurrent))
    return recurrent


def _state_mamba2(out: Statement, fields: Fields, keys: Mamba2Keys, hidden: int) -> None:
    for name, harmless in keys.needed:
        fields.refuse_unless((name,), (harmless,), "not supported")
    limit = fields.get("time_step_limit")
    if limit is not None and (not isinstance(limit, list) or [*map(_untag, limit)] != [0.0, math.inf]):
        fields.refuse("time_step_limit", "none: 0 to infinity")
    heads = fields.integer(keys.heads, 1, limits.MAX_HEADS)
    if keys.expand is None:
        head_dim = fields.integer(keys.head_dim, 1, limits.MAX_STATED)
    else:
        head_dim = _read_part(fields, keys, heads, _read_columns(fields, keys, hidden))
    out.put("ssm.group_count", _read_divisor(fields, keys.groups, heads, "heads", default=1))
    out.put("ssm.conv_kernel", fields.integer(keys.taps, 2, limits.MAX_TAPS, default=4))
    normed = keys.norm is None or fields.flag(keys.norm, False)
    if keys.norm is not None and normed:
        fields.refuse_unless(("mamba_norm_before_gate",), (False,), "norms before gates are not supported")
    out.put_own("ssm.norm", normed)
    out.put("ssm.state_size", fields.integer(keys.state_dim, 1, limits.MAX_STATED))
    out.put("ssm.time_step_rank", heads)
    out.put("ssm.inner_size", heads * head_dim, fields, keys.head_dim)


def _read_divisor(fields: Fields, name: str, heads: int, what: str, default: int | None = None) -> int:
    parts = fields.integer(name, 1, limits.MAX_HEADS, default=default)
    if heads % parts:
        fields.refuse(name, f"a divisor of the {heads} {what}")
    return parts


def _read_columns(fields: Fields, keys: Mamba2Keys, hidden: int) -> int:
    """Return the columns of all heads."""
    if keys.columns is not None and fields.get(keys.columns) is not None:
        return fields.integer(keys.columns, 1, limits.MAX_WIDTH)
    return hidden * fields.integer(keys.expand or "", 1, limits.MAX_STATED, default=2)


def _read_part(fields: Fields, keys: Mamba2Keys, heads: int, columns: int) -> int:
    """Return the columns of each head, of which all heads have so many."""
    is_stated = fields.get(keys.head_dim) not in (None, "auto")
    head_dim = fields.integer(keys.head_dim, 1, limits.MAX_STATED) if is_stated else columns // heads
    if heads * head_dim != columns:
        fields.refuse(keys.head_dim, f"so many that {heads} heads have the {columns} columns of all")
    return head_dim


def _untag(number: object) -> object:
    """Return the number; infinity is an object in newer folders."""
    is_infinite = isinstance(number, Mapping) and number.get("__float__") == "Infinity"
    return math.inf if is_infinite else number


def _read_layer_types(fields: Fields, layers: int, kind: RecurrenceKind) -> Flags:
    """Return which layers are recurrent, by their types or by the numbers of those that attend."""
    types, recurs = fields.get("layer_types"), _RECURS[kind]
    if types is None:
        attend = fields.get("full_attn_idxs")
        if not isinstance(attend, list) or any(not isinstance(index, int) for index in attend):
            fields.refuse("layer_types", f"a list of {layers} types, or full_attn_idxs")
        return tuple(index not in attend for index in range(layers))
    if not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= {*recurs, *_ATTENDS}:
        fields.refuse("layer_types", f"a list of {layers}, each one {recurs[0]} or {_ATTENDS[0]}")
    return tuple(kind in recurs for kind in types)


def state_mixture(
    out: Statement, fields: Fields, row: MixtureRow | None, layers: int, blocks: tuple[BlockKind, ...] | None
) -> tuple[int, Flags] | None:
    """State the mixture of experts of a folder; return the features of an expert and the layers that have some, None
    without any."""
    if row is None or (blocks is not None and "experts" not in blocks):
        return None
    if row.switch_key is not None and not fields.flag(row.switch_key, False):
        return None
    key = next((key for key in row.count_keys if fields.get(key) is not None), row.count_keys[0])
    experts = fields.integer(key, 0 if row.optional else 1, limits.MAX_STATED)
    if not experts:
        return None
    out.put("expert_count", experts, fields, key)
    used = fields.integer(row.used_key, 1, limits.MAX_STATED)
    if row.jitter_key is not None and used != SPARSE_USED:
        fields.refuse(row.used_key, f"{SPARSE_USED}, for which alone this routing is known")
    out.put("expert_used_count", used, fields, row.used_key)
    if row.jitter_key is not None:
        out.put(row.jitter_key, fields.number(row.jitter_key, 0.0, 1.0, default=USUAL_JITTER))
    _state_rule(out, fields, row)
    features = fields.integer(row.features_key, 1, limits.MAX_WIDTH)
    out.put("expert_feed_forward_length", features, fields, row.features_key)
    shared = 0 if row.shared_key is None else fields.integer(row.shared_key, 0, limits.MAX_WIDTH, default=0)
    if shared and row.shared_key is not None:
        name = "expert_shared_count" if row.shared == "count" else "expert_shared_feed_forward_length"
        out.put(name, shared, fields, row.shared_key)
    flags = _read_expert_layers(fields, row, layers) if blocks is None else tuple(one == "experts" for one in blocks)
    out.put_own("expert_layers", list(flags))
    if row.states_rule and blocks is None and any(flags):
        out.put("leading_dense_block_count", flags.index(True))
    return features, flags


def _state_rule(out: Statement, fields: Fields, row: MixtureRow) -> None:
    """State how a token's experts are chosen and share it, in keys of our own where files of the family have none."""
    groups = fields.integer("n_group", 1, limits.MAX_STATED, default=1)
    rule: dict[str, tuple[object, object, str]] = {  # and what is meant where it is not stated
        "expert_weights_norm": (
            fields.flag("norm_topk_prob", row.renormalises),
            row.renormalises,
            "norm_topk_prob",
        ),
        "expert_weights_scale": (
            fields.number("routed_scaling_factor", 0.0, limits.MAX_SCALE, default=1.0),
            1.0,
            "routed_scaling_factor",
        ),
        "expert_group_count": (groups, 1, "n_group"),
        "expert_group_used_count": (
            fields.integer("topk_group", 1, limits.MAX_STATED, default=groups),
            groups,
            "topk_group",
        ),
    }
    if row.states_rule:
        out.put("expert_gating_func", SCORING_NUMBERS[row.scoring])
    for name, (value, usual, key) in rule.items():
        if row.states_rule:
            out.put(name, value, fields, key)
        elif value != usual:
            out.put_own(name, value, fields, key)


def _read_expert_layers(fields: Fields, row: MixtureRow, layers: int) -> Flags:
    """Return which layers have experts: each one at the end of a step, but for those that are named and for the first
    ones."""
    step = fields.integer("decoder_sparse_step", 1, layers, default=1)
    first = fields.integer(row.first_key, 0, layers, default=0)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int or not 0 <= index < layers for index in dense):
        fields.refuse("mlp_only_layers", f"a list of layers below {layers}")
    return tuple((index + 1) % step == 0 and index not in dense and index >= first for index in range(layers))
