"""The probe as a process of its own, so that no side's memory includes its buffer. `python -m comparison.limits`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from comparison.protocol import serve
from mlxr.kernels.context import Context
from mlxr.kernels.ledger import Probe


class Side:
    """Measures the limits of the machine, with the interface of an engine's side."""

    def __init__(self) -> None:
        self._probe: Probe | None = None

    def open(self, threads: int) -> dict[str, Any]:
        """Fill the probe's buffer; returns the threads, the instruction set and the size of the buffer."""
        ctx = Context(threads=threads)
        self._probe = Probe(ctx)
        return {"threads": ctx.threads, "isa": ctx.isa, "buffer_bytes": self._probe.buffer_bytes}

    def measure(self) -> dict[str, Any]:
        """Measure the rates of the memory and of the arithmetic; returns them by name."""
        assert self._probe is not None
        return asdict(self._probe.measure())


def main() -> None:
    """Serve until stdin ends."""
    side = Side()
    serve({"open": side.open, "measure": side.measure})


if __name__ == "__main__":
    main()
