"""What a `config.json` says of rotary positions and of sliding windows, as GGUF's metadata and tensors of factors.

Rotations have an older spelling (`rope_theta`, `rope_scaling`) and a newer one (`rope_parameters`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxr.core.errors import ModelError
from mlxr.kernels.rope import (
    RopeScaling,
    inverse_frequencies,
    llama3_factors,
    longrope_attention_factor,
    yarn_attention_factor,
)
from mlxr.models import limits
from mlxr.models.architecture import Architecture
from mlxr.models.fields import Fields
from mlxr.models.folders.statement import Statement
from mlxr.models.rope_config import ROPE_SWITCH, Flags, RopeRow, default_rope_layers
from mlxr.models.rope_factors import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, STANDS_STILL
from mlxr.models.window_config import WINDOW_THETA, WindowRow, default_window_layers

FULL, WINDOWED = "full_attention", "sliding_attention"  # what `config.json` calls kinds of layers
_DEFAULT_FULL_LAYERS = 28
_ORIGINAL = "original_max_position_embeddings"
_LONGROPE = ("longrope", "su")  # its name, and the one in older files
_REFUSED_SCALING = {
    "dynamic": "it would turn cached keys by other angles as a text grows; use type ntk with a fixed factor, or yarn",
    "mrope": "it is for images",
}


@dataclass(frozen=True, slots=True)
class Turned:
    """What the rotation of a folder depends on besides its own keys."""

    row: Architecture  # of the folder's class
    target: Architecture  # that readers of GGUF files take the model for
    layers: int
    head_dim: int
    context_tokens: int  # as the folder states it


def state_rotation(out: Statement, fields: Fields, about: Turned) -> tuple[bool, ...]:
    """State the rotation, the windows and the longest context; return which layers have a window."""
    row, layers = about.row, about.layers
    rope, window_rope = _find_rope(fields, row.rope)
    theta = _read_theta(fields, row.rope, rope)
    window, window_layers = _state_window(out, fields, about)
    if row.windows.theta is not None and not row.windows.plain:
        stated = fields.number("rope_local_base_freq", 1.0001, limits.MAX_THETA, default=row.windows.theta)
        out.put(WINDOW_THETA, window_rope.number("rope_theta", 1.0001, limits.MAX_THETA, default=stated))
    rope_dim = _read_rope_dim(fields, row.rope, rope, about.head_dim)
    out.put("rope.dimension_count", rope_dim, *_find_dim_key(fields))
    out.put("rope.freq_base", theta, rope if rope.get("rope_theta") is not None else fields, "rope_theta")
    out.put("context_length", about.context_tokens)
    _state_still_layers(out, fields, about, window_layers)
    _state_scaling(out, fields, about, rope, theta, rope_dim)
    _state_temperature(out, rope, about.context_tokens)
    return window_layers or (window is not None,) * layers


def _find_dim_key(fields: Fields) -> tuple[Fields, str]:
    names = ("global_head_dim", "head_dim")
    return fields, next((name for name in names if fields.get(name) is not None), "partial_rotary_factor")


def _find_rope(fields: Fields, row: RopeRow) -> tuple[Fields, Fields]:
    """Return the objects with the rotation's parameters, of all layers and of those with windows, possibly empty."""
    for name in ("rope_parameters", "rope_scaling"):
        found = fields.mapping(name)
        if found is not None:
            full, windowed = found.mapping(FULL), found.mapping(WINDOWED)
            return full or found, windowed or Fields({}, f"{name}.{WINDOWED}.")
    return Fields(row.unstated), Fields({}, "rope_scaling.")


def _read_theta(fields: Fields, row: RopeRow, rope: Fields) -> float:
    stated = fields.number("rope_theta", 1.0001, limits.MAX_THETA, row.theta)
    return rope.number("rope_theta", 1.0001, limits.MAX_THETA, default=stated)


def _read_rope_dim(fields: Fields, row: RopeRow, rope: Fields, head_dim: int) -> int:
    """Return how many numbers of a head rotate."""
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


