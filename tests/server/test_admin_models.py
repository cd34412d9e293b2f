"""The memory that a model would take, imports from listed folders alone, and the server's report about itself."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import httpx
import pytest
from running_server import MakeServer

import mlxr
from mlxr.loading import ASSETS

sys.path.append(str(Path(__file__).parents[1] / "registry"))
from fake_hub import FakeHub

DRAFT = ASSETS / "demo-draft.gguf"


def ask_memory(client: httpx.Client, name: str) -> dict[str, object]:
    response = client.get(f"/v1/admin/models/{name}/memory")
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.mark.parametrize("settings", [{"arena_bytes": "48M"}, {"arena_bytes": None, "max_sequences": 2}])
def test_what_a_model_would_take_is_what_it_takes(settings: dict[str, object], make_server: MakeServer) -> None:
    with make_server(**settings).client() as client:
        before = ask_memory(client, "demo-draft")
        assert (before["is_loaded"], before["fits"], before["reason"]) == (False, True, None)
        assert before["weights_bytes"] == DRAFT.stat().st_size
        assert client.post("/api/generate", json={"model": "demo-draft"}).status_code == 200
        after = ask_memory(client, "demo-draft")
        assert after["is_loaded"]
        assert [after[name] for name in ("cache_bytes", "cache_max_bytes")] == [
            before[name] for name in ("cache_bytes", "cache_max_bytes")
        ]
        assert 0 == before["cache_in_use_bytes"] <= after["cache_in_use_bytes"] <= after["cache_max_bytes"]  # type: ignore[operator]
        taken = next(row for row in client.get("/api/ps").json()["models"] if row["name"] == "demo-draft:latest")
        assert taken["size"] == after["weights_bytes"] + after["cache_in_use_bytes"]  # type: ignore[operator]
        assert [taken[name] for name in ("weights_bytes", "cache_in_use_bytes", "cache_max_bytes")] == [
            after[name] for name in ("weights_bytes", "cache_in_use_bytes", "cache_max_bytes")
        ]


def test_why_a_model_does_not_fit(make_server: MakeServer) -> None:
    settings = {"arena_bytes": "64M", "models_memory_bytes": "130M", "pinned_models": "demo"}
    with make_server(**settings).client() as client:
        need = ask_memory(client, "demo-draft")
        assert (need["fits"], need["is_loaded"]) == (False, False)
        refused = client.post("/api/generate", json={"model": "demo-draft"})
        assert refused.status_code == 400
        assert refused.json()["error"] == need["reason"]
        assert "raise the setting models_memory_bytes" in str(need["reason"])
        assert ask_memory(client, "demo")["fits"]


def test_which_models_would_make_room(make_server: MakeServer) -> None:
    with make_server(arena_bytes="64M", models_memory_bytes="150M").client() as client:
        need = ask_memory(client, "demo-draft")
        assert (need["fits"], need["unloads"]) == (True, ["demo"])
        assert client.post("/api/generate", json={"model": "demo-draft"}).status_code == 200
        assert [row["name"] for row in client.get("/api/ps").json()["models"]] == ["demo-draft:latest"]
        assert ask_memory(client, "demo-draft")["unloads"] == []


def test_what_a_conversation_fills(client: httpx.Client) -> None:
    whole = ask_memory(client, "demo")
    half = client.get("/v1/admin/models/demo/memory", params={"tokens": "1024"}).json()
    assert (whole["conversation_tokens"], half["conversation_tokens"]) == (2048, 1024)
    assert whole["conversation_bytes"] == 2 * half["conversation_bytes"]
    caches = client.get("/v1/admin/cache").json()["caches"]
    engine = next(cache["engine"] for cache in caches if cache["model"] == "demo:latest")
    assert whole["conversation_bytes"] == 2048 // engine["page_size"] * engine["page_bytes"]
    assert client.get("/v1/admin/models/demo/memory", params={"tokens": "-1"}).status_code == 400


def test_which_well_known_models_there_are_and_what_fits(client: httpx.Client) -> None:
    models = client.get("/v1/admin/library").json()["models"]
    assert len(models) > 20
    assert all(model["fits"] in ("yes", "tight", "no", "unknown") and model["size_bytes"] > 0 for model in models)
    small = min(models, key=lambda model: model["size_bytes"])
    assert small["repository"].count("/") == 1
    assert ":" in small["name"]
    assert all(model["tokens_per_s"] is None or model["tokens_per_s"] > 0 for model in models)


def test_the_hub_is_searched_for_others(make_server: MakeServer) -> None:
    with FakeHub() as hub:
        hub.listing = b'[{"id": "someone/Draft-GGUF", "downloads": 7}]'
        with make_server(hub_url=hub.url).client() as client:
            found = client.get("/v1/admin/library", params={"search": "draft"}).json()
            assert found["hub"] == [{"name": "hf.co/someone/Draft-GGUF", "downloads": 7}]
            assert client.get("/v1/admin/library").json()["hub"] == []
    with make_server(hub_url="http://127.0.0.1:9").client() as client:
        refused = client.get("/v1/admin/library", params={"search": "draft"})
        assert refused.status_code == 502
        assert "cannot be asked" in refused.json()["error"]["message"]


def test_where_the_files_of_a_model_lie(client: httpx.Client, tmp_path: Path) -> None:
    def ask(name: str) -> dict[str, object]:
        return dict(client.get(f"/v1/admin/models/{name}/files").json())

    assert ask("demo-draft") == {
        "model": "demo-draft",
        "path": str(DRAFT),
        "size_bytes": DRAFT.stat().st_size,
        "stays": True,
        "shared_with": [],
    }
    assert client.post("/api/copy", json={"source": "demo-draft", "destination": "twin"}).status_code == 200
    assert (ask("twin")["shared_with"], ask("demo-draft")["shared_with"]) == (["demo-draft"], ["twin"])
    assert client.request("DELETE", "/api/delete", json={"model": "twin"}).status_code == 200


def test_a_name_with_slashes_and_one_that_nobody_has(client: httpx.Client) -> None:
    assert client.post("/api/copy", json={"source": "demo", "destination": "me/copied:v1"}).status_code == 200
    for name in ("me/copied:v1", "me%2Fcopied%3Av1"):
        assert ask_memory(client, name)["model"] == "me/copied:v1"
    assert client.request("DELETE", "/api/delete", json={"model": "me/copied:v1"}).status_code == 200
    missing = client.get("/v1/admin/models/no-such-model/memory")
    assert missing.status_code == 404
    assert "no-such-model" in missing.json()["error"]["message"]


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A folder for imports, and beside it what must not be reached."""
    shelf = tmp_path / "shelf"
    (shelf / "deep").mkdir(parents=True)
    shutil.copy(DRAFT, shelf / "small.gguf")
    shutil.copy(DRAFT, shelf / "deep" / "other.gguf")
    shutil.copy(DRAFT, tmp_path / "outside.gguf")
    (shelf / "text.gguf").write_text("no model")
    (shelf / "link.gguf").symlink_to(tmp_path / "outside.gguf")
    (shelf / "inner.gguf").symlink_to(shelf / "small.gguf")
    (shelf / "circle").symlink_to(shelf / "circle")
    return shelf


