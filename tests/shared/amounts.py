"""How much the longest tests do: in everyday runs a part of it, everything with `--thorough`, as in CI."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

QUICK_SHARE = 8

# Set from the command line before any test is collected.
is_thorough = False
family_schedules: int | None = None  # instead of the usual number


def choose_amount(full: int) -> int:
    """Return `full` in a thorough run and an eighth of it otherwise, for counts of random cases, kills and steps."""
    return full if is_thorough else max(1, full // QUICK_SHARE)


def choose_schedules(full: int) -> int:
    """Return how many random schedules a family of models goes through: what `--schedules` says, else all or one.

    One is enough for every day where the many cases go through different ones.
    """
    return family_schedules or (full if is_thorough else 1)


def choose_each(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return all combinations in a thorough run, else so many that each value is in one."""
    if is_thorough:
        return list(product(first, second))
    return [
        (first[i % len(first)], second[(i + i // len(first)) % len(second)])
        for i in range(max(len(first), len(second)))
    ]


def choose_pairs(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Return all combinations in a thorough run, else so many that each two values of two dimensions are in one."""
    if is_thorough:
        return list(product(first, second, third))
    dimensions = [first, second, third]
    long, middle, short = sorted(range(3), key=lambda at: -len(dimensions[at]))
    chosen = []
    for i, j in product(range(len(dimensions[long])), range(len(dimensions[middle]))):
        places = {long: i, middle: j, short: (i + j) % len(dimensions[short])}
        chosen.append((first[places[0]], second[places[1]], third[places[2]]))
    return chosen
