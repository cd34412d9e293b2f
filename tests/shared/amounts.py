"""How much the longest random tests do: a quarter in everyday runs, everything with `--thorough`, as in CI."""

from __future__ import annotations

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
