"""The metrics of the server and of its engines, which /metrics returns for Prometheus.

`Metrics` counts requests, answers, tokens and times in its own registry, one for each application. Engines count pages,
cache and dispatches themselves (`core/stats`); these are read only for a request to /metrics, not with each token:
`ENGINE` has a row for each metric that is made of them. Names begin with `mlxr_`; seconds and bytes are base units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from mlxr.core.frozen import frozen
from mlxr.core.types import Finish, Timings, Usage
from mlxr.server.activity import InFlight

if TYPE_CHECKING:
    from mlxr.service.stats import SessionStats

# Boundaries of the histograms: those of vLLM and of OpenTelemetry's conventions, and finer ones for small models.
SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.32, 0.5, 0.64, 0.8, 1.0, 1.28, 1.5, 2.0, 2.5, 2.56, 5.0, 5.12),
    *(10.0, 10.24, 15.0, 20.0, 20.48, 30.0, 40.0, 40.96, 50.0, 60.0, 81.92, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
CLIENT_GONE = "client_gone"  # the reason of an answer's end if the client closed the connection


class Metrics:
    """The counters of one application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._requests = self._counter("requests", "HTTP requests that have ended", "method", "route", "status")
        self._seconds = self._histogram("request_seconds", "From arrival to the last byte", SECONDS, "route")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts", "model")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Tokens of prompts from the cache", "model")
        self.generated_tokens = self._counter("generated_tokens", "Tokens of answers", "model")
        self.answers = self._counter("answers", "Answers that have ended", "model", "reason")
        kind = ("model", "operation")
        self.first = self._histogram("time_to_first_token_seconds", "Arrival to first token", FIRST_SECONDS, *kind)
        self.each = self._histogram(
            "time_per_output_token_seconds", "Mean time per later token of an answer", TOKEN_SECONDS, *kind
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "Arrival to the end of an answer", SECONDS, *kind)
        self.queue = self._histogram("request_queue_time_seconds", "Answers waiting for their turn", SECONDS, "model")
        self.prefill = self._histogram("request_prefill_time_seconds", "Turn to first token", SECONDS, "model")
        self.decode = self._histogram("request_decode_time_seconds", "First token to last", SECONDS, "model")
        self.prompt_sizes = self._histogram("request_prompt_tokens", "Tokens of one prompt", TOKENS, "model")
        self.answer_sizes = self._histogram("request_generation_tokens", "Tokens of one answer", TOKENS, "model")
        self._longest = Gauge(
            "mlxr_longest_request_tokens",
            "Most tokens of one prompt with its answer",
            ["model"],
            registry=self._registry,
        )
        self._longest_tokens: dict[str, int] = {}
        self._load = self._histogram("model_load_seconds", "Loading a model", SECONDS, "model")
        self.loop_lag = Histogram(
            "mlxr_event_loop_lag_seconds",
            "How much later than asked for the event loop comes back",
            buckets=LAG_SECONDS,
            registry=self._registry,
        )
        self._stored = Gauge("mlxr_models_stored_bytes", "Models in the store on disk", registry=self._registry)
        self._in_flight = Gauge("mlxr_requests_in_flight", "Requests being served", registry=self._registry)

    @property
    def registry(self) -> CollectorRegistry:
        """The registry, to which other modules may add metrics."""
        return self._registry

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"mlxr_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"mlxr_{name}", text, labels, buckets=buckets, registry=self._registry)

    def count_request(self, row: InFlight, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        self._requests.labels(row.method if row.route != "unknown" else "any", row.route, str(status)).inc()
        self._seconds.labels(row.route).observe(seconds)

    def count_load(self, model: str, seconds: float) -> None:
        """Count a load of a model for a request."""
        self._load.labels(model).observe(seconds)

    def count_prompt(self, model: str, prompt_tokens: int) -> None:
        """Count a prompt that was accepted."""
        self.prompt_tokens.labels(model).inc(prompt_tokens)

    def note_length(self, model: str, tokens: int) -> None:
        """Note that a prompt and its answer had `tokens` tokens together."""
        if tokens > self._longest_tokens.get(model, 0):
            self._longest_tokens[model] = tokens
            self._longest.labels(model).set(tokens)

    def render(self, in_flight: int, stored_bytes: int, models: Iterable[tuple[str, SessionStats]]) -> bytes:
        """Return the text for Prometheus, with the number of requests in flight, the bytes of all stored models, and
        the statistics of the loaded `models` (name, stats).
        """
        self._in_flight.set(in_flight)
        self._stored.set(stored_bytes)
        return generate_latest(_Collected(self.collect(models)))

    def collect(self, models: Iterable[tuple[str, SessionStats]]) -> list[Metric]:
        """Return all metrics as they are now, with the statistics of `models` (name, stats)."""
        read = list(models)
        return [*self._registry.collect(), *_collect_process(), *(row.collect(read) for row in ENGINE)]


class _Collected(CollectorRegistry):
    """A registry of metrics that were read before."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class RequestMetrics:
    """Counts the answers to one request as they grow. `operation` is "chat" or "text_completion".

    Its series are looked up once, so that a token costs one addition.
    """

    def __init__(self, metrics: Metrics, row: InFlight, model: str, operation: str, prompt_tokens: int) -> None:
        self._metrics, self._row, self._model, self.operation = metrics, row, model, operation
        self._tokens = metrics.generated_tokens.labels(model)
        self._has_ended = False
        row.prompt_tokens += prompt_tokens
        metrics.count_prompt(model, prompt_tokens)

    def count_tokens(self, tokens: int) -> None:
        """Count tokens of an answer that were handed out."""
        row = self._row
        if row.first_token_s is None:
            row.first_token_s = monotonic()
            first_s = row.first_token_s - row.arrived_s
            self._metrics.first.labels(self._model, self.operation).observe(first_s)
        row.generated_tokens += tokens
        self._tokens.inc(tokens)

    def count_end(self, finish: Finish) -> None:
        """Count an answer that has ended."""
        metrics, model, usage, timings = self._metrics, self._model, finish.usage, finish.timings
        metrics.answers.labels(model, finish.reason.value).inc()
        metrics.answer_sizes.labels(model).observe(usage.completion_tokens)
        metrics.whole.labels(model, self.operation).observe(monotonic() - self._row.arrived_s)
        metrics.note_length(model, usage.prompt_tokens + usage.completion_tokens)
        if not self._has_ended:
            self._has_ended = True
            self._count_prompt(usage, timings)
        if timings is None:
            return
        metrics.decode.labels(model).observe(timings.generate_s)
        if usage.completion_tokens > 1:
            metrics.each.labels(model, self.operation).observe(timings.generate_s / (usage.completion_tokens - 1))

    def count_left(self, answers: int) -> None:
        """Count `answers` unfinished answers of a request that has ended."""
        if not answers:
            return
        row, metrics = self._row, self._metrics
        metrics.answers.labels(self._model, CLIENT_GONE if row.is_gone else "error").inc(answers)
        for _ in range(answers if row.first_token_s is not None else 0):  # their tokens were counted
            metrics.decode.labels(self._model).observe(monotonic() - (row.first_token_s or 0.0))

    def _count_prompt(self, usage: Usage, timings: Timings | None) -> None:
        """Count the prompt, which all answers share, when the first of them has ended."""
        metrics, model = self._metrics, self._model
        metrics.prompt_sizes.labels(model).observe(usage.prompt_tokens)
        metrics.cached_tokens.labels(model).inc(usage.cached_tokens)
        if timings is not None:
            metrics.queue.labels(model).observe(timings.queue_s)
            metrics.prefill.labels(model).observe(timings.prompt_s)


Samples = Mapping[str, float] | Mapping[tuple[str, ...], float]  # numbers by their labels other than the model


@frozen
class EngineRow:
    """A metric that is made of the counters of loaded models' engines."""

    kind: type[CounterMetricFamily | GaugeMetricFamily]
    name: str
    text: str
    labels: tuple[str, ...]  # besides the model
    read: Callable[[SessionStats], Samples]

    def collect(self, models: Iterable[tuple[str, SessionStats]]) -> Metric:
        """Return the metric with the samples of all models."""
        family = self.kind(f"mlxr_{self.name}", self.text, labels=["model", *self.labels])
        for model, stats in models:
            for values, number in self.read(stats).items():
                family.add_metric([model, *((values,) if isinstance(values, str) else values)], number)
        return family


def _count(name: str, text: str, labels: str, read: Callable[[SessionStats], Samples]) -> EngineRow:
    return EngineRow(CounterMetricFamily, name, text, tuple(labels.split()), read)


def _gauge(name: str, text: str, labels: str, read: Callable[[SessionStats], Samples]) -> EngineRow:
    return EngineRow(GaugeMetricFamily, name, text, tuple(labels.split()), read)


def _read_pages(stats: SessionStats) -> Samples:
    return {state: getattr(stats.engine, f"{state}_pages") for state in ("used", "shared", "cached", "free", "peak")}


def _read_states(stats: SessionStats) -> Samples:
    states = (group for group in stats.engine.cache.groups if group.kv_heads is None)
    return next(({"live": one.held_pages, "snapshot": one.cached_pages, "free": one.free_pages} for one in states), {})


def _read_bytes(stats: SessionStats) -> Samples:
    engine = stats.engine
    return {
        "weights": stats.weight_bytes,
        "arena": engine.arena_bytes,
        "in_use": engine.cache_in_use_bytes,
        "used": engine.used_bytes,
        "cached": engine.cached_bytes,
        "store": engine.disk_bytes,
    }


def _read_work(stats: SessionStats) -> Samples:
    return {name: getattr(stats.engine, name) for name in WORK}


def _read_prefix(stats: SessionStats) -> Samples:
    found = stats.engine
    hits = {"memory": found.memory_hit_tokens, "disk": found.disk_hit_tokens, "peer": found.peer_hit_tokens}
    return {**hits, "missed": found.missed_tokens}


def _read_store_pages(stats: SessionStats) -> Samples:
    store = stats.engine.cache.store
    return {} if store is None else {"written": store.written_pages, "read": store.read_pages}


def _read_store_drops(stats: SessionStats) -> Samples:
    store = stats.engine.cache.store
    return {} if store is None else {cause.value: count for cause, count in store.drops.items()}


def _read_routing(stats: SessionStats) -> Samples:
    names = ("rows", "layer_steps", "experts", "file_reads")
    return {} if stats.routing is None else {name: getattr(stats.routing, name) for name in names}


def _read_balance(stats: SessionStats) -> Samples:
    routing = stats.routing
    return {} if routing is None or not routing.rows else {"evenness": routing.evenness, "busiest": routing.busiest}


def _read_adapters(stats: SessionStats) -> Samples:
    if stats.adapters is None:
        return {}
    return {"loaded": len(stats.adapters.uses), "in_use": sum(use.is_in_use for use in stats.adapters.uses)}


def _read_adapter_bytes(stats: SessionStats) -> Samples:
    adapters = stats.adapters
    return {} if adapters is None else {"held": adapters.held_bytes, "most": adapters.most_bytes}


def _read_adapter_requests(stats: SessionStats) -> Samples:
    return {} if stats.adapters is None else {use.name: use.requests for use in stats.adapters.uses}


def _read_dispatches(stats: SessionStats) -> Samples:
    samples: dict[tuple[str, ...], float] = {}
    for row in stats.dispatches:
        samples[row.operator, row.implementation, row.variant] = row.count
    return samples


def _read_expert_rows(stats: SessionStats) -> Samples:
    samples: dict[tuple[str, ...], float] = {}
    for row in stats.expert_rows:
        samples[row.implementation, row.kernel] = row.rows
    return samples


def _read_copied(stats: SessionStats) -> Samples:
    samples: dict[tuple[str, ...], float] = {(): stats.engine.copied_bytes}
    return samples


WORK = (
    *("steps", "prefill_tokens", "decode_tokens", "recomputed_tokens", "preemptions", "drafted_tokens"),
    *("accepted_tokens", "failed_steps", "late_answers", "refused_requests", "encoded_pictures"),
)
ENGINE = (
    _gauge("pages", "Pages of the KV cache", "state", _read_pages),
    _gauge("states", "States of recurrent layers, each of one sequence", "state", _read_states),
    _gauge("cache_bytes", "Bytes of weights, of the cache at most and in use, and of the store", "kind", _read_bytes),
    _gauge(
        "sequences",
        "Answers that grow or wait",
        "state",
        lambda stats: {"waiting": stats.engine.queue.waiting, "running": stats.engine.queue.running},
    ),
    _count("engine", "What the engine has done", "what", _read_work),
    _count("prefix_tokens", "Tokens of prompts that were looked for in the cache", "where", _read_prefix),
    _count(
        "prefix_short_tokens",
        "Missed tokens that one group of layers had and this one had not",
        "group",
        lambda stats: stats.engine.cache.short_tokens,
    ),
    _count(
        "evictions",
        "Cached pages that were given up",
        "cause",
        lambda stats: {cause.value: count for cause, count in stats.engine.cache.evictions.items()},
    ),
    _count("store_pages", "Pages written to the store and read back", "what", _read_store_pages),
    _count("store_drops", "Pages that did not get, or stay, in the store", "cause", _read_store_drops),
    _count("expert_routing", "What was sent to experts, counted in each layer", "what", _read_routing),
    _gauge(
        "expert_balance",
        "Evenness of the rows of experts, and rows of the busiest over the mean, since the model was loaded",
        "what",
        _read_balance,
    ),
    _gauge("adapters", "Low-rank adapters that are loaded, and those that answers have", "state", _read_adapters),
    _gauge("adapter_bytes", "Bytes of adapters in memory, and their bound", "kind", _read_adapter_bytes),
    _count("adapter_requests", "Requests that chose an adapter", "adapter", _read_adapter_requests),
    _count("dispatches", "Operator calls", "operator implementation variant", _read_dispatches),
    _count("expert_rows", "Rows that experts multiplied", "implementation kernel", _read_expert_rows),
    _count("copied_bytes", "Bytes the cache path copied", "", _read_copied),
)


def _collect_process() -> Iterator[Metric]:
    resident_bytes = read_resident_bytes()
    if resident_bytes is not None:
        yield GaugeMetricFamily("mlxr_process_resident_bytes", "Memory of this process", resident_bytes)


def read_resident_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Return the resident memory of this process, None if the system does not tell it in /proc."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), None)
