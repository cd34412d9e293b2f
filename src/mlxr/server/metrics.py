"""Counts what the server has done, for Prometheus: requests, answers, tokens and times.

Counters of this process live in a registry of their own, one for each application. What engines count themselves is
read when somebody asks (`engine_metrics`). Names begin with `mlxr_`; seconds and bytes are base units. The same numbers
under the names of other servers are made of these (`metric_names`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

from mlxr.core.events import Finish
from mlxr.core.types import Timings, Usage
from mlxr.server.activity import InFlight
from mlxr.server.engine_metrics import Moment
from mlxr.server.metric_names import render_names

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
CLIENT_GONE = "client_gone"  # why an answer ended whose client closed the connection


class Metrics:
    """The counters of one application. `names` are other servers whose names are told too, of `metric_names.NAMES`."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._registry, self._names = CollectorRegistry(auto_describe=False), tuple(names)
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
        """For metrics of others that are told beside these."""
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
        """A model was loaded for a request."""
        self._load.labels(model).observe(seconds)

    def count_prompt(self, model: str, prompt_tokens: int) -> None:
        """Count a prompt that was accepted."""
        self.prompt_tokens.labels(model).inc(prompt_tokens)

    def note_length(self, model: str, tokens: int) -> None:
        """A prompt and its answer had `tokens` tokens together."""
        if tokens > self._longest_tokens.get(model, 0):
            self._longest_tokens[model] = tokens
            self._longest.labels(model).set(tokens)

    def render(self, in_flight: int, stored_bytes: int, models: Iterable[tuple[str, SessionStats]]) -> bytes:
        """The text that Prometheus reads: with the requests in flight, the bytes of all models that are stored, and
        the state of `models` (name, stats), which are loaded.
        """
        self._in_flight.set(in_flight)
        self._stored.set(stored_bytes)
        families = self.collect(models)
        text = generate_latest(_Collected(families))
        return text + render_names(self._names, families).encode() if self._names else text

    def collect(self, models: Iterable[tuple[str, SessionStats]]) -> list[Metric]:
        """All metrics as they are now, with the state of `models` (name, stats)."""
        return [*self._registry.collect(), *Moment(list(models)).collect()]


class _Collected(CollectorRegistry):
    """Metrics that have been read already."""

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
        """Tokens of an answer were handed out."""
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
        """The request has ended with `answers` answers that were still growing."""
        if not answers:
            return
        row, metrics = self._row, self._metrics
        metrics.answers.labels(self._model, CLIENT_GONE if row.is_gone else "error").inc(answers)
        for _ in range(answers if row.first_token_s is not None else 0):  # their tokens were counted
            metrics.decode.labels(self._model).observe(monotonic() - (row.first_token_s or 0.0))

    def _count_prompt(self, usage: Usage, timings: Timings | None) -> None:
        """The first of the answers has ended; all of them share one prompt."""
        metrics, model = self._metrics, self._model
        metrics.prompt_sizes.labels(model).observe(usage.prompt_tokens)
        metrics.cached_tokens.labels(model).inc(usage.cached_tokens)
        if timings is not None:
            metrics.queue.labels(model).observe(timings.queue_s)
            metrics.prefill.labels(model).observe(timings.prompt_s)
