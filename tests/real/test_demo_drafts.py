"""The demo with its draft model answers as it does without, to the bit, and reports the guesses."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

import pytest

from mlxr import LLM, DraftOptions, SamplingParams
from mlxr.core.errors import SettingError
from mlxr.core.types import Grammar
from mlxr.engine.speculative.costs import Credit
from mlxr.engine.speculative.draft_model import Decision, DraftModel
from mlxr.engine.speculative.planner import Planner

K = TypeVar("K", bound=Hashable)
TEXT = """def read_lines(path, limit):
    with open(path) as file:
        for number, line in enumerate(file):
            if number == limit:
                return
            yield line.rstrip()
"""
PROPERTIES = '{"name": {"type": "string"}, "age": {"type": "integer"}}'
SCHEMA = f'{{"type": "object", "properties": {PROPERTIES}, "required": ["age"]}}'
OPTIONS = {"arena_bytes": "24M", "context_tokens": 1024, "threads": 2}
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("demo", draft="off", **OPTIONS) as llm:  # type: ignore[arg-type]
        yield llm


def draw_params(chance: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=chance.choice([1, 9, 40]),
        temperature=chance.choice([0.0, 0.0, 0.7, 1.2]),
        top_p=chance.choice([1.0, 0.9]),
        repetition_penalty=chance.choice([1.0, 1.2]),
        stop=chance.choice([(), ("return",)]),
        seed=chance.getrandbits(60),
        n=chance.choice([1, 1, 3]),
    )


def take_all(
    _planner: Planner, rates: Mapping[K, list[float]], _answers: int, _rows: int, room: int, **_: bool
) -> dict[K, int]:
    lengths: dict[K, int] = {}
    for key, own in rates.items():
        lengths[key] = min(len(own), room - sum(lengths.values()))
    return {key: length for key, length in lengths.items() if length > 0}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make drafts as long as they may be, whatever they cost, since their gain depends on how long steps take."""
    monkeypatch.setattr(Planner, "_choose", take_all)
    monkeypatch.setattr(Planner, "is_due", lambda *_: True)
    monkeypatch.setattr(Planner, "_asks_model", lambda planner, *_: planner.model is not None)
    monkeypatch.setattr(Planner, "end_step", lambda *_, **__: None)
    monkeypatch.setattr(Credit, "save", lambda credit, _: setattr(credit, "seconds", 1e9))
    monkeypatch.setattr(Credit, "count_step", lambda credit, *_: setattr(credit, "seconds", 1e9))
    monkeypatch.setattr(DraftModel, "_choose_places", lambda _, wanted, *__: Decision(list(wanted), 5, 2.0, 1.0))
    monkeypatch.setattr(DraftModel, "_may_read", lambda *_: True)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("draft", ["auto", "ngram", "demo-draft", "demo"])
@pytest.mark.slow
def test_random_answers_are_those_without_drafts(plain: LLM, draft: str) -> None:
    chance = random.Random(draft)
    prompts = [TEXT[: chance.randrange(9, len(TEXT))] * chance.choice([1, 2]) for _ in range(12)]
    params = [draw_params(chance) for _ in prompts]
    wanted = [[choice.token_ids for choice in answer.choices] for answer in plain.generate(prompts, params)]
    drafts = [DraftOptions(chance.choice([None, None, 0, 3])) for _ in prompts]
    options = {**OPTIONS, "arena_bytes": "6M", "page_size": chance.choice([8, 32])}
    with LLM("demo", draft=draft, **options) as llm:  # type: ignore[arg-type]
        found = [
            [choice.token_ids for choice in answer.choices] for answer in llm.generate(prompts, params, drafts=drafts)
        ]
        assert llm.stats().engine.accepted_tokens > 0
    assert found == wanted


def test_a_grammar_ends_drafts_that_do_not_fit_it(plain: LLM) -> None:
    """Tokens of a draft after those that the grammar allows are never computed."""
    params, grammar = SamplingParams(max_tokens=60), Grammar("json_schema", SCHEMA)
    wanted = plain.chat(QUESTION, params, grammar=grammar)
    with LLM("demo", draft="demo-draft", **OPTIONS) as llm:  # type: ignore[arg-type]
        assert llm.chat(QUESTION, params, grammar=grammar).text == wanted.text


def test_the_draft_model_counts_among_the_weights_and_the_cache_stays_within_its_bytes(plain: LLM) -> None:
    with LLM("demo", **OPTIONS) as llm:  # type: ignore[arg-type]
        own, alone = llm.stats(), plain.stats()
        assert own.weight_bytes > alone.weight_bytes + 4_000_000
        assert own.engine.arena_bytes <= alone.engine.arena_bytes <= 24 << 20
        answer = llm.chat(QUESTION, SamplingParams(max_tokens=60))
        assert answer.text == plain.chat(QUESTION, SamplingParams(max_tokens=60)).text
        assert own.engine.accepted_tokens == 0


def test_a_draft_model_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(SettingError, match="draft: nothing-like-it: no such file"):
        LLM("demo", draft="nothing-like-it")
