"""What the machine can do: bytes read from memory and int8 products per second, the yardstick of the benchmarks.

Measured natively with the context's own threads, huge pages and instruction set, so that a kernel's figure divided by
the probe's says how much of the machine it used. Knows no operator.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxr.core.errors import DeviceError

if TYPE_CHECKING:
    from mlxr.kernels.context import Context

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
