"""Trained weights through every type: perplexity, equal bits, and proof of the kernels that ran."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlxr import LLM, SamplingParams
from mlxr.cli.main import main
from mlxr.core.settings import Settings
from mlxr.service.measures import TextScore, score_text
from mlxr.service.opening import build_engine, open_model

ROOT = Path(__file__).parents[2]
HELD_OUT = Path(__file__).parent / "held_out.txt"
TYPES = ("f16", "q8_0", "q4_k_m", "q6_k")
MAX_LOSS_AGAINST_REFERENCE = 0.003


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model in several types, all from the one that ships."""
    folder = tmp_path_factory.mktemp("demo")
    for name in TYPES:
        assert main(["convert", "demo", str(folder / f"{name}.gguf"), "--type", name]) == 0
    return {name: folder / f"{name}.gguf" for name in TYPES}


def score(model: str | Path, device: str = "cpu", tokens: int = 1025, kv_type: str | None = None) -> TextScore:
    """Score the first `tokens` tokens of the held-out text, in windows of 512."""
    settings = Settings(device=device, max_sequences=1, kv_type=kv_type)
    with open_model(model, settings) as loaded:
        text = loaded.tokenizer.decode(loaded.tokenizer.encode(HELD_OUT.read_text())[:tokens])
        return score_text(build_engine(loaded, settings), loaded.tokenizer, text, 512)


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_native_kernels_lose_nothing_against_the_reference(name: str, files: dict[str, Path]) -> None:
    native, reference = score(files[name]), score(files[name], "reference")
    assert native.tokens == reference.tokens >= 1024
    assert native.perplexity / reference.perplexity - 1 < MAX_LOSS_AGAINST_REFERENCE


@pytest.mark.slow
def test_bf16_pages_lose_nothing_against_f16(files: dict[str, Path]) -> None:
    for model in ("demo", files["f16"]):
        half, packed = (score(model, tokens=6000, kv_type=kv_type).perplexity for kv_type in ("f16", "bf16"))
        assert packed / half - 1 < 0.001


@pytest.mark.slow
def test_q8_pages_lose_little(files: dict[str, Path]) -> None:
    half, small = (score(files["f16"], tokens=6000, kv_type=kv_type).perplexity for kv_type in ("f16", "q8"))
    assert small / half - 1 < 0.005


@pytest.mark.slow
def test_types_with_fewer_bits_lose_little(files: dict[str, Path]) -> None:
    best = score(files["f16"]).perplexity
    assert score("demo").perplexity / best == pytest.approx(1, abs=0.005)
    assert score(files["q6_k"]).perplexity / best - 1 < 0.02
    assert score(files["q4_k_m"]).perplexity / best - 1 < 0.10


def test_the_model_has_learnt_its_subject() -> None:
    assert score("demo", tokens=6000).bits_per_byte < 1.5


@pytest.mark.parametrize("name", ["q8_0", "q4_k_m", "f16"])
def test_answers_are_the_same_bits_in_any_company(name: str, files: dict[str, Path]) -> None:
    prompts = [
        "import os\n\ndef " * 5,
        "x",
        "The quick brown fox",
        "class A:\n    def __init__(self",
        "# é\n",
        "0" * 70,
    ]
    params = SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True)
    with LLM(files[name], threads=2) as llm:
        together = llm.generate(prompts, params)
    for sizes in ({"prefill_chunk_tokens": 1}, {"prefill_chunk_tokens": 7}, {"max_batch_tokens": 32}):
        with LLM(files[name], threads=1, **sizes) as llm:  # type: ignore[arg-type]
            assert [llm.generate(prompt, params)[0] for prompt in prompts] == together


@pytest.mark.parametrize("name", ["demo", "demo-draft"])
def test_validate_shows_native_kernels_only(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", name, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["implementation"] for row in report["dispatches"]} == {"cpu"}
    assert {row["operator"] for row in report["dispatches"]} == {
        "activate", "attend", "embed", "linear", "rms_norm", "rope", "sample", "write_pages"
    }  # fmt: skip
    assert report["copied_bytes"] == 0
    assert report["logits"]["agree"]
    assert report["cache"]["gqa_saved_bytes"] == 3 * report["cache"]["peak_bytes"]


def test_one_command_answers() -> None:
    command = [sys.executable, "-m", "mlxr", "run", "What does os.path.join do?"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "Join two or more pathname components" in run.stdout
    assert run.stderr == ""


EXAMPLES = {
    "ask.py": "Join two or more pathname components",
    "batch.py": "equal: True",
    "cache.py": "448 of them from the cache",
    "choices.py": " 13%  ",
    "cite.py": "[1] paths.md:1",
    "conversation.py": "`json`: JSON (JavaScript Object Notation)",
    "drafts.py": "all equal: True",
    "retrieval.py": "The library opens at nine.",
    "schema.py": "{'kind': 'class', 'arguments': 1}",
    "stream.py": "ended by stop: 'formatted'",
    "threads.py": "equal: True",
    "tokens.py": "'import' 94%",
    "tools.py": "read_file('notes.txt')",
}


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "expected"), EXAMPLES.items())
def test_examples_run(name: str, expected: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / name)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert expected in run.stdout
    assert run.stderr == "" or name == "tools.py"  # which starts a server, and that says where it listens


def test_the_readme_example_runs() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    run = subprocess.run([sys.executable, "-c", code[1]], capture_output=True, text=True, check=True, timeout=60)
    assert "Join two or more pathname components" in run.stdout.splitlines()[0]
    assert run.stderr == ""


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES}
