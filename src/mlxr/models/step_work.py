"""How much a model reads and computes in a step, as plain numbers: what its speed is held against."""

from __future__ import annotations

from dataclasses import dataclass

from mlxr.kernels.moe import expect_experts


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Attention of the layers of one group of the cache.

    A token takes `pair_macs` multiply-adds for each position that it sees; with a `window` these are the last ones.
    """

    pair_macs: int
    window: int | None

    def count(self, start: int, tokens: int) -> tuple[int, int]:
        """For `tokens` tokens from position `start` on: pairs of a token and a position that it sees, and positions.

        A position that several of them see is one position.
        """
        stop, window = start + tokens, self.window
        if window is None:
            return tokens * (start + stop + 1) // 2, stop
        grown = min(max(start, window), stop)  # from here on all tokens see as many positions
        pairs = (grown - start) * (start + grown + 1) // 2 + (stop - grown) * window
        return pairs, stop - max(0, start - window + 1)


@dataclass(frozen=True, slots=True)
class ExpertsWork:
    """Experts of all layers that are alike: of so many each token uses some; `nbytes` are those of all of them."""

    experts: int
    used: int
    nbytes: int

    def count_bytes(self, tokens: int) -> float:
        """Return the bytes of those experts that `tokens` tokens are sent to in a step, if all are as likely."""
        return self.nbytes * expect_experts(self.experts, self.used, tokens) / self.experts


@dataclass(frozen=True, slots=True)
class StepWork:
    """`weight_bytes` are read in each step, and of `experts` what its tokens are sent to; multiply-adds count for each
    token, each output row, and in attention."""

    weight_bytes: int
    token_macs: int
    output_macs: int
    attention: tuple[AttentionWork, ...]
    experts: tuple[ExpertsWork, ...] = ()

    def count_weight_bytes(self, tokens: int) -> int:
        """Return the bytes of weights that a step of `tokens` tokens reads, rows of tables of embeddings aside."""
        return self.weight_bytes + round(sum(work.count_bytes(tokens) for work in self.experts))
