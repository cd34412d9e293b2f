"""What files say of rotary positions: out of `config.json`, in the older spelling (`rope_theta`, `rope_scaling`) and in
the newer one (`rope_parameters`), out of GGUF's metadata, and back into the latter.

How a family spells it and what it leaves unsaid is its `RopeRow`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxr.core.errors import ModelError
from mlxr.kernels.rope import QueryTemperature, RopeScaling, longrope_attention_factor, yarn_attention_factor
from mlxr.kernels.tensor import TensorSource
from mlxr.models import limits
from mlxr.models.fields import Fields
from mlxr.models.rope_factors import LONG_FACTORS, SHORT_FACTORS, read_rope_factors

if TYPE_CHECKING:
    from mlxr.models.config import ModelConfig

Flags = tuple[bool, ...] | None  # of each layer; None: all are alike

FULL, WINDOWED = "full_attention", "sliding_attention"  # what `config.json` calls kinds of layers
_ORIGINAL = "original_max_position_embeddings"
_LONGROPE = ("longrope", "su")  # its name, and the one in older files
_REFUSED_SCALING = {
    "dynamic": "it would turn cached keys by other angles as a text grows; use type ntk with a fixed factor, or yarn",
    "mrope": "it is for images",
}
_GGUF_SWITCH = "rope.scaling.finetuned"


@dataclass(frozen=True, slots=True)
class RopeRow:
    """How a family's files state what turns.

    `gguf_interleaved`: GGUF files have the rows of q and k in an order that rotates neighbouring pairs;
    `hf_interleaved`: neighbouring pairs rotate in Hugging Face folders, too. `part` of a head rotates where
    `config.json` does not say, with the base `theta`, or with all that `unstated` says if it has no object for
    rotations. Of every `still_every` layers the last rotates nothing, or with `only_windows` those without a window.
    `switch_key` in `config.json` says whether layers rotate, and with `gguf_switch` GGUF files do. `states_factors`:
    these have a factor for each pair. `truncates_yarn`: yarn's range is rounded to whole pairs, of which they say
    nothing. `has_mscales`: `config.json` states longrope's attention factor as `short_mscale` and `long_mscale`.
    """

    gguf_interleaved: bool = False
    hf_interleaved: bool = False
    part: float = 1.0
    theta: float = 10000.0
    unstated: dict[str, object] = field(default_factory=dict, hash=False)
    still_every: int | None = None
    only_windows: bool = False
    switch_key: str | None = None
    gguf_switch: bool = False
    states_factors: bool = False
    truncates_yarn: bool = True
    has_mscales: bool = False


def default_rope_layers(row: RopeRow, window_layers: Flags, layers: int) -> Flags:
    """Which layers rotate where a file does not say so; None if all do."""
    if row.only_windows:
        return window_layers
    if row.still_every is None:
        return None
    return tuple((index + 1) % row.still_every != 0 for index in range(layers))


def find_hf_rope(fields: Fields, row: RopeRow) -> tuple[Fields, Fields]:
    """The objects with the rotation's parameters, of all layers and of those with windows, possibly empty."""
    for name in ("rope_parameters", "rope_scaling"):
        found = fields.mapping(name)
        if found is not None:
            full, windowed = found.mapping(FULL), found.mapping(WINDOWED)
            return full or found, windowed or Fields({}, f"{name}.{WINDOWED}.")
    return Fields(row.unstated), Fields({}, "rope_scaling.")


def read_hf_theta(fields: Fields, row: RopeRow, rope: Fields) -> float:
    """The base of the rotation."""
    stated = fields.number("rope_theta", 1.0001, limits.MAX_THETA, row.theta)
    return rope.number("rope_theta", 1.0001, limits.MAX_THETA, default=stated)


def read_hf_rope_layers(fields: Fields, row: RopeRow, window_layers: Flags, layers: int) -> Flags:
    """Which layers rotate: all or none, stated one by one (1 means that it does), or the usual; None if all do."""
    if row.switch_key is not None:
        kind = fields.text(row.switch_key, default="nope")
        if kind not in ("nope", "rope"):
            fields.refuse(row.switch_key, "rope or nope")
        return None if kind == "rope" else (False,) * layers
    stated = None if row.still_every is None else fields.get("no_rope_layers")
    if stated is None:
        return default_rope_layers(row, window_layers, layers)
    if not isinstance(stated, list) or len(stated) != layers or any(flag not in (0, 1) for flag in stated):
        fields.refuse("no_rope_layers", f"a list of {layers}, each one 0 or 1")
    return tuple(map(bool, stated))


