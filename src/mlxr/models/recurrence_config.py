"""What files say of recurrent layers: out of `config.json` and out of GGUF's metadata, and back into the latter."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Literal

from mlxr.core.errors import ModelError
from mlxr.models import limits
from mlxr.models.components import GatedDelta, Mamba2, Recurrence, ShortConv
from mlxr.models.fields import Fields

_PATTERN = "hybrid_override_pattern"
FULL_EVERY = 4  # of so many layers of Qwen3.5 the last attends
_ATTENDS = ("full_attention", "attention")  # what `layer_types` call layers that attend, newer spellings first
_RECURS = {"short_conv": ("conv",), "gated_delta": ("linear_attention",), "mamba2": ("linear_attention", "mamba")}

Flags = tuple[bool, ...]  # of each layer
RecurrenceKind = Literal["short_conv", "gated_delta", "mamba2"]


@dataclass(frozen=True, slots=True)
class Mamba2Keys:
    """How a family's `config.json` spells what Mamba-2 has.

    All heads together have `columns`, or `expand` times as many as the stream, where there are such keys. `norm` says
    whether the result is normed; without that key it is. `needed` are the only values of some others that are
    supported.
    """

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state_dim: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    expand: str | None = "mamba_expand"
    columns: str | None = None
    norm: str | None = None
    needed: tuple[tuple[str, object], ...] = (("mamba_proj_bias", False), ("mamba_conv_bias", True))


GRANITE_KEYS = Mamba2Keys()
NEMOTRON_KEYS = Mamba2Keys(
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    expand=None,
    needed=(("use_bias", False), ("mamba_proj_bias", False), ("use_conv_bias", True), ("mamba_hidden_act", "silu")),
)
FALCON_KEYS = Mamba2Keys(
    columns="mamba_d_ssm",
    norm="mamba_rms_norm",
    needed=(("mamba_proj_bias", False), ("mamba_conv_bias", True), ("projectors_bias", False)),
)


@dataclass(frozen=True, slots=True)
class RecurrenceRow:
    """The recurrent mixer that some layers of a family have, and what its files say of it.

    Without a `kind` there is none. A model without such a layer is one of the architectures of the names `attending`,
    without and with experts. `keys`: what `config.json` calls the sizes of Mamba-2. `beside`: the mixer stands beside
    the attention of each layer, and `config.json` states what results are multiplied by. `gguf_tiled`: GGUF files have
    the value heads of gated delta nets in another order, the first of each key head, then the second.
    """

    kind: RecurrenceKind | None = None
    attending: tuple[str, str] | None = None
    keys: Mamba2Keys = GRANITE_KEYS
    beside: bool = False
    gguf_tiled: bool = False


BlockKind = Literal["recurrent", "attention", "dense", "experts"]  # of a layer that is one block
_LETTERS: dict[str, BlockKind] = {"M": "recurrent", "*": "attention", "-": "dense", "E": "experts"}
_WORDS: dict[str, BlockKind] = {
    **dict.fromkeys(_RECURS["mamba2"], "recurrent"),
    **dict.fromkeys(_ATTENDS, "attention"),
    "mlp": "dense",
    "moe": "experts",
}


def read_gguf_recurrence(
    fields: Fields, row: RecurrenceRow, layers: int, hidden: int, tensors: Container[str]
) -> tuple[Recurrence | None, Flags | None]:
    """The recurrent mixer of a GGUF file that has `tensors`, and which layers have it."""
    match row.kind:
        case None:
            return None, None
        case "short_conv":
            taps = fields.integer("shortconv.l_cache", 2, limits.MAX_TAPS)
            return ShortConv(hidden, taps), _read_without_keys(fields, layers)
        case "gated_delta":
            heads, head_dim = _read_gguf_heads(fields, "value heads")
            key_dim = fields.integer("ssm.state_size", 1, limits.MAX_STATED)
            key_heads = _read_divisor(fields, "ssm.group_count", heads, "value heads")
            taps = fields.integer("ssm.conv_kernel", 2, limits.MAX_TAPS)
            delta = GatedDelta(key_heads, heads, key_dim, head_dim, taps, tiled=row.gguf_tiled and key_heads < heads)
            return delta, _read_gguf_layers(fields, layers)
        case "mamba2":
            heads, head_dim = _read_gguf_heads(fields, "heads")
            groups = _read_divisor(fields, "ssm.group_count", heads, "heads", default=1)
            state_dim = fields.integer("ssm.state_size", 1, limits.MAX_STATED)
            taps = fields.integer("ssm.conv_kernel", 2, limits.MAX_TAPS)
            normed = any(f"blk.{index}.ssm_norm.weight" in tensors for index in range(layers))
            mamba = Mamba2(heads, head_dim, groups, state_dim, taps, normed)
            return mamba, (True,) * layers if row.beside else _read_without_keys(fields, layers)


def _read_gguf_heads(fields: Fields, what: str) -> tuple[int, int]:
    heads = fields.integer("ssm.time_step_rank", 1, limits.MAX_HEADS)
    inner = fields.integer("ssm.inner_size", 1, limits.MAX_STATED)
    if inner % heads:
        fields.refuse("ssm.inner_size", f"a multiple of the {heads} {what}")
    return heads, inner // heads


def _read_divisor(fields: Fields, name: str, heads: int, what: str, default: int | None = None) -> int:
    parts = fields.integer(name, 1, limits.MAX_HEADS, default=default)
    if heads % parts:
        fields.refuse(name, f"a divisor of the {heads} {what}")
    return parts


def _read_without_keys(fields: Fields, layers: int) -> Flags:
    """Layers are recurrent that have no heads of keys, unless they are feed-forward blocks alone."""
    counts = read_counts(fields, "attention.head_count_kv", layers, limits.MAX_HEADS)
    widths = read_counts(fields, "feed_forward_length", layers, limits.MAX_WIDTH)
    is_block = [width > 0 and 0 in widths for width in widths]
    return tuple(count == 0 and not block for count, block in zip(counts, is_block, strict=True))


def read_counts(fields: Fields, name: str, layers: int, high: int) -> tuple[int, ...]:
    """A number from 0 to `high` for each layer; files state some for layers at the end, too, that only draft tokens."""
    blocks = fields.integer("block_count", layers, high, default=layers)
    return fields.integers(name, blocks, 0, high)[:layers]


def _read_gguf_layers(fields: Fields, layers: int) -> Flags:
    """Which layers are recurrent: a flag for each, or all but one in so many."""
    if fields.get("attention.recurrent_layers") is not None:
        return tuple(map(bool, fields.integers("attention.recurrent_layers", layers, 0, 1)))
    every = fields.integer("full_attention_interval", 1, layers, default=min(layers, FULL_EVERY))
    return make_flags(layers, every)


def make_flags(layers: int, every: int) -> Flags:
    """Flags that are false for the last of each `every` layers."""
    return tuple((index + 1) % every != 0 for index in range(layers))


def read_block_kinds(fields: Fields) -> tuple[BlockKind, ...]:
    """What the only block of each layer is: a letter for each, or a word."""
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


def read_hf_recurrence(
    fields: Fields, row: RecurrenceRow, layers: int, hidden: int, flags: Flags | None = None
) -> tuple[Recurrence | None, Flags | None]:
    """The recurrent mixer of a model folder, and which layers have it, which `flags` say or the folder; None if all of
    them attend."""
    kind = row.kind
    match kind:
        case None:
            return None, None
        case "short_conv":
            fields.refuse_unless(("conv_bias",), (False,), "biases of convolutions are not supported")
            taps = fields.integer("conv_L_cache", 2, limits.MAX_TAPS, default=3)
            return ShortConv(hidden, taps), _read_layer_types(fields, layers, kind)
        case "gated_delta":
            heads = fields.integer("linear_num_value_heads", 1, limits.MAX_HEADS, default=32)
            key_dim = fields.integer("linear_key_head_dim", 1, limits.MAX_STATED, default=128)
            value_dim = fields.integer("linear_value_head_dim", 1, limits.MAX_STATED, default=128)
            taps = fields.integer("linear_conv_kernel_dim", 2, limits.MAX_TAPS, default=4)
            key_heads = _read_divisor(fields, "linear_num_key_heads", heads, "value heads")
            delta = GatedDelta(key_heads, heads, key_dim, value_dim, taps)
            if fields.get("layer_types") is None:
                every = fields.integer("full_attention_interval", 1, layers, default=min(layers, FULL_EVERY))
                return delta, make_flags(layers, every)
            return delta, _read_layer_types(fields, layers, kind)
        case "mamba2":
            if row.beside:
                flags = (True,) * layers
            if flags is None:
                flags = _read_layer_types(fields, layers, kind)
                if all(flags):
                    fields.refuse("layer_types", "a layer that attends")
            return (_read_mamba2(fields, row.keys, hidden), flags) if any(flags) else (None, None)


def _read_mamba2(fields: Fields, keys: Mamba2Keys, hidden: int) -> Mamba2:
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
    groups = _read_divisor(fields, keys.groups, heads, "heads", default=1)
    taps = fields.integer(keys.taps, 2, limits.MAX_TAPS, default=4)
    normed = keys.norm is None or fields.flag(keys.norm, False)
    if keys.norm is not None and normed:
        fields.refuse_unless(("mamba_norm_before_gate",), (False,), "norms before gates are not supported")
    return Mamba2(heads, head_dim, groups, fields.integer(keys.state_dim, 1, limits.MAX_STATED), taps, normed)


def _read_columns(fields: Fields, keys: Mamba2Keys, hidden: int) -> int:
    """The columns of all heads."""
    if keys.columns is not None and fields.get(keys.columns) is not None:
        return fields.integer(keys.columns, 1, limits.MAX_WIDTH)
    return hidden * fields.integer(keys.expand or "", 1, limits.MAX_STATED, default=2)


def _read_part(fields: Fields, keys: Mamba2Keys, heads: int, columns: int) -> int:
    """The columns of each head, of which all heads have so many."""
    is_stated = fields.get(keys.head_dim) not in (None, "auto")
    head_dim = fields.integer(keys.head_dim, 1, limits.MAX_STATED) if is_stated else columns // heads
    if heads * head_dim != columns:
        fields.refuse(keys.head_dim, f"so many that {heads} heads have the {columns} columns of all")
    return head_dim


def _untag(number: object) -> object:
    """Infinity is an object in newer folders."""
    is_infinite = isinstance(number, Mapping) and number.get("__float__") == "Infinity"
    return math.inf if is_infinite else number


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


def gguf_recurrence(mixer: Recurrence, recurrent: Flags, attends: Flags, kv_heads: int) -> dict[str, object]:
    """What a GGUF file says of the recurrent layers, and of the heads of keys of those that attend."""
    counts = kv_heads if all(attends) else [kv_heads if flag else 0 for flag in attends]
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
