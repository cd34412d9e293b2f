"""`route` and `mix` on a GPU: two launches of products and one that sorts; the host need not know the chosen experts.

The sum of a token's experts by rank is deferred, as that of a product's shares: the norm that follows adds them up,
with the shared expert's result. Without kernels, and for columns that these do not take, MLX gathers the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxr.core.errors import DeviceError
from mlxr.core.frozen import frozen
from mlxr.kernels.activate import Activation
from mlxr.kernels.activate.gpu import activate
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise.gpu import defer_sum
from mlxr.kernels.gpu.deferred import Summands, Value, settle
from mlxr.kernels.gpu.device import Gpu
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.gpu.launcher import MIN_ARRAY
from mlxr.kernels.gpu.mlx import Mlx
from mlxr.kernels.ledger import EXPERT_ROWS, MLX
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.linear.parts import GATES
from mlxr.kernels.lora import AdapterRows
from mlxr.kernels.moe import Experts, ExpertsUse, Router
from mlxr.kernels.moe.products import (
    ITEMS,
    PANELS,
    ROWS,
    SORT,
    SQUARES,
    STREAM,
    TILES,
    Stack,
    Tiling,
    can_multiply,
    multiply_experts,
    plan_panels,
    sort_pairs,
    stack_weights,
    takes_squares,
)
from mlxr.kernels.tensor import DeviceArray

FOLDER = Path(__file__).parent
ROUTE = Kernel(
    "moe_route",
    FOLDER,
    "route.body",
    ("logits", "bias", "scales", "use", "live", "numbers"),
    ("chosen", "shares"),
    ("route.h",),
)
KERNELS = (ROUTE, SORT, ROWS, TILES, ITEMS, PANELS, STREAM, SQUARES)
SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax_chosen": 2, "sparsemixer": 3}


@frozen(eq=False)
class Payload:
    """The weights of all experts of a layer, and counts of their use.

    `use` counts launches, experts with rows in each, and the rows of each expert, in place, as in moe/sort.body: 2 +
    experts numbers of 64 bits, at least MIN_ARRAY.
    """

    up: Stack
    down: Stack
    use: DeviceArray
    experts: int

    def suits_kernels(self, gpu: Gpu) -> bool:
        """Return True if our kernels multiply by them."""
        return can_multiply(gpu, self.up) and can_multiply(gpu, self.down)


def prepare_experts(
    ctx: Context,
    up: tuple[LinearWeight, ...],
    down: tuple[LinearWeight, ...],
    activation: Activation,
    parameters: tuple[float, ...],
) -> Payload:
    """Return the weights of all experts as stacks. Raises DeviceError if their types differ, or if the activation has
    parameters."""
    if parameters:
        raise DeviceError(
            f"the model's experts have the activation {activation} with numbers of its own, for which there are "
            "kernels for processors alone; run it with --device cpu"
        )
    mx = ctx.gpu.mx
    use = mx.zeros((max(MIN_ARRAY, 2 + len(up)),), mx.int64)
    mx.eval(use)
    return Payload(stack_weights(ctx.gpu, up), stack_weights(ctx.gpu, down), use, len(up))


def read_use(ctx: Context, payload: Payload) -> ExpertsUse | None:
    """Return the use of each expert after all started work is done; None if MLX itself multiplies.

    Dropped steps that ran ahead count, too.
    """
    if not payload.suits_kernels(ctx.gpu):
        return None
    steps, groups, *rows = ctx.gpu.fetch_written(payload.use).tolist()
    return ExpertsUse(tuple(rows[: payload.experts]), steps, groups)


def route(
    ctx: Context, logits: DeviceArray, router: Router, experts: Experts | None = None
) -> tuple[DeviceArray, DeviceArray]:
    """Choose the experts of each token in one launch, which also counts the use of `experts` by a single token."""
    gpu, rule, logits = ctx.gpu, router.rule, settle(logits)
    tokens, (bias, scales) = (
        logits.shape[0],
        (None if each is None else gpu.hold(each) for each in (router.choice_bias, router.expert_scales)),
    )
    if gpu.launcher is None:
        return route_composed(ctx, logits, router, bias, scales)
    none = gpu.launcher.numbers(0.0)
    is_counted = experts is not None and tokens == 1
    chosen, shares = gpu.launcher.launch(
        ROUTE,
        [
            logits,
            none if bias is None else bias,
            none if scales is None else scales,
            experts.payload.use if experts is not None and is_counted else none,
            gpu.count_live(tokens) if is_counted else none,
            gpu.launcher.numbers(float(rule.floor), float(rule.scale), float(rule.gap)),
        ],
        groups=(tokens, 1, 1),
        threads=32,
        outputs=[((tokens, rule.used), gpu.mx.int32), ((tokens, rule.used), gpu.mx.float32)],
        constants={
            "EXPERTS": router.experts,
            "USED": rule.used,
            "SCORING": SCORINGS[rule.scoring],
            "RENORMALISES": int(rule.renormalises),
            "GROUPS": rule.groups,
            "GROUPS_USED": rule.groups_used,
            "BIASED": int(bias is not None),
            "SCALED": int(scales is not None),
            "COUNTED": int(is_counted),
        },
    )
    return chosen, shares


def mix(
    ctx: Context,
    x: DeviceArray,
    chosen: DeviceArray,
    shares: DeviceArray,
    experts: Experts,
    _adapters: Sequence[AdapterRows] = (),
) -> Value:
    """Return the sum over ranks, in f32, deferred to its reader. No adapter updates the experts."""
    gpu, payload, x = ctx.gpu, experts.payload, settle(x)
    assert isinstance(payload, Payload)
    if not payload.suits_kernels(gpu):
        return mix_composed(ctx, x, chosen, shares, experts, payload)
    (tokens, used), count = chosen.shape, len(experts.up)
    panels = plan_panels(gpu, x.dtype, payload.up, payload.down, tokens * used / count) if tokens > 1 else None
    squared = takes_squares(gpu, payload.up, payload.down)
    tiling = sort_pairs(gpu, chosen, count, gpu.has_tiles, panels, payload.use, squared)
    if experts.is_gated and len(payload.up.parts) == 1:
        inner = multiply_experts(gpu, x, payload.up, tiling, GATES[experts.activation], None, gpu.operands)
    else:
        made = multiply_experts(gpu, x, payload.up, tiling, 0, None, gpu.activations)
        inner = activate(ctx, made, experts.activation, experts.is_gated)
    return defer_sum(ctx, Summands(multiply_experts(gpu, inner, payload.down, tiling, 0, shares, gpu.mx.float32)))


def route_composed(
    ctx: Context, logits: DeviceArray, router: Router, bias: DeviceArray | None, scales: DeviceArray | None
) -> tuple[DeviceArray, DeviceArray]:
    """Choose experts by MLX's operations, as `route` of the reference."""
    mx, rule = ctx.gpu.mx, router.rule
    logits = logits.astype(mx.float32)
    scores = logits
    if rule.scoring == "softmax":
        scores = mx.softmax(logits, axis=1, precise=True)
    elif rule.scoring == "sigmoid":
        scores = mx.sigmoid(logits)
    worth = scores if bias is None else scores + bias
    if rule.groups_used < rule.groups:
        grouped = worth.reshape(worth.shape[0], rule.groups, -1)
        best = mx.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
        kept = _find_ranks(mx, best) < rule.groups_used
        worth = mx.where(kept[:, :, None], grouped, float("-inf")).reshape(worth.shape)
    chosen = _sort_falling(mx, worth)[:, : rule.used]
    shares = mx.take_along_axis(scores, chosen, axis=1)
    if rule.scoring == "softmax_chosen":
        shares = mx.softmax(shares, axis=1, precise=True)
    elif rule.scoring == "sparsemixer":
        shares = _share_near(mx, logits, chosen, rule.gap)
    if rule.renormalises:
        shares = shares / (shares.sum(axis=1, keepdims=True) + rule.floor)
    shares = shares * rule.scale
    if scales is not None:
        shares = shares * mx.take(scales, chosen)
    return chosen.astype(mx.int32), shares


