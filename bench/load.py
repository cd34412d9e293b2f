"""The engine under load: more requests than the cache holds, and a long prompt that arrives while others decode.

    python bench/load.py pressure MODEL            # many requests, an arena for a few of them
    python bench/load.py gap MODEL --svg FILE      # gaps between tokens while a long prompt arrives
    python bench/load.py stretch OUT --shape tinyllama-1.1b --type q4_k_m --context 8448    # a model with room for it

Prompts are random. `pressure` compares answers with those of the same requests alone in an engine without pages and
sharing, and the process's memory with weights + arena + 300 MB. `gap` compares the worst gap with 3 times the median
step of the same budget, that is of the steps which the long prompt fills up. All end with exit code 1 if a bound is
missed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxr.core.errors import MlxrError
from mlxr.core.settings import Settings, resolve
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.loading import LoadedModel
from mlxr.service.measures import read_peak_memory_bytes
from mlxr.service.opening import build_engine, open_model
from plot import draw_gaps
from synthetic import SHAPES, show_progress, write_model

EXTRA_BYTES = 300 * 10**6
MAX_GAP_STEPS = 3.0


@dataclass
class Life:
    """The record of one request: times in seconds since the load began, and its tokens with their logprobs."""

    arrival_s: float
    times_s: list[float] = field(default_factory=list)
    tokens: list[tuple[int | None, float | None]] = field(default_factory=list)

    @property
    def wait_s(self) -> float:
        """The seconds until the first token."""
        return self.times_s[0] - self.arrival_s

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two tokens, in seconds."""
        return max((b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)), default=0.0)


