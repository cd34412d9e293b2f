"""Results that are not computed yet because the operator after them may do it in the same launch.

A norm waits for the product that reads it, a product for the norm, the gate or the sum that takes it. Whoever cannot
make use of that asks for the array (`settle`). Models and operators' checks see shape and type as of any array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Parts = TypeVar("_Parts")


class Deferred:
    """`compute` gives the array; `parts` is what another operator needs to compute something else instead.

    `made` are arrays of the parts whose computing may begin meanwhile, if it is worth while.
    """

    __slots__ = ("_compute", "_value", "dtype", "made", "parts", "shape")

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, parts: Any, compute: Callable[[], Any], made: tuple[Any, ...] = ()
    ) -> None:
        self.shape, self.dtype, self.parts, self.made = shape, dtype, parts, made
        self._compute, self._value = compute, None

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def started(self) -> tuple[Any, ...]:
        """The arrays to begin with: the result if it is there, else those of its parts."""
        return self.made if self.is_open else (self._value,)

    @property
    def is_open(self) -> bool:
        """Whether nobody has asked for the array yet."""
        return self._value is None

    def settle(self) -> Any:
        """Compute the array, unless that has happened, and return it."""
        if self._value is None:
            self._value = self._compute()
        return self._value


def find_parts(value: Any, kind: type[_Parts]) -> _Parts | None:
    """The parts of a deferred result that nobody has asked for yet, if they are of this kind."""
    return value.parts if isinstance(value, Deferred) and value.is_open and isinstance(value.parts, kind) else None


def settle(value: Any) -> Any:
    """The array of a deferred result; other values as they are."""
    return value.settle() if isinstance(value, Deferred) else value
