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
STEP_LANES = (16, 8)  # that have a row of the columns of a step's threadgroup: the first that suits these
STEP_PARTS, STEP_COLUMNS, STEP_ROWS = 8, 4, 128  # of a column; of a lane; that its registers hold at most
STEP_THREADS = 512  # of a multiprocessor, whose registers they share
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


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The kernels of an operator: for any batch, and for sequences of one token each, with the same bits."""

    any: Kernel
    step: Kernel


def make_recurrence(name: str) -> Recurrence:
    """The kernels under the name of an operator."""

    def make(name: str, body: str) -> Kernel:
        return Kernel(name, Path(__file__).parent, body, INPUTS, ("out",), ("recur.h",))

    return Recurrence(make(name, "recur.body"), make(f"{name}_step", "step.body"))


def choose_step_lanes(heads: Heads, offsets: tuple[int, ...]) -> int | None:
    """How many lanes have a row in a step; None where states do not suit it, which begin at multiples of `offsets`."""
    if heads.rows > STEP_ROWS or any(one % STEP_COLUMNS for one in offsets):
        return None
    return next((lanes for lanes in STEP_LANES if heads.columns % (STEP_COLUMNS * lanes) == 0), None)


def choose_block(rows: int) -> int:
    """For how many tokens at a time a threadgroup makes what its columns share: some for each SIMD-group."""
    return max(SIMD_GROUPS, min(MOST_BLOCK, BLOCK_ROWS // rows // SIMD_GROUPS * SIMD_GROUPS))


def launch_recurrence(
    ctx: Context,
    recurrence: Recurrence,
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
    lanes = choose_step_lanes(heads, (pool.shape[1], at)) if batch.is_step else None
    if lanes is None:
        kernel, threads, columns = recurrence.any, SIMD_GROUPS * LANES, SIMD_GROUPS * LANES // COLUMN_LANES
        is_small = heads.rows <= RESIDENT_ROWS and not constants["DECAYS"]
        form = {"LANES": COLUMN_LANES, "BLOCK": choose_block(heads.rows), "RESIDENT": RESIDENT if is_small else 1}
    else:
        kernel, threads, columns = recurrence.step, STEP_PARTS * lanes, STEP_COLUMNS * lanes
        form = {"LANES": lanes, "RESIDENT": STEP_THREADS // threads}
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
        threads=threads,
        outputs=[((batch.tokens, heads.value_heads * heads.columns), gpu.activations)],
        constants={
            "ROWS": heads.rows,
            **form,
            "SKIP": int(skip is not None),
            **constants,
        },
        types={"Y": gpu.activations},
    )
    gpu.pending = [out]
    return out
