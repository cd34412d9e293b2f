"""What GGUF's metadata say of sliding windows.

How a family spells it and what it leaves unsaid is its `WindowRow`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlxr.models import limits
from mlxr.models.fields import Fields
from mlxr.models.rope_config import Flags

PATTERN, WINDOW_THETA = "attention.sliding_window_pattern", "rope.freq_base_swa"  # of GGUF


@dataclass(frozen=True, slots=True)
class WindowRow:
    """How a family's files state windows."""

    full_every: int | None = None  # of so many layers the last has no window
    theta: float | None = None  # the base of the rotation of the others
    plain: bool = False  # whose rotation is not stretched


def default_window_layers(row: WindowRow, window: int | None, layers: int) -> Flags:
    """Which layers have the window where a file does not say so; None if all have it."""
    if window is None or row.full_every is None:
        return None
    return tuple((index + 1) % row.full_every != 0 for index in range(layers))


def read_gguf_window_layers(fields: Fields, own: Fields, row: WindowRow, window: int | None, layers: int) -> Flags:
    """Return which layers have the window: one flag for each, a number of layers of which the last has none, or the
    usual."""
    stated = own.flags("attention.sliding_window_layers", layers)
    if stated is not None:
        return None if all(stated) else stated
    pattern = fields.get(PATTERN)
    if pattern is None or row.full_every is None or window is None:
        return default_window_layers(row, window, layers)
    if isinstance(pattern, Iterable) and not isinstance(pattern, str):
        return fields.flags(PATTERN, layers)
    every = fields.integer(PATTERN, 1, limits.MAX_LAYERS)
    return tuple((index + 1) % every != 0 for index in range(layers))


def read_gguf_window_theta(fields: Fields, row: WindowRow, window: int | None, theta: float) -> float | None:
    """The base of the rotation of layers with windows, where it is another one; `theta` is that of the others."""
    if row.plain:
        return None if window is None else theta
    if row.theta is None:
        return None
    return fields.number(WINDOW_THETA, 1.0001, limits.MAX_THETA, default=row.theta)
