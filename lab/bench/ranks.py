"""Several GPUs as one: what a sum over all of them takes, alone, and how fast models decode on one and on several.

    python lab/bench/ranks.py --device cuda sums
    python lab/bench/ranks.py --device cuda model llama-3-8b bf16 --batches 1 8 32

`sums` checks the numbers first, launched by MLX and from a recorded graph, on all ranks. `--gpus` says how many ranks
there are, each of which has a process; `--gpus 1` with `model` is the baseline.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gpu_comparison.cases import Case
from gpu_comparison.ours import Ours, make_context
from mlxr.engine.tensor_parallel import (
    Ranks,
    TensorParallelModel,
    follow_steps,
    join_first,
    join_other,
    receive_bytes,
    send_bytes,
)
from mlxr.kernels.collectives import all_gather
from mlxr.kernels.collectives import gpu as sum_launch
from mlxr.kernels.collectives.gpu import OwnPart, launch_sum
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.recording import Recorder
from mlxr.kernels.linear import floats
from mlxr.service.tensor_parallel import RankProcess, end_with
from synthetic import SHAPES, Shape

IN_GRAPH, VOCABULARY, EPS = 64, 128_256, 1e-5


def numbers(seed: int, *shape: int) -> Any:
    """Random numbers that every rank can make."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def record(ctx: Context, launch_all: Callable[[Recorder], Any]) -> tuple[Any, Any]:
    """A prepared graph of launches, and what `launch_all` returned."""
    gpu, launcher = ctx.gpu, ctx.gpu.launcher
    gpu.launcher = recorder = Recorder(launcher.numbers, gpu.machine.memory.open(), multiplies=False)
    gpu.is_traced, gpu.last_turn = True, None
    try:
        result = launch_all(recorder)
    finally:
        gpu.launcher = launcher
        gpu.forget_placed()
    return gpu.machine.prepare(recorder.take_launches()), result


def time_graph(ctx: Context, graph: Any) -> float:
    """Seconds of a graph, the least of several runs, each after one that brings the ranks together."""
    if ctx.device == "cuda":
        return min(ctx.gpu.driver.time(graph) for _ in range(5))
    start = time.perf_counter()
    ctx.gpu.machine.start(graph)
    return time.perf_counter() - start


def check_sums(ctx: Context, rows: int, columns: int, shares: int) -> str:
    """Whether sum and norm are right, launched by MLX and recorded, and microseconds of one in a graph."""
    gpu, mx, ranks = ctx.gpu, ctx.gpu.mx, ctx.gpu.ranks
    x, gain = numbers(91, rows, columns), numbers(92, columns)
    parts = [numbers(rank, shares, rows, columns) for rank in range(ranks.count)]
    summed = x + sum(part.sum(axis=0) for part in parts)
    normed = summed / np.sqrt((summed**2).mean(axis=1, keepdims=True) + EPS) * gain
    held = mx.array(gain)
    mx.eval(held)
    own = OwnPart(mx.array(parts[ranks.rank]))
    found = launch_sum(ctx, own, mx.array(x), held, EPS)
    pairs = zip(found, (summed, normed), strict=True)
    errors = [float(np.abs(np.array(one.astype(mx.float32)) - right).max()) for one, right in pairs]

    def launch_all(recorder: Recorder) -> Any:
        streams = recorder.make((rows, columns), mx.float32)
        given = recorder.make((shares, rows, columns), mx.float32)
        kept = [launch_sum(ctx, OwnPart(given), streams, held, EPS) for _ in range(IN_GRAPH)]
        return streams, given, kept[-1]

    graph, (streams, given, last) = record(ctx, launch_all)
    gpu.settle_arrays()
    gpu.machine.write(streams.address, x)
    gpu.machine.write(given.address, parts[ranks.rank])
    gpu.machine.start(graph)
    read = gpu.machine.read(last[0].address, rows * columns, np.float32).wait().reshape(rows, columns)
    errors.append(float(np.abs(read - summed).max()))
    seconds = time_graph(ctx, graph) / IN_GRAPH
    gpu.machine.synchronize()
    return (
        f"sum {rows} x {columns}, {shares} shares: errors {' '.join(f'{error:.1e}' for error in errors)}; "
        f"{seconds * 1e6:.2f} us each in a graph; digest {zlib.crc32(read.tobytes()):08x}"
    )


def check_gather(ctx: Context, rows: int) -> str:
    """The same of logits."""
    gpu, mx, ranks = ctx.gpu, ctx.gpu.mx, ctx.gpu.ranks
    each = VOCABULARY // ranks.count // 64 * 64
    columns = [each] * (ranks.count - 1) + [VOCABULARY - each * (ranks.count - 1)]
    parts = [numbers(rank, rows, count) for rank, count in enumerate(columns)]
    own = mx.array(parts[ranks.rank]).astype(mx.bfloat16)
    found = np.array(all_gather(ctx, own, columns).astype(mx.float32))
    error = float(np.abs(found - np.concatenate(parts, axis=1)).max())
    mx.eval(own)

    def launch_all(recorder: Recorder) -> Any:
        given = recorder.make((rows, columns[ranks.rank]), mx.bfloat16)
        return [all_gather(ctx, given, columns) for _ in range(8)]

    graph, _ = record(ctx, launch_all)
    gpu.settle_arrays()
    gpu.machine.start(graph)
    return f"gather {rows} x {VOCABULARY}: error {error:.1e}; {time_graph(ctx, graph) / 8 * 1e6:.2f} us each in a graph"


