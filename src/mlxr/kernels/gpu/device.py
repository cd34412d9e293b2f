"""A GPU as the operators see it: MLX, the launcher, what has been put on the device, and what is still to be computed.

Host arrays that stay the same (norm weights, rotation tables) are put on the device once and found again by identity.
The integers of a batch are put there once per step. Knows no operator.
"""

from __future__ import annotations

import hashlib
import logging
import re
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import DeviceError
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
]  # mlx, type name and raw blocks to the blocks as kernels read them
MAX_STARTED = 2
NEURAL_GENERATION, NEURAL_ROWS = 17, 64
ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBatch:
    """The arrays of a RaggedBatch on the device; `owners` is the sequence of each token, `lengths` what it sees.

    `parts` keeps what an operator makes of them once for all layers.
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
    """A tensor's raw blocks, or its plain numbers, on the device; shared by all that use it.

    `source` is the tensor, where it is one: held, so that no other one can pass for it.
    """

    __slots__ = ("__weakref__", "array", "source")

    def __init__(self, array: DeviceArray, source: TensorSource | None = None) -> None:
        self.array, self.source = array, source


class Gpu:
    """What all operators of one context share: the device, its arrays, its machine and its steps."""

    def __init__(self, device: str, ledger: Ledger, emulator: Emulator | None = None) -> None:
        self.device = device
        self.mx = mx = load_mlx(device)  # mlx.core
        self.narrow = device in ("metal", "cuda")  # products are computed in 16 bits, as GPUs do fastest
        mx.set_default_device(mx.gpu if self.narrow else mx.cpu)
        if device == "metal" and (room_bytes := mx.device_info().get("max_recommended_working_set_size")):
            mx.set_wired_limit(int(room_bytes))  # or macOS pages weights out when they come near to it
        self.watch = Watch(mx, ledger)  # tells the ledger what runs
        driver, code = _open_cuda() if device == "cuda" else (None, None)
        launcher: Launcher | None = None
        if device != "mlx-cpu":
            launcher = Launcher(mx, device, emulator, code, self.watch)  # type: ignore[arg-type]
        # whether kernels are chosen as for an Apple GPU
        self.is_apple = device == "metal" or bool(launcher and launcher.emulator and launcher.emulator.words == "apple")
        # None where kernels cannot run and MLX's own operations take their place
        self.launcher: Launches = cast(Any, launcher)
        self.driver = driver
        self.ranks: Ranks | None = None  # the place of this process among those that compute one model
        self.has_tiles = device == "cuda"  # our kernels use its matrix units,
        self.has_squares = self.is_apple  # or those of 8 x 8, for so many rows; MLX has better ones from the M5 on
        self.most_squared = find_most_squared(mx.device_info()) if device == "metal" else 2**31
        self.activations: NumberType = mx.float32  # between operators
        self.operands: NumberType = mx.float32  # of results which only products read
        self.pending: list[DeviceArray] = []
        self.last_expanded: DeviceArray | None = None  # the product that last read the scratch array
        self.last_turn: DeviceArray | None = None  # what ranks last gave each other: the next time comes after it
        self._scratch: dict[str, DeviceArray] = {}
        self._matrices: dict[tuple[int, int, str], DeviceArray] = {}  # parts of these
        self._uploads: weakref.WeakValueDictionary[tuple[int, int], Upload] = weakref.WeakValueDictionary()
        self._held: dict[int, DeviceArray] = {}
        self._tables: dict[int, tuple[TensorSource, Upload]] = {}
        self._placed: list[tuple[RaggedBatch, PlacedBatch]] = []  # of one step, as its groups of layers see it
        self.steps = Steps()
        self._is_busy = False  # whether MLX was given work since it was last waited for
        self.machine = _make_machine(mx, launcher, driver, code)
        self.processors, self.room_bytes = (
            (0, 0) if self.machine is None else (self.machine.processors, self.machine.room_bytes)
        )
        self.is_traced = False  # operators run for a step that MLX compiles or that is recorded;
        self.live_rows: DeviceArray | None = None  # then (1,) says how many rows of its batch count
        self.rehearses = False  # no row counts
        self.workspace = Workspace(mx, lambda: self.held_bytes + sum(one.nbytes for one in self._scratch.values()))
        self._started: deque[list[Value]] = deque()

    @property
    def own_ranks(self) -> Ranks:
        """The place of this process among the ranks; for what runs only where there are several."""
        assert self.ranks is not None
        return self.ranks

    def allocate_pool(self, shape: tuple[int, ...], kind: str) -> Pool:
        """A zeroed pool of pages or states, of numbers that are bf16, f16 or f32."""
        return Pool(self.mx, self.launcher, shape, kind, self.machine)

    def describe(self) -> str:
        """All that can change the numbers that are computed: the device, MLX's version and the kernels."""
        sources = sorted(path for path in Path(__file__).parents[1].rglob("*") if path.suffix in (".h", ".body"))
        text = hashlib.blake2b(b"".join(path.read_bytes() for path in sources)).hexdigest()
        return f"{self.device}: mlx {version('mlx')}: {text}"

    def read_free_bytes(self) -> int | None:
        """Bytes that arrays may still take in the GPU's memory; None where it does not tell, or where there is none."""
        return read_free_bytes(self.mx, self.device) if self.narrow else None

    @property
    def total_bytes(self) -> int:
        """All memory of an NVIDIA GPU; 0 of others, and where MLX does not tell."""
        return int(self.mx.device_info().get("total_memory", 0)) if self.device == "cuda" else 0

    @property
    def recorder(self) -> Recorder:
        """The list that launches go into; for what runs only while a step is recorded."""
        if not isinstance(self.launcher, Recorder):
            raise TypeError("no step is recorded")
        return self.launcher

    @property
    def is_recording(self) -> bool:
        """Whether operators launch into a list, whose memory is the machine's."""
        return isinstance(self.launcher, Recorder)

    @property
    def emulates(self) -> bool:
        """Whether kernels run on the host."""
        return isinstance(self.launcher, Launcher) and self.launcher.emulator is not None

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that recorded steps hold without MLX."""
        return 0 if self.machine is None else self.machine.held_bytes

    def hold(self, array: AnyArray) -> DeviceArray:
        """`array` on the device, for as long as it lives on the host."""
        held = self._held.get(id(array))
        if held is None:
            held = self.mx.array(array)
            self.mx.eval(held)
            self._held[id(array)] = held
            weakref.finalize(array, self._held.pop, id(array), None)
        return held

    def upload(self, tensor: TensorSource, arrange: Arrange) -> Upload:
        """The tensor on the device, brought to the kernels' order. Uploaded once while anybody holds it."""
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
        """`array`, which came from the host, in the GPU's own memory: there lies only what the GPU made itself."""
        if self.device != "cuda" or len(array) < ALIGNMENT_BYTES:
            return array
        middle = len(array) // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        copy = self.mx.concatenate([array[:middle], array[middle:]])
        self.mx.eval(copy)
        return copy

    def table(self, tensor: TensorSource, arrange: Arrange) -> Upload:
        """The upload of an embedding table, which stays for good."""
        found = self._tables.get(id(tensor))
        if found is None:
            found = self._tables[id(tensor)] = (tensor, self.upload(tensor, arrange))
        return found[1]

    def place(self, batch: RaggedBatch) -> PlacedBatch:
        """The batch's arrays on the device; the same ones for all operators of a step.

        What is launched with them does not overtake a step that ran ahead.
        """
        found = next((placed for known, placed in self._placed if known is batch), None)
        if found is None:
            self.steps.finish_ahead()
            mx = self.mx
            rows = np.repeat(np.arange(batch.sequences, dtype=np.int32), np.diff(batch.query_starts))
            columns = (batch.token_ids, batch.rope_rows, batch.slots, rows, batch.positions + np.int32(1))
            # one array, since the device fetches each new one from the host by itself
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
        """Let `arrays` (what `steps.unpack_batch` gives) and tokens stand for those of `batch` in a trace."""
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
        """Let go of the arrays of the last step, but for what the next one has to wait for."""
        self._placed, self.last_turn = [], None
        if self.is_traced:  # it is no array then
            self.last_expanded = None
        self.is_traced, self.live_rows = False, None

    def place_ids(self, token_ids: AnyArray) -> DeviceArray:
        """Token ids on the device, those of the step where they are its own."""
        if self._placed and self._placed[0][0].token_ids is token_ids:
            return self._placed[0][1].token_ids
        placed: DeviceArray = self.mx.array(token_ids)
        return placed

    def count_live(self, rows: int) -> DeviceArray:
        """How many of a step's rows do not merely fill it up, (1,) on the device: all `rows` where nobody knows."""
        return self.launcher.numbers(self.count_rows(rows)) if self.live_rows is None else self.live_rows

    def count_rows(self, rows: int) -> int:
        """How many of so many rows count."""
        return 0 if self.rehearses else rows

    def reserve(self, count: int, kind: NumberType) -> DeviceArray:
        """`count` numbers at least, always in the same memory; larger memory only where that does not do."""
        held = self._scratch.get(str(kind))
        if held is None or held.size < count:
            held = self._scratch[str(kind)] = self.mx.zeros((count,), kind)
            self.mx.eval(held)
            self._matrices.clear()
        return held

    def reserve_matrix(self, rows: int, columns: int, kind: NumberType) -> DeviceArray:
        """The beginning of that memory as a matrix; outside of traces the same array each time."""
        whole, key = self.reserve(rows * columns, kind), (rows, columns, str(kind))
        found = self._matrices.get(key)
        if found is None or self.is_traced:
            found = whole[: rows * columns].reshape(rows, columns)
            if not self.is_traced:
                self.mx.eval(found)
                self._matrices[key] = found
        return found

    def fetch_written(self, array: DeviceArray) -> AnyArray:
        """A copy on the host of an array that launches write in place, once all that was started is done."""
        if self.machine is not None:
            self.machine.synchronize()
        copy = array + self.mx.array(0, array.dtype)  # what lies in memory of its own
        self.mx.eval(copy)
        return np.array(copy)

    def submit(self, *results: DeviceArray) -> None:
        """Start computing `results` and whatever else is pending, without waiting for it."""
        pending, self.pending = self.pending, []
        if self.machine is not None:
            self.machine.synchronize()  # it may write pages
        self._started.clear()
        self.mx.async_eval(*results, *pending)
        self._is_busy = True

    def settle_arrays(self) -> None:
        """Wait until MLX has computed all that was submitted."""
        if self._is_busy:
            self.mx.synchronize()
            self._is_busy = False

    def start(self, *results: Value | None) -> None:
        """Let the device begin with `results` while the host goes on to say what follows; nothing in a trace.

        The host waits for what was started MAX_STARTED times before: arrays between operators live until the device is
        done with them, so their memory is bounded by how far the host may be ahead. A thread of MLX returns them; where
        it has fallen behind, the host waits for it as well.
        """
        each: list[tuple[Value, ...]] = [
            result.started if isinstance(result, Deferred) else (result,) for result in results if result is not None
        ]
        if self.is_traced or not all(each):
            return  # of few tokens products wait, too
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
        """A copy of the tensor on the device: blocks as bytes, floats as they are."""
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
    """Up to how many rows of x our kernels multiply blocks by on this Apple GPU, whose name MLX gives: more are better
    expanded where MLX's product has the neural accelerators (from applegpu_g17 on)."""
    generation = re.match(r"applegpu_g(\d+)", str(info.get("architecture", "")))
    return NEURAL_ROWS if generation is not None and int(generation[1]) >= NEURAL_GENERATION else 2**31


def _make_machine(
    mx: Mlx, launcher: Launcher | None, driver: CudaDriver | None, code: CudaCode | None
) -> Machine | None:
    """The machine that runs recorded steps without MLX, where there is one."""
    if launcher is None:
        return None
    if launcher.emulator is not None:
        return None if launcher.emulator.sanitizes else EmulatedMachine(mx, launcher.emulator)
    return None if driver is None or code is None else CudaMachine(mx, launcher, driver, code)


def _open_cuda() -> tuple[CudaDriver, CudaCode] | tuple[None, None]:
    """The driver and what compiles for it; None where a part of CUDA is missing that MLX does not need."""
    try:
        driver = CudaDriver()
    except DeviceError as error:
        logger.warning("kernels are compiled, and steps recorded, by MLX: %s", error)
        return None, None
    return driver, CudaCode(driver)
