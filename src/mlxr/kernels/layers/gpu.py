"""`run_layers` on a GPU: the operators one after another; some defer work to the next one, to share a launch with it.

A step of single tokens is recorded as a whole (`mlxr.kernels.gpu.graph`), so a call per operator costs nothing when it
is replayed. In other steps the device starts on the first layers while the host still prepares launches of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from mlxr.core.errors import DeviceError
from mlxr.core.frozen import frozen
from mlxr.kernels.context import Context
from mlxr.kernels.embed.gpu import hold_table, is_placed
from mlxr.kernels.gpu.device import MAX_STARTED
from mlxr.kernels.layers import operators as op
from mlxr.kernels.layers.operators import Layer, Layers, Operator, StepInput
from mlxr.kernels.layers.reference import Programs, Registers, run_layer
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.linear.parts import FLOATS
from mlxr.kernels.tensor import DeviceArray

START_LAYERS = 1  # number of layers after which the device is told to start on them
ROUTE_BYTES = 8  # bytes of a pair of a token and an expert
STREAM_BYTES = 4  # the residual stream is f32


@frozen
class TokenBytes:
    """Bytes for each token: of the arrays that one layer makes, and of those made before the layers."""

    layer: int
    before: int


@frozen
class Payload:
    """The operators of each layer, and the memory that steps of many tokens need."""

    programs: Programs
    bytes: TokenBytes


def prepare(ctx: Context, layers: tuple[Layer, ...]) -> Payload:
    """Return the layers' operators and the memory that they will need; tables are copied to the device."""
    gpu, programs = ctx.gpu, tuple(layer.program for layer in layers)
    if any(isinstance(operator, op.SpreadStreams) for program in programs for operator in program):
        raise DeviceError(
            "the model has several residual streams side by side, and rows that tokens name by those before them, for "
            "which there are kernels for processors alone; run it with --device cpu"
        )
    if any(_is_of_processors(operator) for program in programs for operator in program):
        raise DeviceError(
            "the model attends to chunks, has gates by softplus, scans states of channels (Mamba), or multiplies what "
            "experts read by their shares, for which there are kernels for processors alone; run it with --device cpu"
        )
    sizes = Sizes(gpu.activations.size, gpu.operands.size, 2 if gpu.narrow else 4)
    most = max((count_layer_bytes(layer.operators, sizes) for layer in layers), default=0)
    hidden = max((layer.columns for layer in layers), default=0)
    before = hidden * (2 * STREAM_BYTES + gpu.activations.size)
    for layer in layers:
        before += count_layer_bytes(layer.before, sizes) if layer.before else 0
        for operator in layer.before:
            if isinstance(operator, op.GetRows) and is_placed(ctx, operator.table):
                hold_table(ctx, operator.table)  # now, as the first step measures the memory that is left
    return Payload(programs, TokenBytes(most, before))


def _is_of_processors(operator: Operator) -> bool:
    match operator:
        case op.Attend(heads):
            return heads.chunked
        case op.GateHeads(softplus):
            return softplus
        case _:
            return isinstance(operator, op.TakeShares | op.Scan)


@frozen
class Sizes:
    """Bytes of a number: of results, of operands of products, and of what MLX's products and attention take."""

    result: int
    operand: int
    cast: int


def count_layer_bytes(program: Sequence[Operator], sizes: Sizes) -> int:
    """Return the bytes of a layer's arrays for one token of a long prompt, with keys and values gathered to attend."""
    # of the stream, or of the inputs
    columns = max(len(operator.weight.weight) * operator.parts for operator in program if isinstance(operator, op.Norm))
    return sum(count_operator_bytes(operator, sizes, columns) for operator in program)


