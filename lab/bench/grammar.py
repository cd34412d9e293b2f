"""What share of a step goes to grammars when every sequence of the batch follows one.

    python lab/bench/grammar.py [MODEL] [--batch 8] [--tokens 150] [--repeat 5] [--same] [--json FILE]

In every round the batch generates at temperature 1, each sequence under its own JSON schema, or all under the same
one, long enough that none ends early; then as many tokens without grammars. Counted are the steps in which all
sequences decode. The cost is how much longer the median step gets. What the engine's own thread spends on masks and
accepted tokens, measured around each call, is shown beside it. Exit code 1 if grammars cost 10 % of a step or more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from mlxr.core.errors import MlxrError
from mlxr.core.settings import resolve
from mlxr.core.types import Grammar, SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest, Mask, TokenConstraint
from mlxr.loading import LoadedModel
from mlxr.service.grammar import GrammarCompiler
from mlxr.service.opening import build_engine, open_model

MAX_COST = 0.10
PROMPT = "List what the module offers.\n"


class Stopwatch:
    """Seconds spent in the constraints of one step."""

    def __init__(self) -> None:
        self.spent_s = 0.0


class TimedConstraint:
    """A constraint whose calls are timed."""

    def __init__(self, inner: TokenConstraint, watch: Stopwatch) -> None:
        self._inner, self._watch = inner, watch

    @property
    def needs_end(self) -> bool:
        """As the inner constraint says."""
        return self._inner.needs_end

    def count_free(self) -> int:
        """As the inner constraint says."""
        return self._inner.count_free()

    def fill_mask(self, mask: Mask) -> None:
        """The inner constraint's mask."""
        start_s = time.perf_counter()
        self._inner.fill_mask(mask)
        self._watch.spent_s += time.perf_counter() - start_s

    def accept(self, token_id: int) -> None:
        """The inner constraint goes on."""
        start_s = time.perf_counter()
        self._inner.accept(token_id)
        self._watch.spent_s += time.perf_counter() - start_s

    def look_ahead(self, tokens_left: int) -> int:
        """As the inner constraint says."""
        start_s = time.perf_counter()
        held_tokens = self._inner.look_ahead(tokens_left)
        self._watch.spent_s += time.perf_counter() - start_s
        return held_tokens

    def close(self) -> Sequence[int]:
        """Return what the inner constraint ends with."""
        return self._inner.close()

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """As the inner constraint says."""
        return self._inner.count_allowed(token_ids)

    def fork(self) -> TokenConstraint:
        """Timed with the same watch."""
        return TimedConstraint(self._inner.fork(), self._watch)


def write_schema(index: int) -> str:
    """A long list of records; each schema has names and bounds of its own, and text, numbers, choices and dates."""
    record = {
        "type": "object",
        "properties": {
            f"title_{index}": {"type": "string", "minLength": 3, "maxLength": 60 + index},
            "count": {"type": "integer", "minimum": 0, "maximum": 1000 * (index + 1)},
            "ratio": {"type": "number", "minimum": 0, "maximum": 1},
            "kind": {"enum": ["module", "function", "class", f"kind_{index}"]},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 4},
            "since": {"type": "string", "format": "date"},
            "next": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 30}]},
        },
        "required": [f"title_{index}", "count", "ratio", "kind", "tags", "since", "next"],
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "items": record, "minItems": 40})


def run_round(
    engine: Engine,
    prompt: list[int],
    constraints: list[TokenConstraint | None],
    tokens: int,
    watch: Stopwatch,
    first_seed: int,
) -> tuple[list[float], list[float]]:
    """Milliseconds of each full decode step, and of the grammars in it."""
    for seed, constraint in enumerate(constraints, first_seed):
        params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=constraint is None)
        engine.submit(EngineRequest(prompt, params, constraint=constraint))
    steps_ms, grammars_ms = [], []
    while engine.has_work:
        watch.spent_s, start_s = 0.0, time.perf_counter()
        events = engine.step()
        spent_s = time.perf_counter() - start_s
        errors = [event.error for event in events if event.error is not None]
        if errors:
            raise MlxrError(errors[0])
        decoding = [event for event in events if event.usage.completion_tokens > 1]
        if len(decoding) == len(constraints):
            steps_ms.append(1000 * spent_s)
            grammars_ms.append(1000 * watch.spent_s)
    return steps_ms, grammars_ms


def measure(loaded: LoadedModel, engine: Engine, given: argparse.Namespace) -> dict[str, float]:
    """Interleaved rounds with and without grammars, after one of each that does not count."""
    prompt = loaded.tokenizer.encode(PROMPT)
    compiler = GrammarCompiler(loaded.tokenizer, loaded.tokenizer.eos_ids, loaded.config.vocab_size, loaded.ctx)
    watch = Stopwatch()
    steps: list[float] = []
    grammars: list[float] = []
    plain: list[float] = []
    for number in range(given.repeat + 1):
        grammar_texts = [write_schema(0 if given.same else index) for index in range(given.batch)]
        constraints = [TimedConstraint(compiler.compile(Grammar("json_schema", text)), watch) for text in grammar_texts]
        constrained = run_round(engine, prompt, list(constraints), given.tokens, watch, 1000 * number)
        free = run_round(engine, prompt, [None] * given.batch, given.tokens, watch, 1000 * number)
        if number:
            steps += constrained[0]
            grammars += constrained[1]
            plain += free[0]
    median_ms, median_plain_ms = statistics.median(steps), statistics.median(plain)
    return {
        "batch": given.batch,
        "steps": len(steps),
        "step_ms": statistics.fmean(steps),
        "grammar_ms": statistics.fmean(grammars),
        "share": sum(grammars) / sum(steps),
        "grammar_p99_ms": statistics.quantiles(grammars, n=100)[-1],
        "plain_step_ms": statistics.fmean(plain),
        "median_step_ms": median_ms,
        "median_plain_step_ms": median_plain_ms,
        "cost": (median_ms - median_plain_ms) / median_plain_ms,
    }


def parse_arguments() -> argparse.Namespace:
    """Read the command line; returns what was given, with defaults for the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=150, help="of each answer")
    parser.add_argument("--repeat", type=int, default=5, help="rounds that count")
    parser.add_argument("--same", action="store_true", help="one schema for all sequences")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    """Measure, print, compare with the bound."""
    given = parse_arguments()
    settings = resolve({"threads": given.threads, "context_tokens": 1024, "max_sequences": given.batch})
    try:
        with open_model(given.model, settings) as loaded, closing(build_engine(loaded, settings)) as engine:
            result = measure(loaded, engine, given)
    except MlxrError as error:
        print(f"lab/bench/grammar.py: {error}", file=sys.stderr)
        return 2
    print(f"{given.model}, batch {given.batch}, {result['steps']} steps")
    print(f"step with grammars   {result['step_ms']:8.3f} ms (median {result['median_step_ms']:.3f})")
    print(f"  grammars in it     {result['grammar_ms']:8.3f} ms, {100 * result['share']:.1f} %")
    print(f"  at the 99th centile{result['grammar_p99_ms']:8.3f} ms")
    print(f"step without         {result['plain_step_ms']:8.3f} ms (median {result['median_plain_step_ms']:.3f})")
    print(f"grammars cost        {100 * result['cost']:8.1f} % of a step")
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(result["cost"] >= MAX_COST)


if __name__ == "__main__":
    sys.exit(main())
