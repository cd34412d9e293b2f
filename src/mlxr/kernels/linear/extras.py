"""What a product may do in its own launch besides multiplying: a bias, the norm of x before it, a sum after it.

Every kernel of products takes the arrays for that behind the weights, and constants say which of them are read.
"""

from __future__ import annotations

from typing import Any


def list_extras(gpu: Any, bias: Any, norm: tuple[Any, float] | None, residual: Any) -> list[Any]:
    """The bias, the norm's weight, the residual, and the norm's epsilon; zeros stand for what is None."""
    numbers = gpu.launcher.numbers
    none = numbers(0.0)
    weight, eps = (none, none) if norm is None else (norm[0], numbers(norm[1]))
    return [none if bias is None else bias, weight, none if residual is None else residual, eps]
