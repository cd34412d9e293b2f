"""Measure decode and prefill on a GPU, with random weights made on the device, beside mlx-lm on the same device.

    python bench/gpu.py --device cuda --case tinyllama-bf16:1 --case llama-8b-q4_k_m:8 --peer --out results.json

A case is SHAPE-TYPE:BATCH[@CONTEXT]. Ours runs through the engine, requests and events included; mlx-lm (where it is
installed, and only in bf16 and its own 4 bits) runs its model with its cache, one step always ahead. Both are warmed up
first. Reported are the median step, tokens per second and the bandwidth at which weights and cache are read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.formats.ggml_types import by_name
from mlxr.formats.recipes import tensor_type
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.device import Gpu
from mlxr.models import Decoder
from synthetic import SHAPES, Pools, Shape

NAMES = {"tinyllama": "tinyllama-1.1b", "llama-8b": "llama-3-8b"}
WARM_STEPS = 8
STEPS = 48


@dataclass(frozen=True)
class Case:
    """One thing to measure."""

    shape: str
    type_name: str
    batch: int
    context: int

    @staticmethod
    def parse(text: str) -> Case:
        """SHAPE-TYPE:BATCH[@CONTEXT]."""
        model, _, rest = text.partition(":")
        batch, _, context = rest.partition("@")
        shape = next(name for name in NAMES if model.startswith(name + "-"))
        return Case(shape, model.removeprefix(shape + "-"), int(batch or 1), int(context or 32))


@dataclass
class Result:
    """What was measured; bytes read are weights and cache."""

    engine: str
    case: str
    tokens_per_s: float
    step_ms: float
    prefill_tokens_per_s: float
    read_bytes_per_step: int
    read_gb_per_s: float
    peak_bytes: int
    note: str = ""


class RandomTensor:
    """A tensor whose values are made where they are needed."""

    def __init__(self, name: str, type_name: str, shape: tuple[int, ...], gain: float) -> None:
        self.name, self.type_name, self.shape, self.gain = name, type_name, shape, gain
        self.data = np.zeros(1, np.uint8)
        kind = by_name(type_name)
        self.nbytes = int(np.prod(shape)) // kind.block_size * kind.type_size

    def to_float32(self, start: int | None = None, stop: int | None = None) -> Any:  # noqa: ARG002
        """Vectors are all ones, as norms begin."""
        assert len(self.shape) == 1, "only vectors are made on the host"
        return np.ones(self.shape, np.float32)

    def release(self) -> None:
        """Nothing is mapped."""


class RandomGpu(Gpu):
    """A GPU on which uploads of random tensors are drawn from a small pool of valid blocks."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._pools, self._placed_pools = Pools(0), {}

    def read(self, tensor: Any) -> Any:
        """Blocks drawn at random."""
        mx, key = self.mx, (tensor.type_name, tensor.shape[-1], tensor.gain)
        if key not in self._placed_pools:
            self._placed_pools[key] = mx.array(self._pools._get_pool(*key))
        pool = self._placed_pools[key]
        count = tensor.nbytes // pool.shape[1]
        array = mx.take(pool, mx.random.randint(0, pool.shape[0], (count,)), axis=0)
        if tensor.type_name in ("bf16", "f16"):
            array = array.view(mx.bfloat16 if tensor.type_name == "bf16" else mx.float16).reshape(tensor.shape)
        else:
            array = array.reshape(-1)
        mx.eval(array)
        return array


def make_tensors(shape: Shape, recipe: str) -> dict[str, RandomTensor]:
    """All tensors of a model, in the types that the recipe gives them."""
    tensors = {}
    for name, dimensions in shape.list_tensors():
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        kind = tensor_type(
            recipe,
            name,
            dimensions,
            layer=layer,
            layers=shape.layers,
            tied_output=False,
            query_groups=shape.heads // shape.kv_heads,
        )
        gain = (2 * shape.layers) ** -0.5 if "attn_output" in name or "ffn_down" in name else 1.0
        tensors[name] = RandomTensor(name, "f32" if len(dimensions) == 1 else kind, dimensions, gain)
    return tensors


