"""What GGUF's metadata say of rotary positions.

How a family spells it and what it leaves unsaid is its `RopeRow`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlxr.kernels.rope import QueryTemperature, RopeScaling, yarn_attention_factor
from mlxr.kernels.tensor import TensorSource
from mlxr.models import limits
from mlxr.models.fields import Fields
from mlxr.models.rope_factors import LONG_FACTORS, SHORT_FACTORS, read_rope_factors

Flags = tuple[bool, ...] | None  # of each layer; None: all are alike

ROPE_SWITCH = "rope.scaling.finetuned"


@dataclass(frozen=True, slots=True)
class RopeRow:
    """How a family's files state what turns."""

    gguf_interleaved: bool = False  # the rows of q and k are in an order that rotates neighbouring pairs
    still_every: int | None = None  # of so many layers the last rotates nothing
    only_windows: bool = False  # layers without a window rotate nothing
    gguf_switch: bool = False  # files say whether layers rotate
    truncates_yarn: bool = True  # yarn's range is rounded to whole pairs, of which files say nothing


def default_rope_layers(row: RopeRow, window_layers: Flags, layers: int) -> Flags:
    """Which layers rotate where a file does not say so; None if all do."""
    if row.only_windows:
        return window_layers
    if row.still_every is None:
        return None
    return tuple((index + 1) % row.still_every != 0 for index in range(layers))


def read_gguf_rope_layers(fields: Fields, own: Fields, row: RopeRow, window_layers: Flags, layers: int) -> Flags:
    """Return which layers rotate: one by one in a key of our own, all or none in files of Granite, or the usual; None
    if all do."""
    stated = own.flags("rope.layers", layers)
    if stated is not None:
        return None if all(stated) else stated
    if row.gguf_switch and not fields.flag(ROPE_SWITCH, True):
        return (False,) * layers
    return default_rope_layers(row, window_layers, layers)


def read_gguf_scaling(
    fields: Fields, own: Fields, row: RopeRow, context_length: int, tensors: Mapping[str, TensorSource]
) -> RopeScaling | None:
    """How the rotation is stretched for contexts of that length, if it is."""
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
        truncate=own.flag("rope.scaling.yarn_truncate", row.truncates_yarn),
    )


def _read_original_context(fields: Fields, context_length: int) -> int:
    return fields.integer("rope.scaling.original_context_length", 1, limits.MAX_CONTEXT, default=context_length)


def read_gguf_temperature(fields: Fields, context_length: int) -> QueryTemperature | None:
    """How queries grow with their position, if they do."""
    beta = fields.number("attention.temperature_scale", 0.0, limits.MAX_SCALE, default=0.0)
    return QueryTemperature(beta, _read_original_context(fields, context_length)) if beta else None
