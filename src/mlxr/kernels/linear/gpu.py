"""`linear` on a GPU: quantised weights stay in the blocks of the file, floats go to MLX's matmul.

Up to MAX_ROWS rows are multiplied by a kernel that reads each block once. Where there are matrix units, others take
over (`tiles.py`), from MIN_TILED to MAX_TILED rows, and one for a single row of some types (`stream.py`). More rows:
the weight is expanded and MLX multiplies (`expand.py`). Floats are streamed for a few rows (`floats.py`), else a
library's matter, or in recorded steps that of `panels.py`; all may leave sums to the norm after them. Without kernels
(MLX on CPU) weights are decoded when they are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from mlxr.core.errors import DeviceError
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import Deferred, settle
from mlxr.kernels.gpu.device import Upload
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.gpu.recording import Buffer
from mlxr.kernels.linear.expand import BLOCK_HEADERS, FILL, multiply_expanded
from mlxr.kernels.linear.floats import FLOATS as FLOAT_STREAM
from mlxr.kernels.linear.floats import FloatsPlan, multiply_floats, plan_floats
from mlxr.kernels.linear.panels import PANELS, PanelPlan, multiply_panels, plan_panels
from mlxr.kernels.linear.stream import STREAM, describe, multiply_stream, plan_stream
from mlxr.kernels.linear.tiles import TILES, can_norm, multiply_tiles
from mlxr.kernels.linear.weight import LinearWeight
from mlxr.kernels.tensor import FloatArray, TensorSource

FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Layout:
    """How blocks.h knows a type: ggml's number, values and bytes of a block, and where in it each plane's field lies.

    `fields` are (offset, bytes), in the order of the planes; without any, blocks stay whole.
    """

    number: int
    block_size: int
    block_bytes: int
    fields: tuple[tuple[int, int], ...] = ()


LAYOUTS = {
    "f16": Layout(1, 256, 512),
    "bf16": Layout(30, 256, 512),
    "q4_0": Layout(2, 32, 18, ((2, 16), (0, 2))),
    "q4_1": Layout(3, 32, 20, ((4, 16), (0, 4))),
    "q5_0": Layout(6, 32, 22, ((6, 16), (2, 4), (0, 2))),
    "q5_1": Layout(7, 32, 24, ((8, 16), (4, 4), (0, 4))),
    "q8_0": Layout(8, 32, 34, ((2, 32), (0, 2))),
    "q2_k": Layout(10, 256, 84, ((16, 64), (0, 16), (80, 4))),
    "q3_k": Layout(11, 256, 110, ((32, 64), (0, 32), (96, 12), (108, 2))),
    "q4_k": Layout(12, 256, 144),
    "q5_k": Layout(13, 256, 176),
    "q6_k": Layout(14, 256, 210, ((0, 128), (128, 64), (192, 16), (208, 2))),
    "q8_k": Layout(15, 256, 292, ((4, 256), (0, 4))),  # the sums at the end follow from the rest
    "iq4_nl": Layout(20, 32, 18, ((2, 16), (0, 2))),
    "iq4_xs": Layout(23, 256, 136, ((8, 128), (4, 4), (0, 4))),
    "mxfp4": Layout(39, 32, 17, ((1, 16), (0, 1))),
    "affine4_32": Layout(432, 32, 24, ((8, 16), (0, 8))),  # our own, by our own numbers
    "affine4_64": Layout(464, 64, 40, ((8, 32), (0, 8))),
    "affine8_32": Layout(832, 32, 40, ((8, 32), (0, 8))),
    "affine8_64": Layout(864, 64, 72, ((8, 64), (0, 8))),
}
BLOCKS = frozenset(LAYOUTS) - frozenset(FLOATS)
MAX_ROWS = 8
MAX_FLOAT_ROWS = 2  # a library's products of 16-bit numbers are better from here on,
MAX_OTHER_ROWS = 4  # but what is not as the library takes it, one weight without bias in the type of x, is not recorded
MIN_TILED, MAX_TILED = 1, 64
SIMD_GROUPS = 4
PRODUCT_SIMD_GROUPS = 8  # each brings one of the eight quads of every run into their shared memory
MANY_OUTPUTS = 4096
MAX_SHARED_OUTPUTS = 8192  # more keep the device busy without
SHARES, LIBRARY_COLUMNS = 2, 64

_FOLDER = Path(__file__).parent
ROWS = Kernel(
    "linear_rows",
    _FOLDER,
    "rows.body",
    ("x", "a", "b", "bias", "norm", "residual", "numbers", "sizes"),
    ("out",),
    (*BLOCK_HEADERS, "rows.h", "gate.h"),
)
EXPAND = Kernel(
    "linear_expand",
    _FOLDER,
    "expand.body",
    ("weights", "ids", "sizes"),
    ("out",),
    (*BLOCK_HEADERS, "expand.h"),
)
KERNELS = (ROWS, TILES, STREAM, FLOAT_STREAM, PANELS, FILL, EXPAND)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Neighbouring tensors of one type: `upload` holds their planes, or the matrix (rows, columns) of floats.

    `raw` are the bytes that kernels read, None for what they do not multiply.
    """

    type_name: str
    rows: int
    upload: Upload
    raw: Any


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """A norm that waits: x (T, n) in f32, and the weight on the device."""

    x: Any
    weight: Any
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A product that waits; x is an array or a norm. `way` names what computes it: rows, tiles, floats or
    library, in whose place panels may come."""

    x: Any
    parts: list[Part]
    bias: Any
    way: str

    @property
    def tokens(self) -> int:
        """Rows of x."""
        rows: int = (self.x.x if isinstance(self.x, Normed) else self.x).shape[0]
        return rows


Payload = tuple[list[Part], Any]  # and the bias of all outputs, or None


def prepare(
    ctx: Context, tensors: Sequence[TensorSource], biases: Sequence[FloatArray | None] | None
) -> tuple[Payload, int]:
    """The parts on the device and their bytes. Raises DeviceError for a type without a kernel."""
    for tensor in tensors:
        if tensor.type_name not in FLOATS and tensor.type_name not in BLOCKS:
            known = ", ".join([*FLOATS, *sorted(BLOCKS)])
            raise DeviceError(
                f"tensor {tensor.name} has type {tensor.type_name}, which has no GPU kernel; known are {known}"
            )
        if tensor.type_name in BLOCKS and tensor.shape[1] % LAYOUTS[tensor.type_name].block_size:
            raise ValueError(
                f"tensor {tensor.name} has {tensor.shape[1]} columns, {tensor.type_name} needs whole blocks"
            )
    parts = []
    for type_name, group in groupby(tensors, key=lambda tensor: tensor.type_name):
        parts.append(_make_part(ctx, type_name, list(group)))
    bias = _join_biases(ctx, tensors, biases)
    return (parts, bias), sum(part.upload.array.nbytes for part in parts) + (0 if bias is None else bias.nbytes)


def linear(ctx: Context, x: Any, weight: LinearWeight) -> Any:
    """x Wᵀ + b; x in any float type, the result in the type of the activations, perhaps deferred."""
    mx, gpu = ctx.gpu.mx, ctx.gpu
    parts, bias = weight.payload
    tokens = x.shape[0]
    if not tokens:
        return mx.zeros((0, weight.out_features), gpu.activations)
    way = _find_way(ctx, x, parts, bias)
    if way:
        norms = way == "rows" or (way == "tiles" and can_norm(tokens, weight.in_features))
        # what is only multiplied by the norm's weight may be too large for f16
        norms = norms or (way == "floats" and tokens == 1 and parts[0].type_name == "bf16")
        inputs = x.parts if isinstance(x, Deferred) and x.is_open and norms else settle(x)
        product = Product(inputs, parts, bias, way)
        return Deferred((tokens, weight.out_features), gpu.activations, product, lambda: multiply(ctx, product))
    x = settle(x)
    outputs = []
    for part in parts:
        if _takes_tiles(ctx, part, tokens) or _has_kernel(part, tokens):
            way = "tiles" if _takes_tiles(ctx, part, tokens) else "rows"
            outputs.append(multiply(ctx, Product(x, [part], None, way)))
        elif part.type_name in FLOATS:
            outputs.append(_multiply_floats(ctx, x, part.upload.array))
        else:
            outputs += multiply_expanded(gpu, x, LAYOUTS[part.type_name].number, part.rows, part.raw)
    result = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
    if bias is not None:
        result = result + bias
    return result.astype(gpu.activations)


def multiply(ctx: Context, product: Product, gate: int = 0, residual: Any = None) -> Any:
    """One launch for one or two parts: the product, or gated (1 silu, 2 gelu), or added to `residual` in f32."""
    gpu, numbers = ctx.gpu, ctx.gpu.launcher.numbers
    plan = _plan_floats(ctx, product, gate=gate) if product.way == "floats" else None
    if product.way == "library" or (product.way == "floats" and plan is None):
        matrix, panels = product.parts[0].upload.array, _plan_panels(ctx, product, gate) if gate else None
        if panels is None:
            return _multiply_floats(ctx, product.x, matrix)
        return multiply_panels(gpu, product.x, matrix, gate, gpu.operands, panels)
    kind = gpu.mx.float32 if residual is not None else gpu.operands if gate else gpu.activations
    normed = product.x if isinstance(product.x, Normed) else None
    x = product.x if normed is None else normed.x
    tokens, columns = x.shape
    norm = None if normed is None else (normed.weight, normed.eps)
    if plan is not None:
        matrix = product.parts[0].upload.array
        return multiply_floats(gpu, x, matrix, product.bias, gate, residual, kind, norm, plan)
    if product.way == "tiles":
        weights = [(LAYOUTS[part.type_name].number, part.rows, part.raw) for part in product.parts]
        stream = plan_stream(describe(weights, columns, gate), gpu.processors, gpu.room_bytes) if tokens == 1 else None
        if stream is not None:
            return multiply_stream(gpu, x, weights, product.bias, gate, residual, kind, norm, stream)
        return multiply_tiles(gpu, x, weights, product.bias, gate, residual, kind, norm)
    first, second = product.parts[0], product.parts[-1]
    rows = first.rows, (second.rows if len(product.parts) == 2 else 0)
    width = next(width for width in (1, 2, 4, 8) if width >= tokens)
    per_group = choose_rows(width, sum(rows))
    made = rows[0] // 2 if gate else sum(rows)
    step = PRODUCT_SIMD_GROUPS * (per_group // 2 if gate else per_group)
    groups = -(-made // step) if gate else sum(-(-count // step) for count in rows)
    none = numbers(0.0)
    (out,) = gpu.launcher.launch(
        ROWS,
        [
            x,
            first.raw,
            second.raw,
            none if product.bias is None else product.bias,
            none if normed is None else normed.weight,
            none if residual is None else residual,
            none if normed is None else numbers(normed.eps),
            numbers(columns, tokens, *rows),
        ],
        groups=(groups, 1, 1),
        threads=32 * PRODUCT_SIMD_GROUPS,
        outputs=[((tokens, made), kind)],
        constants={
            "TYPE_A": LAYOUTS[first.type_name].number,
            "TYPE_B": LAYOUTS[second.type_name].number,
            "ROWS": per_group,
            "T": width,
            "BIAS": int(product.bias is not None),
            "NORM": int(normed is not None),
            "GATE": gate,
            "RESIDUAL": int(residual is not None),
        },
        types={"X": x.dtype, "Y": kind},
    )
    return out


def choose_rows(tokens: int, outputs: int) -> int:
    """Outputs that a SIMD-group makes at a time: even, since a gate takes two."""
    return 4 if tokens >= 4 and outputs >= MANY_OUTPUTS else 2


def add_product(ctx: Context, product: Product, x: Any) -> tuple[Any, Any]:
    """x plus the product, in f32, and None; or x and the product, or shares of it, which are still to be added."""
    matrix = product.parts[0].upload.array
    if product.way == "floats":
        plan = _plan_floats(ctx, product, shared=True)
        if plan is not None and plan.shares > 1:
            return x, multiply_floats(ctx.gpu, product.x, matrix, None, 0, None, ctx.gpu.mx.float32, None, plan)
    if product.way != "library":
        return multiply(ctx, product, residual=x), None
    panels, wide = _plan_panels(ctx, product), ctx.gpu.mx.float32
    if panels is not None:
        return x, multiply_panels(ctx.gpu, product.x, matrix, 0, wide, panels)
    shares = choose_shares(*matrix.shape)
    if shares == 1:
        return x, multiply(ctx, product)
    return x, ctx.gpu.launcher.multiply(_narrow(ctx, product.x, matrix), matrix, shares, wide)


def choose_shares(outputs: int, inputs: int) -> int:
    """Into how many shares of its inputs a library's product is best split, whose sum comes later anyway."""
    return SHARES if outputs < MAX_SHARED_OUTPUTS and inputs % (SHARES * LIBRARY_COLUMNS) == 0 else 1


