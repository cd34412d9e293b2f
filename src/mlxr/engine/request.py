"""One request while any of its answers grows: which they are, when it must be over, and which answers are given out.

Knows no pages and no model. With `best_of` above `n` nothing is given out before the last answer has ended; then the
`n` with the highest mean log-probability are, all of their events at once, the best first.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import replace

from mlxr.core.types import SamplingParams
from mlxr.engine.sequence import Sequence, TokenEvent


class Request:
    """The answers to one prompt; `growing` holds those that have not ended.

    The request came at `arrival` and may take `deadline_s` seconds, or as long as it needs.
    """

    __slots__ = ("_arrival", "_held", "_means", "_n", "_withholds", "client", "deadline_s", "growing", "priority")

    def __init__(
        self, params: SamplingParams, sequences: Listed[Sequence], arrival: float, deadline_s: float | None
    ) -> None:
        self._arrival, self.deadline_s = arrival, deadline_s
        self.client, self.priority = sequences[0].client, sequences[0].priority
        self.growing = {sequence.index: sequence for sequence in sequences}
        self._n = params.n
        self._withholds = params.streams > params.n
        self._held: dict[int, list[TokenEvent]] = {index: [] for index in self.growing}
        self._means: dict[int, float] = {}

    def is_late(self, now: float) -> bool:
        """Whether the time that the request allowed is over."""
        return self.deadline_s is not None and now - self._arrival >= self.deadline_s

    def deliver(self, sequence: Sequence, event: TokenEvent) -> list[TokenEvent]:
        """What may be given out now that `event` of one of the answers is there."""
        if event.finish_reason is not None:
            del self.growing[sequence.index]
            self._means[sequence.index] = sequence.mean_logprob
        if not self._withholds:
            return [event]
        self._held[sequence.index].append(event)
        return [] if self.growing else self._rank()

    def _rank(self) -> list[TokenEvent]:
        """The events of the `n` best answers under their new numbers; answers that failed come last."""
        order = sorted(self._held, key=self._sort_key)[: self._n]
        return [replace(event, index=rank) for rank, index in enumerate(order) for event in self._held[index]]

    def _sort_key(self, index: int) -> tuple[bool, float, int]:
        return self._held[index][-1].error is not None, -self._means[index], index
