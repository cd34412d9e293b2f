"""Recorded decode steps: traced once for each class of shapes, then started with two arrays of integers.

A step of single tokens is the same list of launches every time. A few tokens of one text, if all their logits are
wanted, are single tokens whose sequences share their pages (`RaggedBatch.split_rows`). Batches are padded to classes:
sequences and pages to powers of two; padding reads and writes the spare page at the end of the pools (`Pool`), and
begins with a state of zeros. A trace runs the same operators as any step; whatever they decide on the host may depend
only on the class.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import DeviceError
from mlxr.core.frozen import frozen
from mlxr.core.stats import Dispatch
from mlxr.kernels.checks import refuse
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.launcher import count_recorded
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.gpu.recording import Buffer, Machine, Recorder, Results
from mlxr.kernels.gpu.steps import (
    NUMBERS,
    Ints,
    Numbers,
    Run,
    Step,
    StepPools,
    count_packed,
    launch_draw,
    pack_batch,
    unpack_batch,
)
from mlxr.kernels.ledger import Part
from mlxr.kernels.ragged import MAX_RUN, NO_STATE, RaggedBatch

if TYPE_CHECKING:  # a server without a GPU starts without its device
    from mlxr.kernels.gpu.device import Gpu

logger = logging.getLogger(__name__)
Compute = Callable[[RaggedBatch], Any]
FORWARD, DRAW, LARGEST = "forward", "draw", "largest"  # parts of a recorded step
MAX_SEQUENCES = 256  # larger batches are bound by arithmetic and are not recorded


def takes_step(batch: RaggedBatch) -> bool:
    """Return True if a recorded step can take the batch: single tokens, or a few of each text, all with logits wanted,
    without adapters and pictures."""
    if (
        batch.adapters
        or batch.rows_over is not None
        or batch.axes.shape[1]
        or not batch.tokens == len(batch.output_rows) <= MAX_SEQUENCES
    ):
        return False
    is_single = batch.tokens == batch.sequences
    return is_single or (not batch.has_states and int(np.diff(batch.query_starts).max()) <= MAX_RUN)


def run_step(gpu: Gpu, compute: Compute, batch: RaggedBatch, pools: StepPools, key: object) -> Any:
    """Return the logits of `compute(batch)` by a recorded step, which is recorded first if it is new.

    `key` is everything besides the shape on which the step depends. The step starts, or has run ahead (`Steps`).
    `pools` have the pages and slots that the batch names.
    """
    padded, graphs = pad_batch(batch if batch.tokens == batch.sequences else batch.split_rows(), pools), pools.graphs
    shape = (key, padded.tokens, padded.longest_run, *(group.page_table.shape[1] for group in padded.groups))
    step = graphs.get(shape)
    if step is None:
        step = graphs[shape] = _make_step(gpu, compute, padded)
    else:
        check_step(padded, pools)
    return gpu.steps.run(step, padded, batch.tokens, pools)


def _make_step(gpu: Gpu, compute: Compute, batch: RaggedBatch) -> Step:
    recorded = None if gpu.machine is None else record_step(gpu, compute, batch)
    return recorded or compile_step(gpu, compute, batch)


def check_step(batch: RaggedBatch, pools: StepPools) -> None:
    """Check the batch of a replayed step, as operators check it in a trace."""
    for group, pool in pools.pair_groups(batch):
        pages, page_size = pool.shape[0] + 1, pool.shape[2]
        slots, table = group.slots, group.page_table
        if slots.min() < 0 or slots.max() >= pages * page_size or table.min() < 0 or table.max() >= pages:
            refuse("run_step", "slots and pages", f"up to {slots.max()} and {table.max()}", f"within {pages - 1} pages")
    if pools.states is not None and max(batch.state_reads.max(), batch.state_writes.max()) > pools.states.shape[0]:
        highest = max(batch.state_reads.max(), batch.state_writes.max())
        refuse("run_step", "slot", int(highest), f"below {pools.states.shape[0]}")


def pad_batch(batch: RaggedBatch, pools: StepPools) -> RaggedBatch:
    """Return the batch with its sequences, and the pages of each group, padded to powers of two."""
    rows = _round_up(batch.sequences)
    more = rows - batch.sequences
    places = [_pad_places(group, rows, pool) for group, pool in pools.pair_groups(batch)]
    if not places:
        places = [(_extend(batch.slots, more, NO_STATE), np.empty((rows, 0), np.int32))]
    first = batch.with_tokens(
        token_ids=_extend(batch.token_ids, more, 0),
        positions=_extend(batch.positions, more, 0),
        turns=_extend(batch.turns, more if len(batch.turns) else 0, 0),
        slots=places[0][0],
        query_starts=np.arange(rows + 1, dtype=np.int32),
        context_lengths=_extend(batch.context_lengths, more, 1),
        page_table=places[0][1],
        output_rows=np.arange(rows, dtype=np.int32),
    )
    padded = first.with_groups(places[1:]) if places[1:] else first
    if pools.states is None:
        return padded
    spare = pools.states.shape[0]
    reads, writes, nexts = (
        _extend(slots, more, filler)
        for slots, filler in ((batch.state_reads, NO_STATE), (batch.state_writes, spare), (batch.state_nexts, NO_STATE))
    )
    return padded.with_states(reads, writes, nexts, spare=spare)


def _pad_places(group: RaggedBatch, rows: int, pool: Pool) -> tuple[Ints, Ints]:
    """Return slots and page table of one group, padded to `rows` sequences; missing pages are the pool's spare page."""
    spare, (sequences, columns) = pool.shape[0], group.page_table.shape
    table = np.full((rows, _round_up(columns)), spare, np.int32)
    table[:sequences, :columns] = np.where(group.page_table < 0, spare, group.page_table)
    return _extend(group.slots, rows - sequences, spare * pool.shape[2]), table