def _state_window(out: Statement, fields: Fields, about: Turned) -> tuple[int | None, Flags]:
    """State the window, and which layers have it where this is not the usual; return both, None for no window and for
    layers that are all alike."""
    row, layers = about.row.windows, about.layers
    if not row.in_folders or (row.switch and not fields.flag("use_sliding_window", False)):
        return None, None
    unstated = 0 if fields.has("sliding_window") else row.default  # null says: no window
    window = fields.integer("sliding_window", 0, limits.MAX_CONTEXT, default=unstated)
    flags = _read_window_layers(fields, row, layers) if window else ()
    if not any(flags):
        return None, None
    out.put("attention.sliding_window", window, fields, "sliding_window")
    window_layers = None if all(flags) else flags
    if window_layers != default_window_layers(about.target.windows, window, layers) and not about.row.two_sizes:
        out.put_own("attention.sliding_window_layers", list(flags))
    return window, window_layers


def _read_window_layers(fields: Fields, row: WindowRow, layers: int) -> tuple[bool, ...]:
    """Return which layers have a window: stated one by one, by a period, or (where there is a switch) from one layer
    on."""
    kinds = fields.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (WINDOWED, FULL) for kind in kinds):
            fields.refuse("layer_types", f"a list of {layers}, each one of {FULL}, {WINDOWED}")
        flags = tuple(kind == WINDOWED for kind in kinds)
        return (*flags[:-1], False) if row.last_full else flags  # its last layer sees all, whatever the file says
    if row.full_every is not None:
        every = fields.integer("sliding_window_pattern", 1, limits.MAX_LAYERS, default=row.full_every)
        last = layers - 1 if row.last_full else layers
        return tuple((index + 1) % every != 0 and index != last for index in range(layers))
    first = fields.integer("max_window_layers", 0, 1 << 20, default=_DEFAULT_FULL_LAYERS) if row.switch else 0
    return tuple(index >= first for index in range(layers))


def _state_still_layers(out: Statement, fields: Fields, about: Turned, window_layers: Flags) -> None:
    """State which layers rotate, where these are not the usual ones."""
    flags = _read_rope_layers(fields, about.row.rope, window_layers, about.layers)
    if about.target.rope.gguf_switch and flags in (None, (False,) * about.layers):
        out.put(ROPE_SWITCH, flags is None)
    elif flags != default_rope_layers(about.target.rope, window_layers, about.layers):
        out.put_own("rope.layers", list(flags or (True,) * about.layers))


def _read_rope_layers(fields: Fields, row: RopeRow, window_layers: Flags, layers: int) -> Flags:
    """Return which layers rotate: all or none, stated one by one (1 means that it does), or the usual; None if all
    do."""
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


def _state_scaling(out: Statement, fields: Fields, about: Turned, rope: Fields, theta: float, rope_dim: int) -> None:
    """State how the rotation is stretched; with a tensor of factors for what GGUF has no keys for."""
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    pairs = rope_dim // 2
    if about.row.rope.states_factors:
        out.vectors[ROPE_FACTORS] = [1.0] * pairs
    if kind == "default":
        return
    if kind in _REFUSED_SCALING:
        raise ModelError(f"{rope.key('rope_type')} {kind!r} is not supported: {_REFUSED_SCALING[kind]}")
    if kind == "proportional":
        turning = int(rope.number("partial_rotary_factor", 1e-6, 1.0, default=1.0) * pairs)
        factor = rope.number("factor", 1e-6, 1e6, default=1.0)
        out.vectors[ROPE_FACTORS] = [factor] * turning + [STANDS_STILL] * (pairs - turning)
        return
    if kind not in ("linear", "ntk", "yarn", "llama3", *_LONGROPE):
        raise ModelError(
            f"{rope.key('rope_type')} is {kind!r}, expected default, linear, longrope, ntk, proportional, yarn "
            "or llama3"
        )
    beside = fields.integer(_ORIGINAL, 1, limits.MAX_CONTEXT, about.context_tokens)  # where Phi states it
    original = rope.integer(_ORIGINAL, 1, limits.MAX_CONTEXT, beside)
    if kind in _LONGROPE:
        _state_longrope(out, rope, about, original)
        return
    rope.refuse_unless(("short_factor", "long_factor"), (), "only known with rope_type longrope")
    if kind == "llama3":
        out.vectors[ROPE_FACTORS] = _list_llama3(rope, original, theta, rope_dim)
    elif kind == "yarn":
        _state_yarn(out, rope, about, original)
    elif kind == "linear":
        out.put("rope.scaling.type", "linear")
        out.put("rope.scaling.factor", rope.number("factor", 1.0, 1e6), rope, "factor")
    else:
        if rope_dim < 4:
            raise ModelError(f"model has rope_dim {rope_dim} with ntk scaling, which needs at least 4")
        base = theta * rope.number("factor", 1.0, 1e6) ** (rope_dim / (rope_dim - 2))
        out.put("rope.freq_base", base, rope, "factor")


