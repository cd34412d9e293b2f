"""`linear` on a GPU: the choice of the kernel or library that multiplies, and of the extras in its launch.

- Blocks of a file (`blocks.py`): on matrix units, MIN_TILED to MAX_TILED rows of x; a single row of some types is
  streamed; on Hopper, more rows are unpacked in registers (`unpacked.py`). Without such matrix units, up to MAX_ROWS
  rows, and more on those of an Apple GPU (`squares.py`). Otherwise the weight is expanded, and MLX multiplies
  (`parts.py`).
- Floats of 16 bits (`floats.py`): streamed on matrix units, 1 to 16 rows; in recorded steps on Hopper by panels, 17 to
  128 rows; each if its plan fits and pays. Otherwise a few rows as blocks.
- Floats of 32 bits that the library does not take as they are (a router's): few outputs by `multiply_wide`.
- All other floats: the library, which is MLX's matmul, or cuBLASLt in recorded steps. Without kernels (MLX on CPU) this
  is the only way.

If one launch makes a result, it is deferred, so that the launch can also do the norm before it, and the gate or the sum
after it; some leave the sum to the norm that follows, in shares. `parts.py` has the weights' layout on the device.
"""

from __future__ import annotations

from itertools import groupby

from mlxr.core.frozen import frozen
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import Deferred, Dot, Summands, Value, find_parts, settle
from mlxr.kernels.gpu.recording import Buffer
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.linear.blocks import (
    ROWS,
    STREAM,
    TILES,
    can_norm,
    describe,
    multiply_rows,
    multiply_stream,
    multiply_tiles,
    plan_stream,
)
from mlxr.kernels.linear.floats import (
    FLOAT_STREAM,
    PANELS,
    WIDE,
    FloatsPlan,
    PanelPlan,
    multiply_floats,
    multiply_panels,
    plan_floats,
    plan_panels,
)
from mlxr.kernels.linear.parts import (
    BLOCKS,
    EXPAND,
    FILL,
    FLOATS,
    GATES,
    LAYOUTS,
    Extras,
    Part,
    multiply_expanded,
    name_product,
    prepare,
)
from mlxr.kernels.linear.squares import SQUARES, multiply_squares
from mlxr.kernels.linear.unpacked import UNPACKED, UNPACKED_BOXED, UnpackPlan, multiply_unpacked, plan_unpacked
from mlxr.kernels.linear.unpacked import describe as describe_unpacked
from mlxr.kernels.tensor import DeviceArray

__all__ = ["linear", "prepare"]

MAX_ROWS = 8
MAX_FLOAT_ROWS = 2  # most rows of 16-bit floats; with more, the library is faster
MAX_OTHER_ROWS = 4  # the same for products that the library cannot record: two weights, a bias, or another type than x
MAX_WIDE_ROWS, MAX_WIDE_OUTPUTS = 256, 1024  # limits of 32-bit floats
MIN_TILED, MAX_TILED = 1, 64
MIN_SQUARED = 5
MAX_SHARED_OUTPUTS = 8192  # more outputs keep the device busy without shares
SHARES, LIBRARY_COLUMNS = 2, 64
KERNELS = (ROWS, WIDE, TILES, STREAM, FLOAT_STREAM, PANELS, UNPACKED, UNPACKED_BOXED, FILL, EXPAND, SQUARES)


@frozen(eq=False)
class Normed:
    """A deferred norm: x (T, n) in f32, and the weight on the device."""

    x: DeviceArray
    weight: DeviceArray
    eps: float


@frozen(eq=False)
class Product:
    """A deferred product; x is an array or a deferred norm. `way` names what computes it: rows, tiles, squares,
    unpacked, floats or library (instead of which panels may be used)."""

    x: DeviceArray | Normed
    parts: list[Part]
    bias: DeviceArray | None
    way: str

    @property
    def tokens(self) -> int:
        """The number of rows of x."""
        return (self.x.x if isinstance(self.x, Normed) else self.x).shape[0]

    @property
    def array(self) -> DeviceArray:
        """x, if it is an array; TypeError if it is a deferred norm, which this way does not take."""
        if isinstance(self.x, Normed):
            raise TypeError(f"a product by {self.way} takes no norm that waits")
        return self.x


