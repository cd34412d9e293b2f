"""How much faster a GPU answers with a draft model that is right so often, in shapes of real models, random weights.

    python lab/bench/gpu_drafts.py --device cuda --model llama-8b-bf16 --draft llama-3-draft-q4_k_m [--right 0.7]
        [--batches 1] [--tokens 400]

Several draft models are written with commas.

Both models compute all that they would. Each guess agrees with a chance of `right`, and is wrong else: where it is
verified, the large model is said to have drawn that token, or another one; where it was guessed and not taken, the
guess is said to have been what was drawn, or is left, which is as good as never right. Without drafts and with them in
turns; the first quarter of each answer, in which steps are recorded and costs are learned, does not count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

import mlxr.engine.engine as engine_module
from gpu_comparison.ours import Ours
from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.postprocess import Drafted, Drawing
from mlxr.engine.request import EngineRequest
from mlxr.engine.scheduler import Chunk
from mlxr.engine.speculative.drafters import ModelDrafter
from mlxr.engine.speculative.planner import DraftSource
from mlxr.kernels.sample import SampleResult
from synthetic import SHAPES

PROMPT_TOKENS = 64
SHORT_NAMES = {"llama-8b": "llama-3-8b", "tiny": "tiny-spm"}


class Agreeing(Drawing):
    """Draws as always, then says that it drew the drafted tokens as often as it is told to."""

    right = 0.7
    chance = random.Random(1)
    vocabulary = 0

    def draw_first(self) -> list[SampleResult]:
        """See `Drawing`."""
        return [self._agree(chunk, 0, one) for chunk, one in zip(self.chunks, super().draw_first(), strict=True)]

    def draw(self, drafted: Drafted, place: int) -> list[SampleResult]:
        """See `Drawing`."""
        results = super().draw(drafted, place)
        return [self._agree(chunk, place, one) for (chunk, _), one in zip(drafted, results, strict=True)]

    def _agree(self, chunk: Chunk, place: int, result: SampleResult) -> SampleResult:
        drafter = chunk.sequence.drafter
        guesses = drafter.drafted if isinstance(drafter, ModelDrafter) and drafter.is_current(place) else []
        if place < len(chunk.draft):
            drafted = chunk.draft[place]
            told = drafted if self.chance.random() < self.right else (drafted + 1) % self.vocabulary
            return replace(result, token_id=told)
        if place < len(guesses) and self.chance.random() < self.right:
            guesses[place] = result.token_id
        return result


def open_model(device: str, text: str) -> Ours:
    """A model written SHAPE-TYPE."""
    shape, _, kind = text.rpartition("-")
    return Ours(device, SHAPES[SHORT_NAMES.get(shape, shape)], kind)


def measure(engine: Engine, batch: int, tokens: int, vocabulary: int) -> tuple[float, int, int]:
    """Tokens a second, and how many tokens were drafted and accepted."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1, seed=1)  # which repeats nothing
    chances = np.random.default_rng(1)
    for _ in range(batch):
        engine.submit(EngineRequest(chances.integers(3, vocabulary, PROMPT_TOKENS).tolist(), params))
    drawn = 0
    while drawn < batch * tokens // 4:
        drawn += len(engine.step())
    before, start, counted = engine.stats(), time.perf_counter(), 0
    while drawn + counted < batch * tokens - batch * 8:
        counted += len(engine.step())
    seconds, after = time.perf_counter() - start, engine.stats()
    while engine.has_work:
        engine.step()
    drafted = after.drafted_tokens - before.drafted_tokens
    return counted / seconds, drafted, after.accepted_tokens - before.accepted_tokens


def describe(engine: Engine) -> str:
    """Format the milliseconds of steps that the engine has measured."""
    planner: Any = engine._planner
    costs, model = planner._costs, planner.model
    one_s = costs.read_seconds(1) or 0.0
    own = {"plain": one_s, **{rows: costs.read_seconds(rows, waits=True) for rows in (1, 2, 4, 5, 8)}}
    drafts = {} if model is None else {places: model._read_curve(1).estimate(places) * one_s for places in (1, 3, 5)}
    rates = "" if model is None else f"; right first {model._rates.first:.2f}, later {model._rates.later:.2f}"
    texts = [
        f"{name} {', '.join(f'{rows}: {1e3 * (seconds or 0):.3f}' for rows, seconds in found.items())}"
        for name, found in (("steps by rows", own), ("drafts by places", drafts))
    ]
    return "; ".join(texts) + rates


def main() -> None:
    """Measure with each draft model and print a line for each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="llama-8b-bf16")
    parser.add_argument("--draft", default="llama-3-draft-q4_k_m")
    parser.add_argument("--right", type=float, default=0.7)
    parser.add_argument("--batches", default="1")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    ours = open_model(args.device, args.model)
    for name in args.draft.split(","):
        compare(args, ours, open_model(args.device, name), name)


def compare(args: argparse.Namespace, ours: Ours, draft: Ours, draft_name: str) -> None:
    """Measure each batch in turns with one draft model."""
    Agreeing.right, Agreeing.vocabulary = args.right, ours.shape.vocab_size
    source = DraftSource(draft.model, b"draft", draft.ctx)
    total = PROMPT_TOKENS + args.tokens + 32
    for batch in map(int, args.batches.split(",")):
        engines = {}
        for name in ("off", "little"):
            engine_module.Drawing = Drawing if name == "off" else Agreeing  # type: ignore[misc]
            engines[name] = Engine(
                ours.model,
                ours.ctx,
                ModelSettings(context_tokens=total, max_sequences=max(batch, 2), draft=name),
                eos_ids=(),
                pages=batch * (-(-total // 32) + 1),
                prefix_sharing=False,
                draft=source if name == "little" else None,
            )
        speeds: dict[str, list[float]] = {"off": [], "little": []}
        counts = (0, 0)
        for _ in range(args.turns):
            for name, engine in engines.items():
                engine_module.Drawing = Drawing if name == "off" else Agreeing  # type: ignore[misc]
                speed, *counts = measure(engine, batch, args.tokens, ours.shape.vocab_size)  # type: ignore[assignment]
                speeds[name].append(speed)
        plain, fast = (statistics.median(found) for found in speeds.values())
        ratios = [b / a for a, b in zip(*speeds.values(), strict=True)]
        print(
            f"{args.model} with {draft_name}, batch {batch}: {plain:.1f} tokens/s without drafts, {fast:.1f} with: "
            f"{fast / plain:.2f} times ({min(ratios):.2f} to {max(ratios):.2f}); "
            f"{counts[0]} drafted, {counts[1]} accepted; {describe(engines['little'])}",
            flush=True,
        )


if __name__ == "__main__":
    main()
