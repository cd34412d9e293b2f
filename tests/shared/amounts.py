"""Sizes of the longest tests: everything with `--exhaustive`, a sixth with `--thorough`, as in CI, else a twelfth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

QUICK_SHARE, THOROUGH_SHARE = 12, 6

# Set from the command line before any test is collected.
is_thorough = False
is_exhaustive = False  # this is thorough, too
family_schedules: int | None = None  # instead of the usual number


def choose_amount(full: int) -> int:
    """Return how much is done of `full`, a count of random cases, kills or steps."""
    return full if is_exhaustive else max(1, full // (THOROUGH_SHARE if is_thorough else QUICK_SHARE))


def choose_schedules(full: int) -> int:
    """Return how many random schedules a family of models goes through: what `--schedules` says, all, or one.

    One is enough where the many cases go through different ones.
    """
    return family_schedules or (full if is_exhaustive else 1)


def choose_each(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return all combinations in a thorough run, else so many that each value is in one."""
    if is_thorough:
        return list(product(first, second))
    return [
        (first[i % len(first)], second[(i + i // len(first)) % len(second)])
        for i in range(max(len(first), len(second)))
    ]


def choose_pairs(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Return all combinations in an exhaustive run, else so many that each two values of two dimensions are in one."""
    if is_exhaustive:
        return list(product(first, second, third))
    dimensions = [first, second, third]
    long, middle, short = sorted(range(3), key=lambda at: -len(dimensions[at]))
    chosen = []
    for i, j in product(range(len(dimensions[long])), range(len(dimensions[middle]))):
        places = {long: i, middle: j, short: (i + j) % len(dimensions[short])}
        chosen.append((first[places[0]], second[places[1]], third[places[2]]))
    return chosen
