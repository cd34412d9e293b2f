"""llm-comply's tests of three formats: everything that a model of texts can do passes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from conftest import MODEL

pytestmark = pytest.mark.skipif(find_spec("llm_comply") is None, reason="llm-comply is not installed")

# Differences on purpose: pictures are refused by name, and a request that names no model is answered by the loaded
# model, as on other local servers.
OTHERWISE = {
    "openai-chat": {"chat-image-input", "chat-error-handling"},
    "open-responses": {"image-input", "error-handling", "compact-missing-model"},
    "anthropic": {"anth-image-input"},
}


@pytest.mark.parametrize("form", list(OTHERWISE))
def test_a_format(form: str, url: str) -> None:
    program = Path(sys.executable).with_name("llm-comply")
    command = [program, "-u", f"{url}/v1", "-k", "x", "-m", MODEL, "--format", form, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.stdout, run.stderr
    results: dict[str, Any] = {result["id"]: result for result in json.loads(run.stdout)["results"]}
    failed = {name: result.get("errors") for name, result in results.items() if result["status"] == "failed"}
    assert failed.keys() == OTHERWISE[form], failed
    assert sum(result["status"] == "passed" for result in results.values()) >= 6
