"""Checks of a GPU, one by one: each kernel against NumPy with small numbers, writes into pages, and speeds.

The error that a check raises, such as a message of the GPU's compiler, becomes its finding, and the next check runs.
The caller makes the tensors of weights, as the engine reads no files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from mlxr.cache.arena import Arena
from mlxr.core.frozen import frozen
from mlxr.core.tables import WEIGHT_TYPES
from mlxr.kernels.activate import activate
from mlxr.kernels.attend import attend
from mlxr.kernels.context import Context
from mlxr.kernels.embed import embed
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.mlx import find_gpu, load_mlx
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.moe import RoutingRule, make_experts, make_router, mix, route
from mlxr.kernels.norms import layer_norm, rms_norm
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import build_table
from mlxr.kernels.rope_and_write_kv import rope_and_write_kv
from mlxr.kernels.tensor import FloatArray, TensorSource

__all__ = ["Finding", "describe_gpu", "find_gpu", "list_checks", "run_check", "summarise_parts"]


class MakeTensor(Protocol):
    """Makes random weights of a type."""

    def __call__(self, type_name: str, rows: int, columns: int, seed: int) -> TensorSource:
        """Return the weights: the same ones for the same arguments."""


Result = tuple[bool | None, str]
Check = tuple[str, str, Callable[[], Result]]  # part, name, the function that checks
WIDTH, HEAD_TYPE = 512, "q4_k"
EXACT, NARROW = 2e-5, 2e-2  # root mean square of the error over that of the result: of f32, and of 16 bits on the way
PAGE_ORDERS, PAGES, PAGE_SIZE = 100, 6, 16
EMPTY_LAUNCHES = 1000
COPIED_BYTES, MATRIX = 1 << 28, 4096
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (65536, 4096))  # outputs and inputs of an 8B model, and its head
REPEATS, TOGETHER = 5, 50  # a figure is the best of so many; runs that are submitted at once, as in a step


@frozen
class Finding:
    """The outcome of one check; `passed` is None for figures, which are not judged."""

    part: str
    name: str
    passed: bool | None
    text: str
    seconds: float


def run_check(part: str, name: str, check: Callable[[], Result]) -> Finding:
    """Run a check; all that it raises is a finding, as compilers and drivers may raise anything."""
    start_s = time.perf_counter()
    try:
        passed, text = check()
    except Exception as error:
        passed, text = False, f"{type(error).__name__}: {error}"
    return Finding(part, name, passed, text, time.perf_counter() - start_s)


def describe_gpu(device: str) -> dict[str, str]:
    """Return MLX's description of the device. Raises DeviceError where there is none."""
    return {str(name): str(value) for name, value in load_mlx(device).device_info().items()}


def list_checks(device: str, make_tensor: MakeTensor, *, is_brief: bool = False) -> Iterator[Check]:
    """Yield the checks of a device, in the order in which they help to understand each other.

    With `is_brief` there are one type of weights, one row, few orders of pages and no speeds, which suits a device that
    is emulated. Raises DeviceError if there is no such device.
    """
    ctx = Context(device)  # type: ignore[arg-type]
    kernels = _Kernels(ctx)
    for name in [HEAD_TYPE] if is_brief else [row.name for row in WEIGHT_TYPES]:
        yield "kernel", f"embed {name}", partial(kernels.compare, _embed(make_tensor, name), EXACT)
        for rows in (1,) if is_brief else (1, 4, 32):
            run = _multiply(make_tensor, name, rows)
            yield "kernel", f"linear {name}, {rows} rows", partial(kernels.compare, run, NARROW)
    yield "kernel", "norms, and a gated block", partial(kernels.compare, _feed_forward(make_tensor), NARROW)
    yield "kernel", "layer norm", partial(kernels.compare, _layer_norm, EXACT)
    heads = (64,) if is_brief else (64, 80, 128, 256)
    for dim in heads:
        for context, queries in ((20, 1),) if is_brief else ((20, 1), (600, 1), (40, 24)):
            run = _attend(dim, context, queries)
            yield "kernel", f"attend {dim}, {queries} of {context}", partial(kernels.compare, run, NARROW)
    for rows in (1,) if is_brief else (1, 9):
        run = _mix(make_tensor, rows)
        yield "kernel", f"experts, {rows} rows", partial(kernels.compare, run, NARROW)
    orders = PAGE_ORDERS // 10 if is_brief else PAGE_ORDERS
    yield "pages", f"{orders} orders of writes", partial(_write_pages, ctx, orders)
    if not is_brief:
        yield from _list_speeds(ctx, make_tensor)


def _random(seed: int, *shape: int) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _place(ctx: Context, array: FloatArray) -> Any:
    return array if ctx.gpu is None else ctx.gpu.mx.array(array)


