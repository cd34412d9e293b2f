"""The ledger: counts of the kernels that ran for each operator, and of the bytes copied out of the cache.

Counts are always on. Native code counts calls where it has chosen a kernel (csrc/runtime/tally.h), GPU launches are
counted where they are made, and NumPy's and MLX's own operations where they are called; the ledger adds them up. Only
the thread that runs the model writes Python's counts; any thread may call `snapshot`.

Times are measured only for a profile, by native code and on the GPU. While a GPU is profiled, it waits for every
launch; on a CPU calls run as always. A probe measures bytes read from memory and int8 products per second, with the
context's own threads, huge pages and instruction set, so that a kernel's figure divided by the probe's says how much of
the machine it used.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from mlxr.core.errors import DeviceError
from mlxr.core.frozen import frozen
from mlxr.core.stats import Dispatch, ExpertRows, KernelTime, Moment, Profile

if TYPE_CHECKING:
    from mlxr.kernels.context import Context
    from mlxr.kernels.gpu.launcher import Watched

Part = tuple[str, str, str]  # operator, implementation, variant
Counts = dict[Part, int]
EXPERT_ROWS = "expert rows"  # in place of an operator's name, for counts of rows instead of calls
MLX = "mlx"
# index, operator, kernel and form, calls, nanoseconds, bytes, multiply-adds
NativeRow = tuple[int, str, str, int, int, int, int]


@frozen
class LedgerSnapshot:
    """The counts since the last reset. `copied_bytes` were gathered out of cache pages before use."""

    dispatches: list[Dispatch]
    copied_bytes: int
    expert_rows: list[ExpertRows]


class Ledger:
    """Counts of the kernels of one context."""

    __slots__ = ("_before", "_copied_bytes", "_counts", "_list_native", "_list_native_rows")

    def __init__(self) -> None:
        self._counts: Counts = {}
        self._list_native: Callable[[], Iterable[NativeRow]] = tuple
        self._list_native_rows: Callable[[], Iterable[tuple[str, int]]] = tuple
        self._before: Counts = {}  # native code's counts at the last reset
        self._copied_bytes = 0

    def attach(
        self, list_native: Callable[[], Iterable[NativeRow]], list_native_rows: Callable[[], Iterable[tuple[str, int]]]
    ) -> None:
        """Add native code's counts to the snapshots, from a Runtime's `list_ran` and `list_expert_rows`."""
        self._list_native, self._list_native_rows = list_native, list_native_rows

    def count(self, operator: str, implementation: str, variant: str = "", calls: int = 1) -> None:
        """Count one call, or several that a recorded step makes at once; for EXPERT_ROWS, rows."""
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
        """Return the counts since the last reset, sorted by operator, implementation and variant."""
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
        """Return a copy of Python's counts, for `take_back`."""
        return self._counts.copy()

    def take_back(self, before: Counts, copied_bytes: int | None = None) -> list[Dispatch]:
        """Undo Python's counts since `before`, and return them; `copied_bytes`, if given, replaces that count."""
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


BUFFER_BYTES = 512 << 20  # several times any cache of a few cores
READ_AHEADS_BYTES = (0, 4096, 8192, 16384)  # software prefetch: which distance is best depends on the processor
CHOICE_PASSES = 3
PASS_MACS = 8 * 10**9


@frozen
class Limits:
    """The rates of memory and products that the machine reaches, all threads together."""

    read_bytes_per_s: float
    int8_macs_per_s: float


