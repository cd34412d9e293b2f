"""Where the time of a decode step goes on a GPU: the host's part, the device's part, and both through the engine.

    python lab/bench/gpu_step.py --device cuda --case tinyllama-bf16:1 --case llama-8b-bf16:128 --profile

For each case: engine steps with steps recorded by the driver and by MLX (tokens per second, and whether they drew the
same tokens), and a step alone: what starting it costs the host while nobody waits, and what it takes when many are
queued. --profile prints the functions in which the engine's steps spend the host's time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from typing import Any

import numpy as np

from gpu_comparison.cases import NAMES, Case
from gpu_comparison.ours import Ours
from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.kernels.gpu.recording import Product
from synthetic import SHAPES

QUEUED_STEPS = 30


def make_engine(ours: Ours, case: Case, steps: int, temperature: float = 0.0) -> Engine:
    """An engine whose prompts are computed and whose steps are recorded."""
    total = case.context + steps + 10
    engine = Engine(
        ours.model,
        ours.ctx,
        ModelSettings(
            context_tokens=min(ours.shape.context_length, total),
            max_batch_tokens=max(2048, case.batch),
            max_sequences=case.batch,
            prefill_chunk_tokens=2048,
        ),
        eos_ids=(),
        pages=case.batch * (-(-total // 32) + 1),
        prefix_sharing=False,
    )
    params = SamplingParams(max_tokens=steps, ignore_eos=True, temperature=temperature, top_p=0.9, seed=1)
    random = np.random.default_rng(1)
    for _ in range(case.batch):
        prompt = random.integers(3, ours.shape.vocab_size, case.context).tolist()
        engine.submit(EngineRequest(prompt, params))
    while engine.stats().decode_tokens < 4 * case.batch:
        engine.step()
    return engine


def run_engine(engine: Engine) -> tuple[float, list[list[int | None]]]:
    """The median step in seconds, and the tokens of all steps."""
    times, tokens = [], []
    while engine.has_work:
        start = time.perf_counter()
        events = engine.step()
        times.append(time.perf_counter() - start)
        tokens.append([event.token_id for event in events])
    return statistics.median(times[:-1]), tokens


def find_step(engine: Engine) -> Any:
    """The step that was recorded last."""
    pool = next(pool for pool in (*engine._arena.k_pools, *engine._arena.states) if pool is not None and pool.graphs)
    return list(pool.graphs.values())[-1]


def time_step(ours: Ours, engine: Engine) -> tuple[float, float]:
    """Seconds that starting a step costs the host, and seconds a step takes when many are queued."""
    gpu = ours.ctx.gpu
    recorded = find_step(engine)
    run = gpu.steps._current

    def start() -> Any:
        again = recorded.start(run.batch, run.rows, None)
        again.draw(None)
        return again.results

    start().wait()
    begun = time.perf_counter()
    made = [start() for _ in range(QUEUED_STEPS)]
    started = time.perf_counter()
    for results in made:
        results.wait()
    return (started - begun) / QUEUED_STEPS, (time.perf_counter() - begun) / QUEUED_STEPS


def time_parts(ours: Ours, engine: Engine) -> None:
    """Print what each kind of launch of a recorded step takes, all of a kind after one another."""
    machine = ours.ctx.gpu.machine
    recorded = find_step(engine)
    kinds: dict[str, list[Any]] = {}
    for part in ("forward", "largest"):
        for launch in recorded.launches[part]:
            name = "product" if isinstance(launch, Product) else f"{launch.kernel.name} {launch.variant.suffix[:60]}"
            kinds.setdefault(f"{name} {getattr(launch, 'groups', '')}", []).append(launch)
    kinds["all"] = recorded.launches["forward"] + recorded.launches["largest"]
    for name, launches in kinds.items():
        prepared = machine.prepare(launches)
        seconds = []
        for _ in range(4):
            machine.synchronize()
            begun = time.perf_counter()
            for _ in range(QUEUED_STEPS):
                machine.start(prepared)
            machine.synchronize()
            seconds.append((time.perf_counter() - begun) / QUEUED_STEPS)
        print(f"{1e6 * min(seconds):9.1f} us in {len(launches):3d} launches of {name}", flush=True)


def measure(ours: Ours, case: Case, profile: bool, parts: bool) -> None:
    """All figures of one case."""
    gpu, drawn = ours.ctx.gpu, []
    ways = [("driver", gpu.machine)] if gpu.machine is not None else []
    ways.append(("mlx", None))
    for name, machine in ways:
        gpu.machine = machine
        begun = time.perf_counter()
        engine = make_engine(ours, case, 40)
        ready = time.perf_counter() - begun
        host, queued = time_step(ours, engine)
        if parts and machine is not None:
            time_parts(ours, engine)
        engine = make_engine(ours, case, 40)
        drawing, _ = run_engine(make_engine(ours, case, 40, temperature=0.8))
        if profile:
            profiler = cProfile.Profile()
            profiler.enable()
            for _ in range(10):
                engine.step()
            profiler.disable()
        median, tokens = run_engine(engine)
        drawn.append(tokens)
        print(
            f"{case.shape}-{case.type_name}:{case.batch}@{case.context} {name:6s} {case.batch / median:9.0f} tok/s "
            f"{1e3 * median:8.3f} ms a step; alone: host {1e3 * host:7.3f} ms, queued {1e3 * queued:7.3f} ms; "
            f"drawn {case.batch / drawing:.0f} tok/s; ready after {ready:.1f} s",
            flush=True,
        )
        if profile:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(22)
    if len(drawn) == 2:
        same = np.mean([a == b for a, b in zip(*drawn, strict=False)])
        print(f"steps whose tokens are the same both ways: {100 * same:.0f} %", flush=True)
    gpu.machine = ways[0][1]


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", action="append", required=True)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--parts", action="store_true", help="time each kind of launch of a recorded step")
    given = parser.parse_args()
    cases = [Case.parse(text) for text in given.case]
    for shape, type_name in dict.fromkeys((case.shape, case.type_name) for case in cases):
        begun = time.perf_counter()
        ours = Ours(given.device, SHAPES[NAMES[shape]], type_name)
        print(f"{shape} {type_name} made in {time.perf_counter() - begun:.1f} s", flush=True)
        for case in cases:
            if (case.shape, case.type_name) == (shape, type_name):
                measure(ours, case, given.profile, given.parts)


if __name__ == "__main__":
    main()
