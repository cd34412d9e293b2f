"""What files say of recurrent layers: out of `config.json` and out of GGUF's metadata, and back into the latter."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlxr.core.errors import ModelError
from mlxr.models.fields import Fields
from mlxr.models.recurrent import RecurrenceKind
from mlxr.models.specs import GatedDelta, Mamba2, Recurrence, ShortConv

MAX_HEADS = 1024
MAX_SIZE = 1 << 16
MAX_TAPS = 16
FULL_EVERY = 4  # of so many layers of Qwen3.5 the last attends
_ATTENDS = ("full_attention", "attention")  # what `layer_types` call layers that attend, newer spellings first
_RECURS = {"short_conv": ("conv",), "gated_delta": ("linear_attention",), "mamba2": ("linear_attention", "mamba")}

Flags = tuple[bool, ...]  # of each layer


@dataclass(frozen=True, slots=True)
class _Mamba2Keys:
    """How a family's `config.json` spells what Mamba-2 has, and the values that other families do not have."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state_dim: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    refused: tuple[tuple[str, object], ...] = (("mamba_proj_bias", False), ("mamba_conv_bias", True))


def read_gguf_recurrence(
    fields: Fields, kind: RecurrenceKind | None, layers: int, hidden: int
) -> tuple[Recurrence | None, Flags | None]:
    """The recurrent mixer of a GGUF file, and which layers have it."""
    match kind:
        case None:
            return None, None
        case "short_conv":
            taps = fields.integer("shortconv.l_cache", 2, MAX_TAPS)
            return ShortConv(hidden, taps), _read_without_keys(fields, layers)
        case "gated_delta":
            heads, head_dim = _read_gguf_heads(fields, "value heads")
            key_dim = fields.integer("ssm.state_size", 1, MAX_SIZE)
            key_heads = _read_divisor(fields, "ssm.group_count", heads, "value heads")
            taps = fields.integer("ssm.conv_kernel", 2, MAX_TAPS)
            delta = GatedDelta(key_heads, heads, key_dim, head_dim, taps, tiled=key_heads < heads)
            return delta, _read_gguf_layers(fields, layers)
        case "mamba2":
            heads, head_dim = _read_gguf_heads(fields, "heads")
            groups = _read_divisor(fields, "ssm.group_count", heads, "heads", default=1)
            state_dim = fields.integer("ssm.state_size", 1, MAX_SIZE)
            mamba = Mamba2(heads, head_dim, groups, state_dim, fields.integer("ssm.conv_kernel", 2, MAX_TAPS))
            return mamba, _read_without_keys(fields, layers)


def _read_gguf_heads(fields: Fields, what: str) -> tuple[int, int]:
    heads = fields.integer("ssm.time_step_rank", 1, MAX_HEADS)
    inner = fields.integer("ssm.inner_size", 1, MAX_SIZE)
    if inner % heads:
        fields.refuse("ssm.inner_size", f"a multiple of the {heads} {what}")
    return heads, inner // heads


def _read_divisor(fields: Fields, name: str, heads: int, what: str, default: int | None = None) -> int:
    parts = fields.integer(name, 1, MAX_HEADS, default=default)
    if heads % parts:
        fields.refuse(name, f"a divisor of the {heads} {what}")
    return parts


def _read_without_keys(fields: Fields, layers: int) -> Flags:
    """Layers are recurrent that have no heads of keys."""
    return tuple(count == 0 for count in fields.integers("attention.head_count_kv", layers, 0, MAX_HEADS))


def _read_gguf_layers(fields: Fields, layers: int) -> Flags:
    """Which layers are recurrent: a flag for each, or all but one in so many."""
    if fields.get("attention.recurrent_layers") is not None:
        return tuple(map(bool, fields.integers("attention.recurrent_layers", layers, 0, 1)))
    every = fields.integer("full_attention_interval", 1, layers, default=min(layers, FULL_EVERY))
    return make_flags(layers, every)


def make_flags(layers: int, every: int) -> Flags:
    """Flags that are false for the last of each `every` layers."""
    return tuple((index + 1) % every != 0 for index in range(layers))


