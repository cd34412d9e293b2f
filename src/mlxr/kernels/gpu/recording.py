"""A step as a list of launches over fixed addresses, made by running the operators once over stand-ins for arrays.

Operators launch as always; here a launch is only noted down, and its results are `Buffer`s: shape, type and place, no
array. What is not one of our launches cannot be noted, and fails on a Buffer: such steps are not recorded. Memory of a
result is taken over by later ones when nobody holds it any more, since launches run one after another. A `Machine` is
what they run on, whatever the target; the memory of all steps is the same (`StepMemory`).
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import numpy.typing as npt

from mlxr.kernels.gpu.kernel import Box, Kernel, Variant, name_type
from mlxr.kernels.tensor import DeviceArray, NumberType

AnyArray = npt.NDArray[Any]
ALIGNMENT_BYTES = 256
CHUNK_BYTES = 2 * 2**20  # a driver gives no less
# of which a launch reads or writes a part
SHARED_ARRAYS = ("k_pool", "v_pool", "pool", "table", "scratch", "cosines", "sines", "temperatures", "all_a", "all_b")


class Buffer:
    """A result of shape `shape` and MLX's type `dtype` at `address`; `source` keeps the memory."""

    __slots__ = ("__weakref__", "address", "dtype", "shape", "source")

    def __init__(self, shape: tuple[int, ...], dtype: NumberType, address: int, source: object = None) -> None:
        self.shape, self.dtype, self.address, self.source = shape, dtype, address, source

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return int(math.prod(self.shape) * self.dtype.size)

    def reshape(self, *shape: int) -> Buffer:
        """The same numbers in another shape, whose lengths are all given."""
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(f"{self.shape} cannot become {shape}")
        return Buffer(shape, self.dtype, self.address, self)

    def astype(self, dtype: NumberType, /) -> Buffer:
        """The same, in the type that it has; another one would take a launch."""
        if dtype != self.dtype:
            raise TypeError(f"a {self.dtype} buffer is not {dtype}")
        return self

    def as_array(self) -> DeviceArray:
        """The buffer as operators see it, which know arrays."""
        return cast(DeviceArray, self)

    def part(self, start: int, shape: tuple[int, ...]) -> Buffer:
        """Of all numbers in a row, those from `start` on."""
        return Buffer(shape, self.dtype, self.address + start * self.dtype.size, self)


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One launch; `arrays` are addresses, or MLX's arrays where they are not known yet: inputs, then outputs.

    `boxes` are those of the first inputs, which the kernel brings in boxes; `nbytes` is what it reads and writes, and
    `rows` are those of experts that it multiplies.
    """

    kernel: Kernel
    variant: Variant
    arrays: tuple[Any, ...]
    groups: tuple[int, int, int]
    threads: int
    room_bytes: int = 0
    boxes: tuple[Box, ...] = ()
    nbytes: int = 0
    rows: int = 0

    def put_out(self, address: int) -> Launch:
        """The same with its last result at `address`."""
        return replace(self, arrays=(*self.arrays[:-1], address))


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """x (tokens, inputs) times a weight (outputs, inputs) by a library; `arrays` are x, the weight and the result.

    `shares` 0: the result has the type of x. Else it is (shares, tokens, outputs) in f32, each of its own inputs.
    """

    tokens: int
    outputs: int
    inputs: int
    kind: str
    weight_kind: str
    shares: int
    arrays: tuple[Any, ...]
    nbytes: int = 0


class Call(NamedTuple):
    """What a kernel is launched with: its arguments, and how often it runs."""

    kernel: Kernel
    inputs: Sequence[DeviceArray]
    groups: tuple[int, int, int]  # threadgroups of each axis
    threads: int  # of a threadgroup
    outputs: Sequence[tuple[tuple[int, ...], NumberType]]  # shape and type of each array that it makes
    constants: Mapping[str, int]
    types: Mapping[str, NumberType]
    room_bytes: int  # that a ROOM of the body takes of a threadgroup's memory
    boxes: Sequence[Box]  # what the first inputs are brought in

    @property
    def rows(self) -> int:
        """The rows of experts that it multiplies."""
        return self.kernel.count_rows(self.outputs[0][0])

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for launches of a kernel that are compiled alike; takes a tenth of the time of `variant`."""
        inputs, outputs = [array.dtype for array in self.inputs], [kind for _, kind in self.outputs]
        return self.kernel, *self.constants.items(), *self.types.items(), *inputs, *outputs

    @property
    def variant(self) -> Variant:
        """How the kernel is compiled for it."""
        kinds = (array.dtype for array in self.inputs), (kind for _, kind in self.outputs)
        return Variant.of(self.constants, self.types, *kinds)


class Launches(ABC):
    """What operators launch kernels by: MLX, or a list that records a step."""

    is_lazy: bool  # whether a launch is computed when its results are

    @abstractmethod
    def numbers(self, *values: float) -> DeviceArray:
        """Sizes or other numbers that a body reads at run time, as an array on the device."""

    def launch(
        self,
        kernel: Kernel,
        inputs: Sequence[DeviceArray],
        *,
        groups: tuple[int, int, int],
        threads: int,
        outputs: Sequence[tuple[tuple[int, ...], NumberType]],
        constants: Mapping[str, int] | None = None,
        types: Mapping[str, NumberType] | None = None,
        room_bytes: int = 0,
        boxes: Sequence[Box] = (),
    ) -> list[DeviceArray]:
        """One launch of `groups` threadgroups; `outputs` are the shape and type of each array it makes.

        A constant RESIDENT says on CUDA how many must fit on a multiprocessor, which bounds the registers of a thread.
        `room_bytes` is what a ROOM of the body takes of a threadgroup's memory. `boxes` are what the first inputs are
        brought in, which MLX cannot launch: TypeError, as for a kernel that is `cuda_only` on Metal.
        """
        template = {"THREADS": threads, **(constants or {})}
        return self._launch(Call(kernel, inputs, groups, threads, outputs, template, types or {}, room_bytes, boxes))

    @abstractmethod
    def _launch(self, call: Call) -> list[DeviceArray]: ...


