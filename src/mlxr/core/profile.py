"""What a profile holds: the time of each kernel, and of single calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Calls of one kernel: seconds, bytes read and written, and multiply-adds of all together.

    No seconds: it was computed on the way into a product, and is part of that one's time. `grid` and `threads` are the
    threadgroups of a launch on a GPU, and the threads of each; rows of launches that differ in them are apart.
    """

    operator: str
    implementation: str
    variant: str
    calls: int
    seconds: float
    nbytes: int
    macs: int
    grid: tuple[int, int, int] | None = None
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """One call, from `start_ns` to `end_ns` of `time.perf_counter_ns`."""

    operator: str
    variant: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Profile:
    """What ran while it was profiled; `moments` are single calls by their ends, as many as were kept."""

    kernels: list[KernelTime]
    moments: list[Moment]

    @property
    def seconds(self) -> float:
        """Seconds that were spent in kernels."""
        return sum(row.seconds for row in self.kernels)
