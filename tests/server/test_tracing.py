"""Spans: none unless asked for; with the setting, one for each request that generates."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from running_server import MakeServer, wait_until

from mlxr.core.errors import SettingError
from mlxr.server import activity

trace = pytest.importorskip("opentelemetry.trace", reason="opentelemetry is not installed")


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class RecordedSpan:
    def __init__(self, name: str, context: Any) -> None:
        self.name, self.context, self.ended = name, context, False
        self.attributes: dict[str, object] = {}

    def set_attributes(self, attributes: dict[str, object]) -> None:
        self.attributes.update(attributes)

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[RecordedSpan]:
    """The spans that the tracing library is asked to record."""
    found: list[RecordedSpan] = []

    class Tracer:
        def start_span(self, name: str, context: Any) -> RecordedSpan:
            found.append(RecordedSpan(name, context))
            return found[-1]

    monkeypatch.setattr(trace, "get_tracer", lambda name: Tracer())
    return found


@contextmanager
def asked(make_server: MakeServer, **settings: object) -> Iterator[dict[str, Any]]:
    body = {"model": "demo", "prompt": "import os\n", "max_tokens": 3, "ignore_eos": True}
    with make_server(**settings).client() as client:
        yield client.post("/v1/completions", json=body, headers={"traceparent": PARENT}).json()


def test_a_span_for_each_generation(make_server: MakeServer, spans: list[RecordedSpan]) -> None:
    with asked(make_server, tracing=True) as reply:
        (span,) = spans
        assert span.name == "mlxr.generate"
        assert span.attributes["gen_ai.usage.output_tokens"] == 3
        assert span.attributes["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
        assert span.attributes["gen_ai.operation.name"] == "text_completion"
        assert span.attributes["gen_ai.provider.name"] == "mlxr"
        assert span.attributes["gen_ai.request.model"] == "demo:latest"
        assert span.attributes["gen_ai.response.finish_reasons"] == ["length"]
        wait_until(lambda: span.ended)  # the reply may be here a moment before the request is over
        parent = trace.get_current_span(span.context).get_span_context()
        assert f"00-{parent.trace_id:032x}-{parent.span_id:016x}-01" == PARENT


def test_a_collector_gets_the_spans(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `tracing` is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    activity.start_tracing()
    with asked(make_server, tracing=True):
        pass
    provider = trace.get_tracer_provider()
    wait_until(lambda: provider.force_flush() and bool(got))  # the span ends a moment after the reply
    provider.shutdown()
    collector.shutdown()
    collector.server_close()
    thread.join()
    ((path, body),) = got
    (sent,) = ExportTraceServiceRequest.FromString(body).resource_spans
    (span,) = sent.scope_spans[0].spans
    assert (path, span.name) == ("/v1/traces", "mlxr.generate")
    assert f"00-{span.trace_id.hex()}-{span.parent_span_id.hex()}-01" == PARENT
    assert 0 < span.start_time_unix_nano < span.end_time_unix_nano
    values = {pair.key: pair.value for pair in span.attributes}
    assert values["gen_ai.usage.output_tokens"].int_value == 3
    assert values["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    assert "mlxr" in [one.value.string_value for one in sent.resource.attributes if one.key == "service.name"]


def test_no_span_unless_asked_for(make_server: MakeServer, spans: list[RecordedSpan]) -> None:
    with asked(make_server) as reply:
        assert reply["usage"]["completion_tokens"] == 3
        assert spans == []


def test_without_the_library_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk", raising=False)
    with pytest.raises(SettingError, match=r"pip install .*opentelemetry-sdk"):
        activity.start_tracing()
    assert "opentelemetry.sdk" not in sys.modules