def linear(ctx: Context, x: Value, weight: LinearWeight) -> Value:
    """Return x Wᵀ + b in the type of the activations, perhaps deferred; x has any float type."""
    mx, gpu = ctx.gpu.mx, ctx.gpu
    parts, bias = weight.payload
    tokens = x.shape[0]
    if not tokens:
        return mx.zeros((0, weight.out_features), gpu.activations)
    way = _find_way(ctx, x, parts, bias)
    if way:
        norms = way == "rows" or (way == "tiles" and can_norm(tokens, weight.in_features))
        # this way norms after multiplying by the norm's weight, whose results may be too large for f16
        norms = norms or (way == "floats" and tokens == 1 and parts[0].type_name == "bf16")
        normed = find_parts(x, Normed) if norms else None
        inputs = settle(x) if normed is None else normed
        product = Product(inputs, parts, bias, way)
        return Deferred((tokens, weight.out_features), gpu.activations, product, lambda: multiply(ctx, product))
    x = settle(x)
    if bias is None:
        result = _multiply_parts(ctx, x, parts)
    elif _adds_in_product(ctx, x, parts):
        result = _add_in_product(ctx, x, parts[0].upload.array, bias)
    else:
        result = _multiply_parts(ctx, x, parts) + bias
    return result if result.dtype.size <= gpu.activations.size else result.astype(gpu.activations)


def _multiply_parts(ctx: Context, x: DeviceArray, parts: list[Part]) -> DeviceArray:
    """Multiply by each part separately, by parts to be expanded together; 16-bit results of the library stay so."""
    outputs = []
    for way, group in groupby(parts, key=lambda part: _choose_part(ctx, part, x.shape[0])):
        if way == "expanded":
            outputs.append(multiply_expanded(ctx.gpu, x, _list_weights(list(group))))
        elif way == "library":
            outputs += [_multiply_library(ctx, x, part.upload.array) for part in group]
        else:
            outputs += [multiply(ctx, Product(x, [part], None, way)) for part in group]
    return outputs[0] if len(outputs) == 1 else ctx.gpu.mx.concatenate(outputs, axis=1)


def _choose_part(ctx: Context, part: Part, tokens: int) -> str:
    if _takes_tiles(ctx, part, tokens):
        return "tiles"
    if _takes_squares(ctx, part, tokens):
        return "squares"
    if _has_kernel(part, tokens):
        return "rows"
    return "library" if part.type_name in FLOATS else "expanded"


def multiply(
    ctx: Context, product: Product, gate: int = 0, residual: DeviceArray | None = None, *, wide: bool = False
) -> DeviceArray:
    """Multiply by one or two parts in one launch: the product, or gated (by one of GATES), or added to `residual` in
    f32. With `wide`, results of our own kernels are also f32."""
    gpu = ctx.gpu
    plan = _plan_floats(ctx, product, gate=gate) if product.way == "floats" else None
    if product.way == "library" or (product.way == "floats" and plan is None):
        matrix, panels = product.parts[0].upload.array, _plan_panels(ctx, product, gate) if gate else None
        if panels is None:
            return _multiply_library(ctx, product.array, matrix)
        return multiply_panels(gpu, product.array, matrix, gate, gpu.operands, panels)
    kind = gpu.mx.float32 if wide or residual is not None else gpu.operands if gate else gpu.activations
    normed = product.x if isinstance(product.x, Normed) else None
    x = product.array if normed is None else normed.x
    tokens, columns = x.shape
    norm = None if normed is None else (normed.weight, normed.eps)
    extras = Extras(gate, product.bias, norm, residual)
    if plan is not None:
        matrix = product.parts[0].upload.array
        return multiply_floats(gpu, x, matrix, extras, kind, plan)
    weights = _list_weights(product.parts)
    unpacking = _plan_unpacked(ctx, product.parts, tokens, columns, gate=gate) if product.way == "unpacked" else None
    if unpacking is not None:
        return multiply_unpacked(gpu, x, weights, extras, kind, unpacking)
    if product.way == "squares":
        return multiply_squares(gpu, x, weights, extras, kind)
    if product.way == "tiles":
        stream = plan_stream(describe(weights, columns, gate), gpu.processors, gpu.room_bytes) if tokens == 1 else None
        if stream is not None:
            return multiply_stream(gpu, x, weights, extras, kind, stream)
        return multiply_tiles(gpu, x, weights, extras, kind)
    return multiply_rows(gpu, x, weights, extras, kind)


def join_product(ctx: Context, x: DeviceArray, other: Value | None) -> tuple[DeviceArray, Summands | None]:
    """Return x + `other` in f32 and None, if `other` is a deferred product that can add x, or is None; else x and the
    summands that are still to be added."""
    product, summands = find_parts(other, Product), find_parts(other, Summands)
    if product is not None:
        return _add_product(ctx, product, x)
    if summands is None and other is not None:
        summands = Summands(settle(other))
    return x, summands


