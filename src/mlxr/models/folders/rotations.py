"""Rotary positions and sliding windows in a `config.json`, stated as GGUF's metadata and tensors of factors.

Rotations have an older spelling (`rope_theta`, `rope_scaling`) and a newer one (`rope_parameters`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mlxr.core.errors import ModelError
from mlxr.kernels.rope import (
    inverse_frequencies,
    llama3_factors,
    longrope_attention_factor,
    stretch_base,
    yarn_attention_factor,
)
from mlxr.models import limits
from mlxr.models.fields import Fields
from mlxr.models.folders.config import Flags, FolderConfig, Statement
from mlxr.models.metadata import SECTIONS, WINDOW_PATTERN, WINDOW_THETA
from mlxr.models.rotations import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, STANDS_STILL

NOTHING: Mapping[str, object] = MappingProxyType({})
FULL, WINDOWED = "full_attention", "sliding_attention"  # kinds of layers in `config.json`
_DEFAULT_FULL_LAYERS = 28
_ORIGINAL = "original_max_position_embeddings"
_LONGROPE = ("longrope", "su")  # its name, and the one in older files
_KINDS = ("linear", "ntk", "proportional", "yarn", "llama3", *_LONGROPE)
_NAMED_KINDS = "default, linear, longrope, ntk, proportional, yarn or llama3"
_REFUSED_SCALING = {
    "dynamic": "it would turn cached keys by other angles as a text grows; use type ntk with a fixed factor, or yarn",
    "mrope": "it is for images",
}


def state_rotation(
    c: FolderConfig,
    *,
    part: float = 1.0,
    theta: float = 10000.0,
    unstated: Mapping[str, object] = NOTHING,
    head_dim: int | None = None,
    rope_dim: int | None = None,
    truncates_yarn: bool = True,
    scales_scores: bool = False,
    has_mscales: bool = False,
    has_alpha: bool = False,
    has_sections: bool = False,
) -> None:
    """State the rotation.

    `part` is the part of a head that rotates if the folder does not say, with the base `theta`; `unstated` replaces a
    missing object for rotations. `head_dim` is that of layers without a window, if it differs; with a `rope_dim` so
    many numbers rotate, whatever the folder says of parts. With yarn a family that `scales_scores` multiplies them by
    the factor of `mscale_all_dim`. If it `truncates_yarn`, readers assume that yarn's range is rounded to whole pairs.
    `has_mscales`: longrope's attention factor is stated as `short_mscale` and `long_mscale`. `has_alpha`: a dynamic
    rotation that states `alpha` is stretched by it, whatever the length of a text. `has_sections`: `state_sections`
    states the axes of a rotation of the kind mrope.
    """
    out, rope = c.out, find_rope(c.fields, unstated)
    context, stated = out.integer("context_length"), c.fields.number("rope_theta", 1.0001, limits.MAX_THETA, theta)
    base = rope.number("rope_theta", 1.0001, limits.MAX_THETA, default=stated)
    if rope_dim is None:
        rope_dim = _read_rope_dim(c.fields, rope, part, head_dim or c.head_dim)
        out.put("rope.dimension_count", rope_dim, c.fields, "global_head_dim" if head_dim else c.head_key)
    out.put("rope.freq_base", base, rope if rope.get("rope_theta") is not None else c.fields, "rope_theta")
    _state_scaling(c, rope, base, rope_dim, has_alpha=has_alpha, has_sections=has_sections)
    if scales_scores and out.values.get("rope.scaling.type") == "yarn":
        _state_score_factor(out, rope)
    if out.values.get("rope.scaling.type") == "yarn":
        truncate = rope.flag("truncate", True)
        if truncate != truncates_yarn:
            out.put_own("rope.scaling.yarn_truncate", truncate, rope, "truncate")
    if has_mscales:
        _state_mscale(out, rope)
    _state_temperature(out, rope, context)


def state_sections(c: FolderConfig, *, shuffles: bool = True) -> None:
    """State how many of the pairs that rotate turn by each of three axes, which take turns if it `shuffles`, else
    follow one another. The default is a third for each, or in the latter case a quarter for time."""
    pairs, rope = c.out.integer("rope.dimension_count") // 2, find_rope(c.fields)
    plane = pairs // 3 if shuffles else 3 * pairs // 8
    sections = (pairs - 2 * plane, plane, plane)
    if rope.get("mrope_section") is not None:
        order = "take turns" if shuffles else "stand one after another"
        rope.refuse_unless(("mrope_interleaved",), (shuffles,), f"only sections that {order} are supported")
        first, second, last = rope.integers("mrope_section", 3, 0, pairs)
        sections = first, second, last
        if sum(sections) != pairs:
            rope.refuse("mrope_section", f"three numbers that add up to {pairs}")
    c.out.put(SECTIONS, [*sections, 0])


def state_windows(
    c: FolderConfig,
    *,
    default: int = 4096,
    switch: bool = False,
    full_every: int | None = None,
    last_full: bool = False,
    states_layers: bool = False,
) -> Flags:
    """State the window, which is `default` if the folder does not say so, 0 for none; return which layers have it.

    With `switch` it counts only with `use_sliding_window`. The last of every `full_every` layers has none, and with
    `last_full` the last of all. `states_layers`: GGUF files of the family say which layers have it.
    """
    none = (False,) * c.layers
    if switch and not c.fields.flag("use_sliding_window", False):
        return none
    unstated = 0 if c.fields.has("sliding_window") else default  # null says: no window
    window = c.fields.integer("sliding_window", 0, limits.MAX_CONTEXT, default=unstated)
    flags = _read_window_layers(c, switch, full_every, last_full=last_full) if window else none
    if any(flags):
        c.out.put("attention.sliding_window", window, c.fields, "sliding_window")
        if flags != _flag_all_but_last_of(full_every, c.layers) and not states_layers:
            c.out.put_own("attention.sliding_window_layers", list(flags))
    if states_layers:
        c.out.put(WINDOW_PATTERN, list(flags))
    return flags


def _flag_all_but_last_of(every: int | None, layers: int) -> Flags:
    return tuple(every is None or (index + 1) % every != 0 for index in range(layers))


def _read_window_layers(c: FolderConfig, switch: bool, full_every: int | None, *, last_full: bool) -> Flags:
    """Return which layers have a window: stated one by one, by a period, or (if there is a switch) from one layer
    on."""
    kinds, layers = c.fields.get("layer_types"), c.layers
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (WINDOWED, FULL) for kind in kinds):
            c.fields.refuse("layer_types", f"a list of {layers}, each one of {FULL}, {WINDOWED}")
        flags = tuple(kind == WINDOWED for kind in kinds)
    elif full_every is not None:
        every = c.fields.integer("sliding_window_pattern", 1, limits.MAX_LAYERS, default=full_every)
        flags = _flag_all_but_last_of(every, layers)
    else:
        default = _DEFAULT_FULL_LAYERS
        first = c.fields.integer("max_window_layers", 0, 1 << 20, default=default) if switch else 0
        flags = tuple(index >= first for index in range(layers))
    return (*flags[:-1], False) if last_full else flags  # whatever the file says


def state_window_theta(c: FolderConfig, default: float) -> None:
    """State the base of the rotation of layers with windows."""
    stated = c.fields.number("rope_local_base_freq", 1.0001, limits.MAX_THETA, default=default)
    rope = find_rope(c.fields, windowed=True)
    c.out.put(WINDOW_THETA, rope.number("rope_theta", 1.0001, limits.MAX_THETA, default=stated))


def state_turning_layers(c: FolderConfig, flags: Sequence[bool], usual: Sequence[bool]) -> None:
    """State which layers rotate, if these are not the usual ones."""
    if tuple(flags) != tuple(usual):
        c.out.put_own("rope.layers", list(flags))


def find_rope(fields: Fields, unstated: Mapping[str, object] = NOTHING, *, windowed: bool = False) -> Fields:
    """Return the object with the rotation's parameters, for layers without a window or with one; it may be empty."""
    for name in ("rope_parameters", "rope_scaling"):
        found = fields.mapping(name)
        if found is not None:
            if windowed:
                return found.mapping(WINDOWED) or Fields({}, f"{name}.{WINDOWED}.")
            return found.mapping(FULL) or found
    return Fields({}, "rope_scaling.") if windowed else Fields(unstated)


