"""What a model takes and has done, as one plain value: for `LLM.stats`, the command line and /metrics."""

from __future__ import annotations

from dataclasses import dataclass

from mlxr.core.counters import Dispatch, ExpertRows
from mlxr.engine.stats import EngineStats
from mlxr.loading import LoadedModel, Routing
from mlxr.service.adapters import AdaptersUse


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that a model and its cache take now.

    Of the `arena_bytes` that the cache may take, `in_use_bytes` are memory now. It is taken up page by page:
    `used_bytes` by requests, `shared_bytes` of these by several at once,
    `cached_bytes` by what earlier requests left for later ones. `disk_bytes` are this model's pages in the store.
    """

    weight_bytes: int
    arena_bytes: int
    in_use_bytes: int
    used_bytes: int
    shared_bytes: int
    cached_bytes: int
    disk_bytes: int


def measure_memory(weight_bytes: int, engine: EngineStats) -> MemoryUse:
    """The engine's counts of pages as bytes, beside the bytes of the weights."""
    store = engine.cache.store
    return MemoryUse(
        weight_bytes=weight_bytes,
        arena_bytes=engine.arena_bytes,
        in_use_bytes=engine.cache_in_use_bytes,
        used_bytes=engine.used_bytes,
        shared_bytes=engine.shared_bytes,
        cached_bytes=engine.cached_bytes,
        disk_bytes=0 if store is None else store.bytes,
    )


@dataclass(frozen=True, slots=True)
class SessionStats:
    """One moment of a loaded model. `copied_bytes` were copied by the cache path instead of being read in place.

    `routing` tells where tokens were sent in a model with experts, `expert_rows` what multiplied them; None and nothing
    without any.
    `adapters` are those that are loaded, None where that is not told.
    """

    model: str
    device: str
    isa: str
    threads: int
    load_s: float
    weight_bytes: int
    file_bytes: int
    engine: EngineStats
    dispatches: tuple[Dispatch, ...]
    copied_bytes: int
    routing: Routing | None = None
    expert_rows: tuple[ExpertRows, ...] = ()
    adapters: AdaptersUse | None = None

    @property
    def memory(self) -> MemoryUse:
        """Weights, arena, and what is in the cache."""
        return measure_memory(self.weight_bytes, self.engine)


def collect_stats(loaded: LoadedModel, engine: EngineStats, routing: Routing | None) -> SessionStats:
    """Bring together what the loader, the engine, the ledger and `loaded.model.read_routing` know."""
    counted = loaded.ctx.ledger.snapshot()
    return SessionStats(
        model=loaded.name,
        device=loaded.ctx.device,
        isa=loaded.ctx.isa,
        threads=loaded.ctx.threads,
        load_s=loaded.load_s,
        weight_bytes=loaded.weight_bytes,
        file_bytes=loaded.file_bytes,
        engine=engine,
        dispatches=tuple(counted.dispatches),
        copied_bytes=counted.copied_bytes,
        routing=routing,
        expert_rows=tuple(counted.expert_rows),
    )