def read_hf_rope_dim(fields: Fields, row: RopeRow, rope: Fields, head_dim: int) -> int:
    """How many numbers of a head rotate."""
    if rope.get("rope_type") == "proportional":  # of all pairs, of which some turn by nothing
        return head_dim
    default = fields.number("partial_rotary_factor", 0.0, 1.0, default=row.part)
    factor = rope.number("partial_rotary_factor", 0.0, 1.0, default=default)
    rope_dim = int(head_dim * factor)
    if rope_dim < 2 or rope_dim % 2:
        raise ModelError(
            f"head_dim {head_dim} with partial_rotary_factor {factor:g} rotates {rope_dim} elements, expected an even "
            "number from 2"
        )
    return rope_dim


def read_hf_scaling(fields: Fields, row: RopeRow, rope: Fields, context_length: int) -> RopeScaling | None:
    """How the rotation is stretched for contexts of that length, if it is."""
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        return None
    if kind in _REFUSED_SCALING:
        raise ModelError(f"{rope.key('rope_type')} {kind!r} is not supported: {_REFUSED_SCALING[kind]}")
    if kind == "proportional":
        rotated = rope.number("partial_rotary_factor", 1e-6, 1.0, default=1.0)
        return RopeScaling("proportional", rope.number("factor", 1e-6, 1e6, default=1.0), rotated=rotated)
    if kind not in ("linear", "ntk", "yarn", "llama3", *_LONGROPE):
        raise ModelError(
            f"{rope.key('rope_type')} is {kind!r}, expected default, linear, longrope, ntk, proportional, yarn "
            "or llama3"
        )
    beside = fields.integer(_ORIGINAL, 1, limits.MAX_CONTEXT, context_length)  # where Phi states it
    original = rope.integer(_ORIGINAL, 1, limits.MAX_CONTEXT, beside)
    if kind in _LONGROPE:
        return _read_longrope(rope, row, original, context_length)
    rope.refuse_unless(("short_factor", "long_factor"), (), "only known with rope_type longrope")
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            rope.number("factor", 1.0, 1e6),
            original_context=original,
            low_freq_factor=rope.number("low_freq_factor", 1e-6, 1e6),
            high_freq_factor=rope.number("high_freq_factor", 1e-6, 1e6),
        )
    if kind == "yarn":
        return _read_yarn(rope, original, context_length)
    return RopeScaling("linear" if kind == "linear" else "ntk", rope.number("factor", 1.0, 1e6))


def _read_longrope(rope: Fields, row: RopeRow, original: int, context_length: int) -> RopeScaling:
    factor = rope.number("factor", 1e-6, 1e6, default=context_length / original)
    attention_factor = rope.number("attention_factor", 1e-6, 1e6, default=longrope_attention_factor(factor, original))
    if row.has_mscales:
        attention_factor = rope.number("long_mscale", 1e-6, 1e6, default=attention_factor)
        if rope.number("short_mscale", 1e-6, 1e6, default=attention_factor) != attention_factor:
            rope.refuse("short_mscale", f"the long_mscale {attention_factor:g}")
    return RopeScaling(
        "longrope",
        1.0,
        original_context=original,
        attention_factor=attention_factor,
        short_factors=rope.numbers("short_factor", 1e-6, 1e6),
        long_factors=rope.numbers("long_factor", 1e-6, 1e6),
    )


def _read_yarn(rope: Fields, original: int, context_length: int) -> RopeScaling:
    factor = rope.number("factor", 1.0, 1e6, default=max(1.0, context_length / original))
    mscale = rope.number("mscale", 0.0, 1e6, default=0.0)
    mscale_all_dim = rope.number("mscale_all_dim", 0.0, 1e6, default=0.0)
    return RopeScaling(
        "yarn",
        factor,
        original_context=original,
        attention_factor=rope.number(
            "attention_factor", 1e-6, 1e6, default=yarn_attention_factor(factor, mscale, mscale_all_dim)
        ),
        beta_fast=rope.number("beta_fast", 1e-6, 1e6, default=32.0),
        beta_slow=rope.number("beta_slow", 1e-6, 1e6, default=1.0),
        truncate=rope.flag("truncate", True),
    )