def _list_llama3(rope: Fields, original: int, theta: float, rope_dim: int) -> Sequence[float]:
    scaling = RopeScaling(
        "llama3",
        rope.number("factor", 1.0, 1e6),
        original_context=original,
        low_freq_factor=rope.number("low_freq_factor", 1e-6, 1e6),
        high_freq_factor=rope.number("high_freq_factor", 1e-6, 1e6),
    )
    factors: list[float] = llama3_factors(inverse_frequencies(rope_dim, theta), scaling).tolist()
    return factors


def _state_longrope(out: Statement, rope: Fields, about: Turned, original: int) -> None:
    factor = rope.number("factor", 1e-6, 1e6, default=about.context_tokens / original)
    attention_factor = rope.number("attention_factor", 1e-6, 1e6, default=longrope_attention_factor(factor, original))
    if about.row.rope.has_mscales:
        attention_factor = rope.number("long_mscale", 1e-6, 1e6, default=attention_factor)
        if rope.number("short_mscale", 1e-6, 1e6, default=attention_factor) != attention_factor:
            rope.refuse("short_mscale", f"the long_mscale {attention_factor:g}")
    out.put("rope.scaling.type", "longrope")
    out.put("rope.scaling.original_context_length", original, rope, _ORIGINAL)
    out.put("rope.scaling.attn_factor", attention_factor, rope, "attention_factor")
    out.vectors[LONG_FACTORS] = rope.numbers("long_factor", 1e-6, 1e6)
    out.vectors[SHORT_FACTORS] = rope.numbers("short_factor", 1e-6, 1e6)


def _state_yarn(out: Statement, rope: Fields, about: Turned, original: int) -> None:
    """State yarn. Folders often have the original length as `max_position_embeddings`."""
    context = about.context_tokens
    factor = rope.number("factor", 1.0, 1e6, default=max(1.0, context / original))
    mscale = rope.number("mscale", 0.0, 1e6, default=0.0)
    mscale_all_dim = rope.number("mscale_all_dim", 0.0, 1e6, default=0.0)
    default = yarn_attention_factor(factor, mscale, mscale_all_dim)
    attention_factor = rope.number("attention_factor", 1e-6, 1e6, default=default)
    out.put("rope.scaling.type", "yarn")
    out.put("rope.scaling.factor", factor, rope, "factor")
    out.put("rope.scaling.original_context_length", original, rope, _ORIGINAL)
    # readers multiply what is stated by the recommended factor
    out.put("rope.scaling.attn_factor", attention_factor / yarn_attention_factor(factor), rope, "attention_factor")
    out.put("rope.scaling.yarn_beta_fast", rope.number("beta_fast", 1e-6, 1e6, default=32.0), rope, "beta_fast")
    out.put("rope.scaling.yarn_beta_slow", rope.number("beta_slow", 1e-6, 1e6, default=1.0), rope, "beta_slow")
    truncate = rope.flag("truncate", True)
    if truncate != about.target.rope.truncates_yarn:
        out.put_own("rope.scaling.yarn_truncate", truncate, rope, "truncate")
    out.put("context_length", max(context, min(int(original * factor), limits.MAX_CONTEXT)))


def _state_temperature(out: Statement, rope: Fields, context: int) -> None:
    """State how queries grow with their position, if they do."""
    beta = rope.number("llama_4_scaling_beta", 0.0, limits.MAX_SCALE, default=0.0)
    if beta:
        out.put("attention.temperature_scale", beta, rope, "llama_4_scaling_beta")
        period = rope.integer(_ORIGINAL, 1, limits.MAX_CONTEXT, default=context)
        out.put("rope.scaling.original_context_length", period, rope, _ORIGINAL)
