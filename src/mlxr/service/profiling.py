"""Where a step's time goes: a model's prefill and decode with every kernel timed, and the trace that Perfetto opens."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from mlxr.core.model_settings import size_steps
from mlxr.core.settings import Settings
from mlxr.core.stats import Profile
from mlxr.loading import LoadedModel
from mlxr.service.opening import build_engine
from mlxr.service.speed import Load, LoadRunner, bound_lead, list_plain_tokens, without_drafts

PHASES = ("prefill", "decode")
STEPS_ROW, KERNELS_ROW = 1, 2  # rows of the trace


@dataclass(frozen=True, slots=True)
class PhaseProfile:
    """`seconds` that `tokens` tokens took in `steps` (start and end of each, in ns), `plain_seconds` without profiling.

    The time that no kernel takes is Python's, of the engine and of the operators, and what native code does in between.
    """

    name: str
    tokens: int
    seconds: float
    plain_seconds: float
    steps: list[tuple[int, int]]
    profile: Profile


def profile_model(loaded: LoadedModel, settings: Settings, load: Load) -> list[PhaseProfile]:
    """Run `load` once as always, and once with every kernel timed: prefill, then decode.

    The first run is the warm-up too. Raises InvalidRequest for a load that cannot run all at once, DeviceError for a
    device without kernels.
    """
    lead_tokens = bound_lead(load, size_steps(settings, loaded.ctx.device))
    watcher = _Watcher(loaded.ctx.make_profiler())
    with closing(build_engine(loaded, without_drafts(settings))) as engine:
        plain = LoadRunner(engine, list_plain_tokens(loaded), random.Random(0))
        plain_seconds = plain.run(load, lead_tokens)
        watched = LoadRunner(engine, list_plain_tokens(loaded), random.Random(1), watcher.watch)
        seconds = watched.run(load, lead_tokens)
    tokens = (load.batch * load.prompt_tokens, load.batch * load.generate_tokens)
    return [
        PhaseProfile(name, count, took_s, plain_s, watcher.steps[name], watcher.profiles[name])
        for name, count, took_s, plain_s in zip(PHASES, tokens, seconds, plain_seconds, strict=True)
    ]


class _Profiler(Protocol):
    def start(self) -> None:
        """Time calls from here on."""

    def stop(self) -> Profile:
        """Stop timing and return what ran."""


@dataclass
class _Watcher:
    """Profiles the phases of a load."""

    profiler: _Profiler
    steps: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    profiles: dict[str, Profile] = field(default_factory=dict)

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Profile the phase `name`, or note a step in it."""
        if name in PHASES:
            self.steps[name] = []
            self.profiler.start()
            try:
                yield
            finally:
                self.profiles[name] = self.profiler.stop()
            return
        start_ns = time.perf_counter_ns()
        yield
        next(reversed(self.steps.values())).append((start_ns, time.perf_counter_ns()))


def make_trace(phases: list[PhaseProfile]) -> dict[str, object]:
    """Steps and kernels as events of the Trace Event Format, in microseconds since the first step."""
    start_ns = phases[0].steps[0][0]
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}
        for row, name in ((STEPS_ROW, "steps"), (KERNELS_ROW, "kernels"))
    ]

    def add(row: int, name: str, category: str, first_ns: int, last_ns: int, **args: object) -> None:
        times = {"ts": (first_ns - start_ns) / 1000, "dur": (last_ns - first_ns) / 1000}
        events.append({"name": name, "cat": category, "ph": "X", "pid": 1, "tid": row, **times, "args": args})

    for phase in phases:
        for first_ns, last_ns in phase.steps:
            add(STEPS_ROW, phase.name, "step", first_ns, last_ns)
        for moment in phase.profile.moments:
            add(KERNELS_ROW, moment.operator, phase.name, moment.start_ns, moment.end_ns, kernel=moment.variant)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
