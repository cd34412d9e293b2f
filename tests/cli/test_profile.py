"""`mlxr profile`: its tables, the numbers as JSON, and the trace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., str]


def read_profile(mlxr: Run, tmp_path: Path, *arguments: object) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Run `mlxr profile`; return the numbers, the trace and the tables."""
    numbers, trace = tmp_path / "profile.json", tmp_path / "trace.json"
    printed = mlxr("profile", *arguments, "--json-file", numbers, "--trace", trace)
    return json.loads(numbers.read_text()), json.loads(trace.read_text()), printed


def check_trace(report: dict[str, Any], trace: dict[str, Any]) -> None:
    """Check a trace as Perfetto reads it: whole events with a start, a length and a row; kernels lie within steps."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    rows = {event["args"]["name"]: event["tid"] for event in trace["traceEvents"] if event["ph"] == "M"}
    steps = [event for event in events if event["tid"] == rows["steps"]]
    kernels = [event for event in events if event["tid"] == rows["kernels"]]
    assert steps[0]["ts"] == 0
    for phase in report["phases"]:
        assert sum(event["name"] == phase["name"] for event in steps) == phase["steps"]
        own = [event for event in kernels if event["cat"] == phase["name"]]
        assert len(own) == sum(row["calls"] for row in phase["kernels"] if row["seconds"])
        assert sum(event["dur"] for event in own) / 1e6 == pytest.approx(phase["kernel_seconds"])
    for event in kernels:
        assert event["dur"] > 0
        assert any(
            step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"] for step in steps
        )


@pytest.mark.slow
def test_profile(gguf: Path, tmp_path: Path, mlxr: Run) -> None:
    sizes = ["--prompt-tokens", 70, "--steps", 5, "--sequences", 2, "--threads", 2]
    report, trace, printed = read_profile(mlxr, tmp_path, gguf, *sizes)
    check_trace(report, trace)
    prefill, decode = report["phases"]
    assert (prefill["tokens"], decode["tokens"], decode["steps"]) == (140, 10, 5)
    for phase in (prefill, decode):
        assert 0 < phase["kernel_seconds"] < phase["seconds"]
        operators = {row["operator"] for row in phase["kernels"]}
        assert operators >= {"linear", "attend", "rms_norm", "rope", "write_pages", "embed", "sample"}
        for row in phase["kernels"]:
            assert (row["share"] is None) == (row["seconds"] == 0) == row["variant"].startswith("fused")
    (attend,) = [row for row in decode["kernels"] if row["operator"] == "attend"]
    assert attend["calls"] == 2 * 5
    assert any(row["variant"].startswith("rows") for row in decode["kernels"])
    assert "between kernels" in printed
    assert "without profiling" in printed


@pytest.mark.slow
def test_profile_of_a_gpu_has_grids(gguf: Path, tmp_path: Path, mlxr: Run) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    if shutil.which("c++") is None:
        pytest.skip("kernels are emulated by a C++ compiler, which is not here")
    report, trace, printed = read_profile(
        mlxr, tmp_path, gguf, "--device", "emulated", "--prompt-tokens", 5, "--steps", 2
    )
    check_trace(report, trace)
    rows = [row for phase in report["phases"] for row in phase["kernels"]]
    assert {row["implementation"] for row in rows} <= {"gpu", "mlx"}
    assert all((row["grid"] is not None and row["threads"] > 0) == (row["implementation"] == "gpu") for row in rows)
    assert "threadgroups" in printed


def test_profile_refuses_the_reference(gguf: Path, tmp_path: Path, refused: Run) -> None:
    assert "no kernels to profile" in refused("profile", gguf, "--device", "reference")
    assert "cannot be written" in refused("profile", gguf, "--prompt-tokens", 4, "--steps", 1, "--json-file", tmp_path)