def can_gate(ctx: Context, product: Product) -> bool:
    """Whether `gate_product` takes it."""
    if product.way == "floats":
        return _plan_floats(ctx, product, gate=1) is not None
    return len(product.parts) == 1 and (product.way != "library" or _plan_panels(ctx, product, 1) is not None)


def gate_product(ctx: Context, product: Product, kind: str) -> Any:
    """act(first half of the product) * second half."""
    return multiply(ctx, product, gate=1 if kind == "silu" else 2)


def _plan_panels(ctx: Context, product: Product, gate: int = 0) -> PanelPlan | None:
    """How our own kernel computes a product of the library; None where it does not, or is no faster."""
    gpu, matrix = ctx.gpu, product.parts[0].upload.array
    if gpu.machine is None or not gpu.machine.has_boxes or matrix.dtype.size != 2 or product.x.dtype != matrix.dtype:
        return None
    rows, columns = matrix.shape
    return plan_panels(product.tokens, rows, columns, gate, gpu.processors, gpu.room_bytes)


def _find_way(ctx: Context, x: Any, parts: list[Part], bias: Any) -> str:
    """What computes all parts in one launch; empty where nothing does."""
    tokens = x.shape[0]
    if len(parts) <= 2 and all(_takes_tiles(ctx, part, tokens) for part in parts):
        return "tiles"
    is_plain = len(parts) == 1 and bias is None and parts[0].type_name in FLOATS
    suits_library = is_plain and x.dtype == parts[0].upload.array.dtype
    if len(parts) == 1 and _takes_floats(ctx, parts[0], tokens, shared=suits_library):
        return "floats"
    limit = MAX_FLOAT_ROWS if suits_library else MAX_OTHER_ROWS
    if len(parts) <= 2 and all(_has_kernel(part, tokens, limit) for part in parts):
        return "rows"
    if not is_plain:
        return ""
    return "library" if isinstance(settle(x), Buffer) else ""


