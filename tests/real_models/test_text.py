"""Real models' texts and predictions: greedy text, perplexity, chat, long contexts, and pages kept on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_files import find_model

from mlxr import LLM, SamplingParams
from mlxr.core.errors import TemplateError

HELD_OUT = Path(__file__).parents[1] / "real" / "held_out.txt"
CONTEXT_TOKENS = 2048
WINDOW_TOKENS = 1024  # twice the window of Gemma's layers
GEMMA, CODER = "gemma-3-270m", "qwen2.5-coder-0.5b"

# Greedy text and perplexity as llama.cpp has them. Wherever it chose a token, the next likeliest was 0.3 nats behind.
TEXTS = [
    (GEMMA, "The days of the week are Monday, Tuesday,", " Wednesday, Thursday, Friday, Saturday, Sunday, and Monday"),
    (GEMMA, "A, B, C, D, E,", " F, G, H, I, J, K,"),
    (GEMMA, "The opposite of hot is", " cold.\n\nThe opposite of cold is hot.\n\nThe"),
    (
        GEMMA,
        "The first month of the year is January, the second is",
        " February, and the third month is March.\n\nThe first",
    ),
    (CODER, "A, B, C, D, E,", " F, G, H, I, J, K,"),
    (CODER, "1, 1, 2, 3, 5, 8,", " 13, 21, 34,"),
    (CODER, "def add(a, b):\n    return", " a + b\n\ndef subtract(a, b):\n    return"),
    (CODER, "import os\nimport", " shutil\n\ndef copy_files(source_dir, destination_dir):\n   "),
]
PERPLEXITIES = {GEMMA: 6.0898, CODER: 3.6336}
TEXT_CHARACTERS = 6_000

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 60
KEY = "The pass key is 71432. Remember it. 71432 is the pass key. "
PROMPT = f"{KEY}{FILLER}What is the pass key? The pass key is"
SHORT = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module", params=[GEMMA, CODER])
def path(request: pytest.FixtureRequest) -> Path:
    return find_model(request.param)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, context_tokens=CONTEXT_TOKENS) as llm:
        yield llm


def test_greedy_text_is_llama_cpps(path: Path, llm: LLM) -> None:
    cases = {prompt: text for model, prompt, text in TEXTS if model == path.stem}
    completions = llm.generate(list(cases), SHORT)
    assert [completion.text for completion in completions] == list(cases.values())


def test_perplexity_is_llama_cpps(path: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(HELD_OUT.read_text()[:TEXT_CHARACTERS])
    command = [sys.executable, "-m", "mlxr", "perplexity", str(path), str(text), "--context", str(WINDOW_TOKENS)]
    printed = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True).stdout
    ratio = json.loads(printed)["perplexity"] / PERPLEXITIES[path.stem]
    assert abs(ratio - 1) < 0.003  # some 2000 tokens: both engines round activations to eight bits


def test_chat(path: Path, llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    if path.stem == CODER:
        assert "Paris" in llm.chat(messages, SHORT).text
    else:
        with pytest.raises(TemplateError, match="has no chat template, so it can continue text but not chat"):
            llm.chat(messages, SHORT)


def test_the_beginning_of_a_long_text_is_known_at_its_end(llm: LLM) -> None:
    """Layers with Gemma's window of 512 see the end only; those without must find the key some 1500 tokens before."""
    (completion,) = llm.generate(PROMPT, SHORT)
    assert completion.usage.prompt_tokens > 2.5 * 512
    assert completion.text.startswith(" 71432.")


def test_a_long_text_is_resumed_from_disk(path: Path, tmp_path: Path) -> None:
    """Another process would find the same pages: those that Gemma's windows still see, and all of the other layers."""
    answers = []
    for _ in range(2):
        with LLM(path, context_tokens=CONTEXT_TOKENS, store_bytes="512M", store_folder=tmp_path / "pages") as llm:
            answers += llm.generate(PROMPT, SamplingParams(max_tokens=12, logprobs=1))
            disk_tokens = llm.stats().engine.cache.disk_hit_tokens
    first, second = answers
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == disk_tokens > second.usage.prompt_tokens - 64
    assert second.tokens == first.tokens