def list_summands(ctx: Context, value: Value) -> DeviceArray:
    """Return an array whose sum is `value`: for a deferred product in f32, perhaps in shares (shares, rows, columns);
    otherwise the array (rows, columns)."""
    product, summands = find_parts(value, Product), find_parts(value, Summands)
    if summands is not None and summands.is_plain:
        return summands.array
    if product is None:
        return settle(value)
    shares = _share_product(ctx, product)
    return multiply(ctx, product, wide=True) if shares is None else shares


def find_dot(value: Value) -> Dot | None:
    """Return x and weight of `value` if it is a deferred product that makes one number of each row; else None."""
    product = find_parts(value, Product)
    if product is None or not _makes_one(product.parts) or product.bias is not None or isinstance(product.x, Normed):
        return None
    return Dot(product.x, product.parts[0].upload.array)


def _makes_one(parts: list[Part]) -> bool:
    """Return True if the weight is a single row of plain numbers that our kernels read."""
    return len(parts) == 1 and parts[0].rows == 1 and parts[0].type_name in FLOATS and parts[0].raw is not None


def _add_product(ctx: Context, product: Product, x: DeviceArray) -> tuple[DeviceArray, Summands | None]:
    shares = _share_product(ctx, product)
    if shares is not None:
        return x, Summands(shares)
    if product.way == "library":
        return x, Summands(multiply(ctx, product))
    return multiply(ctx, product, residual=x), None


def _share_product(ctx: Context, product: Product) -> DeviceArray | None:
    """Return the product in shares of its inputs, (shares, rows, columns) in f32; None if it is better made whole."""
    matrix = product.parts[0].upload.array
    if product.way == "unpacked":
        tokens, columns = product.array.shape
        plan = _plan_unpacked(ctx, product.parts, tokens, columns, shared=True)
        if plan is not None and plan.shares > 1:
            extras, wide = Extras(bias=product.bias), ctx.gpu.mx.float32
            return multiply_unpacked(ctx.gpu, product.array, _list_weights(product.parts), extras, wide, plan)
    if product.way == "floats":
        floats = _plan_floats(ctx, product, shared=True)
        if floats is not None and floats.shares > 1:
            return multiply_floats(ctx.gpu, product.array, matrix, Extras(), ctx.gpu.mx.float32, floats)
    if product.way != "library":
        return None
    panels, wide = _plan_panels(ctx, product), ctx.gpu.mx.float32
    if panels is not None:
        return multiply_panels(ctx.gpu, product.array, matrix, 0, wide, panels)
    shares = choose_shares(*matrix.shape)
    if shares == 1:
        return None
    return ctx.gpu.recorder.multiply(_narrow(ctx, product.array, matrix), matrix, shares, wide)


def choose_shares(outputs: int, inputs: int) -> int:
    """Return the best number of shares of the inputs for a library's product, whose sum is made later anyway."""
    return SHARES if outputs < MAX_SHARED_OUTPUTS and inputs % (SHARES * LIBRARY_COLUMNS) == 0 else 1


def can_gate(ctx: Context, product: Product) -> bool:
    """Return True if `gate_product` can compute this product."""
    if product.way == "floats":
        return _plan_floats(ctx, product, gate=1) is not None
    if product.way == "unpacked":
        tokens, columns = product.array.shape
        return _plan_unpacked(ctx, product.parts, tokens, columns, gate=1) is not None
    return len(product.parts) == 1 and (product.way != "library" or _plan_panels(ctx, product, 1) is not None)


def gate_product(ctx: Context, product: Product, kind: str) -> DeviceArray:
    """Return act(first half of the product) * second half."""
    return multiply(ctx, product, gate=GATES[kind])


def _list_weights(parts: list[Part]) -> list[tuple[int, int, DeviceArray]]:
    return [(LAYOUTS[part.type_name].number, part.rows, part.planes) for part in parts]


def _plan_unpacked(
    ctx: Context, parts: list[Part], tokens: int, columns: int, *, gate: int = 0, shared: bool = False
) -> UnpackPlan | None:
    """Return the plan to unpack blocks in registers; None if that is impossible or does not pay."""
    gpu = ctx.gpu
    if not gpu.has_tiles or gpu.machine is None or not gpu.machine.has_boxes or len(parts) > (1 if gate else 2):
        return None
    if any(part.raw is None or part.type_name not in BLOCKS for part in parts):
        return None
    shape = describe_unpacked(_list_weights(parts), columns, gate)
    return plan_unpacked(shape, tokens, gpu.processors, gpu.room_bytes, shared=shared)