def _takes_tiles(ctx: Context, part: Part, tokens: int) -> bool:
    return ctx.gpu.has_tiles and part.raw is not None and part.type_name in BLOCKS and MIN_TILED <= tokens <= MAX_TILED


def _takes_floats(ctx: Context, part: Part, tokens: int, *, shared: bool) -> bool:
    """Where it goes in shares alone, `shared` says whether another way is there for whoever wants the whole."""
    gpu = ctx.gpu
    if not gpu.has_tiles or part.type_name not in ("f16", "bf16"):
        return False
    rows, columns = part.upload.array.shape
    return plan_floats(tokens, rows, columns, gpu.processors, gpu.room_bytes, shared=shared) is not None


def _plan_floats(ctx: Context, product: Product, *, gate: int = 0, shared: bool = False) -> FloatsPlan | None:
    gpu, (rows, columns) = ctx.gpu, product.parts[0].upload.array.shape
    made = rows // 2 if gate else rows
    shared = shared and product.bias is None
    return plan_floats(product.tokens, made, columns, gpu.processors, gpu.room_bytes, shared=shared)


def _has_kernel(part: Part, tokens: int, float_rows: int = MAX_OTHER_ROWS) -> bool:
    return part.raw is not None and tokens <= (float_rows if part.type_name in FLOATS else MAX_ROWS)


