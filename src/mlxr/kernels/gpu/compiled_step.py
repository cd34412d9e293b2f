"""A step as MLX keeps it (`mx.compile`): no Python for an operator when it runs again, but all of MLX's own work.

For what our kernels do not do alone. Where launches compute at once nothing is kept, and the step just runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxr.core.counters import Dispatch
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.draw import launch_draw
from mlxr.kernels.gpu.steps import Ints, Numbers, Results, Run, pack_batch, unpack_batch
from mlxr.kernels.ragged import RaggedBatch

if TYPE_CHECKING:
    from mlxr.kernels.gpu.device import Gpu
    from mlxr.kernels.gpu.graph import Compute


@dataclass(frozen=True, slots=True, eq=False)
class CompiledStep:
    """`replay` makes logits of tokens and packed integers; `step` does so without MLX's trace, for profiles."""

    gpu: Gpu
    replay: Callable[[Any, Any], Any]
    step: Callable[[Any, Any], Any]
    dispatches: list[Dispatch]  # what the ledger counts when it runs
    runs_ahead: bool

    def start(self, batch: RaggedBatch, rows: int, before: Run | None) -> Run:
        """See `Step`. What follows a step is submitted with the tokens drawn from it."""
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
        """Draw from the logits of `run`, as `Step.draw` says."""
        mx, whole = self.gpu.mx, run.kept[0]
        if numbers is not None and len(numbers) < whole.shape[0]:
            numbers = np.concatenate([numbers, np.zeros((whole.shape[0] - len(numbers), numbers.shape[1]), np.float32)])
        drawn = launch_draw(mx, self.gpu.launcher, whole, None if numbers is None else mx.array(numbers))
        run.kept = whole, drawn
        self.gpu.submit(drawn)
        return _Array(drawn)

    def finish(self, run: Run) -> None:
        """Wait for `run`: on Metal launches may overtake each other if no array that one makes goes into the other."""
        if self.gpu.machine is None:
            self.gpu.mx.eval([array for array in run.kept if array is not None])


@dataclass(frozen=True, slots=True)
class _Array:
    array: Any

    def wait(self) -> Ints:
        return np.array(self.array)


def compile_step(gpu: Gpu, compute: Compute, batch: RaggedBatch) -> CompiledStep:
    """`compute(batch)` as a function of the tokens and integers of such a batch."""
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
    # traced by this; that the step is computed twice changes nothing
    watched, gpu.watch.watched = gpu.watch.watched, None
    mx.eval(replay(mx.array(batch.token_ids), mx.array(pack_batch(batch, 0))))
    gpu.watch.watched = watched
    return CompiledStep(gpu, replay, step, ledger.take_back(before), runs_ahead=True)
