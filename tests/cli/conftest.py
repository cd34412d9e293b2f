"""Small models on disk: a Hugging Face folder with its own tokenizer, and synthetic GGUF files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from model_folder import make_folder

from mlxr.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a tiny llama with a chat template."""
    return make_folder(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """bench/synthetic.py as a module."""
    spec = importlib.util.spec_from_file_location("synthetic", ROOT / "bench" / "synthetic.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["synthetic"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def gguf(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic Q4_K_M file without a chat template."""
    path = tmp_path_factory.mktemp("models") / "tiny-spm.gguf"
    assert synthetic.main(["--shape", "tiny-spm", "--type", "q4_k_m", "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="session")
def moe_gguf(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic Q4_K_M file with eight experts in each of two layers, two of them for a token."""
    path = tmp_path_factory.mktemp("models") / "tiny-moe.gguf"
    assert synthetic.main(["--shape", "tiny-moe", "--type", "q4_k_m", "--out", str(path)]) == 0
    return path


@pytest.fixture
def mlxr(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line that must succeed; returns its stdout."""

    def run(*arguments: object) -> str:
        code = main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        assert code == 0, output.err
        return output.out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line that must end with exit code 2 and one line on stderr; returns that line."""

    def run(*arguments: object) -> str:
        code = main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        lines = output.err.splitlines()
        assert (code, output.out, len(lines)) == (2, "", 1), output
        assert lines[0].startswith("mlxr: ")
        return lines[0]

    return run
