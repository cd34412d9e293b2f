"""How long each kernel takes, and how fast the machine could be: only while somebody asks, nobody looks at a clock.

A profile asks native code and the GPU what ran. A GPU waits for every launch while it is profiled; on a CPU calls run
as always. A probe measures bytes read from memory and int8 products per second, with the context's own threads, huge
pages and instruction set, so that a kernel's figure divided by the probe's says how much of the machine it used.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxr.core.errors import DeviceError
from mlxr.core.stats import KernelTime, Moment, Profile

if TYPE_CHECKING:
    from mlxr.kernels.context import Context
    from mlxr.kernels.gpu.launcher import Watched
    from mlxr.kernels.ledger import NativeRow, Part

BUFFER_BYTES = 512 << 20  # several times any cache of a few cores
READ_AHEADS_BYTES = (0, 4096, 8192, 16384)  # software prefetch: which distance is best depends on the processor
CHOICE_PASSES = 3
PASS_MACS = 8 * 10**9


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates of all threads together."""

    read_bytes_per_s: float
    int8_macs_per_s: float


class Probe:
    """A buffer to read and the loops to run over it; the reading loop that is fastest here is chosen at the start.

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
        """Medians of `passes` passes; one takes some 20 ms."""
        reads = [self._read(self._ahead_bytes) for _ in range(passes)]
        products = [self._native.multiply(self._ctx.native, PASS_MACS) for _ in range(passes)]
        return Limits(statistics.median(reads), statistics.median(products))

    def _read(self, ahead_bytes: int) -> float:
        """Bytes per second of one pass."""
        return self.buffer_bytes / float(self._native.read(self._ctx.native, ahead_bytes))


MAX_MOMENTS = 1 << 20  # calls that are kept one by one; a step of a large model makes some hundreds


class Profiler:
    """Profiles of one context, one at a time. Raises DeviceError on the reference device, which has no kernels."""

    def __init__(self, ctx: Context) -> None:
        if ctx.native is None and ctx.gpu is None:
            raise DeviceError(f"device {ctx.device!r} has no kernels to profile; use device 'cpu' or a GPU")
        self._native, self._gpu = ctx.native, ctx.gpu
        self._before: dict[int, NativeRow] = {}
        self._offset_ns = 0  # of the native clock

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
    """What native code has done since `before`."""
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
