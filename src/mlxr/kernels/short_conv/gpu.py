"""`short_conv` on a GPU: one launch, which reads and writes states in their pool.

Threads take neighbouring channels of some rows. Sequences of one token each have a kernel of their own with the same
bits, which reads a state once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.gpu.states import compose_on_host, place_states
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.short_conv import Convolution, run_short_conv

THREADS = 128
WIDTH = 4  # channels of a thread: 16 bytes of a state
ROWS = 8  # of a thread
INPUTS = ("x", "weight", "bias", "owners", "reads", "writes", "starts", "pool", "sizes")
CONV = Kernel("short_conv", Path(__file__).parent, "conv.body", INPUTS, ("out",), ("input.h",))
STEP = Kernel("short_conv_step", Path(__file__).parent, "step.body", INPUTS, ("out",), ("input.h",))
KERNELS = (CONV, STEP)
_KINDS = {"plain": 0, "silu": 1, "gated": 2}


def short_conv(ctx: Context, x: Any, conv: Convolution, batch: RaggedBatch, pool: Pool, first: int, at: int) -> Any:
    """The convolution of the batch's tokens."""
    gpu, x, (taps, channels) = ctx.gpu, settle(x), conv.weight.shape
    if gpu.launcher is None:
        return compose_on_host(
            ctx,
            "short_conv",
            conv.kind,
            (x,),
            pool,
            lambda own, states: run_short_conv(ctx, own, conv, batch, states, first, at),
        )
    numbers, places = gpu.launcher.numbers, place_states(gpu, batch)
    tokens, slot_floats = batch.tokens, pool.shape[1]
    width = WIDTH if all(one % WIDTH == 0 for one in (channels, x.shape[1], first, slot_floats, at)) else 1
    rows = tokens if batch.is_step else -(-tokens // ROWS) + batch.sequences
    (out,) = gpu.launcher.launch(
        STEP if batch.is_step else CONV,
        [
            x,
            gpu.hold(conv.weight),
            numbers(0.0) if conv.bias is None else gpu.hold(conv.bias),
            gpu.place(batch).owners,
            places.reads,
            places.writes,
            places.starts,
            pool.array,
            numbers(x.shape[1], first, channels, tokens, slot_floats, at),
        ],
        groups=(-(-channels // (THREADS * width)), rows, 1),
        threads=THREADS,
        outputs=[((tokens, channels), gpu.activations)],
        constants={
            "TAPS": taps,
            "KIND": _KINDS[conv.kind],
            "BIAS": int(conv.bias is not None),
            "N": width,
            "ROWS": 1 if batch.is_step else ROWS,
        },
        types={"X": x.dtype, "Y": gpu.activations},
    )
    gpu.pending = [out]
    return out