def _make_part(ctx: Context, type_name: str, tensors: list[TensorSource]) -> Part:
    mx, layout = ctx.gpu.mx, LAYOUTS.get(type_name)
    rows, columns = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
    if ctx.gpu.launcher is None and type_name in BLOCKS:
        return _decode(ctx, tensors)
    if len(tensors) == 1:
        upload = ctx.gpu.upload(tensors[0], arrange_blocks)
    else:
        joined = mx.concatenate([ctx.gpu.read(tensor) for tensor in tensors])
        for tensor in tensors:
            tensor.release()
        upload = Upload(arrange_blocks(mx, type_name, joined))
    if ctx.gpu.launcher is None or layout is None or columns % layout.block_size:
        return Part(type_name, rows, upload, None)
    raw = upload.array
    if type_name in FLOATS:
        raw = raw.view(mx.uint8).reshape(-1)
        mx.eval(raw)
    return Part(type_name, rows, upload, raw)


def arrange_blocks(mx: Any, type_name: str, raw: Any) -> Any:
    """Blocks of a file as planes; floats and types whose blocks are aligned as they are."""
    layout = LAYOUTS.get(type_name)
    if layout is not None and layout.fields:
        blocks = raw.reshape(-1, layout.block_bytes)
        raw = mx.concatenate([blocks[:, at : at + size].reshape(-1) for at, size in layout.fields])
    mx.eval(raw)
    return raw


