"""Servers with real models, each a process of its own that is started when a test first asks for it.

`MLXR_REAL_MODELS` names a folder with qwen2.5-coder-0.5b.gguf and gemma-3-270m.gguf. Without it, or without the file
that a test needs, the test is skipped and says so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from real_files import find_model

WAIT_S = 60
ANSWER_S = 240  # the longest that a test waits for one answer


@dataclass(frozen=True)
class RealServer:
    """A running `mlxr serve`: its address, the name of its model, and the model's file."""

    url: str
    model: str
    path: Path

    def post(self, path: str, body: dict[str, object]) -> httpx.Response:
        """Send `body` as JSON and return the response, whatever its status."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=ANSWER_S)


def serve(path: Path, home: Path) -> Iterator[RealServer]:
    """Start `mlxr serve PATH`, wait until it is ready, and end it afterwards."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MLXR_")}
    own = {"HOME": str(home), "MLXR_MODELS_FOLDER": str(home / "models"), "MLXR_ARENA_BYTES": "512M"}
    command = [sys.executable, "-m", "mlxr", "serve", str(path), "--port", "0", "--log-level", "warning"]
    log = home / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(command, stderr=output, env=inherited | own)
    try:
        url = read_address(process, log)
        model = httpx.get(f"{url}/v1/admin/models", timeout=WAIT_S).json()["models"][0]["name"]
        yield RealServer(url, model, path)
    finally:
        process.terminate()
        process.wait(WAIT_S)


def read_address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the server's address, read from its output, once it is ready."""
    end_s = time.monotonic() + WAIT_S
    while process.poll() is None and time.monotonic() < end_s:
        text = log.read_text()
        found = re.search(r"http://127\.0\.0\.1:\d+", text)
        if found and "\nready" in text:
            return found[0]
        time.sleep(0.05)
    raise AssertionError(f"the server does not start: {log.read_text()}")


@pytest.fixture(scope="session")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server with Qwen2.5 Coder 0.5B Instruct, which all tests of the session share."""
    yield from serve(find_model("qwen2.5-coder-0.5b"), tmp_path_factory.mktemp("coder"))


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server with Gemma 3 270M, which is not instructed, for all tests of the session."""
    yield from serve(find_model("gemma-3-270m"), tmp_path_factory.mktemp("gemma"))
