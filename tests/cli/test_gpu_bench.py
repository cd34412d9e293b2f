"""bench/gpu.py with tiny shapes on MLX's CPU device, and its report with made-up figures."""

from __future__ import annotations

import importlib
import json
import sys
import xml.etree.ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlxr.core.errors import MlxrError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("gpu")


@pytest.fixture
def report(bench: ModuleType) -> ModuleType:
    return sys.modules["gpu_comparison.report"]


def make_row(case: str, engine: str, *speeds: float, note: str = "") -> dict[str, Any]:
    sizes = {"weight_bytes": 10**9, "cache_bytes": 10**8, "arena_bytes": 10**8, "peak_bytes": 3 * 2**29}
    told = {"case": case, "engine": engine, "turns": 1, "rounds": list(speeds), "tokens_per_s": speeds[1]}
    return {**told, "note": note, **sizes}


@pytest.fixture
def results() -> dict[str, Any]:
    rows = [
        make_row("tinyllama-bf16:1@32", "mlxr", 600.0, 700.0, 800.0),
        make_row("tinyllama-bf16:1@32", "mlx-lm", 400.0, 350.0, 500.0),
        make_row("tinyllama-bf16:1@32", "transformers", 300.0, 320.0, 310.0, note="no CUDA graph"),
        make_row("llama-8b-q4_k_m:1@32", "mlxr", 90.0, 100.0, 110.0),
        make_row("llama-8b-q4_k_m:1@32", "mlx-lm 4-bit", 45.0, 50.0, 55.0),
        make_row("llama-8b-q4_k_m:prefill@2048", "mlxr", 9e4, 1e5, 1.1e5),
    ]
    return {
        "made": "2026-01-02T03:04:05+00:00",
        "device": "GPU <1>",
        "versions": {"mlxr": "1", "MLX": "2"},
        "copy_bytes_per_s": 1e12,
        "skipped": {},
        "failed": {},
        "rows": rows,
    }


@pytest.mark.slow
def test_tiny_models_are_measured(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    path = tmp_path / "results" / "gpu.json"
    cases = ["tiny-bf16:3", "tiny-q4_k_m:1@40", "tiny-q4_k_m:prefill@33"]
    options = ["--device", "mlx-cpu", "--rounds", "2", "--steps", "2", "--without", "mlx-lm", "--json", str(path)]
    arguments = [*options, "--without", "transformers", *(f"--case={case}" for case in cases)]
    assert bench.main(arguments) == 0
    found = json.loads(path.read_text())
    assert found["device"] == "mlx-cpu"
    assert found["skipped"] == {
        **dict.fromkeys(("mlx-lm", "llama.cpp", "transformers"), "not asked for"),
        "vLLM": "vllm not installed",
    }
    assert [(row["case"], row["engine"]) for row in found["rows"]] == [
        ("tiny-bf16:3@32", "mlxr"),
        ("tiny-q4_k_m:1@40", "mlxr"),
        ("tiny-q4_k_m:prefill@33", "mlxr"),
    ]
    assert bench.main([*options, "--without", "transformers", "--update", f"--case={cases[0]}", "--turns=1"]) == 0
    updated = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in updated] == ["tiny-q4_k_m:1@40", "tiny-q4_k_m:prefill@33", "tiny-bf16:3@32"]
    assert [len(row["rounds"]) for row in updated] == [4, 4, 2]
    assert updated[:2] == found["rows"][1:]
    for row in found["rows"]:
        assert (len(row["rounds"]), row["turns"]) == (4, 2)
        assert min(row["tokens_per_s"], row["weight_bytes"], row["cache_bytes"], row["peak_bytes"]) > 0
    assert "tiny Q4_K_M, prefill of 33" in capsys.readouterr().out


