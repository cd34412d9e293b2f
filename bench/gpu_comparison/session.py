"""A model opened by every engine, each in a process of its own, and its cases measured in turns. What fails is left out
by name, and told."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpu_comparison.cases import MLX_LM, MLX_LM_4BIT, OURS, TRANSFORMERS, Case
from mlxr.core.errors import MlxrError

WARM_STEPS = 8
SPARE_TOKENS = 1024  # of the models' context, beyond what is counted
MAX_TRANSFORMERS_CONTEXT = 4096  # what its static cache and masks of longer ones take, the others need
Row = dict[str, Any]


class Asked(Protocol):
    """A `gpu_comparison.side.Side`, wherever it runs."""

    def ask(self, action: str, arguments: Mapping[str, object] | None = None) -> Any:
        """The result of an action. MlxrError when it failed."""

    def close(self) -> None:
        """End it."""


@dataclass
class Session:
    """How cases are measured. `skipped` are peers that take no part; `failed` grows, by engine and case."""

    device: str
    rounds: int
    steps: int
    skipped: Mapping[str, str]
    make_side: Callable[[str], Asked]
    failed: dict[str, str] = field(default_factory=dict)
    _sides: dict[str, Asked] = field(default_factory=dict)

    def measure(self, cases: list[Case], end_s: float) -> Iterator[list[Row]]:
        """Rows of each case of one model, begun before `end_s` (of time.monotonic)."""
        engines = self._open(cases)
        for case in cases:
            start_s = time.monotonic()
            if start_s > end_s:
                self.failed[f"all {case.name}"] = "no time was left"
                continue
            taking = [name for name in engines if takes_part(name, case)]
            for name in taking:
                if name not in self._sides:
                    self.failed[f"{own_name(name, case)} {case.name}"] = "its process had ended"
            yield self._measure_case(case, [name for name in taking if name in self._sides])
            print(f"{case.name}: took {time.monotonic() - start_s:.0f} s", flush=True)

    def close(self) -> None:
        """End all processes."""
        for side in self._sides.values():
            side.close()
        self._sides.clear()

    def _open(self, cases: list[Case]) -> list[str]:
        """The engines that have the model now; all make it at the same time."""
        case = cases[0]
        longest = max(case.context for case in cases) + WARM_STEPS + self.rounds * self.steps + SPARE_TOKENS
        told = {"device": self.device, "case": case.name, "context_length": max(case.model.context_length, longest)}

        def open_one(name: str) -> bool:
            start_s = time.monotonic()
            with self._note_failure(f"{name} {case.shape} {case.type_name}", name):
                if name not in self._sides:
                    self._sides[name] = self.make_side(name)
                self._sides[name].ask("open", {"engine": own_name(name, case), **told})
                print(f"{name}: model ready after {time.monotonic() - start_s:.1f} s", flush=True)
                return True
            return False

        names = [name for name in (OURS, MLX_LM, TRANSFORMERS) if name not in self.skipped]
        names = [name for name in names if any(takes_part(name, case) for case in cases)]
        with ThreadPoolExecutor(len(names)) as pool:
            return [name for name, is_open in zip(names, pool.map(open_one, names), strict=True) if is_open]

    def _measure_case(self, case: Case, engines: list[str]) -> list[Row]:
        """Each engine starts and warms up; then round by round each in turn. A row for each that went through."""
        speeds: dict[str, list[float]] = {name: [] for name in engines}

        def ask(name: str, action: str, **arguments: object) -> Any:
            what = f"{own_name(name, case)} {case.name}"
            if what not in self.failed:
                with self._note_failure(what, name):
                    return self._sides[name].ask(action, arguments)
            return None

        def start(name: str) -> None:
            start_s = time.monotonic()
            ask(name, "start", case=case.name, steps=WARM_STEPS + self.rounds * self.steps, warm_steps=WARM_STEPS)
            print(f"{name}: warm after {time.monotonic() - start_s:.1f} s", flush=True)

        if OURS in engines:
            start(OURS)  # alone: it measures which products are fastest
        with ThreadPoolExecutor() as pool:
            list(pool.map(start, [name for name in engines if name != OURS]))
        for _ in range(self.rounds):
            for name in engines:
                speed = ask(name, "measure", steps=self.steps)
                speeds[name] += [] if speed is None else [speed]
        rows = []
        for name in engines:
            told = ask(name, "describe")
            if told is not None:
                rows.append(describe(own_name(name, case), case, speeds[name], told))
            if name in self._sides:
                with self._note_failure(f"{own_name(name, case)} after {case.name}", name):
                    self._sides[name].ask("stop")
        return rows

    @contextmanager
    def _note_failure(self, what: str, name: str) -> Iterator[None]:
        try:
            yield
        except MlxrError as error:
            self.failed[what] = str(error).splitlines()[0][:200]
            print(f"{what}: {error}", flush=True)
            if "ended during" in str(error) and name in self._sides:
                self._sides.pop(name).close()


def takes_part(name: str, case: Case) -> bool:
    """Whether the engine has something like the type, and room for the context."""
    return name != TRANSFORMERS or (case.type_name == "bf16" and case.context <= MAX_TRANSFORMERS_CONTEXT)


def own_name(name: str, case: Case) -> str:
    """The engine as rows call it: beside quantised weights stands mlx-lm with its own 4 bits."""
    return MLX_LM_4BIT if name == MLX_LM and case.type_name != "bf16" else name


def describe(name: str, case: Case, speeds: list[float], told: Mapping[str, Any]) -> Row:
    """What was measured; printed too."""
    speed = statistics.median(speeds)
    row = {"case": case.name, "engine": name, "rounds": speeds, "tokens_per_s": speed}
    row |= {"ms": 1000 * case.tokens / speed, **told}
    print(
        f"{name:14s} {case.name:30s} {speed:10,.0f} tokens/s ({min(speeds):,.0f} to {max(speeds):,.0f}), "
        f"{row['ms']:.3f} ms, peak {row['peak_bytes'] / 2**30:.2f} GiB {row['note']}",
        flush=True,
    )
    return row
