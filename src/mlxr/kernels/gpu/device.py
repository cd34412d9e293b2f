"""A GPU as the operators see it: MLX, the launcher, arrays on the device, and pending work.

Host arrays that never change (norm weights, rotation tables) are copied to the device once and found again by identity.
The integers of a batch are copied once per step. This module knows no operator.
"""

from __future__ import annotations

import hashlib
import logging
import re
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import DeviceError
from mlxr.core.frozen import frozen
from mlxr.kernels.gpu.cuda.driver import CudaCode, CudaDriver
from mlxr.kernels.gpu.cuda.machine import CudaMachine
from mlxr.kernels.gpu.deferred import Deferred, Value
from mlxr.kernels.gpu.emulator import EmulatedMachine, Emulator
from mlxr.kernels.gpu.launcher import Launcher, Watch
from mlxr.kernels.gpu.mlx import Mlx, Workspace, load_mlx, read_free_bytes
from mlxr.kernels.gpu.pool import PlacedStates, Pool
from mlxr.kernels.gpu.ranks import Ranks
from mlxr.kernels.gpu.recording import Launches, Machine, Recorder
from mlxr.kernels.gpu.steps import Steps
from mlxr.kernels.ledger import Ledger
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import DeviceArray, NumberType, TensorSource

logger = logging.getLogger(__name__)
AnyArray = npt.NDArray[Any]
Arrange = Callable[
    [Mlx, str, DeviceArray], DeviceArray
]  # from mlx, the type's name and raw blocks to the blocks as kernels read them
MAX_STARTED = 2
NEURAL_GENERATION, NEURAL_ROWS = 17, 64
ALIGNMENT_BYTES = 256


@frozen(eq=False)
class PlacedBatch:
    """The arrays of a RaggedBatch on the device; `owners` are the tokens' sequences, `lengths` the positions they see.

    `parts` keeps what operators make of them once for all layers.
    """

    token_ids: DeviceArray
    positions: DeviceArray
    slots: DeviceArray
    owners: DeviceArray
    lengths: DeviceArray
    page_table: DeviceArray
    output_rows: DeviceArray
    parts: dict[object, Any] = field(default_factory=dict)


class Upload:
    """A tensor's raw blocks, or its plain numbers, on the device; shared by all users.

    `source` is the tensor, if there is one; it is held so that no other object gets its identity.
    """

    __slots__ = ("__weakref__", "array", "source")

    def __init__(self, array: DeviceArray, source: TensorSource | None = None) -> None:
        self.array, self.source = array, source


