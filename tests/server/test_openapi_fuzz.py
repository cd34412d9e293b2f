"""Requests made up from the OpenAPI document: none causes a server error, and every answer fits the document."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from amounts import choose_amount
from hypothesis import HealthCheck, given, settings
from running_server import RunningServer, start_server
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from mlxr.server.llamacpp.properties import refused

FEW = settings(
    max_examples=choose_amount(12),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
LENGTHS = ("n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    server = start_server(tmp_path_factory.mktemp("fuzzed"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def document(fuzzed: RunningServer) -> schemathesis.BaseSchema:
    """The document, narrowed to requests that get far and end soon."""
    described = httpx.get(f"{fuzzed.url}/openapi.json").json()
    for name, schema in described["components"]["schemas"].items():
        fields = schema.get("properties", {})
        if not name.endswith(("Request", "Body")):
            continue
        fields.pop("deadline_s", None)  # an answer that runs out of time is an error with status 504
        if "model" in fields:
            fields["model"] = {"const": "demo"}
        for length in LENGTHS:
            if length in fields:
                fields[length] = {"type": "integer", "minimum": 1, "maximum": 8}
    refusals = [row.path for row in refused.rows if row.method == "POST"]
    forms = "/v1/audio/transcriptions", "/v1/audio/translations"
    for path in ("/api/pull", "/infill", "/v1/admin/live", "/v1/admin/pdf", "/v1/admin/probe", *forms, *refusals):
        described["paths"].pop(path)  # no hub, a stream without end, a body that is a PDF, a second's work; others: 501
    return schemathesis.openapi.from_dict(described)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_breaks_the_server(
    fuzzed: RunningServer, document: schemathesis.BaseSchema, mode: GenerationMode
) -> None:
    """Requests that keep to the document (positive) and others that do not (negative)."""
    operations = [result.ok() for result in document.get_all_operations()]
    assert len(operations) > 15
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # there is nothing to get wrong

        @given(case=operation.as_strategy(generation_mode=mode))
        @FEW
        def check(case: schemathesis.Case) -> None:
            case.call_and_validate(base_url=fuzzed.url, checks=CHECKS, timeout=60)

        check()
