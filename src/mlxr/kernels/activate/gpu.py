"""`activate` on a GPU: in the launch of the product that makes gate and up, or in its own; by MLX's operations on
devices without our kernels."""

from __future__ import annotations

import math
from pathlib import Path

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import Value, find_parts, settle
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.gpu.mlx import Mlx
from mlxr.kernels.linear.gpu import Product, can_gate, gate_product
from mlxr.kernels.linear.parts import GATES
from mlxr.kernels.tensor import DeviceArray

THREADS = 256
GATE = Kernel(
    "activate",
    Path(__file__).parent,
    "gate.body",
    ("gate", "up", "sizes", "parameters"),
    ("out",),
    ("../linear/gate.h",),
)
KERNELS = (GATE,)


def activate(
    ctx: Context,
    gate_up: Value,
    kind: str,
    gated: bool,
    up: Value | None = None,
    first: int = 0,
    parameters: tuple[float, ...] = (),
) -> DeviceArray:
    """Return act(first half) * second half, or act(gate_up), perhaps times columns of `up`."""
    gpu, (rows, columns) = ctx.gpu, gate_up.shape
    if gated:
        columns //= 2
        product = find_parts(gate_up, Product)
        if product is not None and not parameters and can_gate(ctx, product):
            return gate_product(ctx, product, kind)
    gate_up, up = settle(gate_up), settle(up)
    times = gated or up is not None
    if gpu.launcher is None:
        variant = kind if times else f"{kind}+ungated"
        return gpu.watch.run_mlx(
            "activate", variant, lambda: _compose(gpu.mx, gate_up, kind, gated, up, first, parameters), gate_up
        )
    if gated:
        up, first = gate_up, columns
    up_columns = gate_up.shape[1] if up is None else up.shape[1]
    width = 8 if columns % 8 == first % 8 == up_columns % 8 == 0 else 1
    (out,) = gpu.launcher.launch(
        GATE,
        [
            gate_up,
            gate_up if up is None else up,
            gpu.launcher.numbers(columns, gate_up.shape[1], up_columns, first),
            gpu.launcher.numbers(*(*parameters, 0.0, 0.0, 0.0, 0.0)[:4]),
        ],
        groups=(-(-columns // (THREADS * width)), rows, 1),
        threads=THREADS,
        outputs=[((rows, columns), gpu.operands)],
        constants={"KIND": GATES[kind], "GATED": int(times), "N": width},
        types={"Y": gpu.operands},
    )
    return out


def _compose(
    mx: Mlx,
    gate_up: DeviceArray,
    kind: str,
    gated: bool,
    up: DeviceArray | None,
    first: int,
    parameters: tuple[float, ...],
) -> DeviceArray:
    """Return act(first half) * second half, or act(gate_up), perhaps times columns of `up`."""
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
    if kind == "limited_swiglu":
        up = mx.clip(up, -parameters[0], parameters[0])
    return activated * up


def _act(mx: Mlx, x: DeviceArray, kind: str, *numbers: float) -> DeviceArray:
    match kind:
        case "silu":
            return x * mx.sigmoid(x)
        case "gelu_tanh":
            return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
        case "gelu_erf":
            return 0.5 * x * (1 + mx.erf(x / math.sqrt(2)))
        case "relu_squared":
            return mx.square(mx.maximum(x, 0.0))
        case "clamp":
            return mx.clip(x, -numbers[0], numbers[0])
        case "relu":
            return mx.maximum(x, 0.0)
        case "xielu":
            alpha_n, alpha_p, beta, eps = numbers
            below = alpha_n * (mx.expm1(mx.minimum(x, min(eps, 0.0))) - x)
            return mx.where(x > 0, alpha_p * mx.square(x), below) + beta * x
        case "limited_swiglu":
            bounded = mx.minimum(x, numbers[0])
            return bounded * mx.sigmoid(bounded)
        case _:
            bounded = mx.minimum(x, 7.0)
            return bounded * mx.sigmoid(1.702 * bounded)
