"""Products of few rows with 16-bit weights, which stream through a ring in the threadgroup's memory: plan and launch.

Where a weight has too few rows to keep the device busy, threadgroups share its inputs, and whoever reads the result
adds the shares up. Knows no deferred results.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxr.kernels.gpu.kernel import Kernel

SIMD_GROUPS = 4
GROUP_ROWS = 64
PIECE_COLUMNS = 64
TILE_TOKENS = 8
MAX_TOKENS = 32
WANTED_GROUPS = 512  # threadgroups that keep a large GPU busy
RESIDENT = 4
RING = Kernel(
    "linear_ring", Path(__file__).parent, "ring.body", ("x", "weights", "sizes"), ("out",), ("ring.h", "gate.h")
)


@dataclass(frozen=True, slots=True)
class RingPlan:
    """Tiles of tokens, pieces of the ring, and how many threadgroups share the inputs of the same outputs."""

    token_tiles: int
    stages: int
    shares: int = 1


def choose_ring(tokens: int, outputs: int, inputs: int, *, shared: bool) -> RingPlan:
    """What was fastest on one H200; one share unless `shared`."""
    tiles = next(tiles for tiles in (1, 2, 4) if tiles * TILE_TOKENS >= tokens)
    shares = 1
    while shared and 2 * shares * outputs <= WANTED_GROUPS * GROUP_ROWS and inputs % (2 * shares * PIECE_COLUMNS) == 0:
        shares *= 2
    return RingPlan(tiles, 5 if tiles == 1 else 4, shares)


def choose_shares(outputs: int, inputs: int) -> int:
    """Into how many shares of the inputs a library's product is best split where its sum comes later anyway."""
    return 2 if outputs < 8192 and inputs % 128 == 0 else 1


def takes_ring(x: Any, weight: Any) -> bool:
    """Whether `multiply_ring` multiplies these."""
    return x.dtype == weight.dtype and weight.dtype.size == 2 and weight.shape[1] % PIECE_COLUMNS == 0


def multiply_ring(gpu: Any, x: Any, weight: Any, gate: int, *, shared: bool, plan: RingPlan | None = None) -> Any:
    """x (tokens, inputs) times weight (outputs, inputs), both of one 16-bit type: (tokens, outputs).

    `gate` 1 silu, 2 gelu: the upper half of the rows gates the lower one. `shared`: the result is (shares, tokens,
    outputs) in f32, still to be added up. `plan` is chosen unless given.
    """
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    plan = plan or choose_ring(tokens, outputs, inputs, shared=shared)
    made, each = (outputs // 2, GROUP_ROWS // 2) if gate else (outputs, GROUP_ROWS)
    kind = gpu.mx.float32 if shared else gpu.operands if gate else gpu.activations
    (out,) = gpu.launcher.launch(
        RING,
        [x, weight, gpu.launcher.numbers(tokens)],
        groups=(-(-made // each), plan.shares, 1),
        threads=32 * SIMD_GROUPS,
        outputs=[((plan.shares, tokens, made) if shared else (tokens, made), kind)],
        constants={
            "ROWS": outputs,
            "INPUTS": inputs,
            "SHARES": plan.shares,
            "N": plan.token_tiles,
            "GATE": gate,
            "STAGES": plan.stages,
            "RESIDENT": RESIDENT,
        },
        types={"K": weight.dtype, "Y": kind},
    )
    return out
