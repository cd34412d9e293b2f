"""The numbers of `metrics` under the names that dashboards for other servers ask for.

Each row says how a metric of another server is made of ours, at the moment when somebody reads /metrics: nothing is
counted twice, and an answer costs nothing more. Where OpenTelemetry's names have dots, Prometheus has underscores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

Labels = Mapping[str, str]
Sample = tuple[str, Labels, float]  # what is added to the name (_bucket, _sum, _count), labels, value
Families = Mapping[str, Metric]  # our metrics by name, without _total
Read = Callable[[Families], Iterable[Sample]]
Number = Callable[[Families], float]

VLLM_LABELS = {"model": "model_name", "le": "le"}
VLLM_ENGINE = {"engine": "0"}
VLLM_REASONS = {"stop": "stop", "tool_calls": "stop", "length": "length", "error": "error"}  # all others: abort
OTEL_LABELS = {"model": "gen_ai_request_model", "operation": "gen_ai_operation_name", "le": "le"}


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of another server."""

    name: str
    kind: str
    help: str
    read: Read


def render_names(names: Sequence[str], families: Iterable[Metric]) -> str:
    """The text that Prometheus reads, for the servers `names` of NAMES; `families` are all of our own metrics."""
    found = {family.name.removeprefix("mlxr_"): family for family in families}
    return "".join(line for name in names for row in NAMES[name] for line in _render(row, found))


def _render(row: Row, families: Families) -> Iterator[str]:
    yield f"# HELP {row.name} {row.help}\n# TYPE {row.name} {row.kind}\n"
    for suffix, labels, value in row.read(families):
        inside = ",".join(f'{name}="{_escape(text)}"' for name, text in labels.items())
        yield f"{row.name}{suffix}{f'{{{inside}}}' if inside else ''} {float(value)!r}\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _same(source: str, rename: Labels, extra: Labels, where: Labels) -> Read:
    """Our metric `source` with its labels renamed, summed over those that `rename` does not name.

    Only samples that have the labels of `where` count.
    """

    def read(families: Families) -> Iterator[Sample]:
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in families[source].samples:
            suffix = sample.name.removeprefix(f"mlxr_{source}")
            if suffix != "_created" and where.items() <= sample.labels.items():
                kept = [(rename[label], text) for label, text in sample.labels.items() if label in rename]
                key = ("" if suffix == "_total" else suffix, (*kept, *extra.items()))
                sums[key] = sums.get(key, 0.0) + sample.value
        for (suffix, labels), value in sums.items():
            yield suffix, dict(labels), value

    return read


def _vllm(name: str, kind: str, text: str, source: str, **where: str) -> Row:
    return Row(f"vllm:{name}", kind, text, _same(source, VLLM_LABELS, VLLM_ENGINE, where))


def _vllm_by_model(name: str, text: str, kind: str, values: Callable[[Families], Mapping[str, float]]) -> Row:
    def read(families: Families) -> Iterator[Sample]:
        for model, value in values(families).items():
            yield "", {"model_name": model, **VLLM_ENGINE}, value

    return Row(f"vllm:{name}", kind, text, read)


def _read_ends(families: Families) -> Iterator[Sample]:
    """Answers by model and by vLLM's word for how they ended."""
    sums: dict[tuple[str, str], float] = {}
    for sample in families["answers"].samples:
        if sample.name.endswith("_total"):
            key = (sample.labels["model"], VLLM_REASONS.get(sample.labels["reason"], "abort"))
            sums[key] = sums.get(key, 0.0) + sample.value
    for (model, reason), value in sums.items():
        yield "", {"model_name": model, **VLLM_ENGINE, "finished_reason": reason}, value


def _by_model(families: Families, source: str, label: str, *wanted: str) -> dict[str, float]:
    """For each model the sum over samples whose `label` is one of `wanted`."""
    sums: dict[str, float] = {}
    for sample in families[source].samples:
        if sample.labels[label] in wanted and not sample.name.endswith("_created"):
            sums[sample.labels["model"]] = sums.get(sample.labels["model"], 0.0) + sample.value
    return sums


def _usage(families: Families) -> dict[str, float]:
    used = _by_model(families, "pages", "state", "used")
    every = _by_model(families, "pages", "state", "used", "cached", "free")
    return {model: used[model] / max(every[model], 1.0) for model in every}


def _queries(families: Families) -> dict[str, float]:
    return _by_model(families, "prefix_tokens", "where", "memory", "disk", "peer", "missed")


def _hits(families: Families) -> dict[str, float]:
    return _by_model(families, "prefix_tokens", "where", "memory", "disk", "peer")


def _total(source: str, suffix: str = "", **where: str) -> Number:
    """The sum of our metric over all models."""

    def read(families: Families) -> float:
        return sum(
            sample.value
            for sample in families[source].samples
            if sample.name == f"mlxr_{source}{suffix}" and where.items() <= sample.labels.items()
        )

    return read


def _ratio(value: Number, by: Number) -> Number:
    def read(families: Families) -> float:
        divisor = by(families)
        return value(families) / divisor if divisor else 0.0

    return read


def _llamacpp(name: str, kind: str, text: str, value: Number) -> Row:
    return Row(f"llamacpp:{name}", kind, text, lambda families: [("", {}, value(families))])


