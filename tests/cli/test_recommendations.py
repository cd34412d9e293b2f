"""Sampling that the files of a model recommend: read, converted, shown, and used unless a caller says otherwise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mlxr.core.sampling import name_file_defaults, read_file_defaults
from mlxr.core.settings import Settings
from mlxr.loading import read_sampling
from mlxr.registry import Changes
from mlxr.service.catalogue import describe_template, open_registry

Run = Callable[..., str]
GENERATION = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "pad_token_id": 1,
}
OPTIONS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repeat_penalty": 1.05}
TEMPLATES = Path(__file__).parents[1] / "tokenizers" / "templates"


@pytest.fixture
def recommending(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXR_MODELS_FOLDER", str(tmp_path / "models"))
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(GENERATION))
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"temp": 0.6000000238418579, "penalty_last_n": 64}, {"temperature": 0.6, "repeat_last_n": 64}),
        ({"min_p": 0.05, "top_k": 20, "mirostat": 2}, {"min_p": 0.05, "top_k": 20, "mirostat": 2}),
        ({"temp": -1.0, "top_p": "much", "top_k": True, "min_p": float("nan"), "sequence": "k;p"}, {}),
        ({}, {}),
    ],
)  # fmt: skip
def test_keys_of_gguf(metadata: Mapping[str, object], expected: dict[str, object]) -> None:
    assert read_file_defaults({f"general.sampling.{key}": value for key, value in metadata.items()}) == expected


def test_a_configuration_of_greedy_answers_recommends_nothing() -> None:
    assert read_file_defaults(name_file_defaults(GENERATION)) == OPTIONS
    assert name_file_defaults({**GENERATION, "do_sample": False}) == {}
    assert name_file_defaults({"temperature": None, "top_k": "20", "top_p": True}) == {}


def test_folders_and_files_recommend_the_same(recommending: Path, tmp_path: Path, mlxr: Run) -> None:
    mlxr("convert", recommending, tmp_path / "model.gguf", "--type", "f16")
    for path in (recommending, tmp_path / "model.gguf"):
        assert read_sampling(path) == OPTIONS
        assert json.loads(mlxr("show", path, "--json"))["sampling"] == OPTIONS
        assert "repeat_penalty 1.05" in mlxr("show", path)
    assert read_sampling("demo") == {}


def test_models_that_are_made_of_it_say_more(recommending: Path, mlxr: Run) -> None:
    registry = open_registry(Settings())
    registry.import_file(recommending, "own")
    assert registry.get("own").parameters == OPTIONS
    registry.derive("cold", registry.get("own"), Changes(parameters={"temperature": 0.1}))
    assert registry.get("cold").parameters == {**OPTIONS, "temperature": 0.1}


def test_a_run_uses_them_unless_a_flag_says_otherwise(recommending: Path, mlxr: Run) -> None:
    question = ("run", recommending, "Hello", "--raw", "--max-tokens", 12)
    plain = [mlxr(*question, "--temperature", 0, "--repetition-penalty", 1) for _ in range(2)]
    assert plain[0] == plain[1]
    assert len({mlxr(*question, "--seed", seed) for seed in range(4)}) > 1


def test_show_tells_what_conversations_are_like(folder: Path, mlxr: Run) -> None:
    described = describe_template((TEMPLATES / "gpt-oss.jinja").read_text())
    assert described == {
        "tool calls": "harmony",
        "thoughts": "<|channel|>analysis<|message|> ... <|end|>",
        "switches": "reasoning_effort (low, medium, high)",
    }
    qwen = describe_template((TEMPLATES / "qwen3.jinja").read_text())
    assert qwen == {"tool calls": "hermes", "thoughts": "<think> ... </think>", "switches": "enable_thinking"}
    assert describe_template("") == {}
    assert json.loads(mlxr("show", folder, "--json"))["chat"]["tool calls"] == "generic"
    assert "tool calls  generic" in mlxr("show", folder)
