"""Where a batch's states lie, on the device; and what stands for the kernels that write them, where there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxr.kernels.gpu.launcher import MIN_ARRAY, view_host
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import FloatArray

if TYPE_CHECKING:
    from mlxr.kernels.context import Context
    from mlxr.kernels.gpu.device import Gpu


@dataclass(frozen=True, slots=True, eq=False)
class PlacedStates:
    """Of each sequence the slots that are read and written, and its first token; all int32, padded."""

    reads: Any
    writes: Any
    starts: Any


def place_states(gpu: Gpu, batch: RaggedBatch) -> PlacedStates:
    """The batch's slots of states on the device; the same arrays for all operators of a step."""
    parts = gpu.place(batch).parts
    found: PlacedStates | None = parts.get(PlacedStates)
    if found is None:
        rows = (batch.state_reads, batch.state_writes, batch.query_starts)
        length = max(MIN_ARRAY, batch.sequences + 1)
        packed = np.zeros((3, length), np.int32)
        for row, values in zip(packed, rows, strict=True):
            row[: len(values)] = values
        arrays = gpu.mx.array(packed)
        found = parts[PlacedStates] = PlacedStates(*(arrays[i] for i in range(3)))
    return found


def compose_on_host(
    ctx: Context,
    operator: str,
    variant: str,
    inputs: Sequence[Any],
    pool: Pool,
    compute: Callable[..., FloatArray],
) -> Any:
    """`compute(*inputs, states)` of arrays in the host's memory, which is the device's where kernels cannot run."""
    mx = ctx.gpu.mx

    def run() -> Any:
        mx.eval(*inputs, pool.array)
        arrays = [np.ascontiguousarray(view_host(mx, array.astype(mx.float32))) for array in inputs]
        return mx.array(compute(*arrays, view_host(mx, pool.array)))

    return ctx.gpu.watch.run_mlx(operator, variant, run, *inputs)
