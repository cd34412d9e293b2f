"""By what a norm multiplies while it adds: what a block adds to the residual stream, and the sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Scales:
    """The sum is (x + residual * the scale `residual`) * the scale `total`."""

    residual: float = 1.0
    total: float = 1.0

    @property
    def change(self) -> bool:
        """Whether they change anything."""
        return self.residual != 1.0 or self.total != 1.0

    def add(self, x: Any, residual: Any | None) -> Any:
        """Return the sum of arrays of any kind, each step rounded to their type."""
        if residual is None or not self.change:
            return x if residual is None else x + residual
        return (x + self.residual * residual) * self.total
