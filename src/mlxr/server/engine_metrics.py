"""Collects what engines and the system tell now, in the form of a collector for Prometheus.

Engines count pages, cache and dispatches themselves; this is read when somebody asks, never on the way of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

if TYPE_CHECKING:
    from mlxr.service.stats import SessionStats

Read = Callable[["SessionStats"], Iterator[tuple[str, float]]]


class Moment:
    """A collector over `models` (name, stats)."""

    def __init__(self, models: list[tuple[str, SessionStats]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """All metrics, with one sample for each model and label."""
        yield from _process_metrics()
        yield self._gauge("pages", "Pages of the KV cache", "state", _pages)
        yield self._gauge("states", "States of recurrent layers, each of one sequence", "state", _states)
        yield self._gauge(
            "cache_bytes", "Bytes of weights, of the cache at most and in use, and of the store", "kind", _bytes
        )
        yield self._gauge("sequences", "Answers that grow or wait", "state", _sequences)
        yield self._counter("engine", "What the engine has done", "what", _work)
        yield self._counter("prefix_tokens", "Tokens of prompts that were looked for in the cache", "where", _prefix)
        text = "Missed tokens that one group of layers had and this one had not"
        yield self._counter("prefix_short_tokens", text, "group", _short)
        yield self._counter("evictions", "Cached pages that were given up", "cause", _evictions)
        yield self._counter("store_pages", "Pages written to the store and read back", "what", _store_pages)
        yield self._counter("store_drops", "Pages that did not get, or stay, in the store", "cause", _store_drops)
        yield self._counter("expert_routing", "What was sent to experts, counted in each layer", "what", _routing)
        text = "Evenness of the rows of experts, and rows of the busiest over the mean, since the model was loaded"
        yield self._gauge("expert_balance", text, "what", _balance)
        text = "Low-rank adapters that are loaded, and those of them that answers have"
        yield self._gauge("adapters", text, "state", _adapters)
        yield self._gauge("adapter_bytes", "Bytes of adapters in memory, and their bound", "kind", _adapter_bytes)
        yield self._counter("adapter_requests", "Requests that chose an adapter", "adapter", _adapter_requests)
        dispatches = CounterMetricFamily(
            "mlxr_dispatches", "Operator calls", labels=["model", "operator", "implementation", "variant"]
        )
        rows = CounterMetricFamily(
            "mlxr_expert_rows", "Rows that experts multiplied", labels=["model", "implementation", "kernel"]
        )
        copied = CounterMetricFamily("mlxr_copied_bytes", "Bytes the cache path copied", labels=["model"])
        for model, stats in self._models:
            copied.add_metric([model], stats.copied_bytes)
            for row in stats.dispatches:
                dispatches.add_metric([model, row.operator, row.implementation, row.variant], row.count)
            for part in stats.expert_rows:
                rows.add_metric([model, part.implementation, part.kernel], part.rows)
        yield dispatches
        yield rows
        yield copied

    def _gauge(self, name: str, text: str, label: str, read: Read) -> Metric:
        return self._fill(GaugeMetricFamily(f"mlxr_{name}", text, labels=["model", label]), read)

    def _counter(self, name: str, text: str, label: str, read: Read) -> Metric:
        return self._fill(CounterMetricFamily(f"mlxr_{name}", text, labels=["model", label]), read)

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, read: Read) -> Metric:
        for model, stats in self._models:
            for kind, value in read(stats):
                family.add_metric([model, kind], value)
        return family


def _pages(stats: SessionStats) -> Iterator[tuple[str, float]]:
    engine = stats.engine
    yield "used", engine.used_pages
    yield "shared", engine.shared_pages
    yield "cached", engine.cached_pages
    yield "free", engine.free_pages
    yield "peak", engine.peak_pages


def _bytes(stats: SessionStats) -> Iterator[tuple[str, float]]:
    memory = stats.memory
    yield "weights", memory.weight_bytes
    yield "arena", memory.arena_bytes
    yield "in_use", memory.in_use_bytes
    yield "used", memory.used_bytes
    yield "cached", memory.cached_bytes
    yield "store", memory.disk_bytes


def _sequences(stats: SessionStats) -> Iterator[tuple[str, float]]:
    yield "waiting", stats.engine.waiting_sequences
    yield "running", stats.engine.running_sequences


def _work(stats: SessionStats) -> Iterator[tuple[str, float]]:
    engine = stats.engine
    yield "steps", engine.steps
    yield "prefill_tokens", engine.prefill_tokens
    yield "decode_tokens", engine.decode_tokens
    yield "recomputed_tokens", engine.recomputed_tokens
    yield "preemptions", engine.preemptions
    yield "drafted_tokens", engine.drafted_tokens
    yield "accepted_tokens", engine.accepted_tokens
    yield "failed_steps", engine.failed_steps
    yield "late_answers", engine.late_answers
    yield "refused_requests", engine.refused_requests


def _prefix(stats: SessionStats) -> Iterator[tuple[str, float]]:
    cache = stats.engine.cache
    yield "memory", cache.memory_hit_tokens
    yield "disk", cache.disk_hit_tokens
    yield "peer", cache.peer_hit_tokens
    yield "missed", cache.missed_tokens


def _states(stats: SessionStats) -> Iterator[tuple[str, float]]:
    for group in stats.engine.cache.groups:
        if group.kv_heads is None:
            yield "live", group.held_pages
            yield "snapshot", group.cached_pages
            yield "free", group.free_pages


def _short(stats: SessionStats) -> Iterator[tuple[str, float]]:
    yield from stats.engine.cache.short_tokens.items()


def _evictions(stats: SessionStats) -> Iterator[tuple[str, float]]:
    yield from ((cause.value, count) for cause, count in stats.engine.cache.evictions.items())


def _store_pages(stats: SessionStats) -> Iterator[tuple[str, float]]:
    store = stats.engine.cache.store
    if store is not None:
        yield "written", store.written_pages
        yield "read", store.read_pages


def _store_drops(stats: SessionStats) -> Iterator[tuple[str, float]]:
    store = stats.engine.cache.store
    if store is not None:
        yield from ((cause.value, count) for cause, count in store.drops.items())


def _routing(stats: SessionStats) -> Iterator[tuple[str, float]]:
    routing = stats.routing
    if routing is not None:
        yield "rows", routing.rows
        yield "layer_steps", routing.layer_steps
        yield "experts", routing.experts
        yield "file_reads", routing.file_reads


def _balance(stats: SessionStats) -> Iterator[tuple[str, float]]:
    if stats.routing is not None and stats.routing.rows:
        yield "evenness", stats.routing.evenness
        yield "busiest", stats.routing.busiest


def _adapters(stats: SessionStats) -> Iterator[tuple[str, float]]:
    if stats.adapters is not None:
        yield "loaded", len(stats.adapters.uses)
        yield "in_use", sum(use.is_in_use for use in stats.adapters.uses)


def _adapter_bytes(stats: SessionStats) -> Iterator[tuple[str, float]]:
    if stats.adapters is not None:
        yield "held", stats.adapters.held_bytes
        yield "most", stats.adapters.most_bytes


def _adapter_requests(stats: SessionStats) -> Iterator[tuple[str, float]]:
    if stats.adapters is not None:
        yield from ((use.name, use.requests) for use in stats.adapters.uses)


def _process_metrics() -> Iterator[Metric]:
    resident_bytes = read_resident_bytes()
    if resident_bytes is not None:
        yield GaugeMetricFamily("mlxr_process_resident_bytes", "Memory of this process", resident_bytes)


def read_resident_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Resident memory of this process, None where the system does not tell it in /proc."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), None)
