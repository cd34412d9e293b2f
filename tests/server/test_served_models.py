"""A file that `mlxr serve` was given has a name, which every list shows and every route takes."""

from __future__ import annotations

from pathlib import Path

import httpx
from running_server import MakeServer

from mlxr.core.settings import resolve
from mlxr.loading import ASSETS
from mlxr.server.model_names import ServedModels
from mlxr.service.catalogue import open_registry

DEMO = ASSETS / "demo.gguf"


def test_a_served_file_is_listed_and_answers_by_its_name(make_server: MakeServer, tmp_path: Path) -> None:
    path = tmp_path / "My model.Q8_0.gguf"
    path.symlink_to(DEMO)
    with make_server(default_model=str(path), pinned_models=["demo"]).client() as client:
        assert [row["id"] for row in client.get("/v1/models").json()["data"]][:1] == ["My-model.Q8_0"]
        assert client.get("/v1/models/my-model.q8_0").json()["display_name"] == "My-model.Q8_0"
        tags = {row["name"]: row for row in client.get("/api/tags").json()["models"]}
        assert list(tags) == ["My-model.Q8_0:latest", "demo:latest", "demo-draft:latest"]
        assert tags["My-model.Q8_0:latest"]["size"] == DEMO.stat().st_size
        assert client.post("/api/show", json={"model": "My-model.Q8_0"}).json()["details"]["family"] == "llama"
        for name in ("My-model.Q8_0", "my-model.q8_0:latest", str(path), None):
            body = {"model": name, "prompt": "import os", "max_tokens": 1}
            body = {key: value for key, value in body.items() if value is not None}
            assert client.post("/v1/completions", json=body).json()["model"]
        assert [row["name"] for row in client.get("/api/ps").json()["models"]].count("My-model.Q8_0:latest") == 1
        unload(client, "my-model.q8_0", "demo", "DEMO:latest")
        assert client.get("/v1/admin/models").json()["models"] == []
        missing = client.delete("/v1/admin/models/demo")
        assert missing.status_code == 404
        assert "not loaded" in missing.text


def unload(client: httpx.Client, *names: str) -> None:
    for name in names:
        assert client.delete(f"/v1/admin/models/{name}").status_code == (404 if name == "DEMO:latest" else 200)


def test_names_that_are_taken_stay_with_who_has_them(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "demo.gguf" for folder in ("a", "b")] + [
        tmp_path / "a" / "x.gguf",
        tmp_path / "x.gguf",
    ]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(DEMO)
    settings = resolve(
        {"models_folder": tmp_path / "models", "pinned_models": [str(path) for path in paths] + ["gone.gguf"]}, {}
    )
    served = ServedModels(open_registry(settings), settings)
    names = [record.name for record in served.list()]
    assert names == [str(paths[0]), str(paths[1]), "x:latest", str(paths[3]), "demo:latest", "demo-draft:latest"]
    assert served.find("demo").path == DEMO
    assert served.find("X").path == paths[2]
    assert served.find(str(paths[3])).path == paths[3]
    paths[2].unlink()
    assert "x:latest" not in [record.name for record in served.list()]
