"""lm-evaluation-harness itself against `mlxr serve`: its results are those of llama.cpp with the same model.

The task is a file of sentences with endings. Runs where `lm_eval` is installed (`pip install 'lm-eval[api]'`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import RealServer

# What llama.cpp's server gives for each ending: the log-probability, and whether greedy would give it.
LLAMA_CPP = [
    (
        "The capital of France is",
        {
            " Paris": (-0.0972, True),
            " Berlin": (-8.1863, False),
            " green": (-19.3091, False),
        },
    ),
    (
        "In Python, a list is made with square",
        {
            " brackets": (-0.0065, True),
            " meals": (-24.7964, False),
            " turtles": (-24.8538, False),
        },
    ),
    (
        "Water boils at one hundred",
        {
            " degrees Celsius": (-1.0119, True),
            " apples": (-15.8339, False),
            " pages": (-17.0134, False),
        },
    ),
    (
        "def add(a, b):\n    return",
        {
            " a + b": (-0.0155, True),
            " a - b": (-9.5847, False),
            " 7": (-15.9554, False),
        },
    ),
    (
        "Les élèves mangent à la",
        {
            " cantine": (-10.7401, False),
            " cheval": (-14.7528, False),
            " 你好": (-25.3429, False),
        },
    ),
    (
        "The sun rises in the",
        {
            " east": (-0.2179, True),
            " west": (-3.2440, False),
            " drawer": (-22.4231, False),
        },
    ),
]

TASK = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{context}}",
    "metadata": {"version": 1},
}
CHOICES = {
    "task": "choices",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": 0,
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
ANSWERS = {
    "task": "answers",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}


def evaluate(folder: Path, client: str, task: dict[str, object], **arguments: object) -> list[dict[str, object]]:
    """Run lm-eval on `task`; return its samples, in order."""
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval is not installed")
    data = folder / "sentences.jsonl"
    data.write_text(
        "".join(json.dumps({"context": context, "choices": list(endings)}) + "\n" for context, endings in LLAMA_CPP)
    )
    # YAML knows JSON.
    (folder / "task.yaml").write_text(
        json.dumps({**TASK, **task, "dataset_kwargs": {"data_files": {"test": str(data)}}})
    )
    command = [sys.executable, "-m", "lm_eval", "--model", client, "--tasks", str(task["task"])]
    command += ["--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--batch_size", "4"] if client == "local-completions" else ["--apply_chat_template"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    subprocess.run(command, check=True, timeout=300, env={**os.environ, **offline})
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    return sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda one: int(one["doc_id"]))


@pytest.mark.parametrize("tokenized", [True, False])
def test_loglikelihoods_are_llama_cpps(coder: RealServer, tmp_path: Path, tokenized: bool) -> None:
    """Both round activations to 8 bits, each in its own way: the results differ by a few percent at most."""
    samples = evaluate(
        tmp_path,
        "local-completions",
        CHOICES,
        model=coder.model,
        base_url=f"{coder.url}/v1/completions",
        tokenized_requests=tokenized,
    )
    assert len(samples) == len(LLAMA_CPP)
    for sample, (_, endings) in zip(samples, LLAMA_CPP, strict=True):
        assert sample["acc"] == 1.0
        for response, (logprob, is_greedy) in zip(sample["filtered_resps"], endings.values(), strict=True):  # type: ignore[call-overload]
            assert float(response[0]) == pytest.approx(logprob, rel=0.03, abs=0.05)
            assert response[1] == str(is_greedy)


def test_generations(coder: RealServer, tmp_path: Path) -> None:
    samples = evaluate(
        tmp_path, "local-completions", ANSWERS, model=coder.model, base_url=f"{coder.url}/v1/completions"
    )
    answers = [str(sample["filtered_resps"][0]) for sample in samples]  # type: ignore[index]
    assert answers[0].startswith(" Paris")
    assert answers[3].startswith(" a + b")


def test_chat(coder: RealServer, tmp_path: Path) -> None:
    samples = evaluate(
        tmp_path, "local-chat-completions", ANSWERS, model=coder.model, base_url=f"{coder.url}/v1/chat/completions"
    )
    assert "Paris" in str(samples[0]["filtered_resps"])
    assert all(sample["filtered_resps"] for sample in samples)
