"""Spans for OpenTelemetry, where the setting asks for them and the library is installed.

The exporter is that of the environment (`OTEL_EXPORTER_OTLP_ENDPOINT` and so on), as the library defines it. Without
the setting a span is nothing and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mlxr.core.errors import SettingError, name_install
from mlxr.core.events import Finish
from mlxr.server.activity import InFlight

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan


class Span:
    """One span, or nothing."""

    def __init__(self, span: OtelSpan | None = None) -> None:
        self._span = span

    def note(self, row: InFlight, operation: str, finish: Finish) -> None:
        """Return what is known when an answer has ended, under the names of the conventions for generative AI."""
        if self._span is None:
            return
        self._span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "mlxr",
                "gen_ai.request.model": row.model or "",
                "gen_ai.usage.input_tokens": finish.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": finish.usage.completion_tokens,
                "gen_ai.response.finish_reasons": [finish.reason.value],
                "mlxr.request_id": row.id,
                "mlxr.cached_tokens": finish.usage.cached_tokens,
            }
        )


NO_SPAN = Span()


@contextmanager
def start_span(name: str, headers: Mapping[str, str], *, wanted: bool) -> Iterator[Span]:
    """A span around what follows; its parent is the one that the request's headers name, if they do."""
    if not wanted:
        yield NO_SPAN
        return
    from opentelemetry import propagate, trace

    # Not the current span of the context: it may end in another task than it began in.
    span = trace.get_tracer("mlxr").start_span(name, context=propagate.extract(headers))
    try:
        yield Span(span)
    finally:
        span.end()


def start_tracing() -> None:
    """Send spans where the environment says; raises SettingError when the library is not installed."""
    if not find_spec("opentelemetry") or not find_spec("opentelemetry.sdk"):
        raise SettingError(f"tracing: needs OpenTelemetry: {name_install('tracing')}")
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "mlxr"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
