from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub
from paper_models import make_model, paper_registry

from mlxr.registry import Registry


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return paper_registry(tmp_path / "store")


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A whole model outside the store."""
    path = tmp_path / "outside" / "Tiny-1.1B.Q4_K_M.gguf"
    path.parent.mkdir()
    path.write_bytes(make_model())
    return path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with FakeHub() as fake:
        yield fake
