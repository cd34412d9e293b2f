"""`short_conv` on a GPU: one launch, which reads and writes states in their pool.

Sequences of one token each have a kernel of their own with the same bits, whose threads take neighbouring channels.
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
from mlxr.kernels.short_conv import Convolution, reference

THREADS = 128
STEP_CHANNELS = 4  # of a thread: 16 bytes of a state
INPUTS = ("x", "weight", "bias", "owners", "reads", "writes", "starts", "pool", "sizes")
CONV = Kernel("short_conv", Path(__file__).parent, "conv.body", INPUTS, ("out",))
STEP = Kernel("short_conv_step", Path(__file__).parent, "step.body", INPUTS, ("out",))
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
            lambda own, states: reference.short_conv(ctx, own, conv, batch, states, first, at),
        )
    numbers, places = gpu.launcher.numbers, place_states(gpu, batch)
    tokens, slot_floats, constants = batch.tokens, pool.shape[1], {}
    if batch.is_step:
        kernel, rows = STEP, tokens
        offsets = (channels, x.shape[1], first, slot_floats, at)
        width = STEP_CHANNELS if all(one % STEP_CHANNELS == 0 for one in offsets) else 1
        constants["N"] = width
    else:
        kernel, rows, width = CONV, tokens + batch.sequences * (taps - 1), 1
    (out,) = gpu.launcher.launch(
        kernel,
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
        constants={"TAPS": taps, "KIND": _KINDS[conv.kind], "BIAS": int(conv.bias is not None), **constants},
        types={"Y": gpu.activations},
    )
    gpu.pending = [out]
    return out