def read_hf_recurrence(
    fields: Fields, kind: RecurrenceKind | None, layers: int, hidden: int
) -> tuple[Recurrence | None, Flags | None]:
    """The recurrent mixer of a model folder, and which layers have it; None if all of them attend."""
    match kind:
        case None:
            return None, None
        case "short_conv":
            fields.refuse_unless(("conv_bias",), (False,), "biases of convolutions are not supported")
            taps = fields.integer("conv_L_cache", 2, MAX_TAPS, default=3)
            return ShortConv(hidden, taps), _read_layer_types(fields, layers, kind)
        case "gated_delta":
            heads = fields.integer("linear_num_value_heads", 1, MAX_HEADS, default=32)
            key_dim, value_dim = (
                fields.integer(f"linear_{part}_head_dim", 1, MAX_SIZE, default=128) for part in ("key", "value")
            )
            taps = fields.integer("linear_conv_kernel_dim", 2, MAX_TAPS, default=4)
            key_heads = _read_divisor(fields, "linear_num_key_heads", heads, "value heads")
            delta = GatedDelta(key_heads, heads, key_dim, value_dim, taps)
            if fields.get("layer_types") is None:
                every = fields.integer("full_attention_interval", 1, layers, default=min(layers, FULL_EVERY))
                return delta, make_flags(layers, every)
            return delta, _read_layer_types(fields, layers, kind)
        case "mamba2":
            flags = _read_layer_types(fields, layers, kind)
            return (_read_mamba2(fields, _Mamba2Keys(), hidden), flags) if any(flags) else (None, None)


def _read_mamba2(fields: Fields, keys: _Mamba2Keys, hidden: int) -> Mamba2:
    for name, harmless in keys.refused:
        fields.refuse_unless((name,), (harmless,), "not supported")
    limit = fields.get("time_step_limit")
    if limit is not None and (not isinstance(limit, list) or limit != [0.0, math.inf]):
        fields.refuse("time_step_limit", "none: 0 to infinity")
    heads = fields.integer(keys.heads, 1, MAX_HEADS)
    inner = hidden * fields.integer("mamba_expand", 1, MAX_SIZE, default=2)
    if fields.get(keys.head_dim) in (None, "auto"):
        head_dim = inner // heads
    else:
        head_dim = fields.integer(keys.head_dim, 1, MAX_SIZE)
    if heads * head_dim != inner:
        fields.refuse(keys.head_dim, f"so many that {heads} heads have the {inner} columns of mamba_expand")
    groups = _read_divisor(fields, keys.groups, heads, "heads", default=1)
    taps = fields.integer(keys.taps, 2, MAX_TAPS, default=4)
    return Mamba2(heads, head_dim, groups, fields.integer(keys.state_dim, 1, MAX_SIZE), taps)


def _read_layer_types(fields: Fields, layers: int, kind: RecurrenceKind) -> Flags:
    """Which layers are recurrent, by their types or by the numbers of those that attend."""
    types, recurs = fields.get("layer_types"), _RECURS[kind]
    if types is None:
        attend = fields.get("full_attn_idxs")
        if not isinstance(attend, list) or any(not isinstance(index, int) for index in attend):
            fields.refuse("layer_types", f"a list of {layers} types, or full_attn_idxs")
        return tuple(index not in attend for index in range(layers))
    if not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= {*recurs, *_ATTENDS}:
        fields.refuse("layer_types", f"a list of {layers}, each one {recurs[0]} or {_ATTENDS[0]}")
    return tuple(kind in recurs for kind in types)


def gguf_recurrence(mixer: Recurrence, recurrent: Flags, kv_heads: int) -> dict[str, object]:
    """What a GGUF file says of the recurrent layers."""
    counts = [0 if flag else kv_heads for flag in recurrent]
    match mixer:
        case ShortConv(_, taps):
            return {"shortconv.l_cache": taps, "attention.head_count_kv": counts}
        case Mamba2():
            return {
                "ssm.conv_kernel": mixer.taps,
                "ssm.state_size": mixer.state_dim,
                "ssm.group_count": mixer.groups,
                "ssm.time_step_rank": mixer.heads,
                "ssm.inner_size": mixer.results,
                "attention.head_count_kv": counts,
            }
        case GatedDelta(key_heads, value_heads, key_dim, value_dim, taps):
            if key_dim != value_dim:
                raise ModelError(f"heads of {key_dim} and {value_dim} columns cannot be stated in a GGUF file")
            numbers: dict[str, object] = {
                "ssm.conv_kernel": taps,
                "ssm.state_size": key_dim,
                "ssm.group_count": key_heads,
                "ssm.time_step_rank": value_heads,
                "ssm.inner_size": mixer.results,
            }
            layers = len(recurrent)
            every = [count for count in range(1, layers + 1) if make_flags(layers, count) == recurrent]
            if every:
                return numbers | {"full_attention_interval": every[0]}
            return numbers | {"attention.recurrent_layers": list(recurrent)}