class Gpu:
    """A GPU, shared by all operators of one context: the device, its arrays, its machine and its steps."""

    def __init__(self, device: str, ledger: Ledger, emulator: Emulator | None = None) -> None:
        self.device = device
        self.mx = mx = load_mlx(device)  # mlx.core
        self.narrow = device in ("metal", "cuda")  # products are computed in 16 bits, which is fastest on GPUs
        mx.set_default_device(mx.gpu if self.narrow else mx.cpu)
        if device == "metal" and (room_bytes := mx.device_info().get("max_recommended_working_set_size")):
            mx.set_wired_limit(int(room_bytes))  # or macOS pages weights out when they nearly reach it
        self.watch = Watch(mx, ledger)  # counts launches in the ledger
        driver, code = _open_cuda() if device == "cuda" else (None, None)
        launcher: Launcher | None = None
        if device != "mlx-cpu":
            launcher = Launcher(mx, device, emulator, code, self.watch)  # type: ignore[arg-type]
        # True if kernels are chosen as for an Apple GPU
        self.is_apple = device == "metal" or bool(launcher and launcher.emulator and launcher.emulator.words == "apple")
        # None if kernels cannot run, so that MLX's own operations replace them
        self.launcher: Launches = cast(Any, launcher)
        self.driver = driver
        self.ranks: Ranks | None = None  # the place of this process among those that compute one model
        self.has_tiles = device == "cuda"  # our kernels use its matrix units,
        self.has_squares = self.is_apple  # or those of 8 x 8, up to `most_squared` rows; from the M5 on, MLX is faster
        self.most_squared = find_most_squared(mx.device_info()) if device == "metal" else 2**31
        self.activations: NumberType = mx.float32  # type of results between operators
        self.operands: NumberType = mx.float32  # type of results that only products read
        self.pending: list[DeviceArray] = []
        self.last_expanded: DeviceArray | None = None  # the product that last read the scratch array
        self.last_turn: DeviceArray | None = None  # result of the ranks' last exchange, for which the next one waits
        self._scratch: dict[str, DeviceArray] = {}
        self._matrices: dict[tuple[int, int, str], DeviceArray] = {}  # parts of the scratch arrays
        self._uploads: weakref.WeakValueDictionary[tuple[int, int], Upload] = weakref.WeakValueDictionary()
        self._held: dict[int, DeviceArray] = {}
        self._tables: dict[int, tuple[TensorSource, Upload]] = {}
        self._placed: list[tuple[RaggedBatch, PlacedBatch]] = []  # batches of one step, for its groups of layers
        self.steps = Steps()
        self._is_busy = False  # True if MLX was given work after the last wait
        self.machine = _make_machine(mx, launcher, driver, code)
        self.processors, self.room_bytes = (
            (0, 0) if self.machine is None else (self.machine.processors, self.machine.room_bytes)
        )
        self.is_traced = False  # True while operators run for a step that MLX compiles or that is recorded
        self.live_rows: DeviceArray | None = None  # in such a step, (1,): the number of its rows that are not padding
        self.rehearses = False  # True while the rows of steps are not to be counted
        self.workspace = Workspace(mx, lambda: self.held_bytes + sum(one.nbytes for one in self._scratch.values()))
        self._started: deque[list[Value]] = deque()

    @property
    def own_ranks(self) -> Ranks:
        """The place of this process among the ranks, of which there must be several."""
        assert self.ranks is not None
        return self.ranks

    def allocate_pool(self, shape: tuple[int, ...], kind: str) -> Pool:
        """Return a zeroed pool of pages or states, in bf16, f16 or f32."""
        return Pool(self.mx, self.launcher, shape, kind, self.machine)

    def describe(self) -> str:
        """Return a text of everything that can change results: the device, MLX's version and a hash of the kernels."""
        sources = sorted(path for path in Path(__file__).parents[1].rglob("*") if path.suffix in (".h", ".body"))
        text = hashlib.blake2b(b"".join(path.read_bytes() for path in sources)).hexdigest()
        return f"{self.device}: mlx {version('mlx')}: {text}"

    def read_free_bytes(self) -> int | None:
        """Return the bytes that arrays may still take in the GPU's memory; None if unknown, or without such memory."""
        return read_free_bytes(self.mx, self.device) if self.narrow else None

    @property
    def total_bytes(self) -> int:
        """Bytes of memory of an NVIDIA GPU; 0 for others, or if MLX does not say."""
        return int(self.mx.device_info().get("total_memory", 0)) if self.device == "cuda" else 0

    @property
    def recorder(self) -> Recorder:
        """The recorder of launches; TypeError if no step is being recorded."""
        if not isinstance(self.launcher, Recorder):
            raise TypeError("no step is recorded")
        return self.launcher

    @property
    def is_recording(self) -> bool:
        """True if launches of operators are recorded, in the machine's memory."""
        return isinstance(self.launcher, Recorder)

    @property
    def emulates(self) -> bool:
        """True if kernels run on the host."""
        return isinstance(self.launcher, Launcher) and self.launcher.emulator is not None

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that recorded steps hold, of which MLX does not know."""
        return 0 if self.machine is None else self.machine.held_bytes

    def hold(self, array: AnyArray) -> DeviceArray:
        """Return `array` on the device, where it stays as long as it lives on the host."""
        held = self._held.get(id(array))
        if held is None:
            held = self.mx.array(array)
            self.mx.eval(held)
            self._held[id(array)] = held
            weakref.finalize(array, self._held.pop, id(array), None)
        return held

    def upload(self, tensor: TensorSource, arrange: Arrange) -> Upload:
        """Return the tensor on the device, arranged for the kernels. It is uploaded once while anybody holds it."""
        key = (id(tensor), tensor.nbytes)
        found = self._uploads.get(key)
        if found is None:
            raw = self.read(tensor)
            arranged = arrange(self.mx, tensor.type_name, raw)
            array = self._take_over(raw) if arranged is raw else arranged
            found = self._uploads[key] = Upload(array, tensor)
            tensor.release()
        return found

    def _take_over(self, array: DeviceArray) -> DeviceArray:
        """Return `array`, which came from the host, in the GPU's own memory, where only results of the GPU are."""
        if self.device != "cuda" or len(array) < ALIGNMENT_BYTES:
            return array
        middle = len(array) // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        copy = self.mx.concatenate([array[:middle], array[middle:]])
        self.mx.eval(copy)
        return copy

    def table(self, tensor: TensorSource, arrange: Arrange) -> Upload:
        """Return the upload of an embedding table, which stays for good."""
        found = self._tables.get(id(tensor))
        if found is None:
            found = self._tables[id(tensor)] = (tensor, self.upload(tensor, arrange))
        return found[1]

    def place(self, batch: RaggedBatch) -> PlacedBatch:
        """Return the batch's arrays on the device; the same ones for all operators of a step.

        Launches with them do not overtake a step that ran ahead.
        """
        found = next((placed for known, placed in self._placed if known is batch), None)
        if found is None:
            self.steps.finish_ahead()
            mx = self.mx
            rows = np.repeat(np.arange(batch.sequences, dtype=np.int32), np.diff(batch.query_starts))
            columns = (batch.token_ids, batch.rope_rows, batch.slots, rows, batch.positions + np.int32(1))
            # one array, since each new one is fetched from the host separately
            packed = mx.array(np.concatenate([*columns, batch.page_table.reshape(-1), batch.output_rows]))
            tokens, stop = batch.tokens, 5 * batch.tokens + batch.page_table.size
            table = packed[5 * tokens : stop].reshape(batch.page_table.shape)
            ids, positions, slots, owners, lengths = (packed[i * tokens : (i + 1) * tokens] for i in range(5))
            found = PlacedBatch(ids, positions, slots, owners, lengths, table, packed[stop:])
            if not self._placed or self._placed[0][0].token_ids is not batch.token_ids:
                self._placed = []
            self._placed.append((batch, found))
        return found

    def place_traced(self, batch: RaggedBatch, token_ids: DeviceArray, arrays: Sequence[DeviceArray]) -> None:
        """Let `arrays` (from `steps.unpack_batch`) and `token_ids` stand for those of `batch` in a trace."""
        self.last_expanded = self.last_turn = None
        positions, lengths, reads, writes, *places, self.live_rows = arrays
        rows, starts = (self.mx.arange(batch.tokens + more, dtype=self.mx.int32) for more in (0, 1))
        parts: dict[object, Any] = {PlacedStates: PlacedStates(reads, writes, starts)} if batch.has_states else {}
        self._placed = []
        for group, slots, table in zip(batch.groups, places[::2], places[1::2], strict=True):
            placed = PlacedBatch(token_ids, positions, slots, rows, lengths, table, rows, dict(parts))
            self._placed.append((group, placed))
        self.is_traced = True

    def forget_placed(self) -> None:
        """Forget the arrays of the last step, except those for which the next one must wait."""
        self._placed, self.last_turn = [], None
        if self.is_traced:  # then it is not a real array
            self.last_expanded = None
        self.is_traced, self.live_rows = False, None

    def place_ids(self, token_ids: AnyArray) -> DeviceArray:
        """Return token ids on the device; those of the step, if they are its own."""
        if self._placed and self._placed[0][0].token_ids is token_ids:
            return self._placed[0][1].token_ids
        placed: DeviceArray = self.mx.array(token_ids)
        return placed

    def count_live(self, rows: int) -> DeviceArray:
        """Return the number of a step's rows that are not padding, (1,) on the device; all `rows` if it is unknown."""
        return self.launcher.numbers(self.count_rows(rows)) if self.live_rows is None else self.live_rows

    def count_rows(self, rows: int) -> int:
        """Return `rows`, or 0 in a rehearsal, where rows do not count."""
        return 0 if self.rehearses else rows

    def reserve(self, count: int, kind: NumberType) -> DeviceArray:
        """Return scratch memory for at least `count` numbers; it is the same each time, unless it must grow."""
        held = self._scratch.get(str(kind))
        if held is None or held.size < count:
            held = self._scratch[str(kind)] = self.mx.zeros((count,), kind)
            self.mx.eval(held)
            self._matrices.clear()
        return held

    def reserve_matrix(self, rows: int, columns: int, kind: NumberType) -> DeviceArray:
        """Return the beginning of the scratch memory as a matrix; outside of traces the same array each time."""
        whole, key = self.reserve(rows * columns, kind), (rows, columns, str(kind))
        found = self._matrices.get(key)
        if found is None or self.is_traced:
            found = whole[: rows * columns].reshape(rows, columns)
            if not self.is_traced:
                self.mx.eval(found)
                self._matrices[key] = found
        return found

    def fetch_written(self, array: DeviceArray) -> AnyArray:
        """Return a host copy of an array that launches write in place, after all started work is done."""
        if self.machine is not None:
            self.machine.synchronize()
        copy = array + self.mx.array(0, array.dtype)  # a new array, in its own memory
        self.mx.eval(copy)
        return np.array(copy)

    def submit(self, *results: DeviceArray) -> None:
        """Start computing `results` and everything pending, without waiting for it."""
        pending, self.pending = self.pending, []
        if self.machine is not None:
            self.machine.synchronize()  # a recorded step may still write pages
        self._started.clear()
        self.mx.async_eval(*results, *pending)
        self._is_busy = True

    def settle_arrays(self) -> None:
        """Wait until MLX has done all submitted work."""
        if self._is_busy:
            self.mx.synchronize()
            self._is_busy = False

    def start(self, *results: Value | None) -> None:
        """Let the device begin with `results` while the host prepares further launches; do nothing in a trace.

        The host waits for the results of MAX_STARTED calls ago: arrays between operators live until the device is done
        with them, so this bounds their memory. A thread of MLX frees them; if it has fallen behind, the host waits for
        it, too.
        """
        each: list[tuple[Value, ...]] = [
            result.started if isinstance(result, Deferred) else (result,) for result in results if result is not None
        ]
        if self.is_traced or not all(each):
            return  # with few tokens, products are deferred, so there is nothing to start
        arrays = [array for arrays in each for array in arrays]
        if self.machine is not None:
            self.machine.synchronize()
        if self._started and self.workspace.is_full:
            self.mx.synchronize()
        self.mx.async_eval(*arrays)
        self._is_busy = True
        self._started.append(arrays)
        if len(self._started) > MAX_STARTED:
            self.mx.eval(self._started.popleft())

    def read(self, tensor: TensorSource) -> DeviceArray:
        """Return a copy of the tensor on the device: blocks as bytes, floats as floats."""
        mx = self.mx
        raw = np.ascontiguousarray(tensor.data)
        match tensor.type_name:
            case "f32":
                array = mx.array(raw.view(np.float32).reshape(tensor.shape))
            case "f16":
                array = mx.array(raw.view(np.float16).reshape(tensor.shape))
            case "bf16":
                array = mx.array(raw.view(np.uint16).reshape(tensor.shape)).view(mx.bfloat16)
            case _:
                array = mx.array(raw.reshape(-1))
        mx.eval(array)
        return array


