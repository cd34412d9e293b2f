"""The launch that both recurrences are on a GPU: token by token, columns of states in registers.

A step whose threadgroups have whole heads waits for the norm of these that follows, which it does in the same launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import Deferred
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
NORM_LANES = (32, 16, 8)  # that have a row of a whole head, which is then normed
STEP_PARTS, STEP_COLUMNS, STEP_ROWS = 8, 4, 128  # of a column; of a lane; that its registers hold at most
STEP_THREADS = 512  # of a multiprocessor, whose registers they share
INPUTS = (
    "qkv", "gates", "rates", "bias", "skip", "reads", "writes", "starts", "pool", "numbers", "sizes",
)  # fmt: skip
NORM_INPUTS = ("gate", "gain", "norm_numbers", "norm_sizes")


@dataclass(frozen=True, slots=True)
class Heads:
    """Key heads of `rows`, value heads of `columns`, and where in a row of qkv queries, keys and values begin."""

    key_heads: int
    value_heads: int
    rows: int
    columns: int
    starts: tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class OutputNorm:
    """The norm and the gate of each head, as `gated_norm` has them: `gate` (tokens, n), whose columns from `first` on
    count, and the weight of one head (columns,) or of all (heads * columns,) on the device."""

    gate: Any
    weight: Any
    eps: float
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class Recurred:
    """A step that waits: `launch(norm)` starts it and norms each head of so many `columns`."""

    columns: int
    launch: Callable[[OutputNorm | None], Any]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The kernels of an operator: for any batch, and for sequences of one token each, with the same bits."""

    any: Kernel
    step: Kernel


def make_recurrence(name: str) -> Recurrence:
    """The kernels under the name of an operator."""

    folder = Path(__file__).parent
    headers = ("recur.h", "../norms/silu.h")
    return Recurrence(
        Kernel(name, folder, "recur.body", INPUTS, ("out",), headers[:1]),
        Kernel(f"{name}_step", folder, "step.body", (*INPUTS, *NORM_INPUTS), ("out",), headers),
    )


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
    lanes = choose_step_lanes(heads, (pool.shape[1], places[1])) if batch.is_step else None

    def launch(norm: OutputNorm | None) -> Any:
        own_lanes = lanes if norm is None else heads.columns // STEP_COLUMNS
        gpu, (rates, bias, skip), (first, at) = ctx.gpu, arrays, places
        numbers, placed, made = gpu.launcher.numbers, place_states(gpu, batch), gpu.activations
        inputs: list[Any] = []
        if own_lanes is None:
            kernel, threads, columns = recurrence.any, SIMD_GROUPS * LANES, SIMD_GROUPS * LANES // COLUMN_LANES
            is_small = heads.rows <= RESIDENT_ROWS and not constants["DECAYS"]
            form = {"LANES": COLUMN_LANES, "BLOCK": choose_block(heads.rows), "RESIDENT": RESIDENT if is_small else 1}
        else:
            kernel, threads, columns = recurrence.step, STEP_PARTS * own_lanes, STEP_COLUMNS * own_lanes
            form = {"LANES": own_lanes, "RESIDENT": STEP_THREADS // threads, "NORM": 0, "SHARED_WEIGHT": 0}
            none = numbers(0.0)
            inputs = [none, none, none, numbers(0)]
        if norm is not None:
            made = gpu.operands
            form |= {"NORM": 1, "SHARED_WEIGHT": int(norm.weight.shape[0] == heads.columns)}
            inputs = [norm.gate, norm.weight, numbers(norm.eps), numbers(norm.gate.shape[1], norm.first)]
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
                *inputs,
            ],
            groups=(-(-heads.columns // columns), heads.value_heads, batch.sequences),
            threads=threads,
            outputs=[((batch.tokens, heads.value_heads * heads.columns), made)],
            constants={
                "ROWS": heads.rows,
                **form,
                "SKIP": int(skip is not None),
                **constants,
            },
            types={"Y": made},
        )
        gpu.pending = [out]
        return out

    if lanes is None or heads.columns not in {STEP_COLUMNS * one for one in NORM_LANES}:
        return launch(None)
    shape = batch.tokens, heads.value_heads * heads.columns
    return Deferred(shape, ctx.gpu.activations, Recurred(heads.columns, launch), lambda: launch(None))
