"""How much the longest random tests do: a quarter in everyday runs, everything with `--thorough`, as in CI."""

from __future__ import annotations

QUICK_SHARE = 4

is_thorough = False  # set from the command line before any test is collected


def choose_amount(full: int) -> int:
    """Return `full` in a thorough run and a quarter of it otherwise, for counts of random cases, kills and steps."""
    return full if is_thorough else max(1, full // QUICK_SHARE)