def mix_composed(
    ctx: Context, x: DeviceArray, chosen: DeviceArray, shares: DeviceArray, experts: Experts, payload: Payload
) -> DeviceArray:
    """Run every pair of a token and a rank by itself, with weights that MLX gathers.

    If our kernels take the weights of one of the two products, such as blocks beside floats of an odd width, they do
    that one.
    """
    gpu, mx, (tokens, used) = ctx.gpu, ctx.gpu.mx, chosen.shape
    numbers = chosen.reshape(-1)

    def sort(stack: Stack) -> Tiling:
        return sort_pairs(gpu, chosen, payload.experts, gpu.has_tiles, has_squares=takes_squares(gpu, stack))

    if can_multiply(gpu, payload.up):
        made = multiply_experts(gpu, x, payload.up, sort(payload.up), 0, None, gpu.activations)
    else:
        made = gather_products(ctx, "moe", mx.repeat(x.astype(mx.float32), used, axis=0), payload.up, numbers)
    inner = activate(ctx, made, experts.activation, experts.is_gated)
    if can_multiply(gpu, payload.down):
        inner = inner.astype(gpu.activations)
        return multiply_experts(gpu, inner, payload.down, sort(payload.down), 0, shares, mx.float32).sum(axis=0)
    made = gather_products(ctx, "moe", inner.astype(mx.float32), payload.down, numbers).reshape(tokens, used, -1)
    return (made * shares[:, :, None]).sum(axis=1)


