"""Deferred results, which are not computed yet because the next operator may do it in its own launch.

A norm is deferred to the product that reads it, a product to the norm, the gate or the sum that takes it. An operator
that cannot use that computes the array (`settle`). Models and operators' checks see shape and type as of any array.

Sums are deferred, too (`Summands`): their reader adds them up, nearly always the norm that follows. The bodies that can
are those of `add` and of the norms (`elementwise/summands.h`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, overload

from mlxr.core.frozen import frozen
from mlxr.kernels.tensor import DeviceArray, NumberType

_Parts = TypeVar("_Parts")


class Deferred:
    """A deferred result: `compute` returns the array; another operator may compute its own result from `parts` instead.

    `made` are arrays of the parts that may already be computed meanwhile.
    """

    __slots__ = ("_compute", "_value", "dtype", "made", "parts", "shape")

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: NumberType,
        parts: object,
        compute: Callable[[], DeviceArray],
        made: tuple[Value, ...] = (),
    ) -> None:
        self.shape, self.dtype, self.parts, self.made = shape, dtype, parts, made
        self._compute = compute
        self._value: DeviceArray | None = None

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def started(self) -> tuple[Value, ...]:
        """The arrays to start computing: the result if it exists, otherwise those of its parts."""
        return self.made if self._value is None else (self._value,)

    @property
    def is_open(self) -> bool:
        """True if the array has not been computed yet."""
        return self._value is None

    def settle(self) -> DeviceArray:
        """Compute the array, unless that has happened, and return it."""
        if self._value is None:
            self._value = self._compute()
        return self._value


Value = DeviceArray | Deferred


def find_parts(value: object, kind: type[_Parts]) -> _Parts | None:
    """Return the parts of a deferred result that is still open, if they are of this kind; otherwise None."""
    return value.parts if isinstance(value, Deferred) and value.is_open and isinstance(value.parts, kind) else None


@overload
def settle(value: Value) -> DeviceArray: ...
@overload
def settle(value: None) -> None: ...
def settle(value: Value | None) -> DeviceArray | None:
    """Return the array of a deferred result; other values unchanged."""
    return value.settle() if isinstance(value, Deferred) else value


@frozen(eq=False)
class Dot:
    """The dot products of the rows of x (rows, columns) with a weight (1, columns), both of plain numbers."""

    x: DeviceArray
    weight: DeviceArray


@frozen(eq=False)
class Gated:
    """Rows of `y`, perhaps a deferred product, each multiplied by the sigmoid of its `dot`."""

    y: Value
    dot: Dot


@frozen(eq=False)
class Summands:
    """Arrays whose sum times `factor` is wanted: `array` (rows, columns), or shares of it (shares, rows, columns), and
    perhaps `other`, in the same form, whose rows are multiplied by the sigmoids of `dot`, if there is one."""

    array: DeviceArray
    other: DeviceArray | None = None
    dot: Dot | None = None
    factor: float = 1.0

    @property
    def arrays(self) -> tuple[DeviceArray, ...]:
        """The arrays to add up."""
        return (self.array,) if self.other is None else (self.array, self.other)

    @property
    def is_plain(self) -> bool:
        """True if there is only `array`, without a factor."""
        return self.other is None and self.factor == 1.0


def list_inputs(summands: Summands | None, none: DeviceArray) -> list[DeviceArray]:
    """Return the inputs of a kernel: array, other, x and weight of the dot products, with `none` for missing ones."""
    if summands is None:
        return [none] * 4
    pair = (none, none) if summands.dot is None else (summands.dot.x, summands.dot.weight)
    return [summands.array, none if summands.other is None else summands.other, *pair]


def count_shares(array: DeviceArray | None) -> int:
    """Return the number of arrays (rows, columns) in an array."""
    if array is None:
        return 0
    return array.shape[0] if array.ndim == 3 else 1


def list_constants(summands: Summands | None) -> dict[str, int]:
    """Return the constants of a kernel that say what there is besides `array`."""
    if summands is None:
        return {"OTHERS": 0, "GATE": 0}
    return {"OTHERS": count_shares(summands.other), "GATE": int(summands.dot is not None)}
