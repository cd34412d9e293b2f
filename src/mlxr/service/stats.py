"""Statistics of a loaded model, as one plain value: for `LLM.stats`, the command line and /metrics."""

from __future__ import annotations

from pathlib import Path

from mlxr.core.frozen import frozen
from mlxr.core.settings import Settings
from mlxr.core.stats import Dispatch, ExpertRows
from mlxr.engine.engine import Engine
from mlxr.engine.memory_plan import StateUse, estimate_state_use, measure_state_use
from mlxr.engine.stats import EngineStats
from mlxr.loading import LoadedModel, Routing, open_source
from mlxr.service.adapters import AdaptersUse


@frozen
class SessionStats:
    """The statistics of a loaded model, `age_s` seconds ago."""

    model: str
    device: str
    isa: str
    threads: int
    load_s: float
    weight_bytes: int
    file_bytes: int
    engine: EngineStats
    dispatches: tuple[Dispatch, ...]
    routing: Routing | None = None  # the experts that tokens were sent to, in a model with experts
    expert_rows: tuple[ExpertRows, ...] = ()  # by the implementation that multiplied them
    adapters: AdaptersUse | None = None  # those that are loaded; None if that is not told
    age_s: float = 0.0

    @property
    def copied_bytes(self) -> int:
        """Count the bytes that the cache path copied instead of reading them in place."""
        return self.engine.copied_bytes


def collect_stats(loaded: LoadedModel, adapters: AdaptersUse | None, engine: Engine) -> SessionStats:
    """Collect the statistics of the loader, the engine and the ledger; on the thread that steps the engine."""
    counted = loaded.ctx.ledger.snapshot()
    return SessionStats(
        model=loaded.name,
        device=loaded.ctx.device,
        isa=loaded.ctx.isa,
        threads=loaded.ctx.threads,
        load_s=loaded.load_s,
        weight_bytes=loaded.weight_bytes,
        file_bytes=loaded.file_bytes,
        engine=engine.stats(),
        dispatches=tuple(counted.dispatches),
        routing=loaded.model.read_routing(),
        expert_rows=tuple(counted.expert_rows),
        adapters=adapters,
    )


__all__ = ["EngineStats", "StateUse", "find_state_use", "read_state_use"]

TOKENS = 8192


def find_state_use(loaded: LoadedModel, settings: Settings) -> StateUse | None:
    """Measure the recurrent states of a loaded model; None without recurrent layers."""
    return measure_state_use(loaded.ctx, loaded.config, settings, TOKENS)


def read_state_use(path: Path, settings: Settings) -> StateUse | None:
    """Estimate the recurrent states of a model on the CPU, by its metadata alone. Raises as `load` does."""
    source = open_source(path)
    source.file.close()
    return estimate_state_use(source.config, settings, TOKENS)