def _extend(values: np.typing.NDArray[np.int32], more: int, filler: int) -> np.typing.NDArray[np.int32]:
    return np.concatenate([values, np.full(more, filler, np.int32)]) if more else values


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()


@frozen(eq=False)
class CompiledStep:
    """A step kept by `mx.compile`: running it again takes no Python for operators, but all of MLX's own work.

    It is for steps that do not consist of our kernels alone. If launches compute at once, nothing is kept, and the step
    just runs. `replay` makes logits of tokens and packed integers; `step` does so without MLX's trace, for profiles.
    """

    gpu: Gpu
    replay: Callable[[Any, Any], Any]
    step: Callable[[Any, Any], Any]
    dispatches: list[Dispatch]  # what the ledger counts when it runs
    runs_ahead: bool

    def start(self, batch: RaggedBatch, rows: int, before: Run | None) -> Run:
        """Start the step, as `Step.start`. A step after another one is submitted when tokens are drawn from it."""
        mx, watch = self.gpu.mx, self.gpu.watch
        replay = self.replay if watch.watched is None else self.step
        for row in self.dispatches if watch.watched is None else ():
            watch.ledger.count(row.operator, row.implementation, row.variant, row.count)
        token_ids = mx.array(batch.token_ids) if before is None else before.kept[1][: batch.tokens]
        whole = replay(token_ids, mx.array(pack_batch(batch, self.gpu.count_rows(rows))))
        logits = whole if rows == batch.tokens else whole[:rows]
        if before is None:
            self.gpu.submit(whole)
        return Run(self, batch, logits, batch.token_ids[:rows] if before is None else None, (whole, None))

    def draw(self, run: Run, numbers: Numbers | None) -> Results:
        """Draw from the logits of `run`, as `Step.draw`."""
        mx, whole = self.gpu.mx, run.kept[0]
        if numbers is not None and len(numbers) < whole.shape[0]:
            numbers = np.concatenate([numbers, np.zeros((whole.shape[0] - len(numbers), numbers.shape[1]), np.float32)])
        drawn = launch_draw(mx, self.gpu.launcher, whole, None if numbers is None else mx.array(numbers))
        run.kept = whole, drawn
        self.gpu.submit(drawn)
        return _Array(drawn)

    def finish(self, run: Run) -> None:
        """Wait for `run`: on Metal launches may overtake each other, unless one takes an array that the other makes."""
        if self.gpu.machine is None:
            self.gpu.mx.eval([array for array in run.kept if array is not None])


@frozen
class _Array:
    array: Any

    def wait(self) -> Ints:
        return np.array(self.array)


def compile_step(gpu: Gpu, compute: Compute, batch: RaggedBatch) -> CompiledStep:
    """Return `compute(batch)` as a step: a function of the tokens and integers of such a batch."""
    mx, ledger = gpu.mx, gpu.watch.ledger
    before = ledger.copy_counts()

    def step(token_ids: Any, packed: Any) -> Any:
        def take(start: int, shape: tuple[int, ...]) -> Any:
            return packed[start : start + math.prod(shape)].reshape(shape)

        gpu.place_traced(batch, token_ids, unpack_batch(batch, take))
        logits = settle(compute(batch))
        gpu.pending = []
        gpu.forget_placed()
        return logits

    if not gpu.launcher.is_lazy:
        return CompiledStep(gpu, step, step, [], runs_ahead=False)
    replay = mx.compile(step)
    # this traces the step; computing it twice changes nothing
    watched, gpu.watch.watched = gpu.watch.watched, None
    mx.eval(replay(mx.array(batch.token_ids), mx.array(pack_batch(batch, 0))))
    gpu.watch.watched = watched
    return CompiledStep(gpu, replay, step, ledger.take_back(before), runs_ahead=True)


