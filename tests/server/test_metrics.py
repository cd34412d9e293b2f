"""The numbers in /metrics after known requests."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import MakeServer, post_and_leave

from mlxr.server.metrics import read_resident_bytes

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
BODY = {"model": "demo", "prompt": "import os\n" * 40, "max_tokens": 5, "ignore_eos": True, "temperature": 0}
MODEL = "demo:latest"
RULES = Path(__file__).parents[2] / "docs" / "grafana" / "mlxr-names.rules.yml"
ASKED_BY_VLLMS_DASHBOARD = [
    "e2e_request_latency_seconds",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_requests_running",
    "num_requests_waiting",
    "time_per_output_token_seconds",
    "time_to_first_token_seconds",
    "gpu_cache_usage_perc",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_success_total",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_max_num_generation_tokens",
]


def read(client: httpx.Client) -> Samples:
    """Read the metrics once no other request is in flight, as a reply can come before its request is counted."""
    while (samples := read_now(client))["mlxr_requests_in_flight", ()] > 1:
        pass
    return samples


def read_now(client: httpx.Client) -> Samples:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((f"mlxr_{name}", tuple(sorted(labels.items()))), 0.0)


def test_requests_tokens_and_times(make_server: MakeServer) -> None:
    with make_server().client() as client:
        replies = [client.post("/v1/completions", json=BODY).json() for _ in range(3)]
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            assert "[DONE]" in "".join(response.iter_lines())
        assert client.post("/v1/completions", json={"prompt": 3}).status_code == 400
        client.get("/no-such-path")
        samples = read(client)
    prompt_tokens = replies[0]["usage"]["prompt_tokens"]
    route = {"method": "POST", "route": "/v1/completions"}
    assert value(samples, "requests_total", **route, status="200") == 4
    assert value(samples, "requests_total", **route, status="400") == 1
    assert value(samples, "requests_total", method="any", route="unknown", status="404") == 1
    assert value(samples, "prompt_tokens_total", model=MODEL) == 4 * prompt_tokens
    assert value(samples, "generated_tokens_total", model=MODEL) == 20
    assert value(samples, "answers_total", model=MODEL, reason="length") == 4
    text = {"model": MODEL, "operation": "text_completion"}
    for name in ("time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds"):
        assert value(samples, f"{name}_count", **text) == 4, name
        assert 0 < value(samples, f"{name}_sum", **text) < 60
    for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds"):
        assert value(samples, f"request_{name}_count", model=MODEL) == 4, name
    assert value(samples, "request_prompt_tokens_sum", model=MODEL) == 4 * prompt_tokens
    assert value(samples, "request_generation_tokens_bucket", model=MODEL, le="5.0") == 4
    assert value(samples, "request_generation_tokens_bucket", model=MODEL, le="2.0") == 0
    assert value(samples, "longest_request_tokens", model=MODEL) == prompt_tokens + 5
    assert value(samples, "request_seconds_count", route="/v1/completions") == 5
    assert value(samples, "requests_in_flight") == 1  # the one that asks


def test_answers_whose_client_left_are_counted(make_server: MakeServer) -> None:
    running = make_server()
    with running.client() as client:
        for stream in (True, False):
            body = {**BODY, "max_tokens": 1000, "n": 2, "stream": stream}
            post_and_leave(running, "/v1/completions", body, lambda row: row.generated_tokens > 2)
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "n": 3}
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        samples = read(client)
    assert value(samples, "answers_total", model=MODEL, reason="client_gone") == 4
    assert value(samples, "e2e_request_latency_seconds_count", model=MODEL, operation="chat") == 3
    assert value(samples, "time_to_first_token_seconds_count", model=MODEL, operation="chat") == 1
    assert value(samples, "request_prompt_tokens_count", model=MODEL) == 1
    assert value(samples, "request_prefill_time_seconds_count", model=MODEL) == 1
    assert value(samples, "request_decode_time_seconds_count", model=MODEL) == 7


def test_rules_for_the_names_of_other_servers(make_server: MakeServer) -> None:
    """They ask for existing series, and leave out labels that these have; vLLM's dashboard finds its own."""
    with make_server(page_size=16).client() as client:
        for _ in range(2):
            client.post("/v1/completions", json=BODY)
        samples = read(client)
    labels_of: dict[str, list[dict[str, str]]] = {}
    for name, labels in samples:
        labels_of.setdefault(name, []).append(dict(labels))
    rules = dict(re.findall(r"- record: (\S+)\n +expr: >-\n +(.*)\n", RULES.read_text()))
    assert len(rules) == RULES.read_text().count("record:") > 60
    for record, expression in rules.items():
        asked = re.findall(r'(mlxr_\w+)(?:\{(\w+)="(\w+)"\})?', expression)
        assert asked or record.startswith("llamacpp:"), record
        for name, label, text in asked:
            assert any(not label or row.get(label) == text for row in labels_of[name]), (record, name)
        assert set(re.findall(r"llamacpp:\w+", expression)) <= rules.keys()
        known = {label for name, *_ in asked for row in labels_of[name] for label in row}
        for left_out in re.findall(r"without \(([^)]*)\)", expression):
            assert set(left_out.split(", ")) <= known, record
    found = {re.sub("_(bucket|sum|count)$", "", record) for record in rules}
    assert {f"vllm:{name}" for name in ASKED_BY_VLLMS_DASHBOARD} <= found


