"""Recurrent mixers on a GPU: one launch for each, which reads and writes states in their pool.

`gated_delta` and `mamba2` are the same kernel, token by token, with columns of states in registers; it norms queries
and keys, too. A step whose threadgroups have whole heads is deferred, to do the norm of heads that follows in the same
launch. In `short_conv`, threads take neighbouring channels of some rows. Sequences of one token each have their own
kernels with the same bits, which read a state once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mlxr.core.errors import DeviceError
from mlxr.core.frozen import frozen
from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import Deferred, Value, settle
from mlxr.kernels.gpu.kernel import LANES, Kernel
from mlxr.kernels.gpu.pool import Pool, compose_on_host, place_states
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.recurrent import EPS, Convolution, DeltaRule, StateSpace, run_gated_delta, run_mamba2, run_short_conv
from mlxr.kernels.tensor import DeviceArray, FloatArray

FOLDER = Path(__file__).parent
SIMD_GROUPS = 4
COLUMN_LANES = 8  # lanes that share a column
MOST_BLOCK, BLOCK_ROWS = 16, 2048  # most tokens of a block, and tokens times rows in a threadgroup's memory
RESIDENT, RESIDENT_ROWS = 4, 256  # threadgroups that fit on a multiprocessor without spills, and most rows for that
MOST_ROWS = 64 * COLUMN_LANES  # most rows of a column, which is in the registers of its lanes
STEP_LANES = (16, 8)  # lanes that share a row of a step's threadgroup: the first that suits its columns
NORM_LANES = (32, 16, 8)  # lanes that share a row of a whole head, if it is normed
STEP_PARTS, STEP_COLUMNS, STEP_ROWS = 8, 4, 128  # parts of a column; columns of a lane; most rows in its registers
STEP_THREADS = 512  # threads of a multiprocessor, which share its registers
RECUR_INPUTS = (
    "qkv", "gates", "rates", "bias", "skip", "reads", "writes", "starts", "pool", "numbers", "sizes",
)  # fmt: skip
NORM_INPUTS = ("gate", "gain", "norm_numbers", "norm_sizes")


@frozen
class Heads:
    """Key heads of `rows`, value heads of `columns`, and the first columns of queries, keys and values in qkv."""

    key_heads: int
    value_heads: int
    rows: int
    columns: int
    starts: tuple[int, int, int]


@frozen(eq=False)
class OutputNorm:
    """The norm and the gate of each head, as in `gated_norm`: the columns of `gate` (tokens, n) from `first` on, and
    the weight of one head (columns,) or of all (heads * columns,) on the device."""

    gate: DeviceArray
    weight: DeviceArray
    eps: float
    first: int


@frozen(eq=False)
class Recurred:
    """A deferred step: `launch(norm)` starts it and norms each head of `columns` columns."""

    columns: int
    launch: Callable[[OutputNorm | None], DeviceArray]


@frozen
class Recurrence:
    """The kernels of an operator: for any batch, and for sequences of one token each, with the same bits."""

    any: Kernel
    step: Kernel


def make_recurrence(name: str) -> Recurrence:
    """Return the kernels of an operator, with its name."""
    headers = ("recur.h", "../norms/silu.h")
    return Recurrence(
        Kernel(name, FOLDER, "recur.body", RECUR_INPUTS, ("out",), headers[:1], operator=name),
        Kernel(
            f"{name}_step", FOLDER, "recur_step.body", (*RECUR_INPUTS, *NORM_INPUTS), ("out",), headers, operator=name
        ),
    )


GATED_DELTA, MAMBA2 = make_recurrence("gated_delta"), make_recurrence("mamba2")
CONV_THREADS = 128
CONV_WIDTH = 4  # channels of a thread: 16 bytes of a state
CONV_ROWS = 8  # rows of a thread
CONV_INPUTS = ("x", "weight", "bias", "owners", "reads", "writes", "starts", "pool", "sizes")
CONV = Kernel("short_conv", FOLDER, "conv.body", CONV_INPUTS, ("out",), ("conv.h",), operator="short_conv")
CONV_STEP = Kernel(
    "short_conv_step", FOLDER, "conv_step.body", CONV_INPUTS, ("out",), ("conv.h",), operator="short_conv"
)
CONV_KINDS = {"plain": 0, "silu": 1, "gated": 2}
KERNELS = (GATED_DELTA.any, GATED_DELTA.step, MAMBA2.any, MAMBA2.step, CONV, CONV_STEP)


def choose_step_lanes(heads: Heads, offsets: tuple[int, ...]) -> int | None:
    """Return the lanes that share a row in a step; None if sizes, or states at multiples of `offsets`, do not fit."""
    if heads.rows > STEP_ROWS or any(one % STEP_COLUMNS for one in offsets):
        return None
    return next((lanes for lanes in STEP_LANES if heads.columns % (STEP_COLUMNS * lanes) == 0), None)


def choose_block(rows: int) -> int:
    """Return the tokens for which a threadgroup prepares shared values at a time: some for each SIMD-group."""
    return max(SIMD_GROUPS, min(MOST_BLOCK, BLOCK_ROWS // rows // SIMD_GROUPS * SIMD_GROUPS))


def launch_recurrence(
    ctx: Context,
    recurrence: Recurrence,
    qkv: DeviceArray,
    gates: DeviceArray,
    heads: Heads,
    arrays: tuple[FloatArray, FloatArray, FloatArray | None],
    batch: RaggedBatch,
    pool: Pool,
    places: tuple[int, int],
    constants: Mapping[str, int],
    eps: float = 0.0,
) -> Value:
    """Launch a recurrence, or defer it to a norm of its heads.

    `arrays` are rates, bias and skip; `places` the first column of gates and the first float in slots.
    """
    lanes = choose_step_lanes(heads, (pool.shape[1], places[1])) if batch.is_step else None

    def launch(norm: OutputNorm | None) -> DeviceArray:
        own_lanes = lanes if norm is None else heads.columns // STEP_COLUMNS
        gpu, (rates, bias, skip), (first, at) = ctx.gpu, arrays, places
        numbers, placed, made = gpu.launcher.numbers, place_states(gpu, batch), gpu.activations
        inputs: list[DeviceArray] = []
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
            constants={"ROWS": heads.rows, **form, "SKIP": int(skip is not None), **constants},
            types={"Y": made},
        )
        gpu.pending = [out]
        return out

    if lanes is None or heads.columns not in {STEP_COLUMNS * one for one in NORM_LANES}:
        return launch(None)
    shape = batch.tokens, heads.value_heads * heads.columns
    return Deferred(shape, ctx.gpu.activations, Recurred(heads.columns, launch), lambda: launch(None))


def gated_delta(
    ctx: Context, qkv: Value, x: Value, rule: DeltaRule, batch: RaggedBatch, pool: Pool, first: int, at: int
) -> Value:
    """Run the rule on the GPU over the tokens of the batch. Raises DeviceError for a rule with a bound."""
    if rule.bound:
        raise DeviceError(
            "the model's delta rule has a bound of what it forgets, for which there are kernels for processors alone; "
            "run it with --device cpu"
        )
    qkv, x = settle(qkv), settle(x)
    if ctx.gpu.launcher is None:
        return compose_on_host(
            ctx,
            "gated_delta",
            "decay of each " + ("channel" if rule.decays_channels else "head"),
            (qkv, x),
            pool,
            lambda own, gates, states: run_gated_delta(ctx, own, gates, rule, batch, states, first, at),
        )
    if rule.key_dim > MOST_ROWS:
        refuse("gated_delta", "key_dim", rule.key_dim, f"at most {MOST_ROWS} on a GPU")
    keys = rule.key_heads * rule.key_dim
    heads = Heads(rule.key_heads, rule.value_heads, rule.key_dim, rule.value_dim, (0, keys, 2 * keys))
    constants = {
        "DELTA": 1, "NORMED": 1, "BETAS": 1, "TILED": int(rule.is_tiled), "DECAYS": int(rule.decays_channels),
    }  # fmt: skip
    arrays = rule.rates, rule.bias, None
    return launch_recurrence(ctx, GATED_DELTA, qkv, x, heads, arrays, batch, pool, (first, at), constants, EPS)


MAMBA2_CONSTANTS = {"DELTA": 0, "NORMED": 0, "BETAS": 0, "TILED": 0, "DECAYS": 0}


def mamba2(
    ctx: Context, xbc: Value, x: Value, space: StateSpace, batch: RaggedBatch, pool: Pool, first: int, at: int
) -> Value:
    """Run the state space on the GPU over the tokens of the batch."""
    xbc, x = settle(xbc), settle(x)
    if ctx.gpu.launcher is None:
        return compose_on_host(
            ctx,
            "mamba2",
            "decay of each head",
            (xbc, x),
            pool,
            lambda own, gates, states: run_mamba2(ctx, own, gates, space, batch, states, first, at),
        )
    if space.state_dim > MOST_ROWS:
        refuse("mamba2", "state_dim", space.state_dim, f"at most {MOST_ROWS} on a GPU")
    b = space.results
    heads = Heads(
        space.groups, space.heads, space.state_dim, space.head_dim, (b + space.groups * space.state_dim, b, 0)
    )
    arrays = space.rates, space.bias, space.skip
    return launch_recurrence(ctx, MAMBA2, xbc, x, heads, arrays, batch, pool, (first, at), MAMBA2_CONSTANTS)


def short_conv(
    ctx: Context, x: Value, conv: Convolution, batch: RaggedBatch, pool: Pool, first: int, at: int
) -> DeviceArray:
    """Convolve the batch's tokens on the GPU."""
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
    width = CONV_WIDTH if all(one % CONV_WIDTH == 0 for one in (channels, x.shape[1], first, slot_floats, at)) else 1
    rows = tokens if batch.is_step else -(-tokens // CONV_ROWS) + batch.sequences
    (out,) = gpu.launcher.launch(
        CONV_STEP if batch.is_step else CONV,
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
        groups=(-(-channels // (CONV_THREADS * width)), rows, 1),
        threads=CONV_THREADS,
        outputs=[((tokens, channels), gpu.activations)],
        constants={
            "TAPS": taps,
            "KIND": CONV_KINDS[conv.kind],
            "BIAS": int(conv.bias is not None),
            "N": width,
            "ROWS": 1 if batch.is_step else CONV_ROWS,
        },
        types={"X": x.dtype, "Y": gpu.activations},
    )
    gpu.pending = [out]
    return out
