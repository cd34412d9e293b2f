"""What GGUF's metadata say of recurrent layers."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from mlxr.models import limits
from mlxr.models.components import GatedDelta, Mamba2, Recurrence, ShortConv
from mlxr.models.fields import Fields

FULL_EVERY = 4  # of so many layers of Qwen3.5 the last attends

Flags = tuple[bool, ...]  # of each layer
RecurrenceKind = Literal["short_conv", "gated_delta", "mamba2"]


@dataclass(frozen=True, slots=True)
class RecurrenceRow:
    """The recurrent mixer that some layers of a family have, and what its files say of it."""

    kind: RecurrenceKind | None = None  # None: there is none
    beside: bool = False  # the mixer stands beside the attention of each layer
    gguf_tiled: bool = False  # value heads are in another order: the first of each key head, then the second


def read_gguf_recurrence(
    fields: Fields, own: Fields, row: RecurrenceRow, layers: int, hidden: int, tensors: Container[str]
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
            mamba = Mamba2(heads, head_dim, groups, state_dim, taps, own.flag("ssm.norm", normed))
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
    stated = fields.flags("attention.recurrent_layers", layers)
    if stated is not None:
        return stated
    every = fields.integer("full_attention_interval", 1, layers, default=min(layers, FULL_EVERY))
    return make_flags(layers, every)


def make_flags(layers: int, every: int) -> Flags:
    """Flags that are false for the last of each `every` layers."""
    return tuple((index + 1) % every != 0 for index in range(layers))
