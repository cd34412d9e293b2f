"""The model that answers for a name: names of models, aliases, and names that no model has."""

from __future__ import annotations

from pathlib import Path

import anthropic
import openai
import pytest
from running_server import MakeServer

from mlxr.core.errors import SettingError, Unavailable
from mlxr.core.settings import resolve
from mlxr.loading import ASSETS
from mlxr.registry import Registry
from mlxr.server.model_names import ServedModels, find_alias, read_aliases
from mlxr.service.catalogue import open_registry

QUESTION = [{"role": "user", "content": "Hi"}]
DEMO = ASSETS / "demo.gguf"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return open_registry(resolve({"models_folder": tmp_path}, {}))


def stand_in(registry: Registry, **settings: object) -> str | None:
    return ServedModels(registry, resolve(settings, {})).find_stand_in()


def test_one_model_or_a_default_answers_for_any_name(registry: Registry) -> None:
    assert stand_in(registry) == "demo"
    registry.import_file(DEMO, "first")
    assert stand_in(registry) == "first:latest"
    registry.import_file(DEMO, "second")
    assert stand_in(registry) is None
    assert stand_in(registry, default_model="second") == "second"
    assert stand_in(registry, default_model="second", strict_model_names=True) is None


def test_files_that_were_given_are_known_once_the_catalogue_can_be_read(registry: Registry, tmp_path: Path) -> None:
    """An answer from a moment when the catalogue could not be read is not kept."""
    registry.import_file(DEMO, "first")
    good = (tmp_path / "catalogue.db").read_bytes()
    (tmp_path / "catalogue.db").write_bytes(b"no database" * 100)
    served = ServedModels(registry, resolve({"pinned_models": str(ASSETS / "demo-draft.gguf")}, {}))
    with pytest.raises(Unavailable):
        served.list()
    assert served.find_default() == "demo"
    (tmp_path / "catalogue.db").write_bytes(good)
    assert served.list()[0].path == ASSETS / "demo-draft.gguf"


def test_the_default_model_is_ones_own_and_stays(registry: Registry) -> None:
    served = ServedModels(registry, resolve({}, {}))
    assert served.find_default() == "demo"
    registry.import_file(DEMO, "first")
    assert served.find_default() == "first"
    registry.import_file(DEMO, "second")
    registry.touch("second:latest")
    assert served.find_default() == "first"
    assert ServedModels(registry, resolve({}, {})).find_default() == "second"
    assert ServedModels(registry, resolve({"default_model": "demo"}, {})).find_default() == "demo"
    registry.remove("first")
    assert served.find_default() == "second"


def test_a_name_that_is_not_there_is_told_to_our_own_client(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(model_aliases="coder=demo")
    body = {"model": "codre", "messages": QUESTION, "max_tokens": 1}
    with server.client() as client:
        with caplog.at_level("INFO", "mlxr.models"):
            assert client.post("/v1/chat/completions", json=body).headers["x-mlxr-ignored"] == "model"
        assert [(row.fields["wanted"], row.fields["model"]) for row in caplog.records] == [("codre", "demo")]  # type: ignore[attr-defined]
        refused = client.post("/v1/chat/completions", json=body, headers={"x-mlxr-exact-model": "true"})
        assert refused.status_code == 404
        assert "near it: coder" in refused.json()["error"]["message"]


def test_aliases_are_names(registry: Registry) -> None:
    registry.import_file(DEMO, "real")
    rows = ["GPT-4o = real", "claude-*=real", "claude-3=demo", "real=demo", "file=" + str(DEMO), "a?[b=demo"]
    settings = resolve({"model_aliases": rows}, {})
    served = ServedModels(registry, settings)
    names = ["gpt-4o", "gpt-4O:latest", "claude-opus-9", "claude-3", "real", "a?[b"]
    assert [served.find(name).short_name for name in names] == ["real", "real", "real", "demo", "real", "demo"]
    assert served.find("file").path == DEMO
    assert find_alias(read_aliases(settings), "gpt-4") is None


def test_files_and_aliases_can_be_copied_and_made_into_others(make_server: MakeServer, tmp_path: Path) -> None:
    file = tmp_path / "given.gguf"
    file.symlink_to(ASSETS / "demo-draft.gguf")
    server = make_server(default_model=str(file), model_aliases="nick=demo,pet-*=given")
    with server.client() as client:
        for source in ("given", "nick", "pet-name"):
            made = {"model": f"{source}-made", "from": source, "system": "x", "stream": False}
            assert client.post("/api/create", json=made).json() == {"status": "success"}
            copied = {"source": source, "destination": f"{source}-copied"}
            assert client.post("/api/copy", json=copied).is_success
        names = {model["name"] for model in client.get("/api/tags").json()["models"]}
        assert names >= {
            f"{source}-{word}:latest" for source in ("given", "nick", "pet-name") for word in ("made", "copied")
        }
        taken = client.post("/api/create", json={"model": "given", "from": "demo", "stream": False})
        assert (taken.status_code, str(file) in taken.json()["error"]) == (400, True)
        assert client.request("DELETE", "/api/delete", json={"model": "given"}).status_code == 400


@pytest.mark.parametrize("row", ["gpt-4o", "=demo", "gpt-4o=", "="])
def test_an_alias_that_is_none_is_refused(row: str) -> None:
    with pytest.raises(SettingError, match="model_aliases: must be alias=model"):
        read_aliases(resolve({"model_aliases": [row]}, {}))


# the client knows when services retire models
@pytest.mark.filterwarnings("ignore:The model 'claude:DeprecationWarning")
def test_clients_with_the_names_of_services_are_answered(make_server: MakeServer) -> None:
    server = make_server(model_aliases="text-embedding-3-small=demo,gone=missing")
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude,
        server.client() as client,
    ):
        chat = ai.chat.completions.with_raw_response.create(model="gpt-4o-mini", messages=QUESTION, max_tokens=1)  # type: ignore[arg-type]
        assert (chat.parse().model, chat.headers["x-mlxr-ignored"]) == ("gpt-4o-mini", "model")
        assert ai.responses.create(model="../../x", input="Hi", max_output_tokens=1).model == "../../x"
        message = claude.messages.create(model="claude-opus-4-5", messages=QUESTION, max_tokens=1)  # type: ignore[arg-type]
        assert message.model == "claude-opus-4-5"
        vectors = ai.embeddings.with_raw_response.create(model="text-embedding-3-small", input="Hi")
        assert "x-mlxr-ignored" not in vectors.headers
        assert [model.id for model in ai.models.list()] == ["demo", "demo-draft", "text-embedding-3-small"]
        assert ai.models.retrieve("text-embedding-3-small").id == "text-embedding-3-small"
        asked = {"model": "llama3", "messages": QUESTION, "options": {"num_predict": 1}, "stream": False}
        assert client.post("/api/chat", json=asked).status_code == 404
        assert client.post("/api/chat", json={**asked, "model": "text-embedding-3-small"}).status_code == 200