class Ours:
    """Our engine on one model; cases of the same model share it."""

    def __init__(self, device: str, shape: Shape, recipe: str) -> None:
        self.ctx = Context(device)  # type: ignore[arg-type]
        self.ctx.gpu = RandomGpu(device)
        self.shape, self.model = shape, Decoder(self.ctx, shape.to_config(), make_tensors(shape, recipe))  # type: ignore[arg-type]

    def measure(self, case: Case) -> Result:
        """Prefill once to warm up, then prefill and decode."""
        mx, total = self.ctx.gpu.mx, case.context + WARM_STEPS + STEPS + 2
        engine = Engine(
            self.model,
            self.ctx,
            eos_ids=(),
            pages=case.batch * (-(-total // 32) + 1),
            prefix_sharing=False,
            context_tokens=min(self.shape.context_length, total),
            max_batch_tokens=max(2048, case.batch),
            max_sequences=case.batch,
            prefill_chunk_tokens=2048,
        )
        mx.reset_peak_memory()
        random = np.random.default_rng(1)
        speeds, before = [], 0
        for warm in (True, False):
            prompts = [random.integers(3, self.shape.vocab_size, case.context).tolist() for _ in range(case.batch)]
            for prompt in prompts:
                engine.submit(prompt, SamplingParams(max_tokens=2 if warm else WARM_STEPS + STEPS + 1, ignore_eos=True))
            start = time.perf_counter()
            while engine.stats().decode_tokens < 1 + before:
                engine.step()
            speeds.append(case.batch * case.context / (time.perf_counter() - start))
            while warm and engine.has_work:
                engine.step()
            before = engine.stats().decode_tokens
        times = []
        while engine.has_work:
            start = time.perf_counter()
            events = engine.step()
            if len(events) == case.batch:
                times.append(time.perf_counter() - start)
        times = times[WARM_STEPS:-1]
        step_s = statistics.median(times)
        cache = engine.stats().page_bytes // 32 * (case.context + WARM_STEPS + STEPS // 2) * case.batch
        read = self.model.step_bytes + cache
        return Result(
            "mlxr",
            name_case(case),
            case.batch / step_s,
            1000 * step_s,
            speeds[1],
            read,
            read / step_s / 1e9,
            mx.get_peak_memory(),
        )


def measure_peer(case: Case, shape: Shape) -> Result:
    """mlx-lm: its llama, its cache, argmax, the next step always under way while the last ids are read."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.models.llama import Model, ModelArgs

    mx.set_default_device(mx.gpu)
    arguments = ModelArgs(
        model_type="llama",
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        rms_norm_eps=1e-5,
        vocab_size=shape.vocab_size,
        rope_theta=shape.rope_theta,
        tie_word_embeddings=False,
    )
    model = Model(arguments)
    model.set_dtype(mx.bfloat16)
    if case.type_name != "bf16":
        nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    mx.reset_peak_memory()

    def prefill(tokens: Any) -> tuple[Any, Any]:
        cache = make_prompt_cache(model)
        step = max(1, 2048 // case.batch)
        for start in range(0, tokens.shape[1] - 1, step):
            logits = model(tokens[:, start : min(start + step, tokens.shape[1] - 1)], cache=cache)
            mx.eval([layer.state for layer in cache])
        del logits
        ids = mx.argmax(model(tokens[:, -1:], cache=cache)[:, -1], axis=-1)
        mx.eval(ids)
        return ids, cache

    tokens = mx.random.randint(3, shape.vocab_size, (case.batch, max(2, case.context)))
    prefill(tokens)
    start = time.perf_counter()
    ids, cache = prefill(tokens)
    speed = tokens.size / (time.perf_counter() - start)
    times = []
    following = mx.argmax(model(ids[:, None], cache=cache)[:, -1], axis=-1)
    mx.async_eval(following)
    for _ in range(WARM_STEPS + STEPS):
        start = time.perf_counter()
        ids, following = following, mx.argmax(model(following[:, None], cache=cache)[:, -1], axis=-1)
        mx.async_eval(following)
        ids.tolist()
        times.append(time.perf_counter() - start)
    step_s = statistics.median(times[WARM_STEPS:])
    weights = (
        sum(array.nbytes for _, array in nn.utils.tree_flatten(model.parameters()))
        - model.model.embed_tokens.weight.nbytes
    )
    return Result(
        "mlx-lm" if case.type_name == "bf16" else "mlx-lm 4-bit",
        name_case(case),
        case.batch / step_s,
        1000 * step_s,
        speed,
        weights,
        weights / step_s / 1e9,
        mx.get_peak_memory(),
    )


def measure_copy() -> float:
    """Bytes per second that a large copy on the device reads and writes."""
    import mlx.core as mx

    array = mx.random.normal((1 << 30,)).astype(mx.bfloat16)
    mx.eval(array)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        mx.eval(mx.abs(array))
        mx.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * array.nbytes / min(times)


def name_case(case: Case) -> str:
    """As written on the command line."""
    return f"{case.shape}-{case.type_name}:{case.batch}@{case.context}"


def run(device: str, cases: list[Case], peer: bool) -> Iterator[Result]:
    """Every case, model by model: ours, then the peer."""
    for shape_name, type_name in dict.fromkeys((case.shape, case.type_name) for case in cases):
        shape = SHAPES[NAMES[shape_name]]
        chosen = [case for case in cases if (case.shape, case.type_name) == (shape_name, type_name)]
        ours = Ours(device, shape, type_name)
        for case in chosen:
            yield ours.measure(case)
        del ours
        for case in chosen if peer else ():
            yield measure_peer(case, shape)


def main() -> int:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", action="append", required=True)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--out")
    given = parser.parse_args()
    copy = measure_copy() if given.device == "cuda" else 0.0
    print(f"copy {copy / 1e9:.0f} GB/s", flush=True)
    results = []
    for result in run(given.device, [Case.parse(text) for text in given.case], given.peer):
        results.append(asdict(result))
        print(
            f"{result.engine:13s} {result.case:28s} {result.tokens_per_s:9.0f} tok/s {result.step_ms:8.3f} ms "
            f"prefill {result.prefill_tokens_per_s:8.0f} tok/s {result.read_gb_per_s:6.0f} GB/s "
            f"peak {result.peak_bytes / 2**30:.2f} GiB",
            flush=True,
        )
        if given.out:
            with open(given.out, "w") as file:
                json.dump({"device": given.device, "copy_gb_per_s": copy / 1e9, "results": results}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
