"""Calls that the ledger of a context counted, for tests."""

from __future__ import annotations

from collections import Counter

from mlxr.kernels.context import Context

JOINED = ("fused ", "gated ", "split ")  # in front of a variant: it was computed in another operator, or in shares


def list_ran(ctx: Context, operator: str) -> dict[str, int]:
    """Calls of an operator by variant."""
    return {row.variant: row.count for row in ctx.ledger.snapshot().dispatches if row.operator == operator}


def count_apart(ctx: Context) -> Counter[tuple[str, str, str]]:
    """Count calls of operators as if each had been computed by itself and in one piece."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for row in ctx.ledger.snapshot().dispatches:
        variant = row.variant
        for word in JOINED:
            variant = variant.removeprefix(word)
        counts[row.operator, row.implementation, variant] += row.count
    return counts
