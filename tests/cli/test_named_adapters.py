"""`mlxr adapters`, and models that are made with one or named with one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from demo_adapters import write_gguf_adapter, write_peft_adapter

from mlxr import LLM, SamplingParams
from mlxr.core.errors import NotFound

Run = Callable[..., str]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXR_MODELS_FOLDER", str(tmp_path / "store"))


def say(model: str, adapter: str | Path | None = None) -> str:
    with LLM(model, device="cpu", threads=1, adapter=adapter) as llm:
        return llm.generate("import os", PARAMS)[0].text


def test_added_listed_used_and_removed(mlxr: Run, refused: Run, tmp_path: Path) -> None:
    path = write_gguf_adapter(tmp_path / "own.gguf", 1)
    assert "added" in mlxr("adapters", "add", "sql", path)
    (listed,) = json.loads(mlxr("adapters", "--json"))
    assert (listed["name"], listed["model"], listed["rank"], listed["weights"]) == ("sql", "demo", 4, 3)
    assert "sql" in mlxr("adapters", "list")
    assert "4, of 3 weights" in mlxr("adapters", "show", "sql")
    assert "sql" in mlxr("show", "demo")
    plain, adapted = say("demo"), say("demo", path)
    assert plain != adapted == say("demo:sql") == say("sql") == say("demo", "sql")
    assert adapted in mlxr("run", "demo:sql", "import os", "--raw", "--max-tokens", "12", "--temperature", "0")
    mlxr("adapters", "remove", "sql")
    with pytest.raises(NotFound):
        say("demo:sql")
    for words in (("add", "sql"), ("show",), ("remove", "sql", path), ("add", "a/b", path), ("show", "sql")):
        refused("adapters", *words)
    assert "no such adapter" in refused("adapters", "add", "sql", tmp_path / "none")
    refused("adapters", "add", "sql", path, "--model", "demo-draft")


def test_a_modelfile_with_an_adapter(mlxr: Run, refused: Run, tmp_path: Path) -> None:
    folder = write_peft_adapter(tmp_path / "folder", 2)
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text("FROM demo\nADAPTER ./folder\n")
    assert "folder" in mlxr("create", "tuned", "-f", modelfile)
    assert say("tuned") == say("demo", folder) != say("demo")
    assert mlxr("adapters", "--json").strip() == "[]"
    modelfile.write_text("FROM tuned\nADAPTER ./folder\n")
    assert "has one already" in refused("create", "twice", "-f", modelfile)
    mlxr("cp", "tuned", "other")
    mlxr("rm", "tuned")
    assert say("other") == say("demo", folder)
    modelfile.write_text("FROM demo\nADAPTER ./Modelfile\n")
    assert "Modelfile" in refused("create", "bad", "-f", modelfile)
