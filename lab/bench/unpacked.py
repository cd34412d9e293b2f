"""Time products of quantised weights with some rows of x on an NVIDIA GPU, in a graph over cold weights.

    PYTHONPATH=src:tests/gpu python lab/bench/unpacked.py --tokens 32 128 --shape gate down

Every plan of `linear/unpacked.py` that fits is tried, beside the kernel for fewer rows (tiles). The error is that
against a float product, computed for some rows.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from gpu_cases import make_tensor

from mlxr.core.errors import DeviceError
from mlxr.kernels.gpu.cuda.driver import CudaDriver
from mlxr.kernels.gpu.kernel import Box, Kernel, Variant, make_cuda_source, name_cuda_function
from mlxr.kernels.linear.blocks import SIMD_GROUPS, TILE_TOKENS, TILES, choose_plan
from mlxr.kernels.linear.parts import LAYOUTS, flag_extras
from mlxr.kernels.linear.unpacked import UNPACKED, UNPACKED_BOXED, UnpackPlan, UnpackShape, make_constants

POOL_ROWS = 128
CACHE_BYTES, GRAPH_BYTES = 160 << 20, 1 << 30


@dataclass(frozen=True)
class Shape:
    """One or two weights, their types and rows, that share x; with `gate` the upper half gates the lower one."""

    types: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    gate: int = 0

    @property
    def made(self) -> int:
        """Outputs."""
        return sum(self.rows) // (2 if self.gate else 1)

    @property
    def numbers(self) -> tuple[int, int]:
        """The types' numbers."""
        return LAYOUTS[self.types[0]].number, LAYOUTS[self.types[-1]].number

    @property
    def all_rows(self) -> tuple[int, int]:
        """Rows of both."""
        return self.rows[0], (self.rows[1] if len(self.rows) > 1 else 0)


SHAPES = {
    "qkv": Shape(("q4_k", "q6_k"), (5120, 1024), 4096),
    "output": Shape(("q4_k",), (4096,), 4096),
    "gate": Shape(("q4_k",), (28672,), 4096, 1),
    "down": Shape(("q4_k",), (4096,), 14336),
    "down6": Shape(("q6_k",), (4096,), 14336),
    "head": Shape(("q6_k",), (128256,), 4096),
    **{
        f"gate-{name}": Shape((name,), (28672,), 4096, 1)
        for name in ("q8_0", "q4_0", "q5_k", "iq4_xs", "mxfp4", "q5_0", "q3_k", "q2_k")
    },
}