def _plan_panels(ctx: Context, product: Product, gate: int = 0) -> PanelPlan | None:
    """Return the plan of our own kernel for a product of the library; None if it cannot do it, or is no faster."""
    gpu, matrix = ctx.gpu, product.parts[0].upload.array
    if (
        gpu.machine is None
        or not gpu.machine.has_boxes
        or matrix.dtype.size != 2
        or product.array.dtype != matrix.dtype
    ):
        return None
    rows, columns = matrix.shape
    return plan_panels(product.tokens, rows, columns, gate, gpu.processors, gpu.room_bytes)


def _find_way(ctx: Context, x: Value, parts: list[Part], bias: DeviceArray | None) -> str:
    """Return the way that computes all parts in one launch; empty if there is none."""
    tokens, columns = x.shape
    if _makes_one(parts):
        return "rows"
    if x.dtype == ctx.gpu.mx.bfloat16 and _plan_unpacked(ctx, parts, tokens, columns) is not None:
        return "unpacked"
    if len(parts) <= 2 and all(_takes_tiles(ctx, part, tokens) for part in parts):
        return "tiles"
    is_plain = len(parts) == 1 and bias is None and parts[0].type_name in FLOATS
    suits_library = is_plain and x.dtype == parts[0].upload.array.dtype
    if len(parts) == 1 and _takes_floats(ctx, parts[0], tokens, shared=suits_library):
        return "floats"
    if len(parts) <= 2 and all(_takes_squares(ctx, part, tokens) for part in parts):
        return "squares"
    if len(parts) <= 2 and all(_has_kernel(part, tokens, _limit_rows(part, suits_library)) for part in parts):
        return "rows"
    if not is_plain:
        return ""
    return "library" if isinstance(settle(x), Buffer) else ""


def _takes_tiles(ctx: Context, part: Part, tokens: int) -> bool:
    return ctx.gpu.has_tiles and part.raw is not None and part.type_name in BLOCKS and MIN_TILED <= tokens <= MAX_TILED


def _takes_squares(ctx: Context, part: Part, tokens: int) -> bool:
    is_block = part.raw is not None and part.type_name in BLOCKS
    return ctx.gpu.has_squares and is_block and MIN_SQUARED <= tokens <= ctx.gpu.most_squared


def _takes_floats(ctx: Context, part: Part, tokens: int, *, shared: bool) -> bool:
    """Return True if `multiply_floats` can do it; `shared` allows shares, if another way can make the whole."""
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


def _limit_rows(part: Part, suits_library: bool) -> int:
    """Return the most rows of x for which floats go to `multiply_rows`."""
    if part.type_name != "f32":
        return MAX_FLOAT_ROWS if suits_library else MAX_OTHER_ROWS
    if suits_library:
        return 0
    return MAX_WIDE_ROWS if part.rows <= MAX_WIDE_OUTPUTS else MAX_OTHER_ROWS


def _has_kernel(part: Part, tokens: int, float_rows: int = MAX_OTHER_ROWS) -> bool:
    return part.raw is not None and tokens <= (float_rows if part.type_name in FLOATS else MAX_ROWS)


def _multiply_library(ctx: Context, x: DeviceArray, matrix: DeviceArray) -> DeviceArray:
    if isinstance(x, Buffer):
        return ctx.gpu.recorder.multiply(_narrow(ctx, x, matrix), matrix)
    kind = matrix.dtype if ctx.gpu.narrow else ctx.gpu.mx.float32
    return ctx.gpu.watch.run_mlx(
        "linear", name_product(matrix.dtype), lambda: x.astype(kind) @ matrix.T.astype(kind), x, matrix
    )


def _adds_in_product(ctx: Context, x: DeviceArray, parts: list[Part]) -> bool:
    """Return True if the library multiplies all of it and may add the bias; not in bf16 if results are wider."""
    gpu = ctx.gpu
    if len(parts) > 1 or isinstance(x, Buffer) or not gpu.narrow:
        return False
    keeps_digits = parts[0].type_name == "bf16" and gpu.activations.size > 2
    return _choose_part(ctx, parts[0], x.shape[0]) == "library" and not keeps_digits


def _add_in_product(ctx: Context, x: DeviceArray, matrix: DeviceArray, bias: DeviceArray) -> DeviceArray:
    """Return x Wᵀ + b by the library, which takes b in 16 bits and adds it before it rounds."""
    gpu, kind = ctx.gpu, matrix.dtype
    return gpu.watch.run_mlx(
        "linear",
        name_product(matrix.dtype),
        lambda: gpu.mx.addmm(bias.astype(kind), x.astype(kind), matrix.T),
        x,
        matrix,
    )


def _narrow(ctx: Context, x: DeviceArray, matrix: DeviceArray) -> Buffer:
    if not isinstance(x, Buffer):
        raise TypeError("a product is recorded of what launches made")
    return x.astype(matrix.dtype if ctx.gpu.narrow else ctx.gpu.mx.float32)
