"""Spans: none unless asked for; with the setting, one for each request that generates."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    """What the library is asked to record."""
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


def test_no_span_unless_asked_for(make_server: MakeServer, spans: list[RecordedSpan]) -> None:
    with asked(make_server) as reply:
        assert reply["usage"]["completion_tokens"] == 3
        assert spans == []


def test_without_the_library_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"pip install .*opentelemetry-sdk"):
        activity.start_tracing()
    assert "opentelemetry.sdk" not in sys.modules
