"""A model opened by every engine, and its cases measured in turns. What fails is left out by name, and told."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from gpu_comparison.cases import MLX_LM, OURS, TRANSFORMERS, Case
from gpu_comparison.ours import Ours
from gpu_comparison.peers import MlxLm, Transformers

WARM_STEPS = 8
SPARE_TOKENS = 1024  # of the models' context, beyond what is counted
MAX_TRANSFORMERS_CONTEXT = 4096  # what its static cache and masks of longer ones take, the others need
Row = dict[str, Any]


@dataclass
class Session:
    """How cases are measured. `skipped` are peers that take no part; `failed` grows, by engine and case."""

    device: str
    rounds: int
    steps: int
    skipped: dict[str, str]
    failed: dict[str, str] = field(default_factory=dict)

    def measure(self, cases: list[Case], end_s: float) -> Iterator[list[Row]]:
        """Rows of each case of one model, begun before `end_s` (of time.monotonic)."""
        engines = []
        for name, make in self._list_engines(cases):
            start_s = time.monotonic()
            with self._note_failure(f"{name} {cases[0].shape} {cases[0].type_name}"):
                engines.append(make())
            print(f"{name}: model ready after {time.monotonic() - start_s:.1f} s", flush=True)
        for case in cases:
            start_s = time.monotonic()
            if start_s > end_s:
                self.failed[f"all {case.name}"] = "no time was left"
                continue
            taking = [one for one in engines if one.name != TRANSFORMERS or case.context <= MAX_TRANSFORMERS_CONTEXT]
            yield self._measure_case(case, taking)
            print(f"{case.name}: took {time.monotonic() - start_s:.0f} s", flush=True)

    def _list_engines(self, cases: list[Case]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Ours, and the peers that have something like the type."""
        shape, type_name = cases[0].model, cases[0].type_name
        room = WARM_STEPS + self.rounds * self.steps + SPARE_TOKENS
        longest = max(case.context for case in cases) + room
        shape = replace(shape, context_length=max(shape.context_length, longest))
        yield OURS, lambda: Ours(self.device, shape, type_name)
        if MLX_LM not in self.skipped:
            yield MLX_LM, lambda: MlxLm(self.device, shape, quantized=type_name != "bf16")
        if TRANSFORMERS not in self.skipped and type_name == "bf16":
            yield TRANSFORMERS, lambda: Transformers(self.device, shape)

    def _measure_case(self, case: Case, engines: list[Any]) -> list[Row]:
        """Each engine starts and warms up; then round by round each in turn. A row for each that went through."""
        speeds: dict[str, list[float]] = {engine.name: [] for engine in engines}

        def start(engine: Any) -> None:
            start_s = time.monotonic()
            engine.start(case, WARM_STEPS + self.rounds * self.steps)
            measure_round(engine, case, WARM_STEPS)
            print(f"{engine.name}: warm after {time.monotonic() - start_s:.1f} s", flush=True)

        def measure(engine: Any) -> None:
            speeds[engine.name].append(measure_round(engine, case, self.steps))

        for part in [start, *[measure] * self.rounds]:
            for engine in engines:
                what = f"{engine.name} {case.name}"
                if what not in self.failed:
                    with self._note_failure(what):
                        part(engine)
        rows = []
        for engine in engines:
            if f"{engine.name} {case.name}" not in self.failed:
                rows.append(describe(engine, case, speeds[engine.name]))
            engine.stop()
        gc.collect()
        return rows

    @contextmanager
    def _note_failure(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed[what] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            gc.collect()


def measure_round(engine: Any, case: Case, steps: int) -> float:
    """Tokens per second of a prompt, or of the median step."""
    return case.tokens / (engine.prefill() if case.kind == "prefill" else statistics.median(engine.decode(steps)))


def describe(engine: Any, case: Case, speeds: list[float]) -> Row:
    """What was measured; printed too."""
    speed = statistics.median(speeds)
    row = {"case": case.name, "engine": engine.name, "rounds": speeds, "tokens_per_s": speed}
    row |= {"ms": 1000 * case.tokens / speed, "note": engine.note, **engine.measure_bytes()}
    print(
        f"{engine.name:14s} {case.name:30s} {speed:10,.0f} tokens/s ({min(speeds):,.0f} to {max(speeds):,.0f}), "
        f"{row['ms']:.3f} ms, peak {row['peak_bytes'] / 2**30:.2f} GiB {engine.note}",
        flush=True,
    )
    return row
