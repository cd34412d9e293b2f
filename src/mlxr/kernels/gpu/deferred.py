"""Results that are not computed yet because the operator after them may do it in the same launch.

A norm waits for the product that reads it, a product for the norm, the gate or the sum that takes it. Whoever cannot
make use of that asks for the array (`settle`). Models and operators' checks see shape and type as of any array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Deferred:
    """`compute` gives the array; `parts` is what another operator needs to compute something else instead."""

    __slots__ = ("_compute", "_value", "dtype", "parts", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: Any, parts: Any, compute: Callable[[], Any]) -> None:
        self.shape, self.dtype, self.parts = shape, dtype, parts
        self._compute, self._value = compute, None

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def is_open(self) -> bool:
        """Whether nobody has asked for the array yet."""
        return self._value is None

    def settle(self) -> Any:
        """Compute the array, unless that has happened, and return it."""
        if self._value is None:
            self._value = self._compute()
        return self._value


def settle(value: Any) -> Any:
    """The array of a deferred result; other values as they are."""
    return value.settle() if isinstance(value, Deferred) else value
