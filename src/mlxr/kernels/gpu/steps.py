"""Decode steps that were recorded as launches over fixed addresses, and the step that runs ahead.

A step is two lists of launches: from tokens and packed integers to logits, and from logits to drawn tokens, which are
put where the next step reads its own. So the next step starts before the tokens of this one are read, and nothing waits
for the host. Knows no model: what is recorded comes from the caller.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.draw import NUMBERS, launch_draw, split_drawn
from mlxr.kernels.gpu.recording import Buffer, Launch, Recorder
from mlxr.kernels.ledger import Dispatch, Ledger
from mlxr.kernels.ragged import RaggedBatch

if TYPE_CHECKING:
    from mlxr.kernels.gpu.device import Gpu
    from mlxr.kernels.gpu.graph import Compute
    from mlxr.kernels.gpu.machine import Machine, Results


FORWARD, DRAW, LARGEST = "forward", "draw", "largest"
Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RecordedStep:
    """What a step launches: FORWARD, then DRAW or LARGEST; `ready` has what of it was started before.

    The launches hold the arrays. See `gpu.draw` for what `numbers` and `drawn` hold.
    """

    launches: dict[str, list[Launch]]
    ready: dict[str, Any]
    numbers: Buffer
    drawn: Buffer
    packed: Buffer
    logits: Buffer
    dispatches: list[Dispatch]

    @property
    def rows(self) -> int:
        """Rows with padding."""
        return self.logits.shape[0]


class Logits(Buffer):
    """Logits (rows, vocabulary) of a recorded step, until the next one starts."""

    __slots__ = ("_steps",)

    def __init__(self, steps: Steps, step: RecordedStep, rows: int) -> None:
        whole = step.logits
        super().__init__((rows, whole.shape[1]), whole.dtype, whole.address, step)
        self._steps = steps

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self._steps.fetch(self).astype(dtype or np.float32, copy=False)


@dataclass(slots=True, eq=False)
class _Run:
    """A step that was started; `results` are on their way once tokens were drawn."""

    step: RecordedStep
    batch: RaggedBatch
    logits: Buffer
    numbers: Numbers | None = None  # by which its results are drawn
    results: Results | None = None
    token_ids: npt.NDArray[np.int32] | None = None  # what it computes, known once the step before was read

    def is_for(self, step: RecordedStep, batch: RaggedBatch, rows: int) -> bool:
        """Whether it computes `batch`, of which `rows` count."""
        return (
            step is self.step
            and np.array_equal(batch.slots, self.batch.slots)
            and np.array_equal(batch.positions, self.batch.positions)
            and np.array_equal(batch.page_table, self.batch.page_table)
            and self.token_ids is not None
            and np.array_equal(self.token_ids[:rows], batch.token_ids[:rows])
        )


class Steps:
    """The recorded steps of a GPU that run on `machine`."""

    def __init__(self, gpu: Gpu, machine: Machine) -> None:
        self._gpu, self.machine = gpu, machine
        self._current: _Run | None = None
        self._ahead: _Run | None = None
        self.refused = 0  # steps that could not be recorded

    def record(self, ledger: Ledger, compute: Compute, batch: RaggedBatch) -> RecordedStep | None:
        """The launches of `compute(batch)`; None where it does something that is not one of our launches."""
        gpu, launcher, before, addresses = self._gpu, self._gpu.launcher, ledger.snapshot(), []

        def allocate(size_bytes: int) -> int:
            addresses.append(self.machine.allocate(size_bytes))
            return addresses[-1]

        gpu.launcher = recorder = Recorder(launcher.numbers, allocate)
        try:
            step = self._record(recorder, compute, batch)
        except (TypeError, AttributeError):  # MLX's operations do not take a Buffer, nor is it an array
            self.refused += 1
            step = None
        finally:
            gpu.launcher, gpu.pending = launcher, []
            gpu.forget_placed()
        dispatches = ledger.take_back(before)
        if step is None:
            self.machine.free(addresses, {})
            return None
        step.dispatches.extend(dispatches)
        weakref.finalize(step, self.machine.free, addresses, step.ready).atexit = False
        return step

    def _record(self, recorder: Recorder, compute: Compute, batch: RaggedBatch) -> RecordedStep:
        gpu, mx, (rows, width) = self._gpu, self._gpu.mx, batch.page_table.shape
        drawn, packed = recorder.make((2 * rows,), mx.int32), recorder.make((rows * (3 + width),), mx.int32)
        columns = [packed.part(index * rows, (rows,)) for index in range(3)]
        gpu.place_traced(batch, (drawn.part(0, (rows,)), *columns, packed.part(3 * rows, (rows, width))))
        logits = settle(compute(batch))
        forward, numbers = recorder.take_launches(), recorder.make((rows, NUMBERS), mx.float32)
        launch_draw(mx, recorder, logits, numbers)
        launch_draw(mx, recorder, logits, None)
        draw, largest = ([launch.put_out(drawn.address)] for launch in recorder.take_launches())
        launches = {FORWARD: forward, DRAW: draw, LARGEST: largest}
        return RecordedStep(launches, {}, numbers, drawn, packed, logits, [])

    def run(self, step: RecordedStep, batch: RaggedBatch, packed: npt.NDArray[np.int32], rows: int) -> Buffer:
        """Start the step on `batch`, of which `rows` count, unless it has run ahead; its logits (rows, vocabulary)."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.is_for(step, batch, rows):
            self._current = ahead
            return ahead.logits
        self._gpu.settle_arrays()
        self.machine.write(step.drawn.address, batch.token_ids)
        logits = Logits(self, step, rows)
        self._current = self._start(step, batch, packed, logits)
        return logits

    def draw(
        self,
        logits: Buffer,
        numbers: Numbers | None,
        following: tuple[RaggedBatch, npt.NDArray[np.int32], Numbers | None] | None,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Tokens of the step that `run` started, and their log-probabilities, once the `following` one is under way.

        `numbers` (rows, NUMBERS) say how to draw, without padding; None takes the largest logits.
        """
        current = self._current
        assert current is not None
        assert logits is current.logits
        self._draw(current, numbers)
        step, results = current.step, current.results
        assert results is not None
        if following is not None:
            batch, packed, numbers = following
            self._ahead = self._start(step, batch, packed, Logits(self, step, logits.shape[0]))
            self._draw(self._ahead, numbers)
        ids, logprobs = split_drawn(results.wait(), logits.shape[0])
        if self._ahead is not None:
            self._ahead.token_ids = ids
        return ids, logprobs

    @property
    def batch(self) -> RaggedBatch:
        """The batch of the step that is run now."""
        assert self._current is not None
        return self._current.batch

    def fetch(self, array: Buffer) -> npt.NDArray[np.float32]:
        """The numbers of a buffer on the host."""
        mx = self._gpu.mx
        kind = {mx.float32: np.float32, mx.float16: np.float16, mx.bfloat16: np.uint16}[array.dtype]
        values = self.machine.read(array.address, int(np.prod(array.shape)), kind).wait().reshape(array.shape)
        if array.dtype == mx.bfloat16:
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)

    def _start(self, step: RecordedStep, batch: RaggedBatch, packed: npt.NDArray[np.int32], logits: Buffer) -> _Run:
        self.machine.write(step.packed.address, packed)
        self._launch(step, FORWARD)
        return _Run(step, batch, logits)

    def _draw(self, run: _Run, numbers: Numbers | None) -> None:
        """Have tokens drawn and read, unless it was done by the same numbers."""
        step, machine = run.step, self.machine
        if run.results is not None and _are_same(run.numbers, numbers):
            return
        if numbers is not None:
            padded = np.zeros(step.numbers.shape, np.float32)
            padded[: len(numbers)] = numbers
            machine.write(step.numbers.address, padded)
        self._launch(step, LARGEST if numbers is None else DRAW)
        run.numbers, run.results = numbers, machine.read(step.drawn.address, 2 * step.rows, np.int32)

    def _launch(self, step: RecordedStep, part: str) -> None:
        if part not in step.ready:
            step.ready[part] = self.machine.prepare(step.launches[part])
        self.machine.start(step.ready[part])


def _are_same(a: Numbers | None, b: Numbers | None) -> bool:
    return np.array_equal(a, b) if a is not None and b is not None else a is b
