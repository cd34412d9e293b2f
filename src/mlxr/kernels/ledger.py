"""Proof of dispatch: counts which implementation of which operator ran, and the bytes the cache path copied.

Always on: one dictionary update per operator call. Written by the thread that runs the model; `snapshot` may be called
from any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

Part = tuple[str, str, str]  # operator, implementation, variant


@dataclass(frozen=True, slots=True)
class Dispatch:
    """`operator` ran `count` times in `implementation` ("cpu", "reference"); `variant` says in which form."""

    operator: str
    implementation: str
    variant: str
    count: int


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """What was counted since the last reset. `copied_bytes` were gathered out of cache pages before use."""

    dispatches: list[Dispatch]
    copied_bytes: int


class Ledger:
    """Counts what the kernels of one context read and compute."""

    __slots__ = ("_blocks", "_copied_bytes", "_counts")

    def __init__(self) -> None:
        self._counts: dict[Part, int] = {}
        self._blocks: dict[tuple[Callable[..., Iterable[Part]], tuple[Hashable, ...]], int] = {}
        self._copied_bytes = 0

    def count(self, operator: str, implementation: str, variant: str = "", calls: int = 1) -> None:
        """Count one call, or several that a recorded step makes at once."""
        key = (operator, implementation, variant)
        self._counts[key] = self._counts.get(key, 0) + calls

    def count_parts(self, list_parts: Callable[..., Iterable[Part]], *args: Hashable) -> None:
        """Count one call of a block that runs several operators: those that `list_parts(*args)` names.

        It is asked only when somebody looks, so that a call costs as much as one operator's.
        """
        key = (list_parts, args)
        self._blocks[key] = self._blocks.get(key, 0) + 1

    def add_copied_bytes(self, count_bytes: int) -> None:
        """Count bytes of keys or values that were copied out of their pages instead of being read in place."""
        self._copied_bytes += count_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes that `add_copied_bytes` has counted."""
        return self._copied_bytes

    def snapshot(self) -> LedgerSnapshot:
        """The counts so far, sorted by operator, implementation and variant."""
        counts = Counter(self._counts.copy())  # one step under the GIL, so the writer cannot change it half-way
        for (list_parts, args), calls in self._blocks.copy().items():
            for part in list_parts(*args):
                counts[part] += calls
        return LedgerSnapshot([Dispatch(*key, counts[key]) for key in sorted(counts)], self._copied_bytes)

    def take_back(self, before: LedgerSnapshot) -> list[Dispatch]:
        """Undo the counts made since `before`, and give them."""
        known = {(row.operator, row.implementation, row.variant): row.count for row in before.dispatches}
        made = [(key, count - known.get(key, 0)) for key, count in self._counts.items()]
        self._counts = dict(known)
        return [Dispatch(*key, count) for key, count in made if count]

    def reset(self) -> None:
        """Set all counts back to zero."""
        self._counts, self._blocks = {}, {}
        self._copied_bytes = 0
