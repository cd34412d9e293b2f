"""How much a model reads and computes in a step, as plain numbers: what its speed is held against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Attention of the layers of one group of the cache.

    A token takes `pair_macs` multiply-adds for each position that it sees; with a `window` these are the last ones.
    """

    pair_macs: int
    window: int | None

    def count_pairs(self, start: int, tokens: int) -> int:
        """Pairs of a token and a position that it sees, for `tokens` tokens from position `start` on."""
        stop = start + tokens
        if self.window is None:
            return _sum_up_to(stop) - _sum_up_to(start)
        grown = min(max(start, self.window), stop)  # from here on all tokens see as many positions
        return _sum_up_to(grown) - _sum_up_to(start) + (stop - grown) * self.window

    def count_positions(self, start: int, tokens: int) -> int:
        """Positions that some of these tokens see."""
        first = 0 if self.window is None else max(0, start - self.window + 1)
        return start + tokens - first


@dataclass(frozen=True, slots=True)
class StepWork:
    """`weight_bytes` are read in each step; multiply-adds count for each token, each output row, and in attention."""

    weight_bytes: int
    token_macs: int
    output_macs: int
    attention: tuple[AttentionWork, ...]


def _sum_up_to(positions: int) -> int:
    """Positions that the first `positions` tokens see together: 1 + 2 + ..."""
    return positions * (positions + 1) // 2