def gather_products(ctx: Context, operator: str, x: DeviceArray, stack: Stack, numbers: DeviceArray) -> DeviceArray:
    """Multiply each row of x by weight `numbers[row]` of a stack, with weights that MLX gathers."""
    mx = ctx.gpu.mx

    def gather() -> DeviceArray:
        made = [
            mx.gather_mm(x[:, None, :], part.array.astype(mx.float32).swapaxes(1, 2), rhs_indices=numbers)[:, 0]
            for part in stack.parts
        ]
        joined = made[0] if len(made) == 1 else mx.concatenate(made, axis=1)
        return joined if stack.biases is None else joined + mx.take(stack.biases, numbers, axis=0)

    variant = "+".join(dict.fromkeys(part.type_name for part in stack.parts))
    if operator == "moe":
        ctx.ledger.count(EXPERT_ROWS, MLX, variant, numbers.shape[0])
    return ctx.gpu.watch.run_mlx(operator, variant, gather, x)


def _share_near(mx: Mlx, logits: DeviceArray, chosen: DeviceArray, gap: float) -> DeviceArray:
    shares, places = [], mx.arange(logits.shape[1])[None]
    for rank in range(chosen.shape[1]):
        number = chosen[:, rank : rank + 1]
        own = mx.take_along_axis(logits, number, axis=1)
        is_far = (own - logits) / mx.maximum(mx.abs(logits), own) > gap
        powers = mx.where(is_far & (logits != own), 0.0, mx.exp(logits - own))
        shares.append(1 / powers.sum(axis=1, keepdims=True))
        logits = mx.where(places == number, float("-inf"), logits)
    return mx.concatenate(shares, axis=1)


def _sort_falling(mx: Mlx, values: DeviceArray) -> DeviceArray:
    """Return the indices of the values, the largest first; equal values stay in order."""
    return mx.argsort(_find_ranks(mx, values), axis=1)


def _find_ranks(mx: Mlx, values: DeviceArray) -> DeviceArray:
    """Return the number of values of a row before each one: larger ones, and equal ones to its left."""
    places = mx.arange(values.shape[1])
    above, equal = values[:, None, :] > values[:, :, None], values[:, None, :] == values[:, :, None]
    return (above | (equal & (places[None, :] < places[:, None])[None])).astype(mx.int32).sum(axis=2)
