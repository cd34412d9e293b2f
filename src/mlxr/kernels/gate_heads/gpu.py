"""`gate_heads` on a GPU: one launch, whose result is what `linear` wants.

Rows with a gate that is a product of one output are left, with that product, to the sum that takes them: see `add`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.add.summands import Gated
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import Deferred, settle
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.gpu import find_dot

THREADS = 256
GATE = Kernel("gate_heads", Path(__file__).parent, "gate.body", ("x", "gates", "sizes"), ("out",))
KERNELS = (GATE,)


def gate_heads(ctx: Context, x: Any, gates: Any) -> Any:
    """x times the sigmoid of its gate."""
    dot = find_dot(gates)
    if dot is not None and dot.x.shape == x.shape:
        return Deferred(x.shape, ctx.gpu.operands, Gated(x, dot), lambda: _gate(ctx, settle(x), settle(gates)))
    return _gate(ctx, settle(x), settle(gates))


def _gate(ctx: Context, x: Any, gates: Any) -> Any:
    gpu = ctx.gpu
    (rows, columns), count = x.shape, gates.shape[1]
    if gpu.launcher is None:

        def compose() -> Any:
            heads = x.reshape(rows, count, columns // count) * gpu.mx.sigmoid(gates)[:, :, None]
            return heads.reshape(rows, columns).astype(gpu.operands)

        return gpu.watch.run_mlx("gate_heads", "elements" if count == columns else "heads", compose, x, gates)
    (out,) = gpu.launcher.launch(
        GATE,
        [x, gates, gpu.launcher.numbers(columns, count)],
        groups=(-(-columns // THREADS), rows, 1),
        threads=THREADS,
        outputs=[((rows, columns), gpu.operands)],
        types={"Y": gpu.operands},
    )
    return out
