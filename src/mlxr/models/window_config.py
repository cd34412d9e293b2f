"""What files say of sliding windows: out of `config.json` and out of GGUF's metadata, and back into the latter.

How a family spells it and what it leaves unsaid is its `WindowRow`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxr.core.errors import ModelError
from mlxr.models import limits
from mlxr.models.fields import Fields
from mlxr.models.rope_config import FULL, WINDOWED, Flags

if TYPE_CHECKING:
    from mlxr.models.config import ModelConfig

_DEFAULT_FULL_LAYERS = 28
PATTERN, WINDOW_THETA = "attention.sliding_window_pattern", "rope.freq_base_swa"  # of GGUF


@dataclass(frozen=True, slots=True)
class WindowRow:
    """How a family's files state windows.

    `in_folders`: `config.json` may state one, and means `default` where it does not, 0 for none; with `switch` it
    counts only with `use_sliding_window`. Of every `full_every` layers the last has no window, and with `last_full` the
    last of all. `theta` is the base of the others' rotation, and with `plain` theirs is not stretched.
    """

    in_folders: bool = False
    default: int = 4096
    switch: bool = False
    full_every: int | None = None
    last_full: bool = False
    theta: float | None = None
    plain: bool = False


def default_window_layers(row: WindowRow, window: int | None, layers: int) -> Flags:
    """Which layers have the window where a file does not say so; None if all have it."""
    if window is None or row.full_every is None:
        return None
    return tuple((index + 1) % row.full_every != 0 for index in range(layers))


def read_hf_window(fields: Fields, row: WindowRow, layers: int) -> tuple[int | None, Flags]:
    """The window, and which layers have it; None instead of flags that are all alike."""
    if not row.in_folders or (row.switch and not fields.flag("use_sliding_window", False)):
        return None, None
    unstated = 0 if fields.has("sliding_window") else row.default  # null says: no window
    window = fields.integer("sliding_window", 0, limits.MAX_CONTEXT, default=unstated) or None
    if window is None:
        return None, None
    flags = _read_hf_layers(fields, row, layers)
    if not any(flags):
        return None, None
    return window, None if all(flags) else flags


def _read_hf_layers(fields: Fields, row: WindowRow, layers: int) -> tuple[bool, ...]:
    """Which layers have a window: stated one by one, by a period, or (where there is a switch) from one layer on."""
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


def read_hf_window_theta(fields: Fields, row: WindowRow, rope: Fields, theta: float | None) -> float | None:
    """The base of the rotation of layers with windows, where it is another one; `theta` is that of the others."""
    if row.plain:
        return theta
    if row.theta is None:
        return None
    stated = fields.number("rope_local_base_freq", 1.0001, limits.MAX_THETA, default=row.theta)
    return rope.number("rope_theta", 1.0001, limits.MAX_THETA, default=stated)


def read_gguf_window_layers(fields: Fields, row: WindowRow, window: int | None, layers: int) -> Flags:
    """Which layers have the window: one flag for each, a number of layers of which the last has none, or the usual."""
    pattern = fields.get(PATTERN)
    if pattern is None or row.full_every is None or window is None:
        return default_window_layers(row, window, layers)
    if isinstance(pattern, Iterable) and not isinstance(pattern, str):
        flags = tuple(pattern)
        if len(flags) != layers or any(flag not in (0, 1) for flag in flags):
            fields.refuse(PATTERN, f"{layers} flags")
        return tuple(bool(flag) for flag in flags)
    every = fields.integer(PATTERN, 1, limits.MAX_LAYERS)
    return tuple((index + 1) % every != 0 for index in range(layers))


def read_gguf_window_theta(fields: Fields, row: WindowRow, window: int | None, theta: float) -> float | None:
    """The base of the rotation of layers with windows, where it is another one; `theta` is that of the others."""
    if row.plain:
        return None if window is None else theta
    if row.theta is None:
        return None
    return fields.number(WINDOW_THETA, 1.0001, limits.MAX_THETA, default=row.theta)


def window_metadata(config: ModelConfig, row: WindowRow, *, states_layers: bool) -> dict[str, object]:
    """The keys of GGUF that state the window; ModelError where they cannot and no others state which layers have it."""
    if not states_layers and config.window_layers != default_window_layers(row, config.sliding_window, config.layers):
        raise ModelError(f"these layers with windows cannot be stated in a GGUF file of {config.architecture}")
    stated: dict[str, object] = {}
    if config.sliding_window is not None:
        stated["attention.sliding_window"] = config.sliding_window
    if config.window_rope_theta is not None and not row.plain:
        stated[WINDOW_THETA] = config.window_rope_theta
    return stated