@frozen(eq=False, weakref_slot=True)
class RecordedStep:
    """A step as launches over fixed addresses, which a machine starts without MLX, with one call for all.

    The operators run once over stand-ins for arrays (`recording`). A step that does anything but launch our kernels
    cannot be recorded. Tokens are drawn to the address where the next step reads its own.

    The launches are FORWARD, then DRAW or LARGEST; `ready` has each in the form that a machine starts.

    The launches hold the arrays; `counts` are theirs in the ledger. `numbers` and `drawn` are as in `launch_draw`.
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
        """True: a machine has a stream."""
        return True

    def start(self, batch: RaggedBatch, rows: int, before: Run | None) -> Run:
        """Start the recorded forward pass for `batch`, as `Step.start`."""
        machine = self.machine
        if before is None:
            self.gpu.settle_arrays()
            machine.write(self.drawn.address, batch.token_ids)
        machine.write(self.packed.address, pack_batch(batch, self.gpu.count_rows(rows)))
        self._launch(FORWARD)
        return Run(self, batch, Logits(self, rows).as_array(), batch.token_ids[:rows] if before is None else None)

    def draw(self, _run: Run, numbers: Numbers | None) -> Results:
        """Draw from the logits of the step, as `Step.draw`."""
        if numbers is not None:
            padded = np.zeros(self.numbers.shape, np.float32)
            padded[: len(numbers)] = numbers
            self.machine.write(self.numbers.address, padded)
        self._launch(LARGEST if numbers is None else DRAW)
        results: Results = self.machine.read(self.drawn.address, self.drawn.shape[0], np.int32)
        return results

    def finish(self, run: Run) -> None:
        """Do nothing: the machine runs one step after the other, and `Gpu.submit` waits for it."""

    def _launch(self, part: str) -> None:
        machine, watch = self.machine, self.gpu.watch
        for counted, calls in self.counts[part].items():
            watch.ledger.count(*counted, calls)
        if watch.watched is not None:
            watch.run_recorded(machine, self.launches[part], self._prepare_singly(part))
            return
        machine.start(self.ready[part])

    def _prepare_singly(self, part: str) -> list[Any]:
        """Return each launch of a part prepared separately, for profiles."""
        launches, ready = self.launches[part], self.ready
        names = [f"{part} {number}" for number in range(len(launches))]
        for name, launch in zip(names, launches, strict=True):
            if name not in ready:
                ready[name] = self.machine.prepare([launch])
        return [ready[name] for name in names]


class Logits(Buffer):
    """Logits (rows, vocabulary) of a recorded step, valid until the next one starts."""

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
    """Record `compute(batch)` as a step; return None if it does anything but launch our kernels."""
    machine, launcher, before = gpu.machine, gpu.launcher, gpu.watch.ledger.copy_counts()
    assert machine is not None
    gpu.launcher = recorder = Recorder(launcher.numbers, machine.memory.open(), multiplies=machine.multiplies)
    try:
        step = _record(gpu, machine, recorder, compute, batch)
        for part, launches in step.launches.items():
            step.ready[part] = machine.prepare(launches)
    except (TypeError, AttributeError, ValueError):  # MLX takes no Buffer; a real error comes again in the other way
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
    gpu.place_traced(batch, drawn.part(0, (rows,)).as_array(), unpack_batch(batch, packed.part))
    logits = settle(compute(batch))
    if not isinstance(logits, Buffer):
        raise TypeError("logits of a recorded step are made by a launch")
    forward, numbers = recorder.take_launches(), recorder.make((rows, NUMBERS), mx.float32)
    launch_draw(mx, recorder, logits, numbers)
    launch_draw(mx, recorder, logits, None)
    draw, largest = ([launch.put_out(drawn.address)] for launch in recorder.take_launches())
    launches = {FORWARD: forward, DRAW: draw, LARGEST: largest}
    counts = {part: count_recorded(each) for part, each in launches.items()}
    return RecordedStep(gpu, machine, launches, {}, numbers, drawn, packed, logits, counts)