def run_sums(ctx: Context, small: bool) -> None:
    """All checks; the first rank prints."""
    started = time.perf_counter()
    sizes = (
        [(1, 256, 1), (3, 256, 2)]
        if small
        else [
            (rows, columns, shares) for columns in (4096, 8192) for rows, shares in ((1, 1), (8, 2), (32, 2), (128, 4))
        ]
    )
    for size in sizes:
        text = check_sums(ctx, *size)
        if ctx.gpu.ranks.has_failed:
            text += "  FAILED: waited in vain"
        print(f"rank {ctx.gpu.ranks.rank}: {text}  [{time.perf_counter() - started:.1f} s]", flush=True)
    for rows in (1,) if small else (1, 8, 32):
        text = check_gather(ctx, rows)
        print(f"rank {ctx.gpu.ranks.rank}: {text}  [{time.perf_counter() - started:.1f} s]", flush=True)


def take_part(shape: Shape, count: int) -> Shape:
    """What one of `count` ranks has, as a model of its own."""
    if count == 1:
        return shape
    changes = dict(shape.changes) | {"head_dim": shape.head_dim}
    parts = {name: getattr(shape, name) // count for name in ("heads", "kv_heads", "ffn", "vocab_size")}
    return replace(shape, **parts, changes=changes)


def run_model(ours: Ours, batches: list[int], context: int, steps: int, gpus: int) -> None:
    """Tokens per second of decoding and of prompts."""
    for batch in batches:
        ours.start(Case("", "", "decode", batch, context), steps + 20)
        ours.decode(20)
        times = ours.decode(steps)
        engine: Any = ours._engine
        recorded = [type(step).__name__ for pool in engine._arena.k_pools[:1] for step in pool.graphs.values()]
        kept, ordered = statistics.median(times), sorted(times)
        tenths = " ".join(f"{ordered[len(times) * i // 10] * 1e6:.0f}" for i in range(10))
        print(
            f"{gpus} GPUs, batch {batch}: {batch / kept:.1f} tokens/s, {kept * 1e6:.0f} us a step "
            f"(tenths {tenths}); steps {set(recorded)}",
            flush=True,
        )
    ours.start(Case("", "", "prefill", 1, 2048 if context > 16 else 8), 1)
    ours.prefill()
    times = [ours.prefill() for _ in range(3)]
    print(f"{gpus} GPUs, prompt of {2048 if context > 16 else 8}: {min(times) * 1e3:.1f} ms", flush=True)


def set_variant(given: dict[str, Any]) -> None:
    """Change constants that are to be compared."""
    if given["threads"]:
        sum_launch.MAX_THREADS = given["threads"]
    if given["resident"]:
        sum_launch.RESIDENT = given["resident"]
    if given["fill"]:
        floats.FULL = given["fill"]


def lead(ctx: Context, args: argparse.Namespace) -> list[RankProcess]:
    """Start the other ranks, which run this script, and join them."""
    command = [sys.executable, str(Path(__file__))]
    processes = [RankProcess(rank, args.device, args.gpus, command) for rank in range(1, args.gpus)]
    given = vars(args) | {"follows": True}
    greetings = {one.rank: json.dumps(given | {"rank": one.rank}).encode() for one in processes}
    join_first(ctx, {one.rank: one.link for one in processes}, greetings)
    return processes


def follow_bench(link: socket.socket, life: int) -> None:
    """What another rank does."""
    threading.Thread(target=end_with, args=(life,), daemon=True).start()
    given = json.loads(receive_bytes(link))
    set_variant(given)
    ctx = make_context(given["device"])
    join_other(ctx, link, given["rank"], given["gpus"])
    if given["work"] == "sums":
        run_sums(ctx, given["small"])
        send_bytes(link, b"done")
        return
    ours = Ours(given["device"], SHAPES[given["shape"]], given["recipe"], ctx)
    send_bytes(link, b"loaded")
    follow_steps(ctx, ours.model, link)


def main() -> None:
    """The command line."""
    if len(sys.argv) == 3 and sys.argv[1].isdigit():
        follow_bench(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--threads", type=int, help="of a threadgroup that sums, to compare")
    parser.add_argument("--resident", type=int, help="of them on a multiprocessor, to compare")
    parser.add_argument("--fill", type=float, help="of the multiprocessors from where gated panels pay, to compare")
    works = parser.add_subparsers(dest="work", required=True)
    works.add_parser("sums")
    model = works.add_parser("model")
    model.add_argument("shape", choices=SHAPES)
    model.add_argument("recipe")
    model.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    model.add_argument("--context", type=int, default=128)
    model.add_argument("--steps", type=int, default=100)
    model.add_argument("--part", type=int, default=1, help="with --gpus 1: what one of so many computes, without sums")
    args = parser.parse_args()
    set_variant(vars(args))
    ctx = make_context(args.device)
    processes = lead(ctx, args) if args.gpus > 1 else []
    if args.work == "sums":
        run_sums(ctx, args.small)
        for process in processes:
            receive_bytes(process.link)
    else:
        start = time.perf_counter()
        ours = Ours(args.device, take_part(SHAPES[args.shape], args.part), args.recipe, ctx)
        ranks = None
        if processes:
            for process in processes:
                receive_bytes(process.link)
            ranks = Ranks(ctx, processes)
            ours.model = TensorParallelModel(ours.model, ranks)
        print(f"{args.shape} {args.recipe}: loaded in {time.perf_counter() - start:.1f} s", flush=True)
        run_model(ours, args.batches, args.context, args.steps, args.gpus)
        if ranks is not None:
            ranks.close()
    for process in processes:
        with contextlib.suppress(Exception):
            process.stop()


if __name__ == "__main__":
    main()