def draw_prompts(count: int, tokens: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random prompts that share nothing."""
    generator = random.Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(tokens)] for _ in range(count)]


def run_load(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Life]:
    """Run all requests at once, to their ends."""
    start_s = time.perf_counter()
    lives = {engine.submit(EngineRequest(prompt, own)): Life(0.0) for prompt, own in zip(prompts, params, strict=True)}
    while engine.has_work:
        step(engine, lives, start_s)
    return list(lives.values())


def step(engine: Engine, lives: dict[int, Life], start_s: float) -> None:
    """Run one step, and note its events with the time at its end."""
    events = engine.step()
    now_s = time.perf_counter() - start_s
    for event in events:
        if event.error is not None:
            raise MlxrError(event.error)
        lives[event.sequence_id].times_s.append(now_s)
        lives[event.sequence_id].tokens.append((event.token_id, event.logprob))


def measure_pressure(given: argparse.Namespace) -> dict[str, Any]:
    """Run many requests on an arena for `--fitting` of them."""
    pages_each = -(-(given.prompt_tokens + given.answer_tokens) // given.page_size)
    sizes = {"threads": given.threads, "max_sequences": given.requests, "page_size": given.page_size}
    with open_model(given.model, resolve(sizes)) as loaded:
        settings = replace(
            resolve(sizes), arena_bytes=given.fitting * pages_each * measure_page(loaded, given.page_size)
        )
        prompts = draw_prompts(given.requests, given.prompt_tokens, loaded.config.vocab_size)
        params = [
            SamplingParams(
                max_tokens=given.answer_tokens,
                ignore_eos=True,
                temperature=0.0 if number % 2 else 0.8,
                seed=number,
                logprobs=0,
            )
            for number in range(given.requests)
        ]
        with closing(build_engine(loaded, settings)) as engine:
            lives = run_load(engine, prompts, params)
            stats = engine.stats()
        peak_bytes = read_peak_memory_bytes()
        checked = random.Random(1).sample(range(given.requests), min(given.check, given.requests))
        wrong = [number for number in checked if run_alone(loaded, prompts[number], params[number]) != lives[number]]
    allowed_bytes = loaded.weight_bytes + stats.arena_bytes + EXTRA_BYTES
    early = lives[: given.fitting]
    figures = {
        "requests": given.requests,
        "fitting": given.fitting,
        "total_s": max(life.times_s[-1] for life in lives),
        "finished": sum(len(life.tokens) == given.answer_tokens for life in lives),
        "answers_compared": len(checked),
        "answers_wrong": len(wrong),
        "preemptions": stats.preemptions,
        "recomputed_tokens": stats.recomputed_tokens,
        "peak_pages": stats.peak_pages,
        "pages": stats.pages,
        "early_longest_wait_s": max(life.wait_s for life in early),
        "early_longest_gap_s": max(life.longest_gap_s for life in early),
        "longest_wait_s": max(life.wait_s for life in lives),
        "longest_gap_s": max(life.longest_gap_s for life in lives),
        "weight_bytes": loaded.weight_bytes,
        "arena_bytes": stats.arena_bytes,
        "peak_memory_bytes": peak_bytes,
        "allowed_memory_bytes": allowed_bytes,
    }
    figures["passed"] = figures["finished"] == given.requests and not wrong and peak_bytes <= allowed_bytes
    return figures


def measure_page(loaded: LoadedModel, page_size: int) -> int:
    """The bytes of one page, reported by an engine with the smallest arena."""
    tiny = Settings(page_size=page_size, max_sequences=1, context_tokens=1)
    with closing(build_engine(loaded, tiny)) as engine:
        return engine.stats().page_bytes


def run_alone(loaded: LoadedModel, prompt: list[int], params: SamplingParams) -> object:
    """Run the same request alone with a simple cache; the result equals a Life with the same tokens."""
    settings = Settings(kv_cache="simple", max_sequences=1)
    with closing(build_engine(loaded, settings)) as engine:
        return _SameTokens(run_load(engine, [prompt], [params])[0])


@dataclass(frozen=True, eq=False)
class _SameTokens:
    life: Life

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Life) and other.tokens == self.life.tokens

    __hash__ = None  # type: ignore[assignment]


def measure_gap(given: argparse.Namespace) -> dict[str, Any]:
    """Let requests decode, then a long prompt arrive."""
    settings = resolve(
        {
            "threads": given.threads,
            "max_batch_tokens": given.max_batch_tokens,
            "prefill_chunk_tokens": given.max_batch_tokens,
            "max_sequences": given.decoding + 1,
        }
    )
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    with open_model(given.model, settings) as loaded, closing(build_engine(loaded, settings)) as engine:
        prompts = draw_prompts(given.decoding, 32, loaded.config.vocab_size)
        (long_prompt,) = draw_prompts(1, given.prompt_tokens, loaded.config.vocab_size, seed=1)
        start_s = time.perf_counter()
        lives = {engine.submit(EngineRequest(prompt, params)): Life(0.0) for prompt in prompts}
        watched = list(lives.values())
        while not all(life.tokens for life in watched):
            step(engine, lives, start_s)
        for _ in range(given.calm_steps):
            step(engine, lives, start_s)
        arrival_s = time.perf_counter() - start_s
        late = engine.submit(EngineRequest(long_prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
        lives[late] = Life(arrival_s)
        while not lives[late].tokens:
            step(engine, lives, start_s)
        first_s = lives[late].times_s[0]
        for _ in range(given.calm_steps):
            step(engine, lives, start_s)
        for sequence_id in lives:
            engine.cancel(sequence_id)
    gaps = [(b, b - a) for life in watched for a, b in zip(life.times_s, life.times_s[1:], strict=False)]
    calm = [gap for end, gap in gaps if end <= arrival_s or end > first_s]
    during = [gap for end, gap in gaps if arrival_s < end <= first_s]
    median_s, worst_s = statistics.median(during), max(during)
    if given.svg is not None:
        points = sorted({(1000 * end, 1000 * gap) for end, gap in gaps})
        marks = {"median step with the prompt": 1000 * median_s, "3 × that": 3000 * median_s}
        given.svg.write_text(draw_gaps(points, marks, (1000 * arrival_s, 1000 * first_s), given.prompt_tokens))
    return {
        "decoding": given.decoding,
        "prompt_tokens": given.prompt_tokens,
        "max_batch_tokens": given.max_batch_tokens,
        "calm_median_gap_ms": 1000 * statistics.median(calm),
        "median_gap_ms": 1000 * median_s,
        "worst_gap_ms": 1000 * worst_s,
        "worst_in_medians": worst_s / median_s,
        "prompt_first_token_s": first_s - arrival_s,
        "passed": worst_s <= MAX_GAP_STEPS * median_s,
    }


def stretch_model(given: argparse.Namespace) -> dict[str, Any]:
    """Write a synthetic model of a known shape with another context length."""
    shape = replace(SHAPES[given.shape], context_length=given.context)
    size_bytes = write_model(Path(given.model), shape, given.type, 0, show_progress)
    return {"file": given.model, "size_bytes": size_bytes, "passed": True}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; returns the options, with defaults for those not given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(required=True)
    pressure = commands.add_parser("pressure")
    pressure.set_defaults(run=measure_pressure)
    pressure.add_argument("--requests", type=int, default=64)
    pressure.add_argument("--fitting", type=int, default=8)
    pressure.add_argument("--prompt-tokens", type=int, default=1936)
    pressure.add_argument("--answer-tokens", type=int, default=64)
    pressure.add_argument("--page-size", type=int, default=32)
    pressure.add_argument("--check", type=int, default=64, help="answers to compare with the same request alone")
    gap = commands.add_parser("gap")
    gap.set_defaults(run=measure_gap)
    gap.add_argument("--decoding", type=int, default=4)
    gap.add_argument("--prompt-tokens", type=int, default=8000)
    gap.add_argument("--max-batch-tokens", type=int, default=128)
    gap.add_argument("--calm-steps", type=int, default=40)
    gap.add_argument("--svg", type=Path)
    stretch = commands.add_parser("stretch")
    stretch.set_defaults(run=stretch_model)
    stretch.add_argument("--shape", choices=SHAPES, required=True)
    stretch.add_argument("--type", required=True)
    stretch.add_argument("--context", type=int, required=True)
    for command in (pressure, gap, stretch):
        command.add_argument("model")
        command.add_argument("--threads", type=int)
        command.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run one measurement, print its figures."""
    given = parse_arguments(arguments)
    figures = given.run(given)
    text = json.dumps(figures, indent=2)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
