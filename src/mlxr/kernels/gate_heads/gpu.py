"""`gate_heads` on a GPU: one launch, whose result is what `linear` wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.kernel import Kernel

THREADS = 256
GATE = Kernel("gate_heads", Path(__file__).parent, "gate.body", ("x", "gates", "sizes"), ("out",))
KERNELS = (GATE,)


def gate_heads(ctx: Context, x: Any, gates: Any) -> Any:
    """x times the sigmoid of its gate."""
    gpu, x, gates = ctx.gpu, settle(x), settle(gates)
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
