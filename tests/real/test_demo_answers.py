"""The model that ships with the package answers questions of the kind it was made for, through the whole stack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxr import LLM, FinishReason, SamplingParams
from mlxr.loading import ASSETS
from mlxr.service.streams import Completion, fold_events

HERE = Path(__file__).parent
QUESTIONS = json.loads((HERE / "questions.json").read_text())
WANTED_SHARE = 0.95


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo") as llm:
        yield llm


def ask(llm: LLM, questions: list[str], params: SamplingParams) -> list[Completion]:
    """Greedy answers to single questions, computed side by side."""
    streams = [llm.stream_chat([{"role": "user", "content": question}], params) for question in questions]
    return [fold_events(stream) for stream in streams]


@pytest.mark.slow
def test_well_known_functions_are_explained(demo: LLM) -> None:
    asked = [(form.format(name=row["name"]), row) for row in QUESTIONS["functions"] for form in QUESTIONS["phrasings"]]
    assert len(asked) == 150
    answers = ask(demo, [question for question, _ in asked], SamplingParams(max_tokens=200))
    wrong = [
        f"{question} -> {answer.text}"
        for (question, row), answer in zip(asked, answers, strict=True)
        if row["first_sentence"] not in answer.text and not (row["signature"] and row["signature"] in answer.text)
    ]
    assert len(wrong) <= (1 - WANTED_SHARE) * len(asked), "\n".join(wrong)
    assert demo.stats().engine.used_pages == 0


def test_small_talk_is_sensible(demo: LLM) -> None:
    greeting, ability = ask(demo, ["Hello!", "What can you do?"], SamplingParams(max_tokens=100))
    assert greeting.finish_reason is ability.finish_reason is FinishReason.STOP
    assert greeting.text.strip()
    assert "Python" in ability.text


def test_answers_end_by_themselves_and_in_one_piece(demo: LLM) -> None:
    (answer,) = ask(demo, ["What does os.path.join do?"], SamplingParams(max_tokens=None))
    assert answer.finish_reason is FinishReason.STOP
    assert "<|" not in answer.text
    assert "\ufffd" not in answer.text


def test_both_models_fit_their_budget_and_share_a_vocabulary(demo: LLM) -> None:
    assert (ASSETS / "demo.gguf").stat().st_size <= 24_000_000
    assert (ASSETS / "demo-draft.gguf").stat().st_size <= 6_000_000
    text = "def f(x: int) -> str:\n    return '\u00e9\U0001f600' * x  # <|im_end|>"
    with LLM("demo-draft") as draft:
        assert draft.tokenize(text) == demo.tokenize(text)
        (answer,) = ask(draft, ["Explain json.dumps."], SamplingParams(max_tokens=60))
        assert answer.text.strip()
