"""`activate` on a GPU: in the launch of the product that makes gate and up, or else in one of its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import Deferred, settle
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.gpu import can_gate, gate_product

THREADS = 256
GATE = Kernel("activate", Path(__file__).parent, "gate.body", ("gate_up", "sizes"), ("out",))
KERNELS = (GATE,)


def activate(ctx: Context, gate_up: Any, kind: str) -> Any:
    """act(first half) * second half."""
    gpu, (rows, columns) = ctx.gpu, gate_up.shape
    half = columns // 2
    if isinstance(gate_up, Deferred) and gate_up.is_open and can_gate(ctx, gate_up.parts):
        return gate_product(ctx, gate_up.parts, kind)
    gate_up = settle(gate_up)
    if gpu.launcher is None:
        return _compose(gpu.mx, gate_up[:, :half], kind) * gate_up[:, half:]
    width = 8 if half % 8 == 0 else 1
    (out,) = gpu.launcher.launch(
        GATE,
        [gate_up, gpu.launcher.numbers(half)],
        groups=(-(-half // (THREADS * width)), rows, 1),
        threads=THREADS,
        outputs=[((rows, half), gpu.operands)],
        constants={"GELU": int(kind == "gelu_tanh"), "N": width},
        types={"Y": gpu.operands},
    )
    return out


def _compose(mx: Any, x: Any, kind: str) -> Any:
    if kind == "silu":
        return x * mx.sigmoid(x)
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
