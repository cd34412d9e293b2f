"""`activate` as MLX's operations, for devices without our kernels."""

from __future__ import annotations

import math
from typing import Any


def compose(mx: Any, gate_up: Any, kind: str, gated: bool, up: Any, first: int, parameters: tuple[float, ...]) -> Any:
    """act(first half) * second half, or act(gate_up), perhaps times columns of `up`."""
    gate = gate_up
    if gated:
        half = gate_up.shape[1] // 2
        gate, up = gate_up[:, :half], gate_up[:, half:]
    elif up is not None:
        up = up[:, first : first + gate.shape[1]]
    activated = _act(mx, gate, kind, *parameters)
    if up is None:
        return activated
    if kind == "clamped_swiglu":
        up = mx.clip(up, -7.0, 7.0) + 1
    return activated * up


def _act(mx: Any, x: Any, kind: str, *numbers: float) -> Any:
    match kind:
        case "silu":
            return x * mx.sigmoid(x)
        case "gelu_tanh":
            return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
        case "gelu_erf":
            return 0.5 * x * (1 + mx.erf(x / math.sqrt(2)))
        case "relu_squared":
            return mx.square(mx.maximum(x, 0.0))
        case "xielu":
            alpha_n, alpha_p, beta, eps = numbers
            below = alpha_n * (mx.expm1(mx.minimum(x, min(eps, 0.0))) - x)
            return mx.where(x > 0, alpha_p * mx.square(x), below) + beta * x
        case _:
            bounded = mx.minimum(x, 7.0)
            return bounded * mx.sigmoid(1.702 * bounded)
