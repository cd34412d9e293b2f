"""A step as launches over fixed addresses, which a machine starts without MLX: one call for all of them.

The operators run once over stand-ins for arrays (`recording`). A step that does something else than launch our kernels
cannot be recorded so. All steps take their memory from the same (`step_memory`). Tokens are drawn into the place where
the next step reads its own.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import DeviceError
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.draw import NUMBERS, launch_draw
from mlxr.kernels.gpu.recording import Buffer, Recorder
from mlxr.kernels.gpu.steps import Numbers, Results, Run, count_packed, pack_batch, unpack_batch
from mlxr.kernels.gpu.watch import count_recorded
from mlxr.kernels.ledger import Part
from mlxr.kernels.ragged import RaggedBatch

if TYPE_CHECKING:
    from mlxr.kernels.gpu.device import Gpu
    from mlxr.kernels.gpu.graph import Compute
    from mlxr.kernels.gpu.machine import Machine

logger = logging.getLogger(__name__)
FORWARD, DRAW, LARGEST = "forward", "draw", "largest"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RecordedStep:
    """The launches of a step: FORWARD, then DRAW or LARGEST; `ready` has each in the form that starts.

    The launches hold the arrays; `counts` is what the ledger counts of them. See `gpu.draw` for what `numbers` and
    `drawn` hold.
    """

    gpu: Gpu
    machine: Machine
    launches: dict[str, list[Any]]
    ready: dict[str, Any]
    numbers: Buffer
    drawn: Buffer
    packed: Buffer
    logits: Buffer
    counts: dict[str, Counter[Part]]

    @property
    def runs_ahead(self) -> bool:
        """Always: a machine has a stream."""
        return True

    def start(self, batch: RaggedBatch, rows: int, before: Run | None) -> Run:
        """Start the recorded forward pass for `batch`, as `Step.start` says."""
        machine = self.machine
        if before is None:
            self.gpu.settle_arrays()
            machine.write(self.drawn.address, batch.token_ids)
        machine.write(self.packed.address, pack_batch(batch, self.gpu.count_rows(rows)))
        self._launch(FORWARD)
        return Run(self, batch, Logits(self, rows), batch.token_ids[:rows] if before is None else None)

    def draw(self, _run: Run, numbers: Numbers | None) -> Results:
        """Draw from the logits of the step, as `Step.draw` says."""
        if numbers is not None:
            padded = np.zeros(self.numbers.shape, np.float32)
            padded[: len(numbers)] = numbers
            self.machine.write(self.numbers.address, padded)
        self._launch(LARGEST if numbers is None else DRAW)
        results: Results = self.machine.read(self.drawn.address, self.drawn.shape[0], np.int32)
        return results

    def finish(self, run: Run) -> None:
        """Nothing: the machine starts one step after the other, and `Gpu.submit` waits for it."""

    def _launch(self, part: str) -> None:
        machine, watch = self.machine, self.gpu.watch
        for counted, calls in self.counts[part].items():
            watch.ledger.count(*counted, calls)
        if watch.watched is not None:
            watch.run_recorded(machine, self.launches[part], self._prepare_singly(part))
            return
        machine.start(self.ready[part])

    def _prepare_singly(self, part: str) -> list[Any]:
        """Each launch of a part by itself, for profiles."""
        launches, ready = self.launches[part], self.ready
        names = [f"{part} {number}" for number in range(len(launches))]
        for name, launch in zip(names, launches, strict=True):
            if name not in ready:
                ready[name] = self.machine.prepare([launch])
        return [ready[name] for name in names]


class Logits(Buffer):
    """Logits (rows, vocabulary) of a recorded step, until the next one starts."""

    __slots__ = ("_gpu", "_machine")

    def __init__(self, step: RecordedStep, rows: int) -> None:
        whole = step.logits
        super().__init__((rows, whole.shape[1]), whole.dtype, whole.address, step)
        self._gpu, self._machine = step.gpu, step.machine

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        mx = self._gpu.mx
        kind = {mx.float32: np.float32, mx.float16: np.float16, mx.bfloat16: np.uint16}[self.dtype]
        values = self._machine.read(self.address, int(np.prod(self.shape)), kind).wait().reshape(self.shape)
        if self.dtype == mx.bfloat16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(values, dtype or np.float32)


def record_step(gpu: Gpu, compute: Compute, batch: RaggedBatch) -> RecordedStep | None:
    """The launches of `compute(batch)`; None where it does something that is not one of our launches."""
    machine, launcher, before = gpu.machine, gpu.launcher, gpu.watch.ledger.copy_counts()
    assert machine is not None
    gpu.launcher = recorder = Recorder(launcher.numbers, machine.memory.open(), multiplies=machine.multiplies)
    try:
        step = _record(gpu, machine, recorder, compute, batch)
        for part, launches in step.launches.items():
            step.ready[part] = machine.prepare(launches)
    except (TypeError, AttributeError, ValueError):  # of MLX, which takes no Buffer; a real one comes again without
        step = None
    except DeviceError as error:
        logger.warning("a step is left to MLX: %s", error)
        step = None
    finally:
        gpu.launcher, gpu.pending = launcher, []
        gpu.forget_placed()
    gpu.watch.ledger.take_back(before)
    if step is None:
        return None
    weakref.finalize(step, machine.drop, step.ready).atexit = False
    return step


def _record(gpu: Gpu, machine: Machine, recorder: Recorder, compute: Compute, batch: RaggedBatch) -> RecordedStep:
    mx, rows = gpu.mx, batch.tokens
    drawn, packed = recorder.make((2 * rows,), mx.int32), recorder.make((count_packed(batch),), mx.int32)
    gpu.place_traced(batch, drawn.part(0, (rows,)), unpack_batch(batch, packed.part))
    logits = settle(compute(batch))
    forward, numbers = recorder.take_launches(), recorder.make((rows, NUMBERS), mx.float32)
    launch_draw(mx, recorder, logits, numbers)
    launch_draw(mx, recorder, logits, None)
    draw, largest = ([launch.put_out(drawn.address)] for launch in recorder.take_launches())
    launches = {FORWARD: forward, DRAW: draw, LARGEST: largest}
    counts = {part: count_recorded(each) for part, each in launches.items()}
    return RecordedStep(gpu, machine, launches, {}, numbers, drawn, packed, logits, counts)
