"""The launch that both recurrences are on a GPU: token by token, columns of states in registers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.kernel import LANES, Kernel
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.gpu.states import place_states
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import FloatArray

SIMD_GROUPS = 4
COLUMN_LANES = 8  # lanes that share a column
MOST_BLOCK, BLOCK_ROWS = 16, 2048  # tokens of a block, and tokens times rows, which lie in a threadgroup's memory
RESIDENT, RESIDENT_ROWS = 4, 256  # threadgroups that fit on a multiprocessor without spills, up to so many rows
MOST_ROWS = 64 * COLUMN_LANES  # of a column, which lies in the registers of its lanes
INPUTS = (
    "qkv", "gates", "rates", "bias", "skip", "reads", "writes", "starts", "pool", "numbers", "sizes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Heads:
    """Key heads of `rows`, value heads of `columns`, and where in a row of qkv queries, keys and values begin."""

    key_heads: int
    value_heads: int
    rows: int
    columns: int
    starts: tuple[int, int, int]


def make_kernel(name: str) -> Kernel:
    """The kernel under the name of an operator."""
    return Kernel(name, Path(__file__).parent, "recur.body", INPUTS, ("out",), ("recur.h",))


def choose_block(rows: int) -> int:
    """For how many tokens at a time a threadgroup makes what its columns share: some for each SIMD-group."""
    return max(SIMD_GROUPS, min(MOST_BLOCK, BLOCK_ROWS // rows // SIMD_GROUPS * SIMD_GROUPS))


def launch_recurrence(
    ctx: Context,
    kernel: Kernel,
    qkv: Any,
    gates: Any,
    heads: Heads,
    arrays: tuple[FloatArray, FloatArray, FloatArray | None],
    batch: RaggedBatch,
    pool: Pool,
    places: tuple[int, int],
    constants: Mapping[str, int],
    eps: float = 0.0,
) -> Any:
    """`arrays` are rates, bias and what is skipped; `places` the first column of gates and the first float of slots."""
    gpu, (rates, bias, skip), (first, at) = ctx.gpu, arrays, places
    numbers, placed = gpu.launcher.numbers, place_states(gpu, batch)
    columns = SIMD_GROUPS * LANES // COLUMN_LANES  # of a threadgroup
    (out,) = gpu.launcher.launch(
        kernel,
        [
            qkv,
            gates,
            gpu.hold(rates),
            gpu.hold(bias),
            numbers(0.0) if skip is None else gpu.hold(skip),
            placed.reads,
            placed.writes,
            placed.starts,
            pool.array,
            numbers(float(eps), float(heads.rows**-0.5)),
            numbers(
                qkv.shape[1],
                *heads.starts,
                gates.shape[1],
                first,
                heads.key_heads,
                heads.value_heads,
                heads.columns,
                pool.shape[1],
                at,
            ),
        ],
        groups=(-(-heads.columns // columns), heads.value_heads, batch.sequences),
        threads=SIMD_GROUPS * LANES,
        outputs=[((batch.tokens, heads.value_heads * heads.columns), gpu.activations)],
        constants={
            "ROWS": heads.rows,
            "LANES": COLUMN_LANES,
            "BLOCK": choose_block(heads.rows),
            "RESIDENT": RESIDENT if heads.rows <= RESIDENT_ROWS and not constants["DECAYS"] else 1,
            "SKIP": int(skip is not None),
            **constants,
        },
        types={"Y": gpu.activations},
    )
    gpu.pending = [out]
    return out