def _read_rope_dim(fields: Fields, rope: Fields, part: float, head_dim: int) -> int:
    """Return how many numbers of a head rotate."""
    if rope.get("rope_type") == "proportional":  # of all pairs, of which some turn by nothing
        return head_dim
    default = fields.number("partial_rotary_factor", 0.0, 1.0, default=part)
    factor = rope.number("partial_rotary_factor", 0.0, 1.0, default=default)
    rope_dim = int(head_dim * factor)
    if rope_dim < 2 or rope_dim % 2:
        raise ModelError(
            f"head_dim {head_dim} with partial_rotary_factor {factor:g} rotates {rope_dim} elements, expected an even "
            "number from 2"
        )
    return rope_dim


def _state_scaling(
    c: FolderConfig, rope: Fields, theta: float, rope_dim: int, *, has_alpha: bool, has_sections: bool
) -> None:
    """State how the rotation is stretched, with a tensor of factors if GGUF has no keys for it."""
    out, pairs, context = c.out, rope_dim // 2, c.out.integer("context_length")
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    ntk_key = "factor"
    if has_alpha and kind == "dynamic" and rope.get("alpha"):
        kind, ntk_key = "ntk", "alpha"
    if kind == "default" or (has_sections and kind == "mrope"):
        return
    if kind in _REFUSED_SCALING:
        raise ModelError(f"{rope.key('rope_type')} {kind!r} is not supported: {_REFUSED_SCALING[kind]}")
    if kind not in _KINDS:
        raise ModelError(f"{rope.key('rope_type')} is {kind!r}, expected {_NAMED_KINDS}")
    beside = c.fields.integer(_ORIGINAL, 1, limits.MAX_CONTEXT, context)  # Phi states it there
    original = rope.integer(_ORIGINAL, 1, limits.MAX_CONTEXT, beside)
    if kind not in _LONGROPE:
        rope.refuse_unless(("short_factor", "long_factor"), (), "only known with rope_type longrope")
    match kind:
        case "proportional":
            turning = int(rope.number("partial_rotary_factor", 1e-6, 1.0, default=1.0) * pairs)
            factor = rope.number("factor", 1e-6, 1e6, default=1.0)
            out.vectors[ROPE_FACTORS] = [factor] * turning + [STANDS_STILL] * (pairs - turning)
        case "llama3":
            out.vectors[ROPE_FACTORS] = _list_llama3(rope, original, theta, rope_dim)
        case "linear":
            out.put("rope.scaling.type", "linear")
            out.put("rope.scaling.factor", rope.number("factor", 1.0, 1e6), rope, "factor")
        case "ntk":
            if rope_dim < 4:
                raise ModelError(f"model has rope_dim {rope_dim} with ntk scaling, which needs at least 4")
            base = stretch_base(theta, rope.number(ntk_key, 1.0, 1e6), rope_dim)
            out.put("rope.freq_base", base, rope, ntk_key)
        case "yarn":
            _state_yarn(out, rope, context, original)
        case _:
            _state_longrope(out, rope, context, original)


