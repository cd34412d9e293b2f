"""A limit on the tokens of an answer under a grammar does not change a real model's text, as long as it fits."""

from __future__ import annotations

import json
from typing import Any

import amounts
import pytest
from amounts import choose_amount
from closed_answers import MORE_TOKENS, compare, list_cases
from real_files import find_model

from conftest import RealServer
from mlxr import LLM

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


def test_more_tokens_change_no_answer_that_ends_by_itself() -> None:
    """Nearly all cut answers are whole as soon as some way to an end fits."""
    more = range(MORE_TOKENS + 1) if amounts.is_thorough else (0, 1, 20, MORE_TOKENS)
    model = str(find_model("qwen2.5-coder-0.5b"))
    with LLM(model, arena_bytes=1 << 29, max_sequences=72, context_tokens=2048) as llm:
        tallies = compare(llm, list_cases(choose_amount(300) if len(more) > 4 else 24), more, fewer=(75,))
    for tally in tallies.values():
        assert tally.requests > 0
        assert (tally.wrong, tally.untold) == (0, 0)