def find_most_squared(info: Mapping[str, Any]) -> int:
    """Return the most rows of x for which our kernels multiply by blocks on this Apple GPU.

    From applegpu_g17 on (the name is in MLX's `info`), MLX's product has neural accelerators, so that expanding weights
    is better for more rows.
    """
    generation = re.match(r"applegpu_g(\d+)", str(info.get("architecture", "")))
    return NEURAL_ROWS if generation is not None and int(generation[1]) >= NEURAL_GENERATION else 2**31


def _make_machine(
    mx: Mlx, launcher: Launcher | None, driver: CudaDriver | None, code: CudaCode | None
) -> Machine | None:
    """Return the machine that runs recorded steps without MLX, if there is one."""
    if launcher is None:
        return None
    if launcher.emulator is not None:
        return None if launcher.emulator.sanitizes else EmulatedMachine(mx, launcher.emulator)
    return None if driver is None or code is None else CudaMachine(mx, launcher, driver, code)


def _open_cuda() -> tuple[CudaDriver, CudaCode] | tuple[None, None]:
    """Return the driver and its compiled code; None if a part of CUDA is missing that MLX does not need."""
    try:
        driver = CudaDriver()
    except DeviceError as error:
        logger.warning("kernels are compiled, and steps recorded, by MLX: %s", error)
        return None, None
    return driver, CudaCode(driver)
