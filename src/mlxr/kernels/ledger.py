"""Proof of dispatch: counts which kernel of which operator ran, and the bytes the cache path copied.

Always on. Native code counts itself where it has chosen a kernel (csrc/runtime/tally.h), launches of a GPU where they
are launched, and NumPy and MLX's own operations where they are called; here it all comes together. Counts of Python are
written by the thread that runs the model; `snapshot` may be called from any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mlxr.core.stats import Dispatch, ExpertRows

Part = tuple[str, str, str]  # operator, implementation, variant
Counts = dict[Part, int]
EXPERT_ROWS = "expert rows"  # stands for an operator where rows are counted instead of calls
MLX = "mlx"
# index, operator, kernel and form, calls, nanoseconds, bytes, multiply-adds
NativeRow = tuple[int, str, str, int, int, int, int]


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """What was counted since the last reset. `copied_bytes` were gathered out of cache pages before use."""

    dispatches: list[Dispatch]
    copied_bytes: int
    expert_rows: list[ExpertRows]


class Ledger:
    """Counts what the kernels of one context read and compute."""

    __slots__ = ("_before", "_copied_bytes", "_counts", "_list_native", "_list_native_rows")

    def __init__(self) -> None:
        self._counts: Counts = {}
        self._list_native: Callable[[], Iterable[NativeRow]] = tuple
        self._list_native_rows: Callable[[], Iterable[tuple[str, int]]] = tuple
        self._before: Counts = {}  # of native code, at the last reset
        self._copied_bytes = 0

    def attach(
        self, list_native: Callable[[], Iterable[NativeRow]], list_native_rows: Callable[[], Iterable[tuple[str, int]]]
    ) -> None:
        """Show what native code has counted too; a Runtime's `list_ran` and `list_expert_rows`."""
        self._list_native, self._list_native_rows = list_native, list_native_rows

    def count(self, operator: str, implementation: str, variant: str = "", calls: int = 1) -> None:
        """Count one call, or several that a recorded step makes at once; or so many rows as EXPERT_ROWS."""
        key = (operator, implementation, variant)
        self._counts[key] = self._counts.get(key, 0) + calls

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
        counts.update(self._count_native())
        counts.subtract(self._before)
        made = [Dispatch(*key, counts[key]) for key in sorted(counts) if counts[key]]
        return LedgerSnapshot(
            [row for row in made if row.operator != EXPERT_ROWS],
            self._copied_bytes,
            [ExpertRows(row.implementation, row.variant, row.count) for row in made if row.operator == EXPERT_ROWS],
        )

    def copy_counts(self) -> Counts:
        """The counts that Python has made, for `take_back`."""
        return self._counts.copy()

    def take_back(self, before: Counts, copied_bytes: int | None = None) -> list[Dispatch]:
        """Undo the counts that Python made since `before`, and give them; copied bytes are again as many as given."""
        made = Counter(self._counts)
        made.subtract(before)
        self._counts = before
        if copied_bytes is not None:
            self._copied_bytes = copied_bytes
        return [Dispatch(*key, count) for key, count in made.items() if count]

    def reset(self) -> None:
        """Set all counts back to zero."""
        self._counts, self._before = {}, self._count_native()
        self._copied_bytes = 0

    def _count_native(self) -> Counts:
        counts = {(operator, "cpu", variant): calls for _, operator, variant, calls, *_ in self._list_native()}
        return counts | {(EXPERT_ROWS, "cpu", kernel): rows for kernel, rows in self._list_native_rows()}
