"""The files of real models that tests use where they are: MLXR_REAL_MODELS names their folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "MLXR_REAL_MODELS"


def find_model(name: str) -> Path:
    """Return the file of the model; skip the test if there is none."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} is not set: it names the folder with {name}.gguf")
    path = Path(folder).expanduser() / f"{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not there, which {VARIABLE} promises")
    return path
