"""Time the experts of one layer on an NVIDIA GPU, as a recorded step launches them for some tokens.

    PYTHONPATH=src:bench python lab/bench/experts.py --shape gpt-oss-20b --type mxfp4 --tokens 32 128
    PYTHONPATH=src:bench python lab/bench/experts.py --vary FEW_RESIDENT=2,3,4      # constants of moe/products.py

Weights are random, and each token's experts are drawn at random. Each kind of launch is repeated in a graph of its own;
a layer's weights are more than the cache keeps. "read" is what its bytes of weights of all experts come to.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpu_comparison.cases import NAMES
from gpu_comparison.ours import RandomTensor, make_context
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.recording import Launch, Recorder
from mlxr.kernels.linear import prepare
from mlxr.kernels.moe import Experts, RoutingRule, make_experts, make_router, mix, products, route
from synthetic import SHAPES

REPEATS = 20


def make_layer(ctx: Context, shape_name: str, recipe: str) -> tuple[Experts, RoutingRule]:
    """The experts of a shape's first layer, and how they are chosen."""
    shape = SHAPES[NAMES[shape_name]]
    mixture = shape.mixture
    assert mixture is not None, "the shape has experts"
    wanted = {name: kind for name, kind, _, _ in shape.plan_tensors(recipe) if name.startswith("blk.0.ffn")}
    gate, down = wanted["blk.0.ffn_gate_exps.weight"], wanted["blk.0.ffn_down_exps.weight"]
    ffn, hidden = mixture.features, shape.hidden
    biases = [np.zeros(ffn, np.float32)] * 2 if mixture.bias else None
    up_weights, down_weights = [], []
    for index in range(mixture.count):
        halves = [RandomTensor(f"{part}.{index}", gate, (ffn, hidden), 1.0) for part in ("gate", "up")]
        up_weights.append(prepare(ctx, halves, biases))  # type: ignore[arg-type]
        one = RandomTensor(f"down.{index}", down, (hidden, ffn), 1.0)
        down_weights.append(prepare(ctx, [one], [np.zeros(hidden, np.float32)] if mixture.bias else None))  # type: ignore[list-item]
    return make_experts(ctx, up_weights, down_weights, mixture.activation), mixture.rule


def record(ctx: Context, experts: Experts, rule: RoutingRule, tokens: int) -> list[Launch]:
    """The launches of a mixture of so many tokens."""
    gpu: Any = ctx.gpu
    mx, launcher, count = gpu.mx, gpu.launcher, len(experts.up)
    random = np.random.default_rng(tokens)
    logits = random.standard_normal((tokens, count)).astype(np.float32)
    chosen, shares = route(Context("reference"), logits, make_router(count, rule))
    x = random.standard_normal((tokens, experts.up[0].in_features)).astype(np.float32)
    given = [((x.view(np.uint32) >> 16).astype(np.uint16), mx.bfloat16), (chosen, mx.int32), (shares, mx.float32)]
    recorder = Recorder(launcher.numbers, gpu.machine.memory.open(), multiplies=True)
    buffers = [recorder.make(array.shape, kind) for array, kind in given]
    for buffer, (array, _) in zip(buffers, given, strict=True):
        gpu.machine.write(buffer.address, np.ascontiguousarray(array))
    gpu.launcher, gpu.is_traced = recorder, True
    try:
        made = mix(ctx, *(buffer.as_array() for buffer in buffers), experts)
        launches = [launch for launch in recorder.take_launches() if isinstance(launch, Launch)]
        del made
    finally:
        gpu.launcher, gpu.is_traced = launcher, False
    recorder.kept = buffers  # type: ignore[attr-defined]
    return launches


def time_launches(ctx: Context, launches: Sequence[Launch]) -> float:
    """Seconds of the launches, one after another, once."""
    machine: Any = ctx.gpu.machine
    prepared = machine.prepare([*launches] * REPEATS)
    try:
        return float(min(machine._driver.time(prepared) for _ in range(5))) / REPEATS
    finally:
        machine._driver.drop(prepared)


def list_settings(varied: Sequence[str]) -> Iterator[dict[str, Any]]:
    """All combinations of what is varied."""
    named = [text.partition("=")[::2] for text in varied]
    for values in itertools.product(*(text.split(",") for _, text in named)):
        yield {name: int(value) for (name, _), value in zip(named, values, strict=True)}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--shape", default="gpt-oss-20b")
    parser.add_argument("--type", default="mxfp4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--vary", nargs="+", default=[], metavar="NAME=VALUE,VALUE")
    given = parser.parse_args()
    ctx = make_context("cuda")
    ctx.gpu.operands = ctx.gpu.mx.bfloat16
    experts, rule = make_layer(ctx, given.shape, given.type)
    print(f"{given.shape} {given.type}: {len(experts.up)} experts, {experts.nbytes / 1e6:.0f} MB", flush=True)
    for settings, tokens in itertools.product(list_settings(given.vary), given.tokens):
        for name, value in settings.items():
            setattr(products, name, value)
        launches = record(ctx, experts, rule, tokens)
        whole = time_launches(ctx, launches)
        each = " ".join(f"{launch.kernel.name} {1e6 * time_launches(ctx, [launch]):.1f}" for launch in launches)
        rate = experts.nbytes / whole / 1e9
        print(f"{tokens:4d} tokens {settings or ''}: {1e6 * whole:.1f} us, read {rate:.0f} GB/s; {each}", flush=True)


if __name__ == "__main__":
    main()