def _list_llama3(rope: Fields, original: int, theta: float, rope_dim: int) -> Sequence[float]:
    factor = rope.number("factor", 1.0, 1e6)
    low, high = (rope.number(f"{name}_freq_factor", 1e-6, 1e6) for name in ("low", "high"))
    if high <= low:
        rope.refuse("high_freq_factor", f"more than the low_freq_factor {low:g}")
    factors: list[float] = llama3_factors(inverse_frequencies(rope_dim, theta), factor, original, low, high).tolist()
    return factors


def _state_longrope(out: Statement, rope: Fields, context: int, original: int) -> None:
    factor = rope.number("factor", 1e-6, 1e6, default=context / original)
    attention_factor = rope.number("attention_factor", 1e-6, 1e6, default=longrope_attention_factor(factor, original))
    out.put("rope.scaling.type", "longrope")
    out.put("rope.scaling.original_context_length", original, rope, _ORIGINAL)
    out.put("rope.scaling.attn_factor", attention_factor, rope, "attention_factor")
    out.vectors[LONG_FACTORS] = rope.numbers("long_factor", 1e-6, 1e6)
    out.vectors[SHORT_FACTORS] = rope.numbers("short_factor", 1e-6, 1e6)


def _state_mscale(out: Statement, rope: Fields) -> None:
    """State longrope's attention factor as Phi-3.5-MoE does: for short and long contexts, which must be one."""
    if out.values.get("rope.scaling.type") != "longrope":
        return
    usual = out.values["rope.scaling.attn_factor"]
    assert isinstance(usual, float)
    factor = rope.number("long_mscale", 1e-6, 1e6, default=usual)
    if rope.number("short_mscale", 1e-6, 1e6, default=factor) != factor:
        rope.refuse("short_mscale", f"the long_mscale {factor:g}")
    out.put("rope.scaling.attn_factor", factor, rope, "long_mscale")


