"""A GPU as the operators see it: MLX, the launcher, what has been put on the device, and what is still to be computed.

Host arrays that stay the same (norm weights, rotation tables) are put on the device once and found again by identity.
The integers of a batch are put there once per step. Knows no operator.
"""

from __future__ import annotations

import hashlib
import importlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import DeviceError
from mlxr.kernels.gpu.emulator import Emulator
from mlxr.kernels.gpu.launcher import Launcher
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import TensorSource

AnyArray = npt.NDArray[Any]
Arrange = Callable[[Any, str, Any], Any]  # mlx, type name and raw blocks to the blocks as kernels read them
GPU_DEVICES = ("metal", "cuda", "mlx-cpu", "emulated")
_REMEDY = {
    "metal": "pip install mlx (on a Mac with Apple silicon)",
    "cuda": "pip install 'mlxr[cuda]' (needs an NVIDIA driver)",
    "mlx-cpu": "pip install 'mlxr[mlx-cpu]'",
    "emulated": "pip install 'mlxr[mlx-cpu]'",
}


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBatch:
    """The arrays of a RaggedBatch on the device; `owners` is the sequence of each token, `lengths` what it sees."""

    token_ids: Any
    positions: Any
    slots: Any
    owners: Any
    lengths: Any
    page_table: Any
    output_rows: Any


class Upload:
    """A tensor's raw blocks, or its plain numbers, on the device; shared by all that use it.

    `source` is the tensor, where it is one: held, so that no other one can pass for it.
    """

    __slots__ = ("__weakref__", "array", "source")

    def __init__(self, array: Any, source: TensorSource | None = None) -> None:
        self.array, self.source = array, source


class Gpu:
    """`mx` is mlx.core; `launcher` is None where kernels cannot run and MLX's own operations take their place.

    `narrow`: products are computed in 16 bits, as GPUs do fastest. `activations` is the type between operators.
    """

    def __init__(self, device: str, emulator: Emulator | None = None) -> None:
        self.device = device
        self.mx = mx = load_mlx(device)
        self.narrow = device in ("metal", "cuda")
        mx.set_default_device(mx.gpu if self.narrow else mx.cpu)
        self.launcher: Any = None
        if device != "mlx-cpu":
            self.launcher = Launcher(mx, "emulated" if device == "emulated" else device, emulator)  # type: ignore[arg-type]
        self.activations = mx.float32
        self.pending: list[Any] = []
        self._uploads: weakref.WeakValueDictionary[tuple[int, int], Upload] = weakref.WeakValueDictionary()
        self._held: dict[int, Any] = {}
        self._tables: dict[int, tuple[TensorSource, Upload]] = {}
        self._placed: tuple[RaggedBatch, PlacedBatch] | None = None
        self.drawn: tuple[Any, Any, Any] | None = None  # logits, and of each row the likeliest id and its logprob
        self.is_greedy = False  # whether the last tokens were the likeliest ones
        self.ahead: Any = None  # the step that was started with them (`graph.Ahead`)

    def describe(self) -> str:
        """What can change the numbers that are computed: the device, MLX's version and the kernels."""
        sources = sorted(path for path in Path(__file__).parents[1].rglob("*") if path.suffix in (".h", ".body"))
        text = hashlib.blake2b(b"".join(path.read_bytes() for path in sources)).hexdigest()
        return f"{self.device}: mlx {version('mlx')}: {text}"

    def hold(self, array: AnyArray) -> Any:
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
            array = arrange(self.mx, tensor.type_name, self.read(tensor))
            found = self._uploads[key] = Upload(array, tensor)
            tensor.release()
        return found

    def table(self, tensor: TensorSource, arrange: Arrange) -> Upload:
        """The upload of an embedding table, which stays for good."""
        found = self._tables.get(id(tensor))
        if found is None:
            found = self._tables[id(tensor)] = (tensor, self.upload(tensor, arrange))
        return found[1]

    def place(self, batch: RaggedBatch) -> PlacedBatch:
        """The batch's arrays on the device; the same ones for all operators of a step."""
        if self._placed is None or self._placed[0] is not batch:
            mx = self.mx
            owners = np.repeat(np.arange(batch.sequences, dtype=np.int32), np.diff(batch.query_starts))
            placed = PlacedBatch(
                token_ids=mx.array(batch.token_ids),
                positions=mx.array(batch.positions),
                slots=mx.array(batch.slots),
                owners=mx.array(owners),
                lengths=mx.array(batch.positions + 1),
                page_table=mx.array(batch.page_table),
                output_rows=mx.array(batch.output_rows),
            )
            self._placed = (batch, placed)
        return self._placed[1]

    def place_traced(self, batch: RaggedBatch, arrays: tuple[Any, ...]) -> None:
        """Let `arrays` (token ids and what `graph.unpack_batch` gives) stand for the tokens of `batch` in a trace."""
        token_ids, positions, slots, lengths, page_table = arrays
        rows = self.mx.arange(batch.tokens, dtype=self.mx.int32)
        placed = PlacedBatch(token_ids, positions, slots, rows, lengths, page_table, rows)
        self._placed = (batch, placed)

    def forget_placed(self) -> None:
        """Let go of the arrays of the last step."""
        self._placed = None

    def place_ids(self, token_ids: AnyArray) -> Any:
        """Token ids on the device, those of the step where they are its own."""
        if self._placed is not None and self._placed[0].token_ids is token_ids:
            return self._placed[1].token_ids
        return self.mx.array(token_ids)

    def submit(self, *results: Any) -> None:
        """Start computing `results` and whatever else is pending, without waiting for it."""
        pending, self.pending = self.pending, []
        self.mx.async_eval(*results, *pending)

    def read(self, tensor: TensorSource) -> Any:
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


def load_mlx(device: str) -> Any:
    """`mlx.core` for `device`; DeviceError with the remedy where it is missing or lacks the device."""
    try:
        mx = importlib.import_module("mlx.core")
    except ImportError as error:
        raise DeviceError(f"device {device!r} needs mlx, which did not load ({error}); {_REMEDY[device]}") from error
    if device in ("metal", "cuda") and not getattr(mx, device).is_available():
        raise DeviceError(f"device {device!r}: the mlx installed here finds no such device; {_REMEDY[device]}")
    return mx


def find_gpu() -> str | None:
    """The GPU device that an installed mlx can use here, if there is one."""
    try:
        mx = importlib.import_module("mlx.core")
    except ImportError:
        return None
    return next((name for name in ("metal", "cuda") if getattr(mx, name).is_available()), None)