class Recorder(Launches):
    """Stands for the launcher while a step is recorded. `allocate(bytes)` gives addresses, which stay good."""

    is_lazy = True

    def __init__(
        self, numbers: Callable[..., DeviceArray], allocate: Callable[[int], int], *, multiplies: bool
    ) -> None:
        self._numbers, self._allocate, self._multiplies = numbers, allocate, multiplies
        self.launches: list[Launch | Product] = []
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def numbers(self, *values: float) -> DeviceArray:
        """As the launcher has them."""
        return self._numbers(*values)

    def take_launches(self) -> list[Launch | Product]:
        """What was noted since the last call."""
        launches, self.launches = self.launches, []
        return launches

    def make(self, shape: tuple[int, ...], dtype: NumberType) -> Buffer:
        """A buffer whose memory serves others once nobody holds it."""
        size_bytes = -(-max(1, math.prod(shape)) * dtype.size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        free = self._free[size_bytes]
        buffer = Buffer(shape, dtype, free.pop() if free else self._allocate(size_bytes))
        weakref.finalize(buffer, free.append, buffer.address).atexit = False
        return buffer

    def _launch(self, call: Call) -> list[DeviceArray]:
        made = [self.make(shape, kind) for shape, kind in call.outputs]
        arrays = tuple(array.address if isinstance(array, Buffer) else array for array in (*call.inputs, *made))
        nbytes = count_bytes(call.kernel.inputs, call.inputs) + sum(buffer.nbytes for buffer in made)
        launch = Launch(
            call.kernel,
            call.variant,
            arrays,
            call.groups,
            call.threads,
            call.room_bytes,
            tuple(call.boxes),
            nbytes,
            call.rows,
        )
        self.launches.append(launch)
        return [buffer.as_array() for buffer in made]

    def multiply(self, x: Buffer, weight: DeviceArray, shares: int = 0, wide: NumberType | None = None) -> DeviceArray:
        """x (tokens, inputs) times weight (outputs, inputs), in the type of x; or `shares` of it in the type `wide`."""
        if not self._multiplies:
            raise TypeError("products are not recorded here")
        (tokens, inputs), outputs = x.shape, weight.shape[0]
        out = self.make((tokens, outputs), x.dtype) if wide is None else self.make((shares, tokens, outputs), wide)
        kinds, arrays = (name_type(x.dtype), name_type(weight.dtype)), (x.address, weight, out.address)
        nbytes = x.nbytes + math.prod(weight.shape) * weight.dtype.size + out.nbytes
        self.launches.append(Product(tokens, outputs, inputs, *kinds, shares, arrays, nbytes))
        return out.as_array()


def count_bytes(names: Sequence[str], arrays: Sequence[DeviceArray]) -> int:
    """Bytes of a launch's inputs, without those of which it reads but a part."""
    return sum(
        math.prod(array.shape) * array.dtype.size
        for name, array in zip(names, arrays, strict=True)
        if name not in SHARED_ARRAYS
    )


class StepMemory:
    """Memory of recorded steps, by its addresses; `allocate(bytes)` gives the address of new one, which stays for good.

    A step takes pieces from the beginning when it is recorded; what it takes beyond the largest one so far is added. So
    all steps together hold hardly more than the largest.
    """

    def __init__(self, allocate: Callable[[int], int]) -> None:
        self._allocate = allocate
        self._chunks: list[tuple[int, int]] = []  # addresses and sizes

    @property
    def nbytes(self) -> int:
        """Bytes that are held for steps."""
        return sum(size for _, size in self._chunks)

    def open(self) -> Callable[[int], int]:
        """What gives one step its pieces, by their bytes."""
        rests = [list(chunk) for chunk in self._chunks]

        def take(size_bytes: int) -> int:
            rest = next((rest for rest in rests if rest[1] >= size_bytes), None)
            if rest is None:
                chunk_bytes = -(-size_bytes // CHUNK_BYTES) * CHUNK_BYTES
                self._chunks.append((self._allocate(chunk_bytes), chunk_bytes))
                rests.append(rest := list(self._chunks[-1]))
            address = rest[0]
            rest[0] += size_bytes
            rest[1] -= size_bytes
            return address

        return take


class Results(Protocol):
    """Numbers on their way to the host."""

    def wait(self) -> Any:
        """The numbers; asked for once."""


class Machine(Protocol):
    """Where recorded launches run, for one thread at a time."""

    multiplies: bool  # whether products by a library are among the launches
    has_boxes: bool  # kernels may bring boxes of matrices into their memory, and multiply them there (`Box`)
    memory: StepMemory  # for results of launches
    processors: int  # that share the threadgroups of a launch; 0 where threadgroups run one after another
    room_bytes: int  # that each processor has for one threadgroup

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that it holds."""

    def drop(self, prepared: Mapping[str, Any]) -> None:
        """Let go of prepared launches."""

    def prepare(self, launches: Sequence[Launch | Product]) -> Any:
        """The launches in a form that `start` takes."""

    def start(self, prepared: Any) -> None:
        """Run prepared launches after what was given before."""

    def write(self, address: int, values: AnyArray) -> None:
        """Copy numbers to the device."""

    def read(self, address: int, size: int, dtype: npt.DTypeLike) -> Results:
        """Have `size` numbers copied to the host."""

    def synchronize(self) -> None:
        """Wait until all is done."""
