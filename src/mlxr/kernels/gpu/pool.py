"""Pools on a GPU, written in place: pages of plain numbers (pages, kv_heads, page_size, head_dim), or recurrent states
(slots, floats); and the slots of a batch's states.

Kernels write through the array that MLX sees as their input, so `array` never changes and compiled steps may hold it.
MLX's own writes (without kernels) also happen in place, since nobody else holds the array then. A pool never takes
twice its memory. It has one spare page, to which padding writes. Only one thread uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxr.core.frozen import frozen
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.gpu.launcher import MIN_ARRAY
from mlxr.kernels.gpu.mlx import Mlx, view_host
from mlxr.kernels.gpu.recording import Launches, Machine
from mlxr.kernels.tensor import ByteArray, DeviceArray, FloatArray

if TYPE_CHECKING:
    from mlxr.kernels.context import Context
    from mlxr.kernels.gpu.device import Gpu
    from mlxr.kernels.ragged import RaggedBatch

THREADS = 256
COPY_PAGE = Kernel(
    "copy_page",
    Path(__file__).parent,
    "page.body",
    ("source", "pool", "pages", "sizes"),
    ("done",),
    operator="copy_page",
)
KERNELS = (COPY_PAGE,)


class Pool:
    """A pool; `array` is the memory, with the spare page; `kind` the type of its numbers as ggml spells it."""

    __slots__ = ("_launcher", "_machine", "_mx", "array", "graphs", "kind", "shape")

    def __init__(
        self, mx: Mlx, launcher: Launches | None, shape: tuple[int, ...], kind: str, machine: Machine | None = None
    ) -> None:
        self._mx, self._launcher, self.shape, self.kind = mx, launcher, shape, kind
        self._machine = machine
        types = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}
        self.array = mx.zeros((shape[0] + 1, *shape[1:]), types[kind])
        mx.eval(self.array)
        self.graphs: dict[object, Any] = {}  # recorded steps that hold the memory, and so may not outlive it

    @property
    def page_numbers(self) -> int:
        """The number of numbers in a page."""
        return math.prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of the pages, without the spare one."""
        return self.shape[0] * self.page_numbers * int(self.array.itemsize)

    def copy_page(self, source: int, target: int) -> None:
        """Copy the numbers of one page to another."""
        self._wait()
        if self._launcher is None:
            self._put(self._mx.take(self.array, self._mx.array([source]), axis=0), target)
        else:
            self._launch(self.array, source, target)

    def read_page(self, page: int) -> ByteArray:
        """Return the bytes of one page, on the host."""
        self._wait()
        held = self._mx.take(self.array, self._mx.array([page]), axis=0)
        self._mx.eval(held)
        return np.ascontiguousarray(view_host(self._mx, held)).reshape(-1).view(np.uint8)

    def write_page(self, page: int, source: ByteArray) -> None:
        """Overwrite one page with bytes that `read_page` returned."""
        self._wait()
        array = self._mx.array(np.ascontiguousarray(source)).view(self.array.dtype).reshape(1, *self.shape[1:])
        if self._launcher is None:
            self._put(array, page)
        else:
            self._launch(array, 0, page)

    def _wait(self) -> None:
        """Wait for all launches: a dropped step that ran ahead may still write into pages that are free by now.

        MLX does not see writes into a pool, so on Metal later launches could overtake them.
        """
        if self._machine is not None:
            self._machine.synchronize()
        elif self._launcher is not None and self._launcher.is_lazy:
            self._mx.synchronize()

    def _put(self, page: DeviceArray, target: int) -> None:
        self._mx.eval(page)  # it reads the old memory, which is written next
        self.array[target : target + 1] = page
        self._mx.eval(self.array)

    def _launch(self, source: DeviceArray, page: int, target: int) -> None:
        assert self._launcher is not None
        pages = self._mx.array([page, target, 0, 0, 0, 0, 0, 0], self._mx.int32)
        (done,) = self._launcher.launch(
            COPY_PAGE,
            [source, self.array, pages, self._launcher.numbers(self.page_numbers)],
            groups=(-(-self.page_numbers // THREADS), 1, 1),
            threads=THREADS,
            outputs=[((8,), self._mx.float32)],
        )
        self._mx.eval(done)


@frozen(eq=False)
class PlacedStates:
    """The slots that each sequence reads and writes, and its first token; all int32, padded."""

    reads: DeviceArray
    writes: DeviceArray
    starts: DeviceArray


def place_states(gpu: Gpu, batch: RaggedBatch) -> PlacedStates:
    """Return the batch's slots of states on the device; the same arrays for all operators of a step."""
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
    inputs: Sequence[DeviceArray],
    pool: Pool,
    compute: Callable[..., FloatArray],
) -> DeviceArray:
    """Return `compute(*inputs, states)` on host memory, which the device shares if kernels cannot run (MLX on CPU)."""
    mx = ctx.gpu.mx

    def run() -> DeviceArray:
        mx.eval(*inputs, pool.array)
        arrays = [np.ascontiguousarray(view_host(mx, array.astype(mx.float32))) for array in inputs]
        return mx.array(compute(*arrays, view_host(mx, pool.array)))

    return ctx.gpu.watch.run_mlx(operator, variant, run, *inputs)
