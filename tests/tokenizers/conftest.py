"""The committed vocabularies and golden ids, and the templates, for all tokenizer tests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlxr.tokenizers import Tokenizer, from_folder, from_gguf, to_gguf_metadata

GOLDENS = Path(__file__).parent / "goldens"
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Goldens:
    """1,200 strings, and llama.cpp's ids for them: by "plain" or "special", then by vocabulary."""

    strings: list[str]
    ids: dict[str, dict[str, list[list[int]]]]


@pytest.fixture(scope="session")
def goldens() -> Goldens:
    cases = json.loads(gzip.decompress((GOLDENS / "cases.json.gz").read_bytes()))
    return Goldens(cases["strings"], {mode: cases[mode] for mode in ("plain", "special")})


@pytest.fixture(scope="session")
def vocabularies() -> dict[str, Tokenizer]:
    """Tokenizers from GGUF metadata: spm, spm-merges, llama3, qwen2."""
    names = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir())
    return {name: from_gguf(to_gguf_metadata(GOLDENS / name)) for name in names}


@pytest.fixture(scope="session")
def folders() -> dict[str, Tokenizer]:
    """The same tokenizers from their folders, through the libraries."""
    return {path.name: from_folder(path) for path in GOLDENS.iterdir() if path.is_dir()}


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    return GOLDENS


@pytest.fixture(scope="session")
def template_source() -> Callable[[str], str]:
    return lambda name: (TEMPLATES / f"{name}.jinja").read_text()


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a model folder, given as a mapping of file names to JSON values, texts or bytes."""

    def write(files: dict[str, Any]) -> Path:
        for name, value in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(value, bytes):
                path.write_bytes(value)
            else:
                path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def load_json() -> Callable[[str], dict[str, Any]]:
    """A fresh copy of a golden folder's tokenizer.json, to be changed."""

    def load(name: str) -> dict[str, Any]:
        value = json.loads((GOLDENS / name / "tokenizer.json").read_text(encoding="utf-8"))
        assert isinstance(value, dict)
        return value

    return load
