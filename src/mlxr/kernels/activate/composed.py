"""`activate` as MLX's operations, for devices without our kernels."""

from __future__ import annotations

import math
from typing import Any


def compose(mx: Any, gate_up: Any, kind: str, gated: bool, up: Any, first: int) -> Any:
    """act(first half) * second half, or act(gate_up), perhaps times columns of `up`."""
    gate = gate_up
    if gated:
        half = gate_up.shape[1] // 2
        gate, up = gate_up[:, :half], gate_up[:, half:]
    elif up is not None:
        up = up[:, first : first + gate.shape[1]]
    if up is None:
        return _act(mx, gate, kind)
    if kind == "clamped_swiglu":
        up = mx.clip(up, -7.0, 7.0) + 1
    return _act(mx, gate, kind) * up


def _act(mx: Any, x: Any, kind: str) -> Any:
    match kind:
        case "silu":
            return x * mx.sigmoid(x)
        case "gelu_tanh":
            return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
        case "gelu_erf":
            return 0.5 * x * (1 + mx.erf(x / math.sqrt(2)))
        case "relu_squared":
            return mx.square(mx.maximum(x, 0.0))
        case _:
            bounded = mx.minimum(x, 7.0)
            return bounded * mx.sigmoid(1.702 * bounded)
