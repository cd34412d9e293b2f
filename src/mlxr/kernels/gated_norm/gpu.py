"""`gated_norm` on a GPU: one launch, or that of the recurrence before it; its result is what `linear` wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gated_delta.launch import OutputNorm, Recurred
from mlxr.kernels.gated_norm import name_variant
from mlxr.kernels.gpu.deferred import find_parts, settle
from mlxr.kernels.gpu.kernel import LANES, Kernel
from mlxr.kernels.tensor import FloatArray

THREADS, MOST_THREADS = 128, 512
MOST_PIECES = 4  # of a lane, where a SIMD-group has a group
WIDTHS = (8, 4, 1)  # neighbours that a thread takes at a time
NORM = Kernel(
    "gated_norm",
    Path(__file__).parent,
    "norm.body",
    ("x", "gate", "weight", "numbers", "sizes"),
    ("out",),
    ("silu.h", "../gpu/threads.h"),
)
KERNELS = (NORM,)


def gated_norm(
    ctx: Context, x: Any, gate: Any, weight: FloatArray | None, eps: float, width: int, gate_first: bool, first: int
) -> Any:
    """The norm of each group and the gate."""
    gpu, recurred, gate = ctx.gpu, find_parts(x, Recurred), settle(gate)
    gain = None if weight is None else gpu.hold(weight)
    if recurred is not None and gain is not None and not gate_first and width == recurred.columns:
        return recurred.launch(OutputNorm(gate, gain, float(eps), first))
    x = settle(x)
    rows, columns = x.shape
    if gpu.launcher is None:
        return gpu.watch.run_mlx(
            "gated_norm",
            name_variant(weight, gate_first),
            lambda: _compose(gpu, x, gate, gain, eps, width, gate_first, first),
            x,
            gate,
        )
    numbers = gpu.launcher.numbers
    each = next(count for count in WIDTHS if all(one % count == 0 for one in (width, gate.shape[1], first)))
    sharing = choose_threads(width, each)
    threads = max(THREADS, sharing)
    (out,) = gpu.launcher.launch(
        NORM,
        [x, gate, x if gain is None else gain, numbers(float(eps)), numbers(columns, gate.shape[1], first)],
        groups=(-(-(columns // width) // (threads // sharing)), rows, 1),
        threads=threads,
        outputs=[((rows, columns), gpu.operands)],
        constants={
            "WIDTH": width,
            "EACH": sharing,
            "N": each,
            "GATE_FIRST": int(gate_first),
            "SHARED_WEIGHT": int(weight is not None and len(weight) == width),
            "NORMED": int(weight is not None),
        },
        types={"Y": gpu.operands},
    )
    return out


def choose_threads(width: int, each: int) -> int:
    """How many threads have a group, each of which takes so many neighbours at a time: a power of two."""
    pieces = -(-width // each)
    if pieces <= LANES * MOST_PIECES:
        return min(LANES, 1 << (pieces - 1).bit_length())
    return min(MOST_THREADS, max(THREADS, 1 << (-(-pieces // MOST_PIECES) - 1).bit_length()))


def _compose(gpu: Any, x: Any, gate: Any, gain: Any, eps: float, width: int, gate_first: bool, first: int) -> Any:
    mx, (rows, columns) = gpu.mx, x.shape
    gates = gate[:, first : first + columns]
    silu = gates * mx.sigmoid(gates)
    if gain is None:
        return (x * silu).astype(gpu.operands)
    groups = mx.fast.rms_norm((x * silu if gate_first else x).reshape(rows, -1, width), None, eps)
    normed = (groups * gain.reshape(-1, width)).reshape(rows, columns)
    return (normed if gate_first else normed * silu).astype(gpu.operands)
