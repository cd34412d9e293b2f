"""How much the longest tests do: in everyday runs a part of it, everything with `--thorough`, as in CI."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

QUICK_SHARE = 4

# Set from the command line before any test is collected.
is_thorough = False
family_schedules: int | None = None  # instead of the usual number


def choose_amount(full: int) -> int:
    """Return `full` in a thorough run and a quarter of it otherwise, for counts of random cases, kills and steps."""
    return full if is_thorough else max(1, full // QUICK_SHARE)


def choose_schedules(full: int) -> int:
    """Return how many random schedules a family of models goes through: what `--schedules` says, else as above."""
    return family_schedules or choose_amount(full)


def choose_pairs(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Return all combinations in a thorough run, else so many that each two values of two dimensions meet in one.

    Dimensions come in the order of their lengths, the longest first.
    """
    if is_thorough:
        return list(product(first, second, third))
    assert len(first) >= len(second) >= len(third)
    pairs = product(range(len(first)), range(len(second)))
    return [(first[i], second[j], third[(i + j) % len(third)]) for i, j in pairs]