@frozen
class _Kernels:
    ctx: Context

    def compare(self, run: Callable[[Context], Any], most: float) -> Result:
        """Do `run` here and by the reference; return whether they agree, how far they differ, and which kernels ran."""
        ctx, reference = self.ctx, Context("reference")
        expected = np.asarray(run(reference)).astype(np.float64)
        before = ctx.ledger.copy_counts()
        made: Any = settle(run(ctx))
        if ctx.gpu is not None:
            made = made.astype(ctx.gpu.mx.float32)
        difference = np.asarray(made).astype(np.float64) - expected
        error = math.sqrt(float((difference**2).mean() / (expected**2).mean()))
        ran = sorted(
            f"{operator} {variant}" for operator, _, variant in ctx.ledger.copy_counts().keys() - before.keys()
        )
        return error < most, f"off by {error:.1e} of at most {most:.0e}" + (f"; ran {', '.join(ran)}" if ran else "")


def _embed(make_tensor: MakeTensor, name: str) -> Callable[[Context], Any]:
    ids = np.asarray([3, 0, 63, 3], np.int32)
    return lambda ctx: embed(ctx, ids, make_tensor(name, 64, WIDTH, 1))


def _multiply(make_tensor: MakeTensor, name: str, rows: int) -> Callable[[Context], Any]:
    x = _random(rows, rows, WIDTH)
    return lambda ctx: linear(ctx, _place(ctx, x), prepare(ctx, [make_tensor(name, WIDTH, WIDTH, 2)]))


def _feed_forward(make_tensor: MakeTensor) -> Callable[[Context], Any]:
    """Return a function that computes norm, gate and up, down, and the norm of the sum, as a layer asks for them, so
    that they are fused alike."""
    x, gain = _random(1, 3, WIDTH), _random(2, WIDTH)

    def run(ctx: Context) -> Any:
        normed, stream = rms_norm(ctx, _place(ctx, x), gain, 1e-5)
        up = prepare(ctx, [make_tensor(HEAD_TYPE, WIDTH, WIDTH, seed) for seed in (3, 4)])
        made = activate(ctx, linear(ctx, normed, up), "silu")
        down = prepare(ctx, [make_tensor("q6_k", WIDTH, WIDTH, 5)])
        return rms_norm(ctx, stream, gain, 1e-5, linear(ctx, made, down))[1]

    return run


def _layer_norm(ctx: Context) -> Any:
    return layer_norm(ctx, _place(ctx, _random(1, 3, WIDTH)), _random(2, WIDTH), 1e-5, bias=_random(3, WIDTH))[0]


def _attend(head_dim: int, context: int, queries: int) -> Callable[[Context], Any]:
    """Return a function that computes attention of the last queries of a context, whose keys and values went through
    pages out of order."""
    return lambda ctx: _fill_pages(ctx, head_dim, context, queries)()


