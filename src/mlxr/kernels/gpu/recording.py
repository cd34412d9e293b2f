"""A step as a list of launches over fixed addresses, made by running the operators once over stand-ins for arrays.

Operators launch as always, but a launch is only noted, and its results are `Buffer`s: shape, type and address, without
an array. Anything else than our launches fails on a Buffer, so such steps are not recorded. The memory of a result is
reused when nobody holds it any more, since launches run one after another. Recorded launches run on a `Machine`,
whatever the target; all steps share their memory (`StepMemory`).
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

import numpy.typing as npt

from mlxr.core.frozen import frozen
from mlxr.kernels.gpu.kernel import Box, Kernel, Variant, name_type
from mlxr.kernels.tensor import DeviceArray, NumberType

AnyArray = npt.NDArray[Any]
ALIGNMENT_BYTES = 256
CHUNK_BYTES = 2 * 2**20  # the least that a driver gives
# names of arrays of which a launch reads or writes only a part
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
        """The size in bytes."""
        return int(math.prod(self.shape) * self.dtype.size)

    def reshape(self, *shape: int) -> Buffer:
        """Return the same numbers in another shape, whose lengths are all given."""
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(f"{self.shape} cannot become {shape}")
        return Buffer(shape, self.dtype, self.address, self)

    def astype(self, dtype: NumberType, /) -> Buffer:
        """Return the buffer itself; TypeError for another type, which would take a launch."""
        if dtype != self.dtype:
            raise TypeError(f"a {self.dtype} buffer is not {dtype}")
        return self

    def as_array(self) -> DeviceArray:
        """Return the buffer typed as an array, for operators."""
        return cast(DeviceArray, self)

    def part(self, start: int, shape: tuple[int, ...]) -> Buffer:
        """Return a part of this shape, from number `start` on."""
        return Buffer(shape, self.dtype, self.address + start * self.dtype.size, self)


@frozen(eq=False)
class Launch:
    """One launch; `arrays` are inputs, then outputs: addresses, or MLX's arrays if addresses are not known yet.

    `boxes` are those of the first inputs, which the kernel loads in boxes; `nbytes` are the bytes that it reads and
    writes, and `rows` the rows of experts that it multiplies.
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
        """Return the same launch with its last result at `address`."""
        return replace(self, arrays=(*self.arrays[:-1], address))


@frozen(eq=False)
class Product:
    """A library's product of x (tokens, inputs) and a weight (outputs, inputs); `arrays` are x, weight and result.

    If `shares` is 0, the result has the type of x. Otherwise it is (shares, tokens, outputs) in f32, each from its own
    inputs.
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
    """The arguments of a launch, and its numbers of threads."""

    kernel: Kernel
    inputs: Sequence[DeviceArray]
    groups: tuple[int, int, int]  # threadgroups on each axis
    threads: int  # threads of a threadgroup
    outputs: Sequence[tuple[tuple[int, ...], NumberType]]  # shape and type of each array that it makes
    constants: Mapping[str, int]
    types: Mapping[str, NumberType]
    room_bytes: int  # bytes of a threadgroup's memory for a ROOM of the body
    boxes: Sequence[Box]  # boxes of the first inputs

    @property
    def rows(self) -> int:
        """The rows of experts that it multiplies."""
        return self.kernel.count_rows(self.outputs[0][0])

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for launches with the same compiled kernel; it takes a tenth of the time of `variant`."""
        inputs, outputs = [array.dtype for array in self.inputs], [kind for _, kind in self.outputs]
        return self.kernel, *self.constants.items(), *self.types.items(), *inputs, *outputs

    @property
    def variant(self) -> Variant:
        """The variant in which the kernel is compiled for it."""
        kinds = (array.dtype for array in self.inputs), (kind for _, kind in self.outputs)
        return Variant.of(self.constants, self.types, *kinds)