def read_hf_temperature(rope: Fields, context_length: int) -> QueryTemperature | None:
    """How queries grow with their position, if they do."""
    beta = rope.number("llama_4_scaling_beta", 0.0, limits.MAX_SCALE, default=0.0)
    period = rope.integer(_ORIGINAL, 1, limits.MAX_CONTEXT, default=context_length)
    return QueryTemperature(beta, period) if beta else None


def extend_context(context_length: int, scaling: RopeScaling | None) -> int:
    """Yarn configurations often state the original length as `max_position_embeddings`."""
    if scaling is None or scaling.kind != "yarn" or scaling.original_context is None:
        return context_length
    return max(context_length, min(int(scaling.original_context * scaling.factor), limits.MAX_CONTEXT))


def read_gguf_rope_layers(fields: Fields, row: RopeRow, window_layers: Flags, layers: int) -> Flags:
    """Which layers rotate; files of Granite say whether they do. None if all do."""
    if row.gguf_switch and not fields.flag(_GGUF_SWITCH, True):
        return (False,) * layers
    return default_rope_layers(row, window_layers, layers)


def read_gguf_scaling(
    fields: Fields, row: RopeRow, context_length: int, tensors: Mapping[str, TensorSource]
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
        truncate=row.truncates_yarn,
    )


def _read_original_context(fields: Fields, context_length: int) -> int:
    return fields.integer("rope.scaling.original_context_length", 1, limits.MAX_CONTEXT, default=context_length)


def read_gguf_temperature(fields: Fields, context_length: int) -> QueryTemperature | None:
    """How queries grow with their position, if they do."""
    beta = fields.number("attention.temperature_scale", 0.0, limits.MAX_SCALE, default=0.0)
    return QueryTemperature(beta, _read_original_context(fields, context_length)) if beta else None


def rope_metadata(config: ModelConfig, row: RopeRow) -> dict[str, object]:
    """The keys of GGUF that state the rotation; ModelError where they cannot.

    llama3 scaling has no keys, and longrope none for its factors: these are the tensors of `list_rope_factors`. ntk
    scaling is a larger frequency base.
    """
    stated: dict[str, object] = {"rope.dimension_count": config.rope_dim, "rope.freq_base": config.rope_theta}
    if row.gguf_switch and config.rope_layers in (None, (False,) * config.layers):
        stated[_GGUF_SWITCH] = config.rope_layers is None
    elif config.rope_layers != default_rope_layers(row, config.window_layers, config.layers):
        raise ModelError(f"these layers that rotate cannot be stated in a GGUF file of {config.architecture}")
    stated |= _scaling_metadata(config, row)
    if config.query_temperature is not None:
        stated["attention.temperature_scale"] = config.query_temperature.beta
        stated["rope.scaling.original_context_length"] = config.query_temperature.period
    return stated


def _scaling_metadata(config: ModelConfig, row: RopeRow) -> dict[str, object]:
    scaling = config.rope_scaling
    if scaling is None or scaling.kind in ("llama3", "proportional"):
        return {}
    if scaling.kind == "ntk":
        return {"rope.freq_base": config.rope_theta * scaling.factor ** (config.rope_dim / (config.rope_dim - 2))}
    if scaling.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor}
    if scaling.kind == "longrope":
        return {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": scaling.original_context,
            "rope.scaling.attn_factor": scaling.attention_factor,
        }
    if scaling.truncate != row.truncates_yarn:
        raise ModelError(
            f"rope scaling yarn with{'' if scaling.truncate else 'out'} truncate cannot be stated in a GGUF file of "
            f"{config.architecture}"
        )
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaling.factor,
        "rope.scaling.original_context_length": scaling.original_context,
        "rope.scaling.attn_factor": scaling.attention_factor / yarn_attention_factor(scaling.factor),
        "rope.scaling.yarn_beta_fast": scaling.beta_fast,
        "rope.scaling.yarn_beta_slow": scaling.beta_slow,
    }