def _fill_pages(ctx: Context, head_dim: int, context: int, queries: int) -> Callable[[], Any]:
    """Write a context into pages out of order; return a function that computes attention of its last queries."""
    heads, kv_heads = 8, 2
    pages = -(-context // PAGE_SIZE)
    order = np.random.default_rng(7).permutation(pages).astype(np.int32)[None]
    table = build_table(context, head_dim, 1e4, interleaved=False)
    arena = Arena(ctx, 1, pages, kv_heads, PAGE_SIZE, head_dim, "bf16")
    k_pool, v_pool = arena.k_pools[0], arena.v_pools[0]
    for first, last in ((0, context - queries), (context - queries, context)):
        batch = _batch(order, first, last)
        qkv = _place(ctx, _random(last, last - first, (heads + 2 * kv_heads) * head_dim))
        q = rope_and_write_kv(ctx, qkv, heads, batch, table, k_pool, v_pool)
        if ctx.gpu is not None:
            ctx.gpu.submit(q)  # type: ignore[arg-type]
    return lambda: attend(ctx, q, k_pool, v_pool, batch, scale=head_dim**-0.5)


def _batch(table: Any, first: int, last: int) -> RaggedBatch:
    positions = np.arange(first, last, dtype=np.int32)
    slots = table[0, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    return RaggedBatch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        slots=slots.astype(np.int32),
        query_starts=np.asarray([0, len(positions)], np.int32),
        context_lengths=np.asarray([last], np.int32),
        page_table=table,
        output_rows=np.arange(len(positions), dtype=np.int32),
    )


def _mix(make_tensor: MakeTensor, rows: int) -> Callable[[Context], Any]:
    count, width = 8, 256
    x, logits = _random(1, rows, width), _random(2, rows, count)
    chosen, shares = route(Context("reference"), logits, make_router(count, RoutingRule(2)))

    def run(ctx: Context) -> Any:
        up = [
            prepare(ctx, [make_tensor(HEAD_TYPE, width, width, 2 * one + at) for at in (0, 1)]) for one in range(count)
        ]
        down = [prepare(ctx, [make_tensor("q6_k", width, width, 77 + one)]) for one in range(count)]
        experts = make_experts(ctx, up, down, "silu")
        return mix(ctx, _place(ctx, x), _place(ctx, chosen), _place(ctx, shares), experts)  # type: ignore[arg-type]

    return run


def _write_pages(ctx: Context, orders: int) -> Result:
    """Check that pages that are copied and overwritten in random orders hold what NumPy's hold."""
    random = np.random.default_rng(11)
    pool = ctx.gpu.allocate_pool((PAGES, 2, PAGE_SIZE, 64), "f32")
    held = np.zeros((PAGES, pool.page_numbers), np.float32)
    for order in range(orders):
        for _ in range(4):
            source, target = random.choice(PAGES, 2, replace=False).tolist()
            if random.random() < 0.5:
                held[target] = random.standard_normal(pool.page_numbers)
                pool.write_page(target, held[target].view(np.uint8))
            else:
                pool.copy_page(source, target)
                held[target] = held[source]
        for page in range(PAGES):
            if pool.read_page(page).tobytes() != held[page].tobytes():
                return False, f"page {page} holds something else after order {order + 1} of {orders}"
    return True, f"{orders} of {orders} as written"


def _time_s(ctx: Context, run: Callable[[], Any], together: int = TOGETHER) -> float:
    """Return the seconds of one run in the quickest of several evaluations of `together` runs, which hide the
    launch."""
    mx, times = ctx.gpu.mx, []
    for _ in range(REPEATS + 1):
        outputs = [settle(run()) for _ in range(together)]
        mx.synchronize()
        start_s = time.perf_counter()
        mx.eval(outputs)
        mx.synchronize()
        times.append((time.perf_counter() - start_s) / together)
    return min(times[1:])


def _list_speeds(ctx: Context, make_tensor: MakeTensor) -> Iterator[Check]:
    mx: Any = ctx.gpu.mx

    def copy() -> Result:
        x = mx.zeros((COPIED_BYTES // 4,), mx.float32)
        seconds = _time_s(ctx, lambda: x + 1, together=8)
        return None, f"{2 * COPIED_BYTES / seconds / 1e9:.0f} GB/s read and written"

    def launch() -> Result:
        def run() -> Any:
            x = mx.zeros((8,), mx.float32)
            for _ in range(EMPTY_LAUNCHES):
                x = x + 1
            return x

        seconds = _time_s(ctx, run, together=1) / EMPTY_LAUNCHES
        return None, f"{seconds * 1e6:.1f} us for each of {EMPTY_LAUNCHES} that wait for another"

    def multiply(kind: str) -> Result:
        x = mx.zeros((MATRIX, MATRIX), getattr(mx, kind))
        seconds = _time_s(ctx, lambda: x @ x, together=8)
        return None, f"{2 * MATRIX**3 / seconds / 1e12:.1f} TFLOP/s"

    def read(outputs: int, inputs: int, rows: int) -> Result:
        tensor = make_tensor(HEAD_TYPE, outputs, inputs, 1)
        weight = prepare(ctx, [tensor])
        x = mx.array(_random(1, rows, inputs))
        seconds = _time_s(ctx, lambda: linear(ctx, x, weight))
        return (
            None,
            f"{seconds * 1e6:.1f} us, {tensor.nbytes / seconds / 1e9:.0f} GB/s (caches included)",
        )

    def look_back() -> Result:
        return None, f"{_time_s(ctx, _fill_pages(ctx, 128, 4096, 1)) * 1e6:.1f} us"

    yield "speed", "memory", copy
    yield "speed", "launch", launch
    for kind in ("bfloat16", "float16"):
        yield "speed", f"MLX's matmul, {kind}", partial(multiply, kind)
    for outputs, inputs in SHAPES:
        for rows in (1, 8):
            yield "speed", f"linear {HEAD_TYPE} {outputs} x {inputs}, {rows} rows", partial(read, outputs, inputs, rows)
    yield "speed", "attend 128, 1 of 4096", look_back


def summarise_parts(findings: Sequence[Finding]) -> dict[str, str]:
    """Return for each part how many of its judged checks passed."""
    counts: dict[str, list[int]] = {}
    for one in findings:
        if one.passed is not None:
            passed = counts.setdefault(one.part, [0, 0])
            passed[0] += one.passed
            passed[1] += 1
    return {part: f"{passed} of {all_}" for part, (passed, all_) in counts.items()}
