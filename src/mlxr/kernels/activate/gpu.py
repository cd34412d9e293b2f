"""`activate` on a GPU: in the launch of the product that makes gate and up, or else in one of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.activate.composed import compose
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import find_parts, settle
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.extras import GATES
from mlxr.kernels.linear.gpu import Product, can_gate, gate_product

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
    gate_up: Any,
    kind: str,
    gated: bool,
    up: Any,
    first: int,
    parameters: tuple[float, ...],
) -> Any:
    """act(first half) * second half, or act(gate_up), perhaps times columns of `up`."""
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
            "activate", variant, lambda: compose(gpu.mx, gate_up, kind, gated, up, first, parameters), gate_up
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
            gpu.launcher.numbers(*(parameters or (0.0,))),
        ],
        groups=(-(-columns // (THREADS * width)), rows, 1),
        threads=THREADS,
        outputs=[((rows, columns), gpu.operands)],
        constants={"KIND": GATES[kind], "GATED": int(times), "N": width},
        types={"Y": gpu.operands},
    )
    return out
