"""Time the product kernels alone on an NVIDIA GPU, without MLX: every plan at the shapes of a model, in a CUDA graph.

    PYTHONPATH=src:tests/gpu python lab/bench/products.py --tokens 1 8 32 --shape output down head

Each launch of a graph takes another copy of the weight, more of them than the cache holds, so the bandwidth is the
memory's; gaps between launches count. The error is that of the result against a float product of the same blocks.
Needs CuPy and nvcc.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
from gpu_cases import make_tensor

from mlxr.kernels.gpu.kernel import Kernel, read_body, read_header
from mlxr.kernels.gpu.launcher import BOUNDS
from mlxr.kernels.linear.blocks import ROWS, SIMD_GROUPS, TILES, Plan
from mlxr.kernels.linear.parts import LAYOUTS, flag_extras

TYPES = {"f32": "float", "bf16": "__nv_bfloat16", "i32": "int", "u8": "uint8_t"}
HEADER = """#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cstdint>
"""
POOL_ROWS = 128
GRAPH_BYTES = 1 << 30
CACHE_BYTES = 160 << 20


@dataclass(frozen=True)
class Shape:
    """A weight of (rows, columns); with `gate` its upper half gates the lower one."""

    type_name: str
    rows: int
    columns: int
    gate: int = 0


SHAPES = {
    "output": Shape("q4_k", 4096, 4096),
    "qkv": Shape("q4_k", 6144, 4096),
    "gate": Shape("q4_k", 28672, 4096, 1),
    "down": Shape("q4_k", 4096, 14336),
    "down6": Shape("q6_k", 4096, 14336),
    "head": Shape("q6_k", 128256, 4096),
    "output8": Shape("q8_0", 4096, 4096),
}


def make_source(kernel: Kernel, constants: dict[str, int], inputs: list[str], x: str, resident: int = 1) -> str:
    """A whole CUDA file with the kernel `product`, as MLX writes it."""
    arguments = [f"const {TYPES[kind]} *{name}" for name, kind in zip(kernel.inputs, inputs, strict=True)]
    lines = [f"  constexpr int {name} = {value};" for name, value in constants.items()]
    return (
        f"{HEADER}{read_header(kernel, 'cuda')}\n{BOUNDS.format(constants['THREADS'], resident)}"
        f'extern "C" __global__ void product({", ".join(arguments)}, float *out) {{\n'
        + "\n".join([*lines, f"  using X = {TYPES[x]};", "  using Y = float;"])
        + f"\n{read_body(kernel, 'cuda')}\n}}\n"
    )


class Case:
    """A weight on the device, in as many copies as it takes, and what it decodes to."""

    def __init__(self, shape: Shape) -> None:
        self.shape, layout = shape, LAYOUTS[shape.type_name]
        pool = make_tensor(shape.type_name, POOL_ROWS, shape.columns)
        self.values = cp.asarray(pool.to_float32())
        blocks = np.asarray(pool.data).reshape(POOL_ROWS, -1, layout.block_bytes)
        fields = layout.fields or ((0, layout.block_bytes),)
        repeats = -(-shape.rows // POOL_ROWS)
        planes = [
            cp.tile(cp.asarray(np.ascontiguousarray(blocks[:, :, at : at + size].reshape(POOL_ROWS, -1))), (repeats, 1))
            for at, size in fields
        ]
        one = cp.concatenate([plane[: shape.rows].reshape(-1) for plane in planes])
        self.nbytes = one.nbytes
        self.copies = [one] + [one.copy() for _ in range(min(40, CACHE_BYTES // one.nbytes))]

    def expect(self, x: Any) -> Any:
        """The product in floats, of the first rows of each half."""
        half = self.shape.rows // 2 if self.shape.gate else self.shape.rows
        low = x @ self.values.T
        rows = cp.arange(min(POOL_ROWS, half))
        if not self.shape.gate:
            return low[:, rows % POOL_ROWS]
        gate, up = low[:, rows % POOL_ROWS], low[:, (half + rows) % POOL_ROWS]
        return gate / (1 + cp.exp(-gate)) * up


def describe_tiles(shape: Shape, tokens: int, plan: Plan) -> tuple[str, list[Any], tuple[int, ...], int]:
    """Source, sizes, threadgroups and threads."""
    constants = {
        "THREADS": 32 * SIMD_GROUPS,
        "TYPE_A": LAYOUTS[shape.type_name].number,
        "TYPE_B": LAYOUTS[shape.type_name].number,
        "M": plan.row_tiles,
        "N": plan.token_tiles,
        "SPLIT": plan.split,
        "AHEAD": int(plan.ahead),
        "STAGED": int(plan.staged),
        "SINGLE": int(plan.single),
        "INPUTS": shape.columns,
        "ROWS_A": shape.rows,
        "ROWS_B": 0,
        **flag_extras(shape.gate),
    }
    blocks = -(-tokens // (8 * plan.token_tiles))
    made = shape.rows // 2 if shape.gate else shape.rows
    source = make_source(TILES, constants, ["bf16", "u8", "u8", *["f32"] * 4, "i32"], "bf16", plan.resident)
    sizes = [tokens, 0, 0, 0, 0, 0, 0, 0]
    return source, sizes, (blocks, plan.count_groups(made, shape.gate != 0)), 32 * SIMD_GROUPS


def describe_rows(shape: Shape, tokens: int, per_group: int) -> tuple[str, list[Any], tuple[int, ...], int]:
    """The same of the kernel for few rows."""
    constants = {
        "THREADS": 32 * SIMD_GROUPS,
        "TYPE_A": LAYOUTS[shape.type_name].number,
        "TYPE_B": LAYOUTS[shape.type_name].number,
        "ROWS": per_group,
        "T": tokens,
        **flag_extras(shape.gate),
    }
    source = make_source(ROWS, constants, ["f32", "u8", "u8", "f32", "f32", "f32", "f32", "i32"], "f32")
    made = shape.rows // 2 if shape.gate else shape.rows
    step = SIMD_GROUPS * (per_group // 2 if shape.gate else per_group)
    return source, [shape.columns, tokens, shape.rows, 0, 0, 0, 0, 0], (-(-made // step),), 32 * SIMD_GROUPS


def list_variants(tokens: int, few: bool) -> dict[str, Any]:
    """Names and plans; a number is the rows of the other kernel."""
    found: dict[str, Any] = {}
    if tokens <= 8:
        found["rows 2"] = 2
        found["rows 4"] = 4
    widest = next(count for count in (1, 2, 4, 8) if count == 8 or 8 * count >= tokens)
    for width, rows, split, resident, ahead, staged in itertools.product(
        sorted({widest, min(widest, 4)}), (1, 2), (8, 4, 2), (1, 2, 3, 4), (False, True), (False, True)
    ):
        if staged and tokens > 1:
            continue
        if few and (
            ahead or split == (2 if width < 8 else 8) or resident > (4, 3, 2, 2)[(1, 2, 4, 8).index(width)] - rows // 2
        ):
            continue
        name = f"tiles {rows} x {width} /{split} {resident}{' ahead' if ahead else ''}{' staged' if staged else ''}"
        found[name] = Plan(rows, width, split, resident, ahead, staged)
        if staged and rows == 1:
            found[name + " single"] = Plan(rows, width, split, resident, ahead, staged, single=True)
    return found


def measure(case: Case, tokens: int, function: Any, described: tuple[Any, ...], is_rows: bool) -> tuple[float, float]:
    """Seconds of one launch, and the relative error."""
    _, sizes, groups, threads = described
    shape = case.shape
    made = shape.rows // 2 if shape.gate else shape.rows
    random = np.random.default_rng(tokens)
    bits = random.standard_normal((tokens, shape.columns)).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    x = cp.asarray(bits.view(np.float32))
    given = x if is_rows else cp.asarray((bits >> 16).astype(np.uint16))
    out, none = cp.full((tokens, made), np.nan, np.float32), cp.zeros(8, np.float32)
    numbers = cp.asarray(np.array(sizes, np.int32))

    def launch(weight: Any) -> None:
        function(groups, (threads,), (given, weight, weight, none, none, none, none, numbers, out))

    launch(case.copies[0])
    expected = case.expect(x.astype(cp.float64))
    error = float(cp.sqrt(((out[:, : expected.shape[1]] - expected) ** 2).mean() / (expected**2).mean()))
    if bool(cp.isnan(out).any()):
        error = float("nan")
    count = max(4, min(64, GRAPH_BYTES // case.nbytes))
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for index in range(count):
            launch(case.copies[index % len(case.copies)])
        graph = stream.end_capture()
        times = []
        for _ in range(6):
            start, stop = cp.cuda.Event(), cp.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            stop.record(stream)
            stop.synchronize()
            times.append(cp.cuda.get_elapsed_time(start, stop) / 1000 / count)
    return min(times[1:]), error


def compile_source(source: str, path: Path) -> Path:
    """Write and compile it: the path of the binary."""
    path.write_text(source)
    target = path.with_suffix(".cubin")
    subprocess.run(["nvcc", "-arch=sm_90a", "-std=c++17", "-cubin", "-o", target, path], check=True)
    return target


def main() -> None:
    """Compile all variants at once, then measure and print one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--shape", nargs="+", default=["output", "gate", "down", "down6", "head"], choices=list(SHAPES))
    parser.add_argument("--few", action="store_true", help="leave out what cannot be fast")
    parser.add_argument("--only", default="", help="a part of the variants' names")
    given = parser.parse_args()

    jobs = []
    for name, tokens in itertools.product(given.shape, given.tokens):
        for variant, plan in list_variants(tokens, given.few).items():
            if given.only not in variant:
                continue
            describe = describe_rows if isinstance(plan, int) else describe_tiles
            jobs.append((name, tokens, variant, describe(SHAPES[name], tokens, plan)))

    sources = list(dict.fromkeys(job[3][0] for job in jobs))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as workers:
        paths = [Path(folder) / f"{index}.cu" for index in range(len(sources))]
        built = list(workers.map(compile_source, sources, paths))
        functions = [cp.RawModule(path=str(path)).get_function("product") for path in built]
        resources = [(function.num_regs, function.local_size_bytes) for function in functions]  # this loads them
    print(f"{len(sources)} kernels compiled", flush=True)
    cases: dict[str, Case] = {}
    for name, tokens, variant, described in jobs:
        if name not in cases:
            cases = {name: Case(SHAPES[name])}
        case, index = cases[name], sources.index(described[0])
        registers, spilled = resources[index]
        seconds, error = measure(case, tokens, functions[index], described, variant.startswith("rows"))
        print(
            f"{name:8s} {tokens:3d} tokens  {variant:24s} {1e6 * seconds:8.1f} us "
            f"{case.nbytes / seconds / 1e9:6.0f} GB/s  error {error:.1e}  "
            f"{registers} registers, {spilled} bytes spilled, {described[2]} groups",
            flush=True,
        )


if __name__ == "__main__":
    main()
