"""bench/compare.py on a tiny model: our side alone and against a stand-in, the table, the docs and the refusals."""

from __future__ import annotations

import importlib
import json
import re
import sys
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlxr.core.errors import MlxrError

ROOT = Path(__file__).parents[2]
TINY = ("--shape", "tiny-spm", "--threads", "1", "--pairs", "2", "--wait-s", "0")


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, for which no machine is too busy."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    script = importlib.import_module("compare")
    session = importlib.import_module("comparison.session")
    monkeypatch.setattr(session, "BUSY", 1.0)
    monkeypatch.setattr(session, "SETTLE_S", 0.0)
    return script


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder in which each test finds the models that earlier ones made."""
    return str(tmp_path_factory.mktemp("compared"))


@pytest.fixture
def results() -> dict[str, Any]:
    """Made-up results of a run with two cases and one point of the curve."""
    row = {
        "kind": "decode",
        "type": "q4_k_m",
        "ours": [50.0, 60.0],
        "theirs": [50.0, 40.0],
        "bystanders": 0.0,
        "commit": "abc",
        "native": "0123",
        "read_range": [38e9, 41e9],
        "share": 0.75,
        "theirs_share": 0.5,
        "probe_per_s": 40e9,
        "ours_tokens_per_s": 55.0,
        "theirs_tokens_per_s": 45.0,
        "ratio": 1.25,
        "ratio_range": [1.0, 1.5],
    }
    curve = [
        {**row, "case": f"context-{tokens}-{kind}", "kind": kind, "ours_tokens_per_s": 100.0 / tokens}
        for tokens in (128, 1024)
        for kind in ("decode", "prefill")
    ]
    side = {"first_load_s": 1.5, "load_s": 0.5, "peak_memory_bytes": 2**30}
    return {
        "shape": "tinyllama-1.1b",
        "threads": 2,
        "made": "2026-01-02T03:04:05+00:00",
        "machine": {"processor": "P <1>", "cores": 2, "memory_bytes": 2**34},
        "commit": "abc",
        "versions": {"mlxr": "1", "llama.cpp": "2"},
        "models": {"q4_k_m": {"file_bytes": 2**30, "ours": side, "theirs": None}},
        "rows": [{**row, "case": "decode-128"}, {**row, "case": "prefill-512", "kind": "prefill"}, *curve],
        "skipped": [],
    }


@pytest.mark.slow
def test_our_side_alone(compare: ModuleType, models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "out.json"
    only = ("--only", "q8_0/*", "q4_k_m/prefill-4096", "q4_k_m/batch-4")
    assert compare.main([*TINY, *only, "--models", models, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert {(row["type"], row["case"]) for row in found["rows"]} == {
        ("q4_k_m", "prefill-4096"),
        ("q4_k_m", "batch-4"),
        ("q8_0", "prefill-512"),
        ("q8_0", "decode-128"),
    }
    for row in found["rows"]:
        assert len(row["ours"]) == len(row["read_bytes_per_s"]) == 2
        assert row["theirs"] == []
        assert row["ratio"] is None
        assert 0 < row["share"] < 1.5
    work = next(row for row in found["rows"] if row["case"] == "prefill-512")
    # 2 layers: q and o 256 x 256, k and v 128 x 256, gate, up and down 512 x 256; the head once in 512 tokens
    assert work["macs_per_token"] == 2 * 256 * (2 * 256 + 2 * 128 + 3 * 512) + 512 * 256 / 512
    printed = capsys.readouterr()
    assert "decode of 4 sequences, total" in printed.out
    assert "q8_0/decode-128" in printed.err
    assert not [path for path in Path(models).iterdir() if path.suffix == ".part"]


@pytest.mark.slow
def test_what_was_measured_outlives_a_run_that_breaks_off(
    compare: ModuleType, models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = compare.Session.measure

    def break_off(session: Any, case: Any, timeout_s: float) -> Any:
        if case.name == "decode-128":
            raise KeyboardInterrupt
        return measure(session, case, timeout_s)

    monkeypatch.setattr(compare.Session, "measure", break_off)
    out = tmp_path / "out.json"
    only = ("--only", "q8_0/prefill-512", "q8_0/decode-128")
    with pytest.raises(KeyboardInterrupt):
        compare.main([*TINY, *only, "--models", models, "--json", str(out)])
    found = json.loads(out.read_text())
    assert [row["case"] for row in found["rows"]] == ["prefill-512"]
    assert "prefill 512" in compare.format_table(found)


ONE_ROUND = ["probe", "mlxr", "llama.cpp"]
ONE_TURN = ["mlxr", "probe", "mlxr", "llama.cpp", "probe", "llama.cpp"]


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "last"), [((), ONE_ROUND * 2), (("--apart",), ONE_TURN)], ids=["", "apart"])
def test_two_sides_take_turns(
    compare: ModuleType,
    models: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    last: list[str],
) -> None:
    """Our engine stands in for the other one, and is told to be half as fast."""
    asked: list[str] = []

    class Slow(compare.Child):  # type: ignore[misc, name-defined]
        def __init__(self, name: str, python: Path, module: str, log: Path) -> None:
            super().__init__(name, python, module.replace("llama", "ours"), log)

        def ask(self, action: str, arguments: Any = None, *, timeout_s: float = 900.0) -> Any:
            if action in ("prefill", "decode", "measure"):
                asked.append(self.name)
            if self.name != "llama.cpp":
                return super().ask(action, arguments, timeout_s=timeout_s)
            if action == "drop":
                return None
            given = dict(arguments or {})
            if action == "open":
                given["settings"] = {}
            elif action == "start":
                given["option"] = None
            answer = super().ask(action, given, timeout_s=timeout_s)
            if action == "open":
                answer["version"] = "stand-in"
            return 1000.0 * answer if action in ("prefill", "decode") else answer

    monkeypatch.setattr(compare, "Child", Slow)
    out = tmp_path / "out.json"
    peer = ("--peer-python", sys.executable, *flags)
    assert compare.main([*TINY, "--only", "q8_0/decode-128", *peer, "--models", models, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["versions"]["llama.cpp"] == "stand-in"
    assert asked[-6:] == last
    (row,) = found["rows"]
    assert row["option"] in compare.BY_NAME["decode-128"].options()
    assert row["ratio_range"][0] <= row["ratio"] <= row["ratio_range"][1]
    assert 30 < row["ratio"] < 30_000
    if flags:
        return  # a later run is the same however sides took turns
    again = ("--only", "q8_0/prefill-512", "--models", models, "--json", str(out), "--update")
    assert compare.main([*TINY, *again]) == 0
    assert len(json.loads(out.read_text())["rows"]) == 2
    assert compare.main([*TINY, "--threads", "2", *again]) == 2


def test_the_table_says_what_was_missed(compare: ModuleType, results: dict[str, Any]) -> None:
    table = compare.format_table(results)
    assert "| decode at 128 tokens | q4_k_m | 55.0 | 45.0 | 1.25 × (1.00 to 1.50) | ≥ 1.15 ×, ≥ 90% |" in table
    assert "30.0 GB/s | 75% of 40 | 50% |" in table
    assert "| 1,024 | 10240.0 | 22.2 | 0 | 45 |" in table
    assert "| q4_k_m | 1.00 GiB | 1.5, 0.5 s |  | 1.00 GiB |  |" in table
    assert compare.find_misses(results) == [
        "q4_k_m/decode-128: 75.0% of the probe, wanted 90%",
        "q4_k_m/prefill-512: 1.25 × llama.cpp, wanted 2.6 ×",
    ]
    results["rows"][0]["bystanders"] = 0.5
    assert "decode at 128 tokens (busy machine)" in compare.format_table(results)
    results["rows"][0] |= {"read_range": [49e9, 81e9], "read_bytes_per_s": [49e9, 81e9], "bytes_per_token": 1e9}
    assert "(busy machine) (memory read 49 to 81 GB/s)" in compare.format_table(results)
    results["rows"][0]["commit"] = ""
    assert "module 0123" in compare.format_table(results)


def test_docs_are_written_between_the_marks(compare: ModuleType, results: dict[str, Any], tmp_path: Path) -> None:
    document = tmp_path / "lab" / "cpu-figures.md"
    document.parent.mkdir()
    (tmp_path / "docs").mkdir()
    marks = "<!-- figures of here/tinyllama-1.1b: begin -->\nold\n<!-- figures of here/tinyllama-1.1b: end -->"
    document.write_text(f"before\n{marks}\nafter\n")
    compare.write_docs(tmp_path, {"here/tinyllama-1.1b": results})
    once = document.read_text()
    compare.write_docs(tmp_path, {"here/tinyllama-1.1b": results})
    assert document.read_text() == once
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "old" not in once
    assert compare.format_table(results) in once
    for name in ("speed", "context"):
        drawing = (tmp_path / "docs" / "img" / f"cpu-{name}-here-tinyllama-1.1b.svg").read_text()
        assert xml.etree.ElementTree.fromstring(drawing).tag.endswith("svg")
        assert "llama.cpp" in drawing
    with pytest.raises(MlxrError, match="has no lines <!-- figures of there/llama-3-8b: begin -->"):
        compare.write_docs(tmp_path, {"there/llama-3-8b": results})


def test_rounds_are_told_apart_by_the_state_of_memory() -> None:
    report = importlib.import_module("comparison.report")
    row = {"type": "q8_0", "case": "decode-128", "bytes_per_token": 1e9, "read_range": [40e9, 80e9]}
    row |= {"ours": [36.0, 60.0, 38.0, 64.0, 68.0], "read_bytes_per_s": [40e9, 80e9, 40e9, 80e9, 80e9]}
    row |= {"theirs": [36.0, 40.0, 19.0, 40.0, 34.0]}
    assert report.format_states([row])[2:] == [
        "| q8_0 | slow | 2 | 37.0 | 1.50 × | 92% of 40 |",
        "| q8_0 | fast | 3 | 64.0 | 1.60 × | 80% of 80 |",
    ]
    assert report.format_states([{**row, "theirs": []}])[2] == "| q8_0 | slow | 2 | 37.0 |  | 92% of 40 |"
    assert report.format_states([{**row, "read_range": [40e9, 50e9]}, {**row, "case": "decode-4096"}]) == []
    assert report.format_rounds([row, {"ours": [1.0, 2.0]}]) == "2 to 5"


def find_recorded() -> list[Path]:
    recorded = sorted((ROOT / "bench" / "results" / "cpu").glob("*/*.json"))
    assert recorded
    return recorded


@pytest.mark.usefixtures("compare")
def test_processors_are_told_apart_by_family_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = importlib.import_module("comparison.machine")
    lines = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"

    def find(_: str, pattern: str) -> str:
        match = re.search(pattern, lines, re.MULTILINE)
        return match[1] if match else ""

    monkeypatch.setattr(machine, "_find", find)
    assert machine.describe_machine()["processor"] == "AMD EPYC (family 25, model 17)"
    lines = "model name\t: Some Arm\n"
    assert machine.describe_machine()["processor"] == "Some Arm"


def test_the_document_has_the_marks(compare: ModuleType, results: dict[str, Any]) -> None:
    report = importlib.import_module("comparison.report")
    text = (ROOT / report.DOCUMENT).read_text()
    for path in find_recorded():
        assert report.replace_figures(text, compare.name_results(path), results) != text


def test_recorded_figures_are_in_the_document(compare: ModuleType) -> None:
    text = (ROOT / "lab" / "cpu-figures.md").read_text()
    for path in find_recorded():
        assert compare.format_table(json.loads(path.read_text())) in text, f"write {path.name} with --write-docs"


@pytest.mark.slow
def test_bench_tells_what_the_machine_can_do(
    gguf: Path, mlxr: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXR_MODELS_FOLDER", str(tmp_path))
    sizes = ("--prompt-tokens", 16, "--generate-tokens", 4, "--repeat", 1, "--threads", 1)
    told = json.loads(mlxr("bench", gguf, *sizes, "--probe", "--json"))
    share = told["decode_bandwidth_bytes_per_s"] / told["probe_read_bytes_per_s"]
    assert told["decode_bandwidth_share"] == share
    assert told["probe_int8_macs_per_s"] > 1e8
    assert told["peak_memory_bytes"] > 0
    (kept,) = json.loads((tmp_path / "limits.json").read_text()).values()
    assert kept["read_bytes_per_s"] == told["probe_read_bytes_per_s"]
    assert "of it used while decoding" in mlxr("bench", gguf, *sizes, "--probe")
    assert "probe_read_bytes_per_s" not in json.loads(mlxr("bench", gguf, *sizes, "--json"))


@pytest.mark.slow
def test_refusals_are_one_line(compare: ModuleType, models: str, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*arguments: str) -> str:
        assert compare.main([*TINY, "--models", models, *arguments]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("compare: ")]
        assert len(lines) == 1
        return lines[0]

    assert "fits none" in refuse("--only", "q3_k/*")
    assert "cannot run /no/python" in refuse("--only", "q8_0/decode-128", "--peer-python", "/no/python")
    without = refuse("--only", "q8_0/decode-128", "--peer-python", sys.executable)
    assert "llama.cpp: open: ModuleNotFoundError" in without
    assert "attend_faster" in refuse("--only", "q8_0/decode-128", "--setting", "attend_faster=1")