class Launches(ABC):
    """The object by which operators launch kernels: MLX's launcher, or the recorder of a step."""

    is_lazy: bool  # True if launches are computed later than they are made

    @abstractmethod
    def numbers(self, *values: float) -> DeviceArray:
        """Return sizes or other numbers that a body reads at run time, as an array on the device."""

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
        """Launch `groups` threadgroups and return the arrays made; `outputs` are the shape and type of each.

        On CUDA, a constant RESIDENT says how many threadgroups must fit on a multiprocessor, which bounds the registers
        of a thread. `room_bytes` are the bytes of a threadgroup's memory for a ROOM of the body. `boxes` are those of
        the first inputs. Raises TypeError for launches with boxes by MLX, and for a `cuda_only` kernel on Metal.
        """
        template = {"THREADS": threads, **(constants or {})}
        return self._launch(Call(kernel, inputs, groups, threads, outputs, template, types or {}, room_bytes, boxes))

    @abstractmethod
    def _launch(self, call: Call) -> list[DeviceArray]: ...


class Recorder(Launches):
    """The launcher while a step is recorded. `allocate(bytes)` returns addresses, which stay valid."""

    is_lazy = True

    def __init__(
        self, numbers: Callable[..., DeviceArray], allocate: Callable[[int], int], *, multiplies: bool
    ) -> None:
        self._numbers, self._allocate, self._multiplies = numbers, allocate, multiplies
        self.launches: list[Launch | Product] = []
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def numbers(self, *values: float) -> DeviceArray:
        """Return numbers as the launcher does."""
        return self._numbers(*values)

    def take_launches(self) -> list[Launch | Product]:
        """Return the launches since the last call."""
        launches, self.launches = self.launches, []
        return launches

    def make(self, shape: tuple[int, ...], dtype: NumberType) -> Buffer:
        """Return a buffer whose memory is reused when nobody holds it."""
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
        """Multiply x (tokens, inputs) by weight (outputs, inputs), in the type of x, or as `shares` in type `wide`."""
        if not self._multiplies:
            raise TypeError("products are not recorded here")
        (tokens, inputs), outputs = x.shape, weight.shape[0]
        out = self.make((tokens, outputs), x.dtype) if wide is None else self.make((shares, tokens, outputs), wide)
        kinds, arrays = (name_type(x.dtype), name_type(weight.dtype)), (x.address, weight, out.address)
        nbytes = x.nbytes + math.prod(weight.shape) * weight.dtype.size + out.nbytes
        self.launches.append(Product(tokens, outputs, inputs, *kinds, shares, arrays, nbytes))
        return out.as_array()


def count_bytes(names: Sequence[str], arrays: Sequence[DeviceArray]) -> int:
    """Return the bytes of a launch's inputs, without those of which it reads only a part."""
    return sum(
        math.prod(array.shape) * array.dtype.size
        for name, array in zip(names, arrays, strict=True)
        if name not in SHARED_ARRAYS
    )


class StepMemory:
    """Memory of recorded steps, by addresses; `allocate(bytes)` returns the address of new memory, which stays.

    Each step takes pieces from the beginning when it is recorded; memory is added only if it needs more than the
    largest one so far. So all steps together hold hardly more than the largest.
    """

    def __init__(self, allocate: Callable[[int], int]) -> None:
        self._allocate = allocate
        self._chunks: list[tuple[int, int]] = []  # addresses and sizes

    @property
    def nbytes(self) -> int:
        """Bytes that are held for steps."""
        return sum(size for _, size in self._chunks)

    def open(self) -> Callable[[int], int]:
        """Return a function that gives one step its pieces: it takes bytes and returns an address."""
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
        """Wait for the numbers and return them; to be called once."""


class Machine(Protocol):
    """A device that runs recorded launches, for one thread at a time."""

    multiplies: bool  # True if launches may be products by a library
    has_boxes: bool  # True if kernels may load boxes of matrices into their memory, and multiply them there (`Box`)
    memory: StepMemory  # memory for results of launches
    processors: int  # number that share the threadgroups of a launch; 0 if threadgroups run one after another
    room_bytes: int  # bytes that each processor has for one threadgroup

    @property
    def held_bytes(self) -> int:
        """Bytes of the device's memory that it holds."""

    def drop(self, prepared: Mapping[str, Any]) -> None:
        """Free the memory of prepared launches."""

    def prepare(self, launches: Sequence[Launch | Product]) -> Any:
        """Return the launches in a form that `start` takes."""

    def start(self, prepared: Any) -> None:
        """Run prepared launches after all earlier work."""

    def write(self, address: int, values: AnyArray) -> None:
        """Copy numbers to the device."""

    def read(self, address: int, size: int, dtype: npt.DTypeLike) -> Results:
        """Start copying `size` numbers to the host."""

    def synchronize(self) -> None:
        """Wait until all is done."""