def pick_blocks(ctx: Context, upload: Upload, table: TensorSource, ids: Any, kind: Any) -> Any:
    """The rows of an uploaded table that `ids` names as plain numbers, (ids, columns)."""
    rows, columns = table.shape
    (out,) = ctx.gpu.launcher.launch(
        EXPAND,
        [upload.array, ids, ctx.gpu.launcher.numbers(columns, ids.shape[0], rows)],
        groups=(-(-ids.shape[0] // SIMD_GROUPS), 1, 1),
        threads=32 * SIMD_GROUPS,
        outputs=[((ids.shape[0], columns), kind)],
        constants={"TYPE_A": LAYOUTS[table.type_name].number},
        types={"Y": kind},
    )
    return out


def _multiply_floats(ctx: Context, x: Any, matrix: Any) -> Any:
    if isinstance(x, Buffer):
        return ctx.gpu.launcher.multiply(_narrow(ctx, x, matrix), matrix)
    if ctx.gpu.narrow:
        return x.astype(matrix.dtype) @ matrix.T
    return x.astype(ctx.gpu.mx.float32) @ matrix.T.astype(ctx.gpu.mx.float32)


def _narrow(ctx: Context, x: Buffer, matrix: Any) -> Buffer:
    return x.astype(matrix.dtype if ctx.gpu.narrow else ctx.gpu.mx.float32)


def _decode(ctx: Context, tensors: Sequence[TensorSource]) -> Part:
    matrix = np.concatenate([tensor.to_float32() for tensor in tensors])
    for tensor in tensors:
        tensor.release()
    array = ctx.gpu.mx.array(matrix)
    ctx.gpu.mx.eval(array)
    return Part("f32", len(matrix), Upload(array), None)


def _join_biases(ctx: Context, tensors: Sequence[TensorSource], biases: Sequence[FloatArray | None] | None) -> Any:
    if biases is None or all(bias is None for bias in biases):
        return None
    vectors = [
        np.zeros(tensor.shape[0], np.float32) if bias is None else bias
        for tensor, bias in zip(tensors, biases, strict=True)
    ]
    joined = ctx.gpu.mx.array(np.concatenate(vectors))
    ctx.gpu.mx.eval(joined)
    return joined
