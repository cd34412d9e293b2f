"""Our own routes: health, admin, the OpenAPI document, errors outside the dialects."""

from __future__ import annotations

import httpx
import pytest
from running_server import MakeServer, RunningServer, wait_until

from mlxr.server.parts import ServerParts


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    assert client.get("/nothing").json()["error"]["code"] == "not_found"
    response = client.put("/tokenize")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"


def test_health(client: httpx.Client) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        response = client.get(path)
        assert response.status_code == 200
        assert response.json()["status"] == "ok"


def test_a_model_that_cannot_be_loaded_is_told_by_health(make_server: MakeServer) -> None:
    running = make_server(default_model="no-such-model", ready=False)
    with running.client() as client:
        wait_until(running.app.state.parts.lifecycle.loaded.is_set)
        response = client.get("/health/ready")
        assert response.status_code == 503
        assert client.get("/health/live").status_code == 200
        assert client.post("/tokenize", json={"content": "x", "model": "demo"}).status_code == 200
        assert client.post("/tokenize", json={"content": "x"}).status_code == 404
        assert "no-such-model" in client.get("/health/ready").json()["reason"]


def test_what_is_loaded(client: httpx.Client) -> None:
    client.post("/tokenize", json={"content": "x"})
    models = client.get("/v1/admin/models").json()["models"]
    (model,) = [model for model in models if model["name"] == "demo:latest"]  # other tests may have loaded others
    assert model["context_tokens"] == 2048
    assert model["size_bytes"] > 10**7


def test_what_the_caches_hold(client: httpx.Client) -> None:
    client.post("/tokenize", json={"content": "x"})
    caches = client.get("/v1/admin/cache").json()["caches"]
    models = client.get("/v1/admin/models").json()["models"]
    (shared_with,) = [model["shared_with"] for model in models if model["name"] == "demo:latest"]
    (cache,) = [cache for cache in caches if cache["model"] in {"demo:latest", *shared_with}]  # together they have one
    assert cache["engine"]["pages"] > 0
    assert cache["engine"]["used_pages"] == 0


def test_which_requests_are_in_flight(client: httpx.Client) -> None:
    rows = client.get("/v1/admin/requests", headers={"x-request-id": "my-own-id"}).json()["requests"]
    (own,) = [row for row in rows if row["id"] == "my-own-id"]
    assert own["path"] == "/v1/admin/requests"
    assert client.delete("/v1/admin/requests/unknown").status_code == 404


def test_a_model_can_be_unloaded_and_comes_back(make_server: MakeServer) -> None:
    with make_server().client() as client:
        assert client.delete("/v1/admin/models/demo:latest").json() == {"status": "ok"}
        assert client.get("/v1/admin/models").json() == {"models": []}
        assert client.delete("/v1/admin/models/demo:latest").status_code == 404
        assert client.post("/tokenize", json={"content": "x"}).status_code == 200
        assert len(client.get("/v1/admin/models").json()["models"]) == 1


@pytest.mark.one_server("Ray Serve's proxy takes any id")
def test_ids_of_requests(client: httpx.Client) -> None:
    ids = {client.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert client.get("/health", headers={"x-request-id": "a-b_1"}).headers["x-request-id"] == "a-b_1"
    for bad in ("x" * 65, "a b", 'a"b', "é"):
        assert client.get("/health", headers={"x-request-id": bad.encode()}).headers["x-request-id"] != bad


def test_the_openapi_document_is_ours(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert {"/tokenize", "/metrics", "/health", "/v1/admin/cache"} <= set(document["paths"])
    for item in document["paths"].values():
        for operation in item.values():
            assert "422" not in operation["responses"]
            assert "default" in operation["responses"]
    assert document["paths"]["/tokenize"]["post"]["security"]
    assert "security" not in document["paths"]["/health"]["get"]


def test_the_parts_are_where_handlers_look(running: RunningServer) -> None:
    parts = running.app.state.parts
    assert isinstance(parts, ServerParts)
    assert parts.settings == running.settings
    assert parts.registry is parts.served.registry
