"""Time one row's products on an NVIDIA GPU, without MLX: each kind alone, and those of a whole step after one another.

    PYTHONPATH=src:tests/gpu python bench/stream.py --alone --chain
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cupy as cp
import mlx.core as mx
import numpy as np
from gpu_cases import make_tensor

from mlxr.kernels.gpu.cuda_driver import CudaDriver
from mlxr.kernels.gpu.kernel import Variant, make_cuda_source, name_cuda_function
from mlxr.kernels.linear.gpu import LAYOUTS
from mlxr.kernels.linear.stream import STREAM, StreamPlan, StreamShape, make_constants, share_groups
from mlxr.kernels.linear.tiles import SIMD_GROUPS, TILES, choose_plan

Q4, Q6 = 12, 14
NAMES = {"q4_k": Q4, "q6_k": Q6}
BYTES = {Q4: 144, Q6: 210}
# name: types, rows, columns, gate, norm, residual
SHAPES = {
    "qkv": ((Q4, Q6), (5120, 1024), 4096, 0, 1, 0),
    "qkv4": ((Q4, Q4), (6144, 0), 4096, 0, 1, 0),
    "output": ((Q4, Q4), (4096, 0), 4096, 0, 0, 1),
    "gate": ((Q4, Q4), (28672, 0), 4096, 1, 1, 0),
    "down": ((Q4, Q4), (4096, 0), 14336, 0, 0, 1),
    "down6": ((Q6, Q6), (4096, 0), 14336, 0, 0, 1),
    "head": ((Q6, Q6), (128256, 0), 4096, 0, 1, 0),
}


VARIANTS = (
    (8, 3, ""),
    (8, 3, "none"),
    (8, 3, "128"),
    (8, 3, "first"),
    (8, 3, "none first"),
    (8, 4, ""),
    (8, 4, "none"),
    (10, 3, ""),
)


class Bench:
    def __init__(self) -> None:
        self.driver = CudaDriver()
        self.functions: dict[Any, int] = {}
        self.sources: dict[Any, str] = {}

    def source(self, kernel: Any, constants: dict[str, int], x: Any, y: Any, early: bool, trigger: bool) -> str:
        u8, f4 = mx.uint8, mx.float32
        kinds = [x, u8, u8, f4, f4, f4, f4] + ([mx.int32] if kernel is TILES else [])
        variant = Variant.of(constants, {"X": x, "Y": y}, kinds, [y])
        variant = variant.opening() if trigger else variant
        text = make_cuda_source(kernel, variant, starts_early=early)
        return text.replace(name_cuda_function(kernel, variant), "product")

    def compile(self, sources: Sequence[str]) -> None:
        missing = [source for source in dict.fromkeys(sources) if source not in self.functions]
        begun = time.perf_counter()
        with ThreadPoolExecutor(12) as pool:
            codes = list(pool.map(self.driver.compile, missing))
        for source, code in zip(missing, codes, strict=True):
            self.functions[source] = self.driver.load(code, "product")
        print(f"{len(missing)} kernels compiled in {time.perf_counter() - begun:.1f} s", flush=True)

    def time(self, launch_all: Any, repeats: int = 5) -> float:
        graph = self.driver.capture(launch_all)
        stream = cp.cuda.ExternalStream(self.driver.stream.value)
        times = []
        for _ in range(repeats + 1):
            start, stop = cp.cuda.Event(), cp.cuda.Event()
            start.record(stream)
            self.driver.start(graph)
            stop.record(stream)
            stop.synchronize()
            times.append(cp.cuda.get_elapsed_time(start, stop) / 1000)
        self.driver.drop(graph)
        return min(times[1:])


class Op:
    """One product in one variant, over given arrays."""

    def __init__(self, bench: Bench, name: str, plan: StreamPlan | None, early: bool, trigger: bool, kinds: Any, hint: str = "") -> None:
        types, rows, columns, gate, norm, residual = SHAPES[name]
        self.bench, self.name, self.early = bench, name, early
        self.kinds = x, y = kinds
        made = (rows[0] // 2 if gate else rows[0]), rows[1]
        if plan is None:
            old = choose_plan(1, columns, sum(rows), set(types if rows[1] else types[:1]), bool(norm))
            constants = {"THREADS": 32 * SIMD_GROUPS, "TYPE_A": types[0], "TYPE_B": types[1], "M": old.row_tiles, "N": 1,
                         "SPLIT": old.split, "RESIDENT": old.resident, "AHEAD": 0, "STAGED": int(old.staged),
                         "SINGLE": int(old.single), "INPUTS": columns, "ROWS_A": rows[0], "ROWS_B": rows[1],
                         "NORM": norm, "BIAS": 0, "GATE": gate, "RESIDUAL": residual}
            self.groups, self.threads, self.room = (1, sum(old.count_groups(n, gate != 0) for n in made), 1), 256, 0
            self.source = bench.source(TILES, constants, x, y, early, trigger)
        else:
            shape = StreamShape(types, rows, columns, gate)
            self.groups, self.threads = (sum(plan.groups), 1, 1), 32 * plan.simd_groups
            constants = {"THREADS": self.threads, **make_constants(shape, plan, bool(norm), False, bool(residual))}
            self.room = shape.count_room(plan)
            self.source = bench.source(STREAM, constants, x, y, early, trigger)
            whole = 'asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");'
            assert whole in self.source
            if "none" in hint:
                self.source = self.source.replace(whole, whole.replace(".L2::256B", ""))
            if "128" in hint:
                self.source = self.source.replace(whole, whole.replace("256B", "128B"))
            if "first" in hint:
                self.source = self.source.replace(whole, 'unsigned long policy; asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy)); '
                    'asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "l"(policy) : "memory");')
        self.tiled = plan is None

    def launch(self, arrays: Sequence[int], early: bool) -> None:
        function = self.bench.functions[self.source]
        if self.room:
            self.bench.driver.give_room(function, self.room)
        self.bench.driver.launch(function, self.groups, self.threads, arrays, early=early and self.early, room_bytes=self.room)


def size_of(name: str) -> int:
    types, rows, columns, *_ = SHAPES[name]
    return sum(count * columns // 256 * BYTES[kind] for count, kind in zip(rows, types, strict=True))


def plan_of(name: str, simds: int, stages: int, processors: int) -> StreamPlan:
    types, rows, columns, gate, *_ = SHAPES[name]
    return StreamPlan(share_groups(StreamShape(types, rows, columns, gate), processors), simds, stages)


def check(bench: Bench, name: str, ops: dict[str, Op]) -> None:
    """Errors against a float product, then times with a cold cache."""
    types, rows, columns, gate, norm, residual = SHAPES[name]
    planes, values = [], []
    for kind, count in zip(types, rows, strict=True):
        if not count:
            continue
        type_name = {Q4: "q4_k", Q6: "q6_k"}[kind]
        layout, pool = LAYOUTS[type_name], make_tensor(type_name, 128, columns)
        blocks = np.asarray(pool.data).reshape(128, -1, layout.block_bytes)
        fields = layout.fields or ((0, layout.block_bytes),)
        planes.append(cp.concatenate([
            cp.tile(cp.asarray(np.ascontiguousarray(blocks[:, :, at : at + size].reshape(128, -1))), (-(-count // 128), 1))[:count].reshape(-1)
            for at, size in fields]))
        values.append(cp.tile(cp.asarray(pool.to_float32()), (-(-count // 128), 1))[:count])
    copies = [[plane.copy() for plane in planes] for _ in range(max(1, min(40, (160 << 20) // size_of(name) + 1)))]
    rng = np.random.default_rng(1)
    x = cp.asarray(rng.standard_normal(columns).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    gain, added = cp.asarray(rng.standard_normal((2, max(columns, sum(rows)))).astype(np.float32))
    xx = x.astype(np.float64)
    if norm:
        xx = xx / cp.sqrt((xx**2).mean() + 1e-5) * gain[:columns]
    y = cp.concatenate([part.astype(np.float64) @ xx for part in values])
    if gate:
        y = y[: len(y) // 2] / (1 + cp.exp(-y[: len(y) // 2])) * y[len(y) // 2 :]
    if residual:
        y = y + added[: len(y)]
    del values
    eps, sizes = cp.full(8, 1e-5, np.float32), cp.asarray(np.array([1] + [0] * 7, np.int32))
    x_kind, y_kind = next(iter(ops.values())).kinds
    if x_kind == mx.bfloat16:
        x = (x.view(np.uint32) >> 16).astype(np.uint16)
    out = cp.full(len(y), 0xFFFF, np.uint16) if y_kind == mx.bfloat16 else cp.full(len(y), np.nan, np.float32)
    for label, op in ops.items():
        out.view(np.uint8)[:] = 0xFF
        cp.cuda.Device().synchronize()

        def arrays(index: int) -> list[int]:
            weights = copies[index % len(copies)]
            held = [x, weights[0], weights[-1], eps, gain, added, eps, *([sizes] if op.tiled else []), out]
            return [array.data.ptr for array in held]

        try:
            op.launch(arrays(0), False)
            bench.driver.synchronize()
            made = (out.astype(np.uint32) << 16).view(np.float32) if y_kind == mx.bfloat16 else out
            error = float(cp.sqrt(((made - y) ** 2).mean() / (y**2).mean()))
            count = max(8, min(64, (1 << 30) // size_of(name)))

            def launch_all() -> None:
                for index in range(count):
                    op.launch(arrays(index), index > 0)

            seconds = bench.time(launch_all) / count
        except Exception as failure:
            print(f"{name:7s} {label:30s} failed: {failure}", flush=True)
            continue
        print(f"{name:7s} {label:30s} {1e6 * seconds:7.2f} us {size_of(name) / seconds / 1e9:6.0f} GB/s error {error:.1e} room {op.room}", flush=True)


def chain(bench: Bench, ways: dict[str, dict[str, Op]], layers: int) -> None:
    """A step's products with weights of their own, each waiting for the one in front."""
    order = [name for layer in range(layers) for name in (("qkv", "output", "gate", "down6") if layer % 2 else ("qkv4", "output", "gate", "down"))] + ["head"]
    pool = cp.asarray(np.random.default_rng(1).integers(0, 96, 1 << 26, dtype=np.uint8))
    weights = []
    for name in order:
        types, rows, columns, *_ = SHAPES[name]
        weights.append([cp.tile(pool, -(-count * columns // 256 * BYTES[kind] // pool.size))[: count * columns // 256 * BYTES[kind]].copy() for kind, count in zip(types, rows, strict=True) if count])
    total = sum(map(size_of, order))
    ones, zeros = cp.ones(16384, np.float32), cp.zeros(16384, np.float32)
    sizes = cp.asarray(np.array([1] + [0] * 7, np.int32))
    buffers = [cp.zeros(131072, np.float32) for _ in range(2)]
    cp.cuda.Device().synchronize()
    for label, ops in ways.items():
        def launch_all(names: set[str] | None = None) -> None:
            number = 0
            for index, (name, held) in enumerate(zip(order, weights, strict=True)):
                if names is not None and name not in names:
                    continue
                op = ops[name]
                arrays = [buffers[number % 2], held[0], held[-1], zeros, ones, zeros, ones, *([sizes] if op.tiled else []), buffers[1 - number % 2]]
                op.launch([array.data.ptr for array in arrays], number > 0)
                number += 1

        try:
            seconds = bench.time(launch_all, 8)
            parts = " ".join(f"{part}:{1e6 * bench.time(lambda part=part: launch_all({part})) / max(1, order.count(part)):.2f}" for part in dict.fromkeys(order))
        except Exception as failure:
            print(f"chain {label:34s} failed: {failure}", flush=True)
            continue
        print(f"chain {label:34s} {1e3 * seconds:.3f} ms, {total / seconds / 1e9:.0f} GB/s; us each {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--layers", type=int, default=32)
    given = parser.parse_args()
    bench, n = Bench(), int(cp.cuda.Device().attributes["MultiProcessorCount"])
    print(n, "multiprocessors", flush=True)
    f4, b2 = mx.float32, mx.bfloat16

    def kinds(name: str) -> Any:
        return (b2 if name in ("output", "down", "down6") else f4, b2 if name == "gate" else f4)

    alone: dict[str, dict[str, Op]] = {}
    for name in SHAPES:
        found = {"tiles": Op(bench, name, None, True, False, kinds(name))}
        for simds, stages, hint in VARIANTS:
            plan = plan_of(name, simds, stages, n)
            types, rows, columns, gate, *_ = SHAPES[name]
            if StreamShape(types, rows, columns, gate).count_room(plan) <= 226 * 1024:
                found[f"{simds} x {stages} {hint}"] = Op(bench, name, plan, True, True, kinds(name), hint)
        alone[name] = found
    labels = list(dict.fromkeys(label for ops in alone.values() for label in ops))
    bench.compile([op.source for ops in alone.values() for op in ops.values()])
    if given.alone:
        for name, ops in alone.items():
            check(bench, name, ops)
            cp.get_default_memory_pool().free_all_blocks()
    if given.chain:
        ways = {label: {name: alone[name][label] for name in SHAPES} for label in labels if all(label in alone[name] for name in SHAPES)}
        chain(bench, ways, given.layers)


if __name__ == "__main__":
    main()