def test_embeddings_are_counted(make_server: MakeServer) -> None:
    with make_server().client() as client:
        reply = client.post("/v1/embeddings", json={"model": "demo", "input": ["one text", "and another one"]}).json()
        samples = read(client)
    assert value(samples, "prompt_tokens_total", model=MODEL) == reply["usage"]["prompt_tokens"] > 2


def test_pages_prefixes_and_dispatches(make_server: MakeServer) -> None:
    with make_server(page_size=16).client() as client:
        first = client.post("/v1/completions", json=BODY).json()
        before = read(client)
        second = client.post("/v1/completions", json=BODY).json()
        after = read(client)
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    cached = value(after, "prefix_tokens_total", model=MODEL, where="memory")
    assert cached - value(before, "prefix_tokens_total", model=MODEL, where="memory") > 16
    assert value(after, "cached_prompt_tokens_total", model=MODEL) == cached
    assert value(after, "pages", model=MODEL, state="used") == 0
    assert value(after, "pages", model=MODEL, state="cached") > 1
    assert value(after, "cache_bytes", model=MODEL, kind="weights") > 10**7
    assert value(after, "engine_total", model=MODEL, what="decode_tokens") == 8
    assert value(after, "copied_bytes_total", model=MODEL) == 0
    dispatches = {labels: number for (name, labels), number in after.items() if name == "mlxr_dispatches_total"}
    assert {dict(labels)["operator"] for labels in dispatches} >= {"linear", "attend", "sample", "rms_norm"}
    assert value(after, "event_loop_lag_seconds_count") > 0


def test_the_store_is_counted(make_server: MakeServer, tmp_path: Path) -> None:
    options = {"page_size": 16, "store_bytes": "16M", "store_folder": tmp_path / "pages"}
    with make_server(**options, arena_bytes="1M").client() as client:
        for number in range(12):
            client.post("/v1/completions", json={**BODY, "prompt": f"import module_{number}\n" * 20})
        samples = read(client)
    assert value(samples, "evictions_total", model=MODEL, cause="grow") > 0
    assert value(samples, "store_pages_total", model=MODEL, what="written") > 0
    assert value(samples, "cache_bytes", model=MODEL, kind="store") > 0
    assert samples["mlxr_models_stored_bytes", ()] == 0


def test_memory_of_the_process(client: httpx.Client, tmp_path: Path) -> None:
    if Path("/proc/self/status").exists():
        assert value(read(client), "process_resident_bytes") > 10**7
    assert read_resident_bytes(tmp_path / "nothing") is None


@pytest.mark.parametrize("path", ["/a", "/b", "/v1/models/x" * 50])
def test_paths_of_strangers_make_no_new_series(path: str, client: httpx.Client) -> None:
    client.get(path)
    assert not any(path in dict(labels).values() for _, labels in read(client))
