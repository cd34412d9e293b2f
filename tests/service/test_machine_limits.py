"""Measured limits are kept for each processor, instruction set and number of threads, whatever the file has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxr.core.errors import DeviceError
from mlxr.core.settings import resolve
from mlxr.core.stats import MachineLimits
from mlxr.service import machine_limits
from mlxr.service.machine_limits import MAX_KEPT, KeptLimits, explain_missing, measure_limits

LIMITS = MachineLimits(2e10, 3e11, 1.7e9)


def loaded(threads: int = 2, isa: str = "avx2", device: str = "cpu") -> Any:
    return SimpleNamespace(ctx=SimpleNamespace(device=device, isa=isa, threads=threads))


@pytest.fixture
def kept(tmp_path: Path) -> KeptLimits:
    return KeptLimits(resolve({"models_folder": tmp_path / "models"}, {}))


def test_a_measurement_is_found_again_for_what_it_holds(kept: KeptLimits) -> None:
    assert kept.find(loaded()) is None
    kept.keep("avx2", 2, LIMITS)
    assert kept.find(loaded()) == LIMITS
    assert kept.find(loaded(threads=4)) is kept.find(loaded(isa="avx512")) is None
    newer = MachineLimits(1e10, 1e11, 1.8e9)
    kept.keep("avx2", 4, newer)
    assert (kept.find(loaded()), kept.find(loaded(threads=4))) == (LIMITS, newer)
    kept.keep("avx2", 2, newer)
    assert kept.find(loaded()) == newer
    assert [path.name for path in kept.path.parent.iterdir()] == ["limits.json"]


def test_old_measurements_go_first(kept: KeptLimits) -> None:
    for threads in range(1, MAX_KEPT + 3):
        kept.keep("avx2", threads, LIMITS)
    found = [threads for threads in range(1, MAX_KEPT + 3) if kept.find(loaded(threads))]
    assert found == list(range(3, MAX_KEPT + 3))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", "[" * 100000, '{"a": 1}', "\x00\xff"],
    ids=["empty", "list", "cut", "null", "deep", "other", "bytes"],
)
def test_a_file_that_is_not_ours_is_none(kept: KeptLimits, text: str) -> None:
    kept.path.parent.mkdir()
    kept.path.write_text(text, encoding="latin-1")
    assert kept.find(loaded()) is None
    kept.keep("avx2", 2, LIMITS)
    assert kept.find(loaded()) == LIMITS


@pytest.mark.parametrize("value", ["0.0", "-1.0", "NaN", "Infinity", '"x"', "null", "true"])
def test_rates_that_cannot_be_are_none(kept: KeptLimits, value: str) -> None:
    kept.keep("avx2", 2, LIMITS)
    kept.path.write_text(kept.path.read_text().replace("20000000000.0", value))
    assert kept.find(loaded()) is None


def test_a_folder_that_cannot_be_written_is_warned_of(kept: KeptLimits, caplog: pytest.LogCaptureFixture) -> None:
    kept.path.parent.parent.joinpath("models").write_text("a file")
    kept.keep("avx2", 2, LIMITS)
    assert "cannot be kept" in caplog.text


def test_what_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="device 'cuda'"):
        measure_limits(loaded(device="cuda"))
    assert "cuda" in explain_missing(loaded(device="cuda"))
    assert "bench --probe" in explain_missing(loaded())
    monkeypatch.setattr(machine_limits, "read_room_bytes", lambda device: 10 << 20)
    with pytest.raises(DeviceError, match="10 MiB are free"):
        measure_limits(loaded())