class Probe:
    """A buffer and loops that measure the machine; the fastest reading loop is chosen at the start.

    Raises DeviceError on a device without native kernels.
    """

    def __init__(self, ctx: Context, buffer_bytes: int = BUFFER_BYTES) -> None:
        if ctx.native is None:
            raise DeviceError(f"device {ctx.device!r} has no native kernels to measure; use device 'cpu'")
        self._ctx = ctx
        self._native = ctx.module.Probe(ctx.native, buffer_bytes)
        rates = [statistics.median(self._read(ahead) for _ in range(CHOICE_PASSES)) for ahead in READ_AHEADS_BYTES]
        self._ahead_bytes = READ_AHEADS_BYTES[rates.index(max(rates))]

    @property
    def buffer_bytes(self) -> int:
        """Bytes read in one pass."""
        return int(self._native.nbytes)

    def measure(self, passes: int = 3) -> Limits:
        """Return the medians of `passes` passes, each of about 20 ms."""
        reads = [self._read(self._ahead_bytes) for _ in range(passes)]
        products = [self._native.multiply(self._ctx.native, PASS_MACS) for _ in range(passes)]
        return Limits(statistics.median(reads), statistics.median(products))

    def _read(self, ahead_bytes: int) -> float:
        """Return the bytes per second of one pass."""
        return self.buffer_bytes / float(self._native.read(self._ctx.native, ahead_bytes))


MAX_MOMENTS = 1 << 20  # most calls that a profile keeps one by one; a step of a large model makes some hundreds


class Profiler:
    """Profiler of one context, for one profile at a time. Raises DeviceError on the reference device (no kernels)."""

    def __init__(self, ctx: Context) -> None:
        if ctx.native is None and ctx.gpu is None:
            raise DeviceError(f"device {ctx.device!r} has no kernels to profile; use device 'cpu' or a GPU")
        self._native, self._gpu = ctx.native, ctx.gpu
        self._before: dict[int, NativeRow] = {}
        self._offset_ns = 0  # from the native clock to Python's

    def start(self) -> None:
        """Time calls from here on."""
        if self._gpu is not None:
            self._gpu.watch.watched = []
        if self._native is not None:
            self._before = {row[0]: row for row in self._native.list_ran()}
            self._offset_ns = time.perf_counter_ns() - self._native.now_ns()
            self._native.start_profile(MAX_MOMENTS)

    def stop(self) -> Profile:
        """Stop timing and return what ran."""
        kernels: list[KernelTime] = []
        moments: list[Moment] = []
        if self._native is not None:
            events = self._native.stop_profile()
            rows = {row[0]: row for row in self._native.list_ran()}
            kernels += _list_changes(self._before, rows.values())
            offset_ns = self._offset_ns
            moments += [
                Moment(rows[index][1], rows[index][2], start_ns + offset_ns, end_ns + offset_ns)
                for index, start_ns, end_ns in events
            ]
        if self._gpu is not None:
            watched, self._gpu.watch.watched = self._gpu.watch.watched or [], None
            kernels += _sum_launches(watched)
            moments += [Moment(one.part[0], one.part[2], one.start_ns, one.end_ns) for one in watched[:MAX_MOMENTS]]
        kernels.sort(key=lambda row: -row.seconds)
        return Profile(kernels, sorted(moments, key=lambda moment: moment.end_ns)[:MAX_MOMENTS])


def _list_changes(before: dict[int, NativeRow], rows: Iterable[NativeRow]) -> list[KernelTime]:
    """List the rows of native code that changed since `before`, as differences."""
    changes = []
    for index, operator, variant, *numbers in rows:
        old = before[index][3:] if index in before else (0, 0, 0, 0)
        calls, nanoseconds, nbytes, macs = (new - known for new, known in zip(numbers, old, strict=True))
        if calls:
            changes.append(KernelTime(operator, "cpu", variant, calls, nanoseconds / 1e9, nbytes, macs))
    return changes


def _sum_launches(watched: Iterable[Watched]) -> list[KernelTime]:
    groups: dict[tuple[Part, tuple[int, int, int] | None, int], list[Watched]] = {}
    for one in watched:
        groups.setdefault((one.part, one.grid, one.threads), []).append(one)
    return [
        KernelTime(
            operator=part[0],
            implementation=part[1],
            variant=part[2],
            calls=len(alike),
            seconds=sum(one.end_ns - one.start_ns for one in alike) / 1e9,
            nbytes=sum(one.nbytes for one in alike),
            macs=sum(one.macs for one in alike),
            grid=grid,
            threads=threads,
        )
        for (part, grid, threads), alike in groups.items()
    ]
