"""Real models against llama.cpp, from the same files: perplexity of a long text, and greedy text token by token.

MLXR_REAL_MODELS names the folder with gemma-3-270m.gguf and qwen2.5-coder-0.5b.gguf; without it these tests are
skipped. Tests that need no llama.cpp are in tests/real_models.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
from llama_losses import compute_losses, list_windows, open_llama
from real_files import find_model

from mlxr import LLM, Completion, SamplingParams

DOCS = Path(__file__).parents[2] / "docs"
MODELS = ["gemma-3-270m", "qwen2.5-coder-0.5b"]
TEXT_TOKENS = 20_480
WINDOW_TOKENS = 1024  # twice the window of Gemma's layers
ANSWER_TOKENS = 32
NEAR = 0.5  # nats between two tokens of which either may be the likelier one after rounding
TOPICS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "The three primary colours are",
    "Once upon a time, in a small village by the sea,",
    "The opposite of hot is",
    "A triangle has three sides, and a square has",
    "The largest planet of the solar system is",
    "To bake bread you need flour, water,",
    "The first month of the year is January, the second is",
    "Photosynthesis is the process by which plants",
    "In the year 1969, the first humans",
    "My favourite season is autumn because",
    "The Pythagorean theorem states that",
    "A good way to learn a language is",
    "Bees are important because",
    "def fibonacci(n):",
    "import os\n\n\ndef list_files(folder):",
    "SELECT name, age FROM people WHERE",
    "Bonjour, je m'appelle",
    "1, 1, 2, 3, 5, 8,",
]


@dataclass(frozen=True)
class Answer:
    """Token ids of a prompt and of its greedy answer."""

    prompt: list[int]
    completion: Completion


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Path:
    return find_model(request.param)


@pytest.fixture(scope="module")
def llama(model: Path) -> Iterator[llama_cpp.Llama]:
    llama = open_llama(model, WINDOW_TOKENS)
    yield llama
    llama.close()


@pytest.mark.timeout(1800)
def test_perplexity_of_the_documentation(model: Path, llama: llama_cpp.Llama, tmp_path: Path) -> None:
    """The text is this project's own documentation."""
    documentation = "".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    tokens = llama.tokenize(documentation.encode(), add_bos=False, special=False)[:TEXT_TOKENS]
    text = tmp_path / "text.txt"
    text.write_bytes(llama.detokenize(tokens))
    tokens = llama.tokenize(text.read_bytes(), add_bos=False, special=False)
    theirs = np.concatenate([compute_losses(llama, window) for window in list_windows(llama, tokens, WINDOW_TOKENS)])
    command = [sys.executable, "-m", "mlxr", "perplexity", str(model), str(text), "--context", str(WINDOW_TOKENS)]
    lines = tmp_path / "losses.jsonl"
    subprocess.run([*command, "--device", "cpu", "--per-token", str(lines)], check=True, capture_output=True)
    ours = np.array([json.loads(line)["loss"] for line in lines.read_text().splitlines()])
    assert len(ours) == len(theirs)
    ratio = np.exp((ours - theirs).mean())
    print(f"{model.stem}: {len(ours)} tokens, ours {np.exp(ours.mean()):.4f}, {100 * (ratio - 1):+.4f} %")
    assert abs(ratio - 1) < 0.001


def test_greedy_text(model: Path, llama: llama_cpp.Llama) -> None:
    """llama.cpp's tokens one by one, or up to where two are about as likely for both."""
    same = 0
    with LLM(model, device="cpu", context_tokens=WINDOW_TOKENS) as llm:
        for answer in answer_all(llm, llama):
            ids = list(answer.completion.token_ids)
            llama.reset()
            llama.eval(answer.prompt + ids[:-1])
            logits = llama.scores[len(answer.prompt) - 1 : len(answer.prompt) + len(ids) - 1]
            best = logits.argmax(axis=1)
            differing = np.flatnonzero(best != ids)
            if len(differing) == 0:
                same += 1
                continue
            at = differing[0]
            chosen, other = ids[at], int(best[at])
            ours = {token.token_id: token.logprob for token in answer.completion.tokens[at].top}
            our_gap, their_gap = ours[chosen] - ours[other], float(logits[at, other] - logits[at, chosen])
            print(
                f"{model.stem}: token {at} of {llama.detokenize(ids)!r} is {llama.detokenize([other])!r} in llama.cpp; "
                f"these differ by {our_gap:.3f} here and by {their_gap:.3f} there"
            )
            assert max(our_gap, their_gap) < NEAR
    print(f"{model.stem}: {same} of {len(TOPICS)} answers are the same")
    assert same >= len(TOPICS) / 4


def answer_all(llm: LLM, llama: llama_cpp.Llama) -> Iterator[Answer]:
    """Every topic continued, or answered as a message if the model can chat."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, logprobs=5)
    template = llama.metadata.get("tokenizer.chat_template")
    for topic in TOPICS:
        if template is None:
            (completion,) = llm.generate(topic, params)
            prompt = llama.tokenize(topic.encode(), add_bos=True, special=True)
        else:
            messages = [{"role": "user", "content": topic}]
            completion = llm.chat(messages, params)
            rendered = Jinja2ChatFormatter(template, eos_token="", bos_token="")(messages=messages)  # type: ignore[arg-type]
            prompt = llama.tokenize(rendered.prompt.encode(), add_bos=False, special=True)
        assert completion.usage.prompt_tokens == len(prompt)
        yield Answer(prompt, completion)
