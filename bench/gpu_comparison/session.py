"""The cases of a model, measured in turns of whole processes: an engine's process starts, opens the model, goes through
its cases and ends before the next engine's begins, as an engine is slower even beside an idle one. Cases that fail are
left out and reported by name."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpu_comparison.cases import LLAMA_CPP, MLX_LM, MLX_LM_4BIT, OURS, TRANSFORMERS, VLLM, VLLM_4BIT, Case
from gpu_comparison.vllm_folder import can_open
from mlxr.core.errors import MlxrError

ENGINES = (OURS, MLX_LM, LLAMA_CPP, VLLM, TRANSFORMERS)  # in the order of their turns
WARM_STEPS = 8
SPARE_TOKENS = 1024  # of the models' context, beyond the counted tokens
MAX_TRANSFORMERS_CONTEXT = 4096  # for longer contexts its static cache and masks take the memory that others need
Row = dict[str, Any]


class Asked(Protocol):
    """A `gpu_comparison.side.Side`, wherever it runs."""

    def ask(self, action: str, arguments: Mapping[str, object] | None = None) -> Any:
        """Return the result of an action. Raises MlxrError if it fails."""

    def close(self) -> None:
        """End the engine's process."""


@dataclass
class Session:
    """A measurement of cases, `rounds` times `steps` in each turn. `skipped` are peers that take no part; `failed`
    collects errors by engine and case."""

    device: str
    turns: int
    rounds: int
    steps: int
    skipped: Mapping[str, str]
    make_side: Callable[[str], Asked]
    tools: str = ""  # the folder of llama.cpp's
    failed: dict[str, str] = field(default_factory=dict)
    _rows: dict[tuple[str, str], Row] = field(default_factory=dict)

    def measure(self, cases: list[Case], end_s: float) -> Iterator[None]:
        """Run the turns of one model that begin before `end_s` (of time.monotonic); yields after each case."""
        for turn in range(1, self.turns + 1):
            for name in ENGINES:
                taking = [case for case in cases if name not in self.skipped and takes_part(name, case)]
                start_s = time.monotonic()
                if taking and start_s > end_s:
                    self.failed[f"turn {turn} of {tell_model(name, cases[0])}"] = "no time was left"
                elif taking:
                    yield from self._take_turn(name, taking)
                    took_s = time.monotonic() - start_s
                    print(f"turn {turn} of {tell_model(name, cases[0])}: took {took_s:.0f} s", flush=True)

    def list_rows(self, cases: list[Case]) -> list[Row]:
        """The rows so far, in the order of the cases."""
        keys = [(case.name, own_name(name, case)) for case in cases for name in ENGINES]
        return [self._rows[key] for key in keys if key in self._rows]

    def _take_turn(self, name: str, cases: list[Case]) -> Iterator[None]:
        """Run an engine's process from its start to its end."""
        longest = max(case.context for case in cases) + WARM_STEPS + self.rounds * self.steps + SPARE_TOKENS
        told = {
            "device": self.device,
            "tools": self.tools,
            "context_length": max(cases[0].model.context_length, longest),
        }
        start_s = time.monotonic()
        try:
            with closing(self.make_side(name)) as side:
                side.ask("open", {"engine": own_name(name, cases[0]), "case": cases[0].name, **told})
                print(f"{name}: model ready after {time.monotonic() - start_s:.1f} s", flush=True)
                for case in cases:
                    try:
                        self._measure_case(side, own_name(name, case), case)
                    except MlxrError as error:
                        self._note(f"{own_name(name, case)} {case.name}", error)
                    yield
        except MlxrError as error:
            self._note(tell_model(name, cases[0]), error)

    def _measure_case(self, side: Asked, engine: str, case: Case) -> None:
        """Measure all rounds of a case, and add them to the engine's row."""
        start_s = time.monotonic()
        steps = WARM_STEPS + self.rounds * self.steps
        side.ask("start", {"case": case.name, "steps": steps, "warm_steps": WARM_STEPS})
        warm_s = time.monotonic() - start_s
        speeds = [side.ask("measure", {"steps": self.steps}) for _ in range(self.rounds)]
        told = side.ask("describe")
        row = self._rows[case.name, engine] = add_turn(self._rows.get((case.name, engine)), speeds, told)
        row |= {"case": case.name, "engine": engine, "ms": 1000 * case.tokens / row["tokens_per_s"]}
        print(
            f"{engine:14s} {case.name:30s} {statistics.median(speeds):10,.0f} tokens/s ({min(speeds):,.0f} to "
            f"{max(speeds):,.0f}), peak {told['peak_bytes'] / 2**30:.2f} GiB, warm after {warm_s:.1f} s {told['note']}",
            flush=True,
        )
        side.ask("stop")

    def _note(self, what: str, error: MlxrError) -> None:
        self.failed[what] = str(error).splitlines()[0][:200]
        print(f"{what}: {error}", flush=True)


def takes_part(name: str, case: Case) -> bool:
    """Return True if the engine has something like the type, and room for the context."""
    if name == VLLM:
        return can_open(case.model, case.type_name)
    return name != TRANSFORMERS or (case.type_name == "bf16" and case.context <= MAX_TRANSFORMERS_CONTEXT)


def own_name(name: str, case: Case) -> str:
    """The engine's name in rows: with quantised weights, mlx-lm and vLLM run with 4 bits of their own."""
    if name == VLLM and case.type_name not in ("bf16", "mxfp4"):
        return VLLM_4BIT
    return MLX_LM_4BIT if name == MLX_LM and case.type_name != "bf16" else name


def tell_model(name: str, case: Case) -> str:
    """The engine and the model of a case."""
    return f"{own_name(name, case)} {case.shape}-{case.type_name}"


def add_turn(before: Row | None, speeds: list[float], told: Mapping[str, Any]) -> Row:
    """A row with one turn more: all rounds in order, and the largest peak."""
    before = before or {"rounds": [], "turns": 0, "peak_bytes": 0}
    rounds = [*before["rounds"], *speeds]
    row = {"rounds": rounds, "turns": before["turns"] + 1, "tokens_per_s": statistics.median(rounds), **told}
    return row | {"peak_bytes": max(before["peak_bytes"], told["peak_bytes"])}