def test_a_file_below_a_listed_folder_gets_a_name(shelf: Path, make_server: MakeServer) -> None:
    with make_server(import_folders=[str(shelf)]).client() as client:
        for path, name, given in [
            (str(shelf / "small.gguf"), None, "small"),
            ("deep/other.gguf", None, "other"),
            ("inner.gguf", "me/mine:v2", "me/mine:v2"),
            ("deep/../small.gguf", "again", "again"),
        ]:
            body = {"path": path} | ({"name": name} if name else {})
            reply = client.post("/v1/admin/models/import", json=body)
            assert reply.status_code == 200, reply.text
            assert reply.json() == {"name": given, "size_bytes": DRAFT.stat().st_size}
            answer = client.post("/v1/completions", json={"model": given, "prompt": "import os", "max_tokens": 1})
            assert answer.status_code == 200
        assert client.request("DELETE", "/api/delete", json={"model": "small"}).status_code == 200
    assert (shelf / "small.gguf").exists(), "files that were imported stay"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("../outside.gguf", 403, "only what lies below"),
        ("../no-such-file.gguf", 403, "only what lies below"),
        ("deep/../../outside.gguf", 403, "only what lies below"),
        ("link.gguf", 403, "only what lies below"),
        ("/etc/passwd", 403, "only what lies below"),
        ("/no/such/file", 403, "only what lies below"),
        ("~/outside.gguf", 404, "no file or folder"),
        ("no-such-file.gguf", 404, "no file or folder"),
        ("a\0b", 400, "is not one that a file can have"),
        ("x" * 300, 400, "is not one that a file can have"),
        ("text.gguf", 400, "text.gguf"),
        ("deep", 404, "config.json"),
        ("", 400, "path"),
    ],
)
def test_what_cannot_be_imported(path: str, status: int, words: str, shelf: Path, make_server: MakeServer) -> None:
    with make_server(import_folders=[str(shelf)]).client() as client:
        reply = client.post("/v1/admin/models/import", json={"path": path})
        assert reply.status_code == status, reply.text
        assert words in reply.json()["error"]["message"]
        assert len(client.get("/api/tags").json()["models"]) == 2, "only those that come with mlxr"


