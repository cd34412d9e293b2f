"""The table of well-known models: its names, the files that `pull` takes for them, and its updates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_hub import FakeHub
from paper_models import make_model

from mlxr.core.errors import HubError, InvalidRequest, MlxrError, NameTaken
from mlxr.core.work_threads import Stop
from mlxr.registry import Registry, library
from mlxr.registry.hub import Found, HubClient, parse_reference, search_hub
from mlxr.registry.pull import pull
from mlxr.registry.record import ModelName

MODEL = make_model(1, 100_000)


def test_each_name_is_one_model_that_can_be_pulled() -> None:
    models = library.read_library()
    assert len({model.family for model in models}) >= 50
    assert len({model.name for model in models}) == len(models)
    for model in models:
        assert library.find(model.name) == model
        assert str(ModelName.parse(model.name)) == model.name
        assert parse_reference(model.reference).repo_id == model.repository
        assert 10**8 < model.size_bytes < 10**11
        assert 0 < model.active <= 1


def test_names_without_a_size_in_capitals_and_with_a_quantisation() -> None:
    usual = library.find("qwen3")
    assert usual is not None
    assert usual.tag == "8b"
    assert library.find("Qwen3:latest") == library.find("qwen3:8b-Q4_K_M") == usual
    assert library.find("qwen3:9b") is library.find("qwen") is library.find("") is None


def test_search_and_suggestions() -> None:
    assert {model.family for model in library.search("coder")} >= {"qwen2.5-coder", "qwen3-coder"}
    assert [model.name for model in library.search("llama3.2 1b")] == ["llama3.2:1b"]
    assert library.search("") == library.read_library()
    assert library.suggest("lama3.2")[0] == "llama3.2"
    assert library.suggest("qwen3:99b")[0] == "qwen3:8b"
    assert library.suggest("xyzzy") == []


def test_a_short_name_pulls_its_repository(registry: Registry, hub: FakeHub) -> None:
    model = library.find("llama3.2:1b")
    assert model is not None
    hub.add(model.repository, {"Llama-3.2-1B.Q4_K_M.gguf": MODEL, "Llama-3.2-1B.Q8_0.gguf": b"x"})
    record = pull(registry, "llama3.2:1b", endpoint=hub.url)
    assert (record.name, record.path.read_bytes()) == ("llama3.2:1b", MODEL)
    assert pull(registry, "llama3.2:1b", endpoint=hub.url).name == record.name  # the same again


def test_a_short_name_does_not_replace_another_model(registry: Registry, hub: FakeHub, tmp_path: Path) -> None:
    own = tmp_path / "own.gguf"
    own.write_bytes(make_model(2, 50_000))
    registry.import_file(own, "llama3.2:1b")
    model = library.find("llama3.2:1b")
    assert model is not None
    hub.add(model.repository, {"Llama-3.2-1B.Q4_K_M.gguf": MODEL})
    with pytest.raises(NameTaken):
        pull(registry, "llama3.2:1b", endpoint=hub.url)
    assert registry.get("llama3.2:1b").path == own
    assert not any("/resolve/" in path for path, _ in hub.requests)
    assert pull(registry, "llama3.2:1b", endpoint=hub.url, replaces=True).is_owned


def test_an_unknown_name_is_refused_with_what_is_near() -> None:
    with pytest.raises(InvalidRequest, match=r"'lama3\.2' cannot be pulled.*did you mean llama3\.2"):
        parse_reference("lama3.2")
    with pytest.raises(InvalidRequest, match=r"did you mean hf\.co/Qwen/Qwen3-4B-GGUF:q8_0\?"):
        parse_reference("Qwen/Qwen3-4B-GGUF:q8_0")
    with pytest.raises(InvalidRequest, match="`mlxr search WORDS` finds models"):
        parse_reference("../etc")


def test_refreshed_sizes_are_read_from_the_models_folder(tmp_path: Path) -> None:
    gone = library.read_library()[1]

    def ask(model: library.LibraryModel) -> int:
        if model == gone:
            raise HubError("no such repository")
        return model.size_bytes + 1

    changed, failed = library.refresh(tmp_path, ask)
    assert (changed, failed) == (len(library.read_library()) - 1, [gone.name])
    fresh = {model.name: model.size_bytes for model in library.read_library(tmp_path)}
    assert fresh == {m.name: m.size_bytes + (m != gone) for m in library.read_library()}
    (tmp_path / library.FILE_NAME).write_text("[1")
    with pytest.raises(MlxrError, match=r"library\.json: is no table of models"):
        library.find("qwen3", tmp_path)


def test_the_hub_is_searched(hub: FakeHub) -> None:
    rows = [{"id": "a/B-GGUF", "downloads": 5}, {"id": "c/D", "downloads": None}, {"id": "../x"}, {"id": 3}, "no"]
    hub.listing = json.dumps(rows).encode()
    with HubClient(Stop()) as client:
        assert search_hub("b c", hub.url, client) == [Found("a/B-GGUF", 5), Found("c/D", 0)]
        hub.listing = b"{"
        with pytest.raises(HubError, match="cannot be asked"):
            search_hub("b", hub.url, client)