def _read_computed(families: Families) -> float:
    return _total("request_prompt_tokens", "_sum")(families) - _CACHED(families)


def _read_longest(families: Families) -> float:
    return max((sample.value for sample in families["longest_request_tokens"].samples), default=0.0)


def _otel(name: str, text: str, source: str) -> Row:
    read = _same(source, OTEL_LABELS, {"gen_ai_provider_name": "mlxr"}, {})
    return Row(f"gen_ai_server_{name}_seconds", "histogram", text, read)


_MEAN = "Mean time per later token, one for each answer"
VLLM = (
    _vllm("time_to_first_token_seconds", "histogram", "Time to first token", "time_to_first_token_seconds"),
    _vllm("time_per_output_token_seconds", "histogram", _MEAN, "time_per_output_token_seconds"),
    _vllm("inter_token_latency_seconds", "histogram", _MEAN, "time_per_output_token_seconds"),
    _vllm("request_time_per_output_token_seconds", "histogram", _MEAN, "time_per_output_token_seconds"),
    _vllm("e2e_request_latency_seconds", "histogram", "Arrival to end", "e2e_request_latency_seconds"),
    _vllm("request_queue_time_seconds", "histogram", "Time in the queue", "request_queue_time_seconds"),
    _vllm("request_prefill_time_seconds", "histogram", "Turn to first token", "request_prefill_time_seconds"),
    _vllm("request_decode_time_seconds", "histogram", "First token to last", "request_decode_time_seconds"),
    _vllm("request_prompt_tokens", "histogram", "Tokens of one prompt", "request_prompt_tokens"),
    _vllm("request_generation_tokens", "histogram", "Tokens of one answer", "request_generation_tokens"),
    _vllm("request_max_num_generation_tokens", "histogram", "Tokens of one answer", "request_generation_tokens"),
    _vllm("prompt_tokens_total", "counter", "Tokens of prompts", "prompt_tokens"),
    _vllm("generation_tokens_total", "counter", "Tokens of answers", "generated_tokens"),
    Row("vllm:request_success_total", "counter", "Answers by how they ended", _read_ends),
    _vllm("num_requests_running", "gauge", "Answers that grow", "sequences", state="running"),
    _vllm("num_requests_waiting", "gauge", "Answers that wait", "sequences", state="waiting"),
    _vllm("num_preemptions_total", "counter", "Answers that had to wait again", "engine", what="preemptions"),
    _vllm_by_model("kv_cache_usage_perc", "Pages in use, from 0 to 1", "gauge", _usage),
    _vllm_by_model("gpu_cache_usage_perc", "Pages in use, from 0 to 1", "gauge", _usage),
    _vllm_by_model("prefix_cache_queries_total", "Tokens looked for in the cache", "counter", _queries),
    _vllm_by_model("prefix_cache_hits_total", "Tokens found in the cache", "counter", _hits),
)
_CACHED = _total("cached_prompt_tokens", "_total")
_PREFILL_SECONDS = _total("request_prefill_time_seconds", "_sum")
_DECODE_SECONDS = _total("request_decode_time_seconds", "_sum")
_GENERATED, _STEPS = _total("generated_tokens", "_total"), _total("engine", "_total", what="steps")
_DECODED = _total("engine", "_total", what="decode_tokens")
LLAMACPP = (
    _llamacpp("prompt_tokens_total", "counter", "Prompt tokens computed", _read_computed),
    _llamacpp("prompt_tokens_cached_total", "counter", "Prompt tokens from the cache", _CACHED),
    _llamacpp("prompt_seconds_total", "counter", "Time for prompts", _PREFILL_SECONDS),
    _llamacpp("tokens_predicted_total", "counter", "Tokens of answers", _GENERATED),
    _llamacpp("tokens_predicted_seconds_total", "counter", "Time for answers", _DECODE_SECONDS),
    _llamacpp("n_decode_total", "counter", "Steps", _STEPS),
    _llamacpp("n_tokens_max", "counter", "Most tokens of one prompt with its answer", _read_longest),
    _llamacpp("prompt_tokens_seconds", "gauge", "Prompt tokens per second", _ratio(_read_computed, _PREFILL_SECONDS)),
    _llamacpp("predicted_tokens_seconds", "gauge", "Answer tokens per second", _ratio(_GENERATED, _DECODE_SECONDS)),
    _llamacpp("requests_processing", "gauge", "Answers that grow", _total("sequences", state="running")),
    _llamacpp("requests_deferred", "gauge", "Answers that wait", _total("sequences", state="waiting")),
    _llamacpp("n_busy_slots_per_decode", "gauge", "Answers in one step, on average", _ratio(_DECODED, _STEPS)),
)
OTEL = (
    _otel("request_duration", "Arrival to the end of an answer", "e2e_request_latency_seconds"),
    _otel("time_to_first_token", "Arrival to first token", "time_to_first_token_seconds"),
    _otel("time_per_output_token", _MEAN, "time_per_output_token_seconds"),
)
NAMES: Mapping[str, tuple[Row, ...]] = {"vllm": VLLM, "llamacpp": LLAMACPP, "otel": OTEL}