def test_a_link_to_itself_is_no_file(shelf: Path, make_server: MakeServer) -> None:
    with make_server(import_folders=[str(shelf)]).client() as client:
        reply = client.post("/v1/admin/models/import", json={"path": "circle"})
    assert reply.status_code in (400, 404)  # versions of Python differ in how they tell
    assert reply.json()["error"]["message"].startswith("path: ")


def test_without_listed_folders_nothing_can_be_imported(client: httpx.Client) -> None:
    for path in (str(DRAFT), "/no/such/file"):
        reply = client.post("/v1/admin/models/import", json={"path": path})
        assert reply.status_code == 403
        assert "--import-folders" in reply.json()["error"]["message"]


def test_unknown_fields_are_refused(client: httpx.Client) -> None:
    reply = client.post("/v1/admin/models/import", json={"path": "x", "quantize": "q4_k"})
    assert reply.status_code == 400
    assert reply.json()["error"]["field"] == "quantize"


def test_what_the_server_says_of_itself(shelf: Path, make_server: MakeServer) -> None:
    origin = "http://localhost:9000"
    settings = {"import_folders": [str(shelf)], "page_tool_origins": origin, "context_tokens": 512, "device": "cpu"}
    with make_server(api_keys="k", models_memory_bytes="1G", **settings).client() as client:
        assert client.get("/v1/admin/info").status_code == 401
        info = client.get("/v1/admin/info", headers={"x-api-key": "k"}).json()
    assert info["version"] == str(mlxr.__version__)
    assert info["dialects"] == ["own", "openai", "anthropic", "ollama", "llamacpp"]
    assert (info["device"], info["needs_key"], info["context_tokens"]) == ("cpu", True, 512)
    assert (info["import_folders"], info["tool_origins"]) == ([str(shelf)], [origin])
    assert (info["models_memory_bytes"], info["default_model"]) == (2**30, "demo")
    assert os.environ.get("HOME", "/nowhere") not in str({**info, "import_folders": []})


def test_names_of_one_file_are_told_and_count_once(make_server: MakeServer) -> None:
    with make_server().client() as client:
        assert client.post("/api/copy", json={"source": "demo-draft", "destination": "twin"}).status_code == 200
        for name in ("twin", "demo-draft"):
            assert client.post("/api/generate", json={"model": name}).status_code == 200
        models = {row["name"]: row for row in client.get("/api/ps").json()["models"]}
        assert models["twin:latest"]["shared_with"] == ["demo-draft:latest"]
        assert models["demo-draft:latest"]["size"] == models["twin:latest"]["size"]
        assert [row["model"] for row in client.get("/v1/admin/cache").json()["caches"]] == [
            "demo-draft:latest",
            "demo:latest",
        ]
        assert client.delete("/v1/admin/models/demo-draft").status_code == 200
        assert {row["name"]: row["shared_with"] for row in client.get("/api/ps").json()["models"]} == {
            "twin:latest": [],
            "demo:latest": [],
        }
        assert client.post("/api/generate", json={"model": "twin"}).status_code == 200