class Memory:
    """Arrays on the device."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def put(self, array: Any) -> int:
        """A copy of `array` there."""
        array = np.ascontiguousarray(array)
        address = self._driver.allocate(array.nbytes)
        self._driver.copy_in(address, array.ctypes.data, array.nbytes)
        self._driver.synchronize()
        return address

    def get(self, address: int, array: Any) -> Any:
        """What is there, into `array`."""
        self._driver.copy_out(array.ctypes.data, address, array.nbytes)
        self._driver.synchronize()
        return array


class Case:
    """A shape's weights on the device, in as many copies as it takes to miss the cache."""

    def __init__(self, memory: Memory, shape: Shape) -> None:
        self.shape, self.pools, made = shape, [], []
        for name, rows in zip(shape.types, shape.rows, strict=True):
            layout, pool = LAYOUTS[name], make_tensor(name, POOL_ROWS, shape.columns)
            self.pools.append(pool.to_float32())
            blocks = np.asarray(pool.data).reshape(POOL_ROWS, -1, layout.block_bytes)
            planes = [
                np.tile(np.ascontiguousarray(blocks[:, :, at : at + size]).reshape(POOL_ROWS, -1), (rows // 128, 1))
                for at, size in layout.fields or ((0, layout.block_bytes),)
            ]
            made.append(np.concatenate([plane.reshape(-1) for plane in planes]))
        self.nbytes = sum(planes.nbytes for planes in made)
        self.copies = [[memory.put(planes) for planes in made] for _ in range(1 + min(40, CACHE_BYTES // self.nbytes))]

    def expect(self, x: Any) -> Any:
        """The product with the first rows of each weight, or of both halves."""
        low = [x @ pool.T for pool in self.pools]
        if self.shape.gate:
            return low[0] / (1 + np.exp(-low[0])) * low[0]
        return np.concatenate(low, axis=1)

    def pick(self, out: Any) -> Any:
        """The columns of a result that `expect` gives."""
        starts = np.cumsum([0, *self.shape.rows[:-1]])
        return np.concatenate([out[:, start : start + POOL_ROWS] for start in starts], axis=1)


@dataclass
class Way:
    """A kernel, compiled: what a launch of it takes."""

    function: int
    groups: tuple[int, int, int]
    threads: int
    room_bytes: int
    shares: int
    is_narrow: bool
    box_rows: int = 0  # of a box of x, where it comes in such


def list_plans(shape: Shape, tokens: int, few: bool) -> Iterator[UnpackPlan]:
    """Plans that may be fast."""
    width = next((n for n in (16, 32, 64, 128, 256) if n >= tokens), 256)
    columns = shape.columns // 256
    widths = {width} | ({128} if width == 256 else set())
    for n, (parts, held), shares, depth in product(sorted(widths), ((1, 1), (2, 1), (2, 2), (4, 1)), (1, 2, 4), (0, 1)):
        made = 64 * parts * held // (2 if shape.gate else 1)
        groups = shape.made / made * shares * -(-tokens // n)
        if (shape.gate or shape.types[0] != shape.types[-1] or shape.made > 8192) and shares > 1:
            continue
        if groups < 60 or (groups > 150 and shares > 1) or columns < 4 * shares:
            continue
        if held * n > 256 or (parts == 4 and n > 64) or (few and depth != (1 if n * held <= 128 else 0)):
            continue
        registers = (232, 40) if parts == 2 and (held * n >= 256 or (n == 128 and depth)) else (0, 0)
        for stages, x_stages, ahead in ((5, 10, 5), (4, 8, 4), (4, 7, 3), (3, 7, 3), (3, 6, 2), (2, 6, 2), (2, 5, 1)):
            plan = UnpackPlan(n, parts, held, shares, stages, x_stages, 4, ahead, depth, registers)
            if plan.count_room(shape.numbers, shape.gate != 0) <= 226 * 1024:
                yield plan
                break


def compile_way(driver: CudaDriver, kernel: Kernel, constants: dict[str, int], threads: int, narrow: bool) -> int:
    """The function of a variant."""
    y = "bfloat16" if narrow else "float32"
    kinds = ("bfloat16", "uint8", "uint8", *["float32"] * 4, "int32")
    variant = Variant(tuple({"THREADS": threads, **constants}.items()), (("X", "bfloat16"), ("Y", y)), kinds, (y,))
    source = make_cuda_source(kernel, variant.opening(), starts_early=driver.starts_early)
    driver.enter()
    return driver.load(driver.compile(source), name_cuda_function(kernel, variant.opening()))


def build(driver: CudaDriver, shape: Shape, tokens: int, plan: UnpackPlan | None) -> Way | str:
    """A plan compiled, or the kernel for fewer rows; or why that does not go."""
    narrow, flags = shape.gate != 0, flag_extras(shape.gate)
    try:
        if plan is not None:
            known = UnpackShape(shape.numbers, shape.all_rows, shape.columns, shape.gate)
            constants, room = make_constants(known, plan) | flags, plan.count_room(shape.numbers, narrow)
            threads, groups = 32 * (4 * plan.parts + plan.fillers), plan.count_groups(known, tokens)
            function = compile_way(driver, UNPACKED_BOXED if plan.boxed else UNPACKED, constants, threads, narrow)
            way = Way(function, groups, threads, room, plan.shares, narrow, plan.width if plan.boxed else 0)
        else:
            tiles = choose_plan(tokens, shape.columns, sum(shape.rows), set(shape.numbers), False)
            constants = {
                "TYPE_A": shape.numbers[0],
                "TYPE_B": shape.numbers[1],
                "M": tiles.row_tiles,
                "N": tiles.token_tiles,
                "SPLIT": tiles.split,
                "RESIDENT": tiles.resident,
                "AHEAD": 0,
                "STAGED": 0,
                "SINGLE": 0,
                "INPUTS": shape.columns,
                "ROWS_A": shape.all_rows[0],
                "ROWS_B": shape.all_rows[1],
                **flags,
            }
            made = [shape.made] if len(shape.rows) == 1 else list(shape.rows)
            groups = (
                -(-tokens // (TILE_TOKENS * tiles.token_tiles)),
                sum(tiles.count_groups(count, narrow) for count in made),
                1,
            )
            threads = 32 * SIMD_GROUPS
            way = Way(compile_way(driver, TILES, constants, threads, narrow), groups, threads, 0, 1, narrow)
        driver.give_room(way.function, way.room_bytes)
    except DeviceError as error:
        return str(error)[:300]
    return way


def measure(driver: CudaDriver, memory: Memory, case: Case, tokens: int, way: Way) -> tuple[float, float]:
    """Seconds of a launch, and the relative error."""
    shape, rng = case.shape, np.random.default_rng(1)
    bits = rng.standard_normal((tokens, shape.columns)).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    given = memory.put((bits >> 16).astype(np.uint16))
    raw = np.full((way.shares, tokens, shape.made), 0xFFFF, np.uint16 if way.is_narrow else np.uint32)
    out, zeros = memory.put(raw), memory.put(np.zeros(8, np.float32))
    sizes = memory.put(np.array([tokens] + [0] * 7, np.int32))

    def launch(index: int) -> None:
        planes = case.copies[index % len(case.copies)]
        first = driver.make_box(given, Box(tokens, shape.columns, way.box_rows, 1)) if way.box_rows else given
        arrays = [first, planes[0], planes[-1], zeros, zeros, zeros, zeros, sizes, out]
        driver.launch(way.function, way.groups, way.threads, arrays, early=index > 0, room_bytes=way.room_bytes)

    launch(0)
    driver.synchronize()
    raw = memory.get(out, raw)
    made = (raw.astype(np.uint32) << 16).view(np.float32) if way.is_narrow else raw.view(np.float32)
    found, expected = case.pick(made.sum(axis=0)), case.expect(bits.view(np.float32))
    error = float(np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()))
    count = max(8, min(64, GRAPH_BYTES // case.nbytes))

    def launch_all() -> None:
        for index in range(count):
            launch(index)

    graph = driver.capture(launch_all)
    seconds = min(driver.time(graph) for _ in range(5)) / count
    driver.drop(graph)
    return seconds, error


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile all at once, then measure and print one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--shape", nargs="+", default=["qkv", "output", "gate", "down", "down6"], choices=list(SHAPES))
    parser.add_argument("--few", action="store_true", help="leave out what is hardly fast")
    given = parser.parse_args(arguments)

    driver = CudaDriver()
    memory, jobs = Memory(driver), []
    for name, tokens in product(given.shape, given.tokens):
        plans: list[UnpackPlan | None] = [None] if tokens <= 64 else []
        plans += list_plans(SHAPES[name], tokens, given.few)
        jobs += [(name, tokens, plan) for plan in plans]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ways = list(pool.map(lambda job: build(driver, SHAPES[job[0]], job[1], job[2]), jobs))
    print(f"{len(jobs)} kernels compiled", flush=True)
    driver.enter()
    cases: dict[str, Case] = {}
    for (name, tokens, plan), way in zip(jobs, ways, strict=True):
        told = f"{name:11s} {tokens:4d} {'tiles' if plan is None else plan}"
        if isinstance(way, str):
            print(f"{told}: {way}", flush=True)
            continue
        if name not in cases:
            cases[name] = Case(memory, SHAPES[name])
        seconds, error = measure(driver, memory, cases[name], tokens, way)
        rate = cases[name].nbytes / seconds / 1e9
        print(f"{1e6 * seconds:8.1f} us {rate:5.0f} GB/s error {error:.1e}  {told}", flush=True)


if __name__ == "__main__":
    main()