def count_operator_bytes(operator: Operator, sizes: Sizes, columns: int) -> int:
    """Return the bytes of an operator's arrays for one token; the stream has `columns` columns."""
    result, operand, cast = sizes.result, sizes.operand, sizes.cast
    match operator:
        case op.Norm(weight, parts=parts):
            return len(weight.weight) * parts * (operand + STREAM_BYTES)
        case op.MatMul(weight):
            return count_product_bytes(weight, result, operand, cast)
        case op.RopeAndWriteKV(heads):
            queries = heads.heads * heads.head_dim
            keys = 2 * heads.kv_heads * heads.head_dim  # keys shared with another layer are gathered, too
            return queries * (result + (cast if cast != result else 0)) + keys * cast
        case op.Attend(heads):
            return heads.value_columns * (cast + (operand if cast != operand else 0))
        case op.RopeAndWriteLatent(heads):
            queries = heads.heads * heads.head_dim
            return queries * (result + (cast if cast != result else 0)) + 2 * heads.head_dim * cast
        case op.ProjectParts(parts, passed):
            made = parts.weights[0].in_features + 2 * parts.weights[0].out_features + passed
            return len(parts.weights) * made * result
        case op.Activate(features=features):
            return features * operand
        case op.Turn(rotation):
            return rotation.columns * operand
        case op.Convolve(conv):
            return conv.channels * result
        case op.Recur(rule):
            return rule.results * result
        case op.GatedNorm(norm):
            return norm.columns * operand
        case op.GateHeads():
            return columns * operand  # attention's results are about as wide as the stream
        case op.AddResidual() | op.AllReduce() | op.Scale() | op.Add() | op.GateRows():
            return columns * STREAM_BYTES
        case op.Route(router):
            return router.rule.used * ROUTE_BYTES
        case op.MixExperts(experts, used):
            up, down = experts.up[0], experts.down[0]
            is_fused = experts.is_gated and len(up.payload[0]) == 1
            inner = down.in_features * operand + (0 if is_fused else up.out_features * result)
            return used * (inner + columns * STREAM_BYTES) + columns * STREAM_BYTES + used * ROUTE_BYTES
        case op.GetRows(table):
            return table.shape[1] * STREAM_BYTES
        case op.MixStreams() | op.SpreadStreams() | op.MatchStreams() | op.GetNgrams() | op.TakeShares():
            return 0
        case op.BalanceStreams() | op.BlendStreams() | op.Scan() | op.LevelStreams() | op.CutGates():
            return 0  # no GPU has these


def count_product_bytes(weight: LinearWeight, result_bytes: int, operand_bytes: int, cast_bytes: int) -> int:
    """Return the bytes per row of a product of many rows: converted operands, parts of the result, and the result."""
    parts, bias = weight.payload
    kinds: list[int] = [part.upload.array.itemsize if part.type_name in FLOATS else cast_bytes for part in parts]
    made_bytes: int = sum(kind * part.rows for kind, part in zip(kinds, parts, strict=True))
    operands = sum(kind * weight.in_features for kind in set(kinds) - {operand_bytes})
    products = [
        1 if is_blocks else len(list(group))
        for is_blocks, group in groupby(parts, key=lambda part: part.type_name not in FLOATS)
    ]
    joined_bytes = made_bytes if sum(products) > 1 else 0
    summed_bytes = 0 if bias is None else STREAM_BYTES * weight.out_features
    is_cast = max(kinds) > result_bytes or (bias is not None and result_bytes < STREAM_BYTES)
    cast = result_bytes * weight.out_features if is_cast else 0
    return operands + made_bytes + joined_bytes + summed_bytes + cast


def run_layers(ctx: Context, stream: DeviceArray, layers: Layers, step: StepInput) -> tuple[DeviceArray, DeviceArray]:
    """Run the layers one after another on the GPU."""
    payload: Payload = layers.payload
    if not ctx.gpu.is_recording:
        tokens = step.batch.tokens
        ahead = len(layers.layers) if ctx.gpu.is_traced else START_LAYERS * (MAX_STARTED + 1)
        layer_bytes, before_bytes = tokens * payload.bytes.layer, tokens * payload.bytes.before
        ctx.gpu.workspace.cover(ahead * layer_bytes + before_bytes, START_LAYERS * layer_bytes)
    registers: Registers = {"stream": stream, "delta": None}
    for index, program in enumerate(payload.programs):
        run_layer(ctx, registers, program, step, index)
        if (index + 1) % START_LAYERS == 0:
            ctx.gpu.start(registers["stream"], registers["delta"])
    return registers["stream"], registers["delta"]