def _state_yarn(out: Statement, rope: Fields, context: int, original: int) -> None:
    """State yarn. Folders often have the original length as `max_position_embeddings`."""
    factor = rope.number("factor", 1.0, 1e6, default=max(1.0, context / original))
    mscale = rope.number("mscale", 0.0, 1e6, default=0.0)
    mscale_all_dim = rope.number("mscale_all_dim", 0.0, 1e6, default=0.0)
    default = yarn_attention_factor(factor, mscale, mscale_all_dim)
    attention_factor = rope.number("attention_factor", 1e-6, 1e6, default=default)
    out.put("rope.scaling.type", "yarn")
    out.put("rope.scaling.factor", factor, rope, "factor")
    out.put("rope.scaling.original_context_length", original, rope, _ORIGINAL)
    # readers multiply the stated factor by the recommended one
    out.put("rope.scaling.attn_factor", attention_factor / yarn_attention_factor(factor), rope, "attention_factor")
    out.put("rope.scaling.yarn_beta_fast", rope.number("beta_fast", 1e-6, 1e6, default=32.0), rope, "beta_fast")
    out.put("rope.scaling.yarn_beta_slow", rope.number("beta_slow", 1e-6, 1e6, default=1.0), rope, "beta_slow")
    out.put("context_length", max(context, min(int(original * factor), limits.MAX_CONTEXT)))


def _state_score_factor(out: Statement, rope: Fields) -> None:
    """State the factor of scores by `mscale_all_dim`, as readers of deepseek2 take it: then the attention factor is
    stated whole, and it is 1 if `mscale` is the same."""
    mscale, all_dim = (rope.number(name, 0.0, 1e6, default=0.0) for name in ("mscale", "mscale_all_dim"))
    if not all_dim:
        return
    factor = out.values["rope.scaling.factor"]
    assert isinstance(factor, float)
    usual = yarn_attention_factor(factor, mscale, all_dim)
    attention_factor = rope.number("attention_factor", 1e-6, 1e6, default=usual)
    out.put("rope.scaling.attn_factor", attention_factor, rope, "attention_factor")
    out.put("rope.scaling.yarn_log_multiplier", 0.1 * all_dim, rope, "mscale_all_dim")


def _state_temperature(out: Statement, rope: Fields, context: int) -> None:
    """State how queries grow with their position, if they do."""
    beta = rope.number("llama_4_scaling_beta", 0.0, limits.MAX_SCALE, default=0.0)
    if beta:
        out.put("attention.temperature_scale", beta, rope, "llama_4_scaling_beta")
        period = rope.integer(_ORIGINAL, 1, limits.MAX_CONTEXT, default=context)
        out.put("rope.scaling.original_context_length", period, rope, _ORIGINAL)
