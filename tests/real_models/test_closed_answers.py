"""A limit on the tokens of an answer under a grammar does not change a real model's text, as long as it fits."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import amounts
import numpy as np
import pytest
from amounts import choose_amount
from closed_answers import KINDS, MORE_TOKENS, Case, ShortestAnswers, compare, list_cases
from real_files import find_model
from shortest_texts import TokenSearch

from conftest import RealServer
from mlxr import LLM
from mlxr.engine.request import Mask, MaskSource, TokenConstraint

WORDS = 'root ::= " yes" | " no" | " maybe"'
NUMBERS = 'start: " 3" | " 12" | " forty-two"'
MOST_TOKENS = (16, 33, 20, 10, 6, 5, 4, 3, 2)


def complete(coder: RealServer, prompt: str, most_tokens: int | None, grammar: str) -> dict[str, Any]:
    body = {"prompt": prompt, "grammar": grammar, "temperature": 0, "max_tokens": most_tokens}
    choice: dict[str, Any] = coder.post("/v1/completions", body).json()["choices"][0]
    return choice


@pytest.mark.parametrize(
    ("prompt", "grammar", "text"),
    [
        ("Q: Is fire hot? A:", WORDS, " yes"),
        ("Q: How many sides has a triangle? A:", NUMBERS, " 3"),
    ],
)
def test_a_choice_of_words_is_the_same_with_few_tokens(coder: RealServer, prompt: str, grammar: str, text: str) -> None:
    assert complete(coder, prompt, 200, grammar)["text"] == text
    needed = 3 if text == " 3" else 2
    for most_tokens in (None, *MOST_TOKENS):
        if most_tokens is None or most_tokens >= needed:
            choice = complete(coder, prompt, most_tokens, grammar)
            assert (choice["text"], choice["finish_reason"]) == (text, "stop")


def test_a_number_and_a_city_are_the_same_with_few_tokens(coder: RealServer) -> None:
    person = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    city = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
    }
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": city}}
    asks: list[dict[str, Any]] = [
        {
            "messages": [{"role": "user", "content": "Ann is 42 years old. Who is it?"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": person}},
        },
        {
            "messages": [{"role": "user", "content": "How is the weather in Paris in celsius?"}],
            "tools": [tool],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ]
    for ask, right in zip(asks, ({"name": "Ann", "age": 42}, {"city": "Paris", "unit": "celsius"}), strict=True):
        for most_tokens in (200, 60, 45, 36):
            body = {"temperature": 0, "max_tokens": most_tokens, **ask}
            choice = coder.post("/v1/chat/completions", body).json()["choices"][0]
            calls = choice["message"].get("tool_calls") or [{"function": {"arguments": choice["message"]["content"]}}]
            assert json.loads(calls[0]["function"]["arguments"]) == right
            assert choice["finish_reason"] != "length"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    model = str(find_model("qwen2.5-coder-0.5b"))
    with LLM(model, arena_bytes=1 << 29, max_sequences=72, context_tokens=2048) as opened:
        yield opened


@pytest.fixture(scope="module")
def shortest(llm: LLM) -> ShortestAnswers:
    return ShortestAnswers(llm)


def test_more_tokens_change_no_answer_that_ends_by_itself(llm: LLM, shortest: ShortestAnswers) -> None:
    """Nearly all cut answers are whole if any text that the grammar permits fits in their tokens."""
    more = range(MORE_TOKENS + 1) if amounts.is_thorough else (0, 1, 20, MORE_TOKENS)
    cases = list_cases(choose_amount(300) if len(more) > 4 else 24)
    tallies = compare(llm, cases, more, fewer=(75,), shortest=shortest)
    for kind, tally in tallies.items():
        print(f"{kind}: {tally.cut} cut, {tally.fitting} could be whole, {tally.whole} are", *tally.lost, sep="\n  ")
        assert tally.requests > 0
        assert (tally.wrong, tally.untold) == (0, 0)
    lost = [line for tally in tallies.values() for line in tally.lost]
    assert 20 * len(lost) <= sum(tally.fitting for tally in tallies.values()), lost


CASES = sorted(list_cases(24), key=lambda case: (KINDS.index(case.kind), case.number))  # one of each grammar


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.number}")
def test_patterns_permit_all_that_grammars_permit(llm: LLM, shortest: ShortestAnswers, case: Case) -> None:
    """So no text in fewer tokens than the shortest one is whole; that one is, as the grammar takes it."""
    constraint = llm._session._preparation.prepare(case.request).request.constraint
    assert constraint is not None
    fewest, ends = shortest.find(case), llm._session.tokenizer.eos_ids
    assert max(constraint.count_allowed([*fewest, end]) for end in ends) == len(fewest) + 1
    walk = Walk(llm, shortest.open_search(case))
    for seed in range(choose_amount(144)):
        walk.go(constraint.fork(), len(fewest) + 4 * (1 + seed % 12), np.random.default_rng(seed))


class Walk:
    """Random answers under a grammar, by which its masks are compared with what its pattern permits.

    `_leads` has for each state of the pattern at which an answer has been the tokens that lead to others.
    """

    def __init__(self, llm: LLM, search: TokenSearch) -> None:
        self._tokenizer, self._vocabulary = llm._session.tokenizer, llm._session.config.vocab_size
        self._search, self._automaton = search, search.automaton
        self._leads: dict[int, dict[int, list[int]]] = {}

    def go(self, constraint: TokenConstraint, most_tokens: int, draw: np.random.Generator) -> None:
        """Draw an answer; wherever it leads, the pattern must permit all that the mask allows, and how it is closed."""
        masks = MaskSource(constraint, self._vocabulary, most_tokens)
        states = [self._automaton.start]
        while len(states) <= most_tokens:
            masks.fill()
            assert masks.error is None
            allowed = self._compare(states[-1], masks.mask)
            if not allowed:
                return
            token_id = self._draw(states[-1], allowed, draw)
            masks.accept(token_id)
            states.append(self._read([token_id], states[-1]))
        if masks.held_tokens:
            assert self._automaton.may_end(self._read(masks.close(), states[-1 - masks.held_tokens]))

    def _compare(self, state: int, mask: Mask) -> set[int]:
        """Return the tokens that a mask allows but for the end, all of which must be permitted."""
        if state not in self._leads:
            leads = self._leads[state] = defaultdict(list)
            for token_ids, behind in self._search.list_next(state):
                leads[behind] += token_ids
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = set(np.flatnonzero(bits).tolist())
        assert self._automaton.may_end(state) or not allowed & self._tokenizer.eos_ids
        allowed -= self._tokenizer.eos_ids
        assert allowed <= {token_id for token_ids in self._leads[state].values() for token_id in token_ids}
        return allowed

    def _draw(self, state: int, allowed: set[int], draw: np.random.Generator) -> int:
        """Draw a token to a state at which no answer has been, if one is allowed, else any."""
        choices = [sorted(allowed.intersection(token_ids)) for token_ids in self._leads[state].values()]
        fresh = [
            tokens for tokens, behind in zip(choices, self._leads[state], strict=True) if behind not in self._leads
        ]
        groups = [tokens for tokens in fresh if tokens] or [tokens for tokens in choices if tokens]
        return int(draw.choice(groups[draw.integers(len(groups))]))

    def _read(self, token_ids: Iterable[int], state: int) -> int:
        return self._automaton.read(b"".join(map(self._tokenizer.token_bytes, token_ids)), state)