ROUNDS_TOLD = """#!/bin/sh
echo run >> "$0.runs"
while [ $# -gt 0 ]; do
  case $1 in -m) test -s "$2" || exit 3;; -npl) batch=$2;; -npp) prompts=$2;; -ntg) steps=$2;; esac
  shift
done
echo loading
round=0
for prompt in $(echo "$prompts" | tr , ' '); do
  round=$((round + 1))
  echo "{\\"n_kv_max\\": 1, \\"t_pp\\": $((prompt + round)), \\"t_tg\\": $((steps * batch * round))}"
done
"""


def test_llama_cpp_says_what_a_step_takes(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script stands in for its tool and prints the figures that it was asked for, times the round."""
    module = importlib.import_module("gpu_comparison.llama_cpp")
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    tool = tmp_path / module.TOOL
    tool.write_text(ROUNDS_TOLD)
    tool.chmod(0o700)
    case = sys.modules["gpu_comparison.cases"].Case.parse("tiny-q8_0:4")
    engine = module.LlamaCpp(str(tmp_path), case)
    engine.start(case, 8)
    runs = Path(f"{tool}.runs")
    assert [engine.decode(8) for _ in range(5)] == [[4.0 * round_] for round_ in (2, 3, 4, 5, 6)]  # not the cold one
    assert runs.read_text().count("run") == 1
    assert (engine.decode(8), engine.decode(200), engine.prefill()) == ([8.0], [8.0], 34.0)
    assert runs.read_text().count("run") == 4
    assert engine.measure_bytes()["weight_bytes"] == (tmp_path / "tiny-q8_0.gguf").stat().st_size
    engine.stop()
    assert (engine.decode(8), runs.read_text().count("run")) == ([8.0], 5)
    engine.stop()
    tool.write_text("#!/bin/sh\necho out of memory >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match="ended with 1 after 0 of 7 rounds: out of memory"):
        engine.decode(8)
    with pytest.raises(FileNotFoundError, match="give the folder"):
        module.LlamaCpp(str(tmp_path / "none"), case)


def test_llama_cpp_may_lose_its_last_line_but_no_other(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end its log is not waited for."""
    module = importlib.import_module("gpu_comparison.llama_cpp")
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    tool = tmp_path / module.TOOL
    tool.write_text(f'#!/bin/sh\nsh {tmp_path}/rounds "$@" | head -n 7\n')  # that it loads, and 6 rounds
    (tmp_path / "rounds").write_text(ROUNDS_TOLD)
    tool.chmod(0o700)
    case = sys.modules["gpu_comparison.cases"].Case.parse("tiny-q8_0:4")
    engine = module.LlamaCpp(str(tmp_path), case)
    engine.start(case, 8)
    assert [engine.decode(8) for _ in range(6)] == [[4.0 * round_] for round_ in (2, 3, 4, 5, 6, 2)]
    tool.write_text(tool.read_text().replace("-n 7", "-n 6"))
    engine.stop()
    with pytest.raises(RuntimeError, match="ended with 0 after 5 of 7 rounds"):
        engine.decode(8)


def test_llama_cpp_is_warmed_by_its_own_process(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case takes one process of the tool, as loading the model takes longer than its rounds."""
    module, side_module = (importlib.import_module(f"gpu_comparison.{name}") for name in ("llama_cpp", "side"))
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    tool = tmp_path / module.TOOL
    tool.write_text(ROUNDS_TOLD)
    tool.chmod(0o700)
    side = side_module.Side()
    side.open("llama.cpp", "cuda", "tiny-q8_0:4@32", 512, str(tmp_path))
    side.start("tiny-q8_0:4@32", 128, 8)
    assert [side.measure(24) for _ in range(3)] == [4 / 8, 4 / 12, 4 / 16]
    assert Path(f"{tool}.runs").read_text().count("run") == 1


def test_tools_are_named_from_here(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that runs the tool has another working folder than the one that names it."""
    asked: list[dict[str, Any]] = []

    class Listener(Speaker):
        def ask(self, action: str, arguments: dict[str, Any] | None = None) -> Any:
            asked.append({"action": action, **(arguments or {})})
            return super().ask(action, arguments)

    monkeypatch.setattr(bench, "start_side", lambda name: Listener(name, 1, []))
    monkeypatch.setattr(bench, "measure_copy", lambda _device: 0.0)
    monkeypatch.chdir(tmp_path)
    options = ["--device=mlx-cpu", "--turns=1", "--rounds=1", "--without=mlx-lm", "--without=transformers"]
    assert bench.main([*options, "--case=tiny-q8_0:1", "--llama", "bin"]) == 0
    opened = [told for told in asked if told["action"] == "open"]
    assert [(told["engine"], told["tools"]) for told in opened] == [
        (engine, str(tmp_path / "bin")) for engine in ("mlxr", "llama.cpp")
    ]


class FailingSide:
    """An engine that is measured in this process, but not with two sequences; some cases end it."""

    def __init__(self, bench: ModuleType) -> None:
        self._side, self._is_open = sys.modules["gpu_comparison.side"].Side(), True

    def ask(self, action: str, arguments: dict[str, Any] | None = None) -> Any:
        if not self._is_open:
            raise MlxrError(f"mlxr: ended during {action!r}")
        if (arguments or {}).get("case") == "tiny-bf16:2@32" and action == "start":
            raise MlxrError("mlxr: start: RuntimeError: out of\nmemory")
        if (arguments or {}).get("case") == "tiny-q4_k_m:1@32" and action == "start":
            self.close()
            return self.ask(action)
        return getattr(self._side, action)(**(arguments or {}))

    def close(self) -> None:
        self._is_open = False


@pytest.mark.slow
def test_a_failure_is_told_and_ends_nothing(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    importlib.import_module("gpu_comparison.side")
    started = []
    monkeypatch.setattr(bench, "start_side", lambda _name: started.append(FailingSide(bench)) or started[-1])
    path = tmp_path / "gpu.json"
    options = ["--device=mlx-cpu", "--turns=1", "--rounds=1", "--steps=1", "--without=mlx-lm", f"--json={path}"]
    names = ["tiny-bf16:2", "tiny-bf16:1", "tiny-q4_k_m:1", "tiny-q4_k_m:3", "tiny-q8_0:1"]
    assert bench.main([*options, "--without", "transformers", *(f"--case={name}" for name in names)]) == 1
    found = json.loads(path.read_text())
    assert found["failed"] == {
        "mlxr tiny-bf16:2@32": "mlxr: start: RuntimeError: out of",
        "mlxr tiny-q4_k_m:1@32": "mlxr: ended during 'start'",
        "mlxr tiny-q4_k_m:3@32": "mlxr: ended during 'start'",
    }
    assert [row["case"] for row in found["rows"]] == ["tiny-bf16:1@32", "tiny-q8_0:1@32"]
    assert len(started) == 3
    assert not any(side._is_open for side in started)


class Speaker:
    """An engine with made-up speeds, which records what happens to it."""

    def __init__(self, name: str, turn: int, events: list[str]) -> None:
        self._name, self._turn, self._events, self._round = name, turn, events, 0
        events.append(f"{name} begins")

    def ask(self, action: str, arguments: dict[str, Any] | None = None) -> Any:
        case = (arguments or {}).get("case")
        self._events += [f"{self._name} {case}"] if action == "start" else []
        if self._name == "mlx-lm" and self._turn == 1 and case == "tiny-bf16:2@32" and action == "start":
            raise MlxrError("mlx-lm: start: out of memory")
        if action == "describe":
            return {"note": "", "weight_bytes": 9, "cache_bytes": 9, "arena_bytes": 0, "peak_bytes": 70 - self._turn}
        self._round += action == "measure"
        return 1000.0 * self._turn + self._round

    def close(self) -> None:
        self._events.append(f"{self._name} ends")


@pytest.fixture
def events(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The list of what happens to engines, all of which can start."""
    happened: list[str] = []

    def start(name: str) -> Speaker:
        return Speaker(name, happened.count(f"{name} begins") + 1, happened)

    monkeypatch.setattr(bench, "start_side", start)
    monkeypatch.setattr(
        bench, "find_missing", lambda without, _: dict.fromkeys([*without, "llama.cpp", "vLLM"], "not asked for")
    )
    return happened


def test_one_engine_lives_at_a_time(bench: ModuleType, events: list[str], tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    arguments = ["--device=mlx-cpu", "--rounds=2", "--without=transformers", f"--json={path}"]
    assert bench.main([*arguments, "--case=tiny-bf16:2", "--case=tiny-q8_0:1", "--case=tiny-bf16:1"]) == 0
    bf16, q8_0 = ("tiny-bf16:2@32", "tiny-bf16:1@32"), ("tiny-q8_0:1@32",)
    turns = [(name, cases) for cases in (bf16, q8_0) for _ in range(2) for name in ("mlxr", "mlx-lm")]
    assert events == [f"{name} {what}" for name, cases in turns for what in ("begins", *cases, "ends")]
    found = json.loads(path.read_text())
    assert found["failed"] == {"mlx-lm tiny-bf16:2@32": "mlx-lm: start: out of memory"}
    assert [(row["case"], row["engine"], row["turns"]) for row in found["rows"]] == [
        (bf16[0], "mlxr", 2),
        (bf16[0], "mlx-lm", 1),
        (q8_0[0], "mlxr", 2),
        (q8_0[0], "mlx-lm 4-bit", 2),
        (bf16[1], "mlxr", 2),
        (bf16[1], "mlx-lm", 2),
    ]
    assert found["rows"][0]["rounds"] == [1001.0, 1002.0, 2001.0, 2002.0]
    assert found["rows"][1]["rounds"] == [2001.0, 2002.0]
    assert (found["rows"][0]["tokens_per_s"], found["rows"][0]["peak_bytes"]) == (1501.5, 69)


def test_turns_without_time_are_told(bench: ModuleType, events: list[str], tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    arguments = ["--device=mlx-cpu", "--turns=1", "--without=transformers", f"--json={path}", "--case=tiny-q8_0:1"]
    assert bench.main([*arguments, "--minutes=-1"]) == 0
    assert events == []
    assert json.loads(path.read_text())["failed"] == {
        "turn 1 of mlxr tiny-q8_0": "no time was left",
        "turn 1 of mlx-lm 4-bit tiny-q8_0": "no time was left",
    }


def test_a_process_that_has_ended_may_be_asked_and_closed(bench: ModuleType, tmp_path: Path) -> None:
    program = tmp_path / "ends"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    side = sys.modules["comparison.child"].Child("peer", program, "gpu_comparison.side", tmp_path / "log")
    for _ in range(2):
        with pytest.raises(MlxrError, match="ended during 'start'"):
            side.ask("start")
    side.close()


def test_peers_that_are_not_installed_are_left_out_by_name(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = sys.modules["gpu_comparison.machine"]
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert machine.find_missing(["mlx-lm"], "tools") == {
        "mlx-lm": "not asked for",
        "transformers": "torch and transformers not installed",
        "vLLM": "vllm not installed",
    }


def test_cases_are_read_as_they_are_written(bench: ModuleType) -> None:
    cases = sys.modules["gpu_comparison.cases"]
    for name in cases.TARGETS:
        assert cases.Case.parse(name).name == name
    case = cases.Case.parse("llama-8b-q4_k_m:8")
    assert (case.type_name, case.kind, case.batch, case.context) == ("q4_k_m", "decode", 8, 32)
    assert cases.Case.parse("tiny-bf16:prefill").context == 2048


@pytest.mark.parametrize("text", ["gpt-bf16:1", "tiny-bf16:x", "tiny-bf16", "tiny-bf16:1@y"])
def test_what_is_no_case_is_refused(bench: ModuleType, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--case", text])
    assert "is no SHAPE-TYPE:BATCH" in capsys.readouterr().err


def test_the_table_compares_round_by_round(report: ModuleType, results: dict[str, Any]) -> None:
    lines = report.format_table(results).splitlines()
    assert lines[0].startswith("GPU <1>, 2026-01-02; random weights; mlxr 1, MLX 2. A copy on the device reads and")
    assert "Medians of 3 rounds in 1 turn, each engine's process alone on the device; in brackets" in lines[0]
    assert lines[0].endswith("mlx-lm was measured in 2 of 3 cases. transformers was measured in 1 of 3 cases.")
    without = [row for row in results["rows"] if row["engine"] != "transformers"]
    told = report.describe({**results, "rows": without, "skipped": {"transformers": "not asked for"}})
    assert told.endswith("in 2 of 3 cases. Without transformers: not asked for.")
    assert lines[4] == (
        "| TinyLlama BF16, batch 1 | 700 | 350 | 1.60 × (1.50 to 2.00) | ≥ 1.5 × |  | 320 (no CUDA graph) | 770 GB/s "
        "| weights 70% | 1.5 GiB |"
    )
    assert lines[5].startswith("| Llama 3 8B Q4_K_M, batch 1 | 100 | 50 | 2.00 × (2.00 to 2.00) | ≥ 2.2 ×, ≥ 45% |  |")
    assert lines[6] == "| Llama 3 8B Q4_K_M, prefill of 2,048 | 100,000 |  |  | ≥ 3 × |  |  |  |  | 1.5 GiB |"


def test_turns_that_one_engine_lacks_are_not_compared(report: ModuleType, results: dict[str, Any]) -> None:
    results["rows"][0] |= {"rounds": [600.0, 700.0, 800.0, 1.0, 1.0, 1.0], "turns": 2}
    lines = report.format_table(results).splitlines()
    assert "Medians of 3 to 6 rounds in 1 to 2 turns, each" in lines[0]
    assert "| 1.60 × (1.50 to 2.00) |" in lines[4]


def test_misses_are_found(report: ModuleType, results: dict[str, Any]) -> None:
    assert report.find_misses(results) == [
        "llama-8b-q4_k_m:1@32: 2.00 × mlx-lm 4-bit, wanted 2.2 ×",
        "llama-8b-q4_k_m:1@32: weights at 10.0% of the copy rate, wanted 45%",
    ]


def test_documents_get_table_and_plot(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    results: dict[str, Any],
    tmp_path: Path,
    report: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    (tmp_path / "lab").mkdir()
    document, path = tmp_path / "lab" / "gpu-figures.md", tmp_path / "gpu.json"
    path.write_text(json.dumps(results))
    document.write_text((ROOT / "lab" / "gpu-figures.md").read_text())
    for _ in range(2):  # once more changes nothing
        assert bench.main(["--write-docs", str(path)]) == 0
        text = document.read_text()
        assert text.count("| TinyLlama BF16, batch 1 | 700 |") == 1
    plot = xml.etree.ElementTree.parse(tmp_path / "docs" / "img" / "gpu-speed.svg")
    assert "GPU <1>" in "".join(plot.getroot().itertext())
    del results["rows"][0]["turns"]
    path.write_text(json.dumps(results))
    assert bench.main(["--write-docs", str(path)]) == 2
    assert "has rows of engines that were not alone on the device" in capsys.readouterr().err
    document.write_text("# no marks")
    with pytest.raises(MlxrError, match="has no lines"):
        report.write_docs(tmp_path, results)


def test_memory_is_held_against_what_is_stated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    path = tmp_path / "memory.json"
    arguments = ["--device=mlx-cpu", "--random=tiny-bf16", "--prompt=40", "--batch=2", "--arena=0.05", f"--out={path}"]
    assert importlib.import_module("gpu_memory").main([*arguments, "--check"]) == 1  # so small that 64 MiB are too much
    (rows,) = json.loads(path.read_text())["models"].values()
    assert [row["stage"] for row in rows] == ["load", "arena", "prompt 40", "prompt 40", "decode batch 2"]
    assert rows[-1]["peak_bytes"] > rows[-1]["arena_bytes"] > 40 * 2**20
    assert "% of what is stated in the end, in" in capsys.readouterr().out
