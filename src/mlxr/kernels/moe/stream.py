"""One token's experts, their weights streamed through the threadgroups' memory as `linear` streams one weight.

The tiles of all ranks follow one another, and as many threadgroups as the device has multiprocessors share them out.
Those of the second product begin to read weights while the first one ends. Knows no deferred results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.expand import BLOCK_HEADERS
from mlxr.kernels.linear.parts import LAYOUTS, TYPE_NAMES
from mlxr.kernels.linear.stream import TILE_ROWS, StreamPlan, StreamShape, plan_stream
from mlxr.kernels.moe.stacked import Stack

STREAM = Kernel(
    "moe_stream",
    Path(__file__).parent,
    "stream.body",
    ("x", "all_a", "bias", "shares", "chosen", "sizes"),
    ("out",),
    tuple(f"../linear/{name}" for name in (*BLOCK_HEADERS, "units.h", "stream.h", "stream_runs.h", "gate.h")),
    opens_late=True,
    type_names=TYPE_NAMES,
    counts_rows=True,
    cuda_only=True,
)


def describe(stack: Stack, used: int, gate: int) -> StreamShape:
    """All ranks' weights as one."""
    number = LAYOUTS[stack.parts[0].type_name].number
    return StreamShape((number, number), (used * stack.out_features, 0), stack.in_features, gate)


def plan_experts(gpu: Any, stack: Stack, used: int, gate: int) -> StreamPlan | None:
    """How to stream the experts of one token; None where they do not go that way."""
    if not gpu.has_tiles or len(stack.parts) > 1:
        return None
    shape, rows = describe(stack, used, gate), stack.parts[0].rows
    plan = plan_stream(shape, gpu.processors, gpu.room_bytes)
    if plan is None or rows % TILE_ROWS or shape.count_tiles(plan) > rows // TILE_ROWS:
        return None
    return plan if _count_room(shape, plan) <= gpu.room_bytes else None


def _count_room(shape: StreamShape, plan: StreamPlan) -> int:
    """Bytes of a threadgroup's memory; it may hold two rows of x."""
    return shape.count_room(plan) + shape.row_bytes


def multiply_stream(
    gpu: Any, x: Any, stack: Stack, chosen: Any, gate: int, shares: Any, kind: Any, plan: StreamPlan
) -> Any:
    """As `products.multiply_experts` does it, of one token.

    With `shares` it comes after the experts' first product, which let it in when `chosen` was there (products.py).
    """
    numbers, used, part = gpu.launcher.numbers, chosen.shape[1], stack.parts[0]
    shape, is_shared = describe(stack, used, gate), shares is not None
    made = stack.out_features // 2 if gate else stack.out_features
    (out,) = gpu.launcher.launch(
        STREAM,
        [
            x,
            part.raw,
            numbers(0.0) if stack.biases is None else stack.biases,
            numbers(0.0) if shares is None else shares,
            chosen,
            numbers(part.stride),
        ],
        groups=(plan.groups[0], 1, 1),
        threads=32 * plan.simd_groups,
        outputs=[((used, 1, made) if is_shared else (used, made), kind)],
        constants={
            "TYPE_A": shape.types[0],
            "INPUTS": stack.in_features,
            "ROWS": part.rows,
            "USED": used,
            "GROUPS": plan.groups[0],
            "STAGES": plan.stages,
            "TILES": shape.count_tiles(plan),
            "APART": int(is_shared),
            "EARLY": int(is_shared),
            "GATE": gate,
            "BIAS": int(stack.biases is not None),
            "SHARED_OUT": int(is_shared),
        },
        types={"X": x.dtype, "Y": kind},
        room_bytes=_count_room(shape, plan),
    )
    return out
