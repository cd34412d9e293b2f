"""What the server has done, for Prometheus: requests, tokens, times, and the state of every loaded model.

Counters of this process live in a registry of their own, one for each application. What engines count themselves
(pages, cache, dispatches) is read when somebody asks, never on the way of a token. Names begin with `mlxr_`; seconds
and bytes are base units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from mlxr.core.types import FinishReason, Usage
from mlxr.server.activity import InFlight

if TYPE_CHECKING:
    from mlxr.service.stats import SessionStats

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """The counters of one application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._requests = self._counter("requests", "HTTP requests that have ended", "method", "route", "status")
        self._seconds = self._histogram("request_seconds", "From arrival to the last byte", SECONDS, "route")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts", "model")
        self._cached_tokens = self._counter("cached_prompt_tokens", "Tokens of prompts from the cache", "model")
        self._generated_tokens = self._counter("generated_tokens", "Tokens of answers", "model")
        self._answers = self._counter("answers", "Answers that have ended", "model", "reason")
        self._first = self._histogram("first_token_seconds", "From arrival to the first token", SECONDS, "model")
        self._each = self._histogram("token_seconds", "Mean time per later token of an answer", TOKEN_SECONDS, "model")
        self._queue = self._histogram("queue_seconds", "Answers waiting for their turn", SECONDS, "model")
        self._load = self._histogram("model_load_seconds", "Loading a model", SECONDS, "model")
        self.loop_lag = Histogram(
            "mlxr_event_loop_lag_seconds",
            "How much later than asked for the event loop comes back",
            buckets=LAG_SECONDS,
            registry=self._registry,
        )
        self._stored = Gauge("mlxr_models_stored_bytes", "Models in the store on disk", registry=self._registry)
        self._in_flight = Gauge("mlxr_requests_in_flight", "Requests being served", registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"mlxr_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"mlxr_{name}", text, labels, buckets=buckets, registry=self._registry)

    def count_request(self, row: InFlight, status: int, seconds: float) -> None:
        """A request has ended."""
        self._requests.labels(row.method if row.route != "unknown" else "any", row.route, str(status)).inc()
        self._seconds.labels(row.route).observe(seconds)

    def count_load(self, model: str, seconds: float) -> None:
        """A model was loaded for a request."""
        self._load.labels(model).observe(seconds)

    def count_first_token(self, model: str, seconds: float) -> None:
        """The first token of an answer is there, `seconds` after the request arrived."""
        self._first.labels(model).observe(seconds)

    def count_prompt(self, model: str, prompt_tokens: int) -> None:
        """A request was accepted."""
        self._prompt_tokens.labels(model).inc(prompt_tokens)

    def count_tokens(self, model: str, tokens: int) -> None:
        """Tokens of an answer were handed out."""
        self._generated_tokens.labels(model).inc(tokens)

    def count_answer(
        self, model: str, reason: FinishReason, usage: Usage, queue_s: float | None, generate_s: float | None
    ) -> None:
        """An answer has ended; `queue_s` and `generate_s` are of its timings, if it has any."""
        self._answers.labels(model, reason.value).inc()
        self._cached_tokens.labels(model).inc(usage.cached_tokens)
        if queue_s is not None:
            self._queue.labels(model).observe(queue_s)
        if generate_s is not None and usage.completion_tokens > 1:
            self._each.labels(model).observe(generate_s / (usage.completion_tokens - 1))

    def render(self, in_flight: int, stored_bytes: int, models: Iterable[tuple[str, SessionStats]]) -> bytes:
        """The text that Prometheus reads: with the requests in flight, the bytes of all models that are stored, and
        the state of `models` (name, stats), which are loaded.
        """
        self._in_flight.set(in_flight)
        self._stored.set(stored_bytes)
        now = CollectorRegistry(auto_describe=False)
        now.register(_Moment(list(models)))
        return generate_latest(self._registry) + generate_latest(now)


Read = Callable[["SessionStats"], Iterator[tuple[str, float]]]


class _Moment:
    """What the engines and the system tell now, in the form of a collector."""

    def __init__(self, models: list[tuple[str, SessionStats]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        yield from _process_metrics()
        yield self._gauge("pages", "Pages of the KV cache", "state", _pages)
        yield self._gauge("cache_bytes", "Bytes of weights, arena and store", "kind", _bytes)
        yield self._gauge("sequences", "Answers that grow or wait", "state", _sequences)
        yield self._counter("engine", "What the engine has done", "what", _work)
        yield self._counter("prefix_tokens", "Tokens of prompts that were looked for in the cache", "where", _prefix)
        yield self._counter("evictions", "Cached pages that were given up", "cause", _evictions)
        yield self._counter("store_pages", "Pages written to the store and read back", "what", _store_pages)
        yield self._counter("store_drops", "Pages that did not get, or stay, in the store", "cause", _store_drops)
        dispatches = CounterMetricFamily(
            "mlxr_dispatches", "Operator calls", labels=["model", "operator", "implementation", "variant"]
        )
        copied = CounterMetricFamily("mlxr_copied_bytes", "Bytes the cache path copied", labels=["model"])
        for model, stats in self._models:
            copied.add_metric([model], stats.copied_bytes)
            for row in stats.dispatches:
                dispatches.add_metric([model, row.operator, row.implementation, row.variant], row.count)
        yield dispatches
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
    yield "failed_steps", engine.failed_steps
    yield "late_answers", engine.late_answers
    yield "refused_requests", engine.refused_requests


def _prefix(stats: SessionStats) -> Iterator[tuple[str, float]]:
    cache = stats.engine.cache
    yield "memory", cache.memory_hit_tokens
    yield "disk", cache.disk_hit_tokens
    yield "missed", cache.missed_tokens


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
