"""The benchmarks of the server run to their end, on little; their findings are right, however fast the machine is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlxr.loading import find_model

BENCH = Path(__file__).parents[2] / "bench"
DEMO = find_model("demo")


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, BENCH / script, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_load(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = run("server_load.py", "--clients", "8", "--seconds", "2", "--json", str(file))
    missed = [line for line in done.stderr.splitlines() if "of the loop's beats" not in line]
    assert missed == []
    figures = json.loads(file.read_text())
    assert figures["answers"] > 0
    assert figures["left"] > 0
    assert figures["used_pages"] == 0


@pytest.mark.slow
def test_compare_alone(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    few = ("--rounds", "2", "--seconds", "0.3", "--clients", "1", "3", "--chat-rounds", "1", "--tokens", "4")
    done = run("server_compare.py", *few, "--model", str(DEMO), "--json", str(file))
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert list(figures) == ["overhead", "chats, 1 client", "chats, 3 clients"]
    assert len(figures["overhead"]["rounds"]) == 2
    for row in figures.values():
        assert row["sides"]["mlxr"]["per_s"] > 0
        assert row["ratios"] == {}


@pytest.mark.slow
def test_resume_across_restarts(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    few = ("--turns", "3", "--conversations", "2", "--beginning-tokens", "600", "--answer-tokens", "8")
    done = run("resume.py", *few, "--restart", "--json", str(file))
    figures = json.loads(file.read_text())
    assert done.returncode == int(figures["again_share"] > 0.05), done.stderr
    assert len(figures["turns"]) == 6
    assert all(row["cached_tokens"] >= 576 for row in figures["turns"] if row["turn"])
    assert figures["cached_bytes_per_conversation"] > 0
    assert figures["snapshots"] > 0
