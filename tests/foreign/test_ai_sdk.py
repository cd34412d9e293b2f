"""Vercel's AI SDK talks, streams, makes objects and calls tools through each of its providers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conftest import AGENTS, MODEL

PROVIDERS = ("chat", "responses", "messages", "compatible")


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    if not (AGENTS / "node_modules" / "ai").is_dir():
        pytest.skip(f"the AI SDK is not installed in {AGENTS}: the npm registry may lack it")
    return str(request.param)


def run(url: str, provider: str, case: str) -> Any:
    script = Path(__file__).with_name("ai_sdk.mjs")
    command = ["node", str(script), str(AGENTS), url, MODEL, f"{provider}/{case}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_talks(provider: str, url: str) -> None:
    whole, streamed = run(url, provider, "text"), run(url, provider, "stream")
    assert whole["text"]
    assert whole["tokens"] == 8
    assert streamed["kinds"][-1] == "finish"
    assert streamed["text"]


def test_an_object_keeps_to_its_schema(provider: str, url: str) -> None:
    made = run(url, provider, "object")
    assert made["city"] in {"Paris", "Rome"}
    assert made["people"] in range(1, 10)


def test_a_tool_is_called(provider: str, url: str) -> None:
    called = run(url, provider, "call")
    assert {"city": "Paris"} in called["seen"]
    assert called["steps"][0] == "tool-calls"


def test_a_stream_of_a_call_has_no_text(provider: str, url: str) -> None:
    kinds = run(url, provider, "call-stream")["kinds"]
    assert "tool-call" in kinds
    assert not {"text-start", "text-delta"} & set(kinds)
