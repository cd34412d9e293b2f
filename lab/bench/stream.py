"""Time one row's quantised products on an NVIDIA GPU: each kind alone, and those of a whole step after one another.

    PYTHONPATH=src:tests/gpu python lab/bench/stream.py --shape gate down --stages 2 3 4
    PYTHONPATH=src:tests/gpu python lab/bench/stream.py --chain

Launches are captured into a graph as recorded steps are, with weights of their own, more than the cache holds. The
error is that against a float product. "tiles" is the kernel that takes more rows. Needs CuPy.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cupy as cp
import mlx.core as mx
import numpy as np
from gpu_cases import make_tensor

from mlxr.core.tables import WEIGHT_TYPES
from mlxr.kernels.gpu.cuda.driver import CudaDriver
from mlxr.kernels.gpu.kernel import Kernel, Variant, make_cuda_source, name_cuda_function
from mlxr.kernels.linear.blocks import (
    SIMD_GROUPS,
    STREAM,
    TILES,
    StreamPlan,
    StreamShape,
    choose_plan,
    make_constants,
    share_groups,
)
from mlxr.kernels.linear.parts import LAYOUTS, flag_extras

Q4, Q6 = 12, 14
TYPE_NAMES = {Q4: "q4_k", Q6: "q6_k"}
TYPE_BYTES = {row.code: row.block_bytes for row in WEIGHT_TYPES}  # of a block of 256 columns
POOL_ROWS = 128
CACHE_BYTES, GRAPH_BYTES = 160 << 20, 1 << 30


@dataclass(frozen=True)
class Case:
    """A product of Llama 3 8B in Q4_K_M: with a norm, or with a sum; what is normed is f32."""

    shape: StreamShape
    normed: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(map(self.count_bytes, (0, 1)))

    def count_bytes(self, index: int) -> int:
        """Bytes of one of them."""
        return self.shape.rows[index] * self.shape.columns // 256 * TYPE_BYTES[self.shape.types[index]]

    @property
    def kinds(self) -> tuple[Any, Any]:
        """Types of x and of the result."""
        return mx.float32 if self.normed else mx.bfloat16, mx.bfloat16 if self.shape.gate else mx.float32


CASES = {
    "qkv": Case(StreamShape((Q4, Q6), (5120, 1024), 4096), normed=True),
    "qkv4": Case(StreamShape((Q4, Q4), (6144, 0), 4096), normed=True),
    "output": Case(StreamShape((Q4, Q4), (4096, 0), 4096), normed=False),
    "gate": Case(StreamShape((Q4, Q4), (28672, 0), 4096, 1), normed=True),
    "down": Case(StreamShape((Q4, Q4), (4096, 0), 14336), normed=False),
    "down6": Case(StreamShape((Q6, Q6), (4096, 0), 14336), normed=False),
    "head": Case(StreamShape((Q6, Q6), (128256, 0), 4096), normed=True),
}
LAYERS = (("qkv4", "output", "gate", "down"), ("qkv", "output", "gate", "down6"))


class Product:
    """One case in one way, compiled; `plan` None is the kernel for more rows."""

    def __init__(self, driver: CudaDriver, case: Case, plan: StreamPlan | None) -> None:
        self._driver, self.is_tiled = driver, plan is None
        shape, norm = case.shape, case.normed
        flags = flag_extras(shape.gate, is_normed=norm, adds=not norm)
        if plan is None:
            made = (shape.rows[0] // 2 if shape.gate else shape.rows[0]), shape.rows[1]
            tiles = choose_plan(1, shape.columns, sum(shape.rows), set(shape.types), norm)
            self._groups, threads, self._room_bytes = sum(tiles.count_groups(n, shape.gate != 0) for n in made), 256, 0
            constants = {
                **make_constants(shape, StreamPlan((1, 1))),
                **flags,
                "M": tiles.row_tiles,
                "N": 1,
                "SPLIT": tiles.split,
                "RESIDENT": tiles.resident,
                "AHEAD": 0,
                "STAGED": int(tiles.staged),
                "SINGLE": int(tiles.single),
            }
            assert threads == 32 * SIMD_GROUPS
        else:
            self._groups, threads, self._room_bytes = sum(plan.groups), 32 * plan.simd_groups, shape.count_room(plan)
            constants = make_constants(shape, plan) | flags
        self._threads = threads
        kernel: Kernel = TILES if plan is None else STREAM
        x, y = case.kinds
        arrays = [x, mx.uint8, mx.uint8, *[mx.float32] * 4, *([mx.int32] if self.is_tiled else [])]
        variant = Variant.of({"THREADS": threads, **constants}, {"X": x, "Y": y}, arrays, [y])
        variant = variant if plan is None else variant.opening()
        source = make_cuda_source(kernel, variant, starts_early=driver.starts_early)
        self._function = driver.load(driver.compile(source), name_cuda_function(kernel, variant))
        driver.give_room(self._function, self._room_bytes)

    def launch(self, arrays: Sequence[Any], *, early: bool) -> None:
        """x, two weights, five more inputs and the result; `early` beside the launch in front."""
        groups = (1, self._groups, 1) if self.is_tiled else (self._groups, 1, 1)
        given = [array.data.ptr for array in arrays]
        if not self.is_tiled:
            del given[7]  # sizes
        self._driver.launch(self._function, groups, self._threads, given, early=early, room_bytes=self._room_bytes)


def time_graph(driver: CudaDriver, launch_all: Callable[[], None]) -> float:
    """Seconds of the fastest of some runs of what is launched, as a graph."""
    graph, times = driver.capture(launch_all), []
    stream = cp.cuda.ExternalStream(driver.stream.value)
    for _ in range(8):
        start, stop = cp.cuda.Event(), cp.cuda.Event()
        start.record(stream)
        driver.start(graph)
        stop.record(stream)
        stop.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, stop) / 1000)
    driver.drop(graph)
    return min(times[1:])


def make_weight(case: Case, index: int) -> tuple[Any, Any]:
    """Planes of one weight, which repeat some rows, and the floats of these."""
    rows, layout = case.shape.rows[index], LAYOUTS[TYPE_NAMES[case.shape.types[index]]]
    pool = make_tensor(TYPE_NAMES[case.shape.types[index]], POOL_ROWS, case.shape.columns)
    blocks = np.asarray(pool.data).reshape(POOL_ROWS, -1, layout.block_bytes)
    planes = [
        cp.tile(cp.asarray(np.ascontiguousarray(blocks[:, :, at : at + size]).reshape(POOL_ROWS, -1)), (rows // 128, 1))
        for at, size in layout.fields or ((0, layout.block_bytes),)
    ]
    return cp.concatenate([plane.reshape(-1) for plane in planes]), cp.asarray(pool.to_float32())


def measure(driver: CudaDriver, case: Case, product: Product) -> tuple[float, float]:
    """Seconds of a launch after others of its kind, and the relative error."""
    shape, rng = case.shape, np.random.default_rng(1)
    weights = [make_weight(case, index) for index in (0, 1) if shape.rows[index]]
    copies = [[planes.copy() for planes, _ in weights] for _ in range(1 + min(40, CACHE_BYTES // case.nbytes))]
    bits = rng.standard_normal(shape.columns).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    x, gain, added = cp.asarray(bits.view(np.float32)), *cp.asarray(rng.standard_normal((2, 131072)).astype(np.float32))
    exact = x.astype(np.float64)
    if case.normed:
        exact = exact / cp.sqrt((exact**2).mean() + 1e-5) * gain[: shape.columns]
    parts = [cp.tile(values.astype(np.float64) @ exact, rows // 128) for (_, values), rows in zip(weights, shape.rows)]  # noqa: B905
    expected = cp.concatenate(parts)
    if shape.gate:
        gate, up = cp.split(expected, 2)
        expected = gate / (1 + cp.exp(-gate)) * up
    if not case.normed:
        expected = expected + added[: len(expected)]
    narrow_x, narrow_y = (kind == mx.bfloat16 for kind in case.kinds)
    given = (x.view(np.uint32) >> 16).astype(np.uint16) if narrow_x else x
    out = cp.full(len(expected), 0xFFFF, np.uint16) if narrow_y else cp.full(len(expected), np.nan, np.float32)
    eps, sizes = cp.full(8, 1e-5, np.float32), cp.asarray(np.array([1] + [0] * 7, np.int32))

    def launch(index: int) -> None:
        planes = copies[index % len(copies)]
        product.launch([given, planes[0], planes[-1], eps, gain, added, eps, sizes, out], early=index > 0)

    cp.cuda.Device().synchronize()
    launch(0)
    driver.synchronize()
    made = (out.astype(np.uint32) << 16).view(np.float32) if narrow_y else out
    error = float(cp.sqrt(((made - expected) ** 2).mean() / (expected**2).mean()))
    count = max(8, min(64, GRAPH_BYTES // case.nbytes))
    return time_graph(driver, lambda: [launch(index) for index in range(count)] and None) / count, error


def measure_chain(driver: CudaDriver, products: dict[str, Product]) -> tuple[float, int]:
    """Seconds of all products of a step, each with what the one in front made, and their bytes."""
    order = [name for layer in range(32) for name in LAYERS[layer % 2]] + ["head"]
    pool = cp.asarray(np.random.default_rng(1).integers(0, 96, 1 << 26, dtype=np.uint8))
    weights = [
        [cp.tile(pool, 8)[: CASES[name].count_bytes(index)].copy() for index in (0, 1) if CASES[name].shape.rows[index]]
        for name in order
    ]
    ones, zeros = cp.ones(131072, np.float32), cp.zeros(131072, np.float32)
    sizes, buffers = cp.asarray(np.array([1] + [0] * 7, np.int32)), [cp.zeros(131072, np.float32) for _ in range(2)]
    cp.cuda.Device().synchronize()

    def launch_all() -> None:
        for number, (name, planes) in enumerate(zip(order, weights, strict=True)):
            x, y = buffers[number % 2], buffers[1 - number % 2]
            products[name].launch([x, planes[0], planes[-1], zeros, ones, zeros, ones, sizes, y], early=number > 0)

    return time_graph(driver, launch_all), sum(CASES[name].nbytes for name in order)


def main() -> None:
    """Compile all ways at once, then measure and print one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--shape", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--stages", type=int, nargs="+", default=[3])
    parser.add_argument("--chain", action="store_true")
    given = parser.parse_args()

    driver = CudaDriver()
    ways: dict[str, dict[str, StreamPlan | None]] = {"tiles": dict.fromkeys(CASES)}
    for stages in given.stages:
        plans = {
            name: StreamPlan(share_groups(case.shape, driver.processors), stages=stages) for name, case in CASES.items()
        }
        if all(CASES[name].shape.count_room(plan) <= driver.room_bytes for name, plan in plans.items()):
            ways[f"{stages} stages"] = dict(plans)

    def build(key: tuple[str, str]) -> Product:
        driver.enter()
        return Product(driver, CASES[key[1]], ways[key[0]][key[1]])

    keys = [(way, name) for way in ways for name in CASES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        products = dict(zip(keys, pool.map(build, keys), strict=True))
    for name in given.shape:
        for way in ways:
            seconds, error = measure(driver, CASES[name], products[way, name])
            rate = CASES[name].nbytes / seconds / 1e9
            print(f"{name:7s} {way:9s} {1e6 * seconds:7.2f} us {rate:6.0f} GB/s  error {error:.1e}", flush=True)
    for way in ways if given.chain else ():
        seconds, nbytes = measure_chain(driver, {name: products[way, name] for name in CASES})
        print(f"step    {way:9s} {1e3 * seconds:7.3f} ms {nbytes / seconds / 1e9:6.0f} GB/s", flush=True)


if __name__ == "__main__":
    main()
