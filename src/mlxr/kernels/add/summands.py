"""Describes sums that wait on a GPU: whoever reads one adds it up, nearly always the norm that follows.

Knows no kernel and no deferred results; `add` and `rms_norm` have the bodies (summands.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Dot:
    """The dot products of the rows of x (rows, columns) with a weight (1, columns), both of plain numbers."""

    x: Any
    weight: Any


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """Rows of `y`, perhaps a product that waits, each times the sigmoid of its `dot`."""

    y: Any
    dot: Dot


@dataclass(frozen=True, slots=True, eq=False)
class Summands:
    """Arrays whose sum is wanted, times `factor`: `array` (rows, columns) or shares of it (shares, rows, columns), and
    perhaps `other` likewise, whose rows are then multiplied by the sigmoids of `dot`, if there is one."""

    array: Any
    other: Any = None
    dot: Dot | None = None
    factor: float = 1.0

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All that is to be added up."""
        return (self.array,) if self.other is None else (self.array, self.other)

    @property
    def is_plain(self) -> bool:
        """Whether `array` is all there is."""
        return self.other is None and self.factor == 1.0


def list_inputs(summands: Summands | None, none: Any) -> list[Any]:
    """The inputs of a kernel: array, other, x and weight of the dot products; `none` stands for those not there."""
    if summands is None:
        return [none] * 4
    pair = (none, none) if summands.dot is None else (summands.dot.x, summands.dot.weight)
    return [summands.array, none if summands.other is None else summands.other, *pair]


def count_shares(array: Any) -> int:
    """Count the arrays (rows, columns) of which this is made."""
    if array is None:
        return 0
    return array.shape[0] if array.ndim == 3 else 1


def list_constants(summands: Summands | None) -> dict[str, int]:
    """The constants of a kernel that say what there is beside `array`."""
    if summands is None:
        return {"OTHERS": 0, "GATE": 0}
    return {"OTHERS": count_shares(summands.other), "GATE": int(summands.dot is not None)}
