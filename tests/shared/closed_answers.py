"""Requests under a grammar of every kind, and how their answers change with the number of tokens that they may have.

An answer that ends by itself in k tokens must be the same for every `max_tokens` from k on; one that is cut must be
whole nevertheless, and say `length`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from mlxr.core.types import FinishReason, Grammar, SamplingParams
from mlxr.llm import LLM
from mlxr.service.requests import ChatRequest, Tool
from mlxr.service.streams import Completion, fold_events

MOST_TOKENS = 200
MORE_TOKENS = 70

ANSWER = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
ORDER = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"title": {"type": "string"}, "kind": {"enum": ["large", "small"]}},
                "required": ["title", "kind"],
            },
            "maxItems": 3,
        },
        "paid": {"type": "boolean"},
    },
    "required": ["items", "paid"],
}
CODE = {"type": "string", "pattern": "^[A-Z]{2,3}-[0-9]{2,4}$"}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
}
PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}

GBNF = (
    'root ::= " yes" | " no" | " maybe"',
    'root ::= number (", " number)*\nnumber ::= [1-9] [0-9]?',
    'root ::= "(" item (" " item){0,3} ")"\nitem ::= [a-z]{1,8} | root',
    'root ::= "- " line ("\\n- " line){1,2} "\\n"\nline ::= [A-Za-z ,]{3,30}',
)
LARK = (
    'start: "red" | "green" | "blue and yellow"',
    'start: "<answer>" TEXT "</answer>"\nTEXT: /[A-Za-z ]{1,40}/',
    'start: term ("+" term)*\nterm: /[1-9][0-9]{0,2}/ | "(" start ")"',
    'start: "Answer: " ("true" | "false") " because " REASON "."\nREASON: /[a-z ]{4,60}/',
)
REGEX = (
    "(Yes|No|It depends)",
    "[0-9]{1,3} (apples|pears|plums)",
    "[A-Z][a-z]{1,12}( [A-Z][a-z]{1,12})?",
    '"[A-Za-z ,]{1,40}[.!]"',
)
CHOICES = (
    "yes|no|maybe",
    "3|12|forty-two",
    "a red house|a blue house by the sea|no house",
    "Paris|London|Rome, the capital of Italy",
)
SCHEMAS = (ANSWER, PERSON, ORDER, {"type": "array", "items": CODE, "minItems": 1, "maxItems": 4})
TOOLS = (
    (Tool("get_weather", "Get the weather in a city", WEATHER),),
    (Tool("multiply", "Multiply two numbers a and b", PAIR),),
    (Tool("note", "Write a note", ANSWER), Tool("add_person", "Add a person", PERSON)),
    (Tool("order", "Order items", ORDER), Tool("stop", "Stop", {"type": "object", "properties": {}})),
)
QUESTIONS = (
    "Is the sky green?",
    "What is the capital of France?",
    "Who wrote the report, and how old is she?",
    "How is the weather in Oslo, in celsius?",
    "Multiply 6 and 7.",
    "Order two apples and a pear.",
    "List some numbers.",
)
KINDS = ("gbnf", "lark", "regex", "choice", "schema", "tools")


@dataclass(frozen=True)
class Case:
    """One request but for its `max_tokens`."""

    kind: str
    request: ChatRequest

    def ask(self, most_tokens: int) -> ChatRequest:
        """The request of an answer that may have so many tokens."""
        return replace(self.request, params=replace(self.request.params, max_tokens=most_tokens))


def list_cases(count: int, kinds: Sequence[str] = KINDS) -> list[Case]:
    """Different requests, as many of each kind, half of them at temperature 0."""
    cases = []
    for index, (question, number, kind) in zip(range(count), product(range(10**6), range(4), kinds), strict=False):
        text = QUESTIONS[(question + number) % len(QUESTIONS)]
        params = SamplingParams(temperature=0.0 if question % 2 == 0 else 1.0, seed=index)
        cases.append(Case(kind, _make_request(kind, number, text, params)))
    return cases


def _make_request(kind: str, number: int, question: str, params: SamplingParams) -> ChatRequest:
    messages = [{"role": "user", "content": question}]
    grammars = {
        "gbnf": ("gbnf", GBNF),
        "lark": ("lark", LARK),
        "regex": ("regex", REGEX),
        "choice": ("regex", CHOICES),
        "schema": ("json_schema", tuple(map(json.dumps, SCHEMAS))),
    }
    if kind == "tools":
        return ChatRequest(messages, params, TOOLS[number], "required", parallel_tool_calls=number % 2 == 1)
    form, texts = grammars[kind]
    return ChatRequest(messages, params, grammar=Grammar(form, texts[number]))


def answer(llm: LLM, requests: Iterable[ChatRequest]) -> list[Completion]:
    """Return the whole answers to all of them, computed side by side."""
    streams = [llm._session.ask(request) for request in requests]
    return [fold_events(stream) for stream in streams]


def read_bytes(given: Completion) -> tuple[object, ...]:
    """Return all of an answer that may not change: text, calls, tokens, and why it ended."""
    calls = tuple((call.name, call.arguments) for call in given.tool_calls)
    return given.text, calls, given.token_ids, given.finish_reason, given.stop, given.usage.completion_tokens


def is_whole(llm: LLM, case: Case, given: Completion) -> bool:
    """Return True if the answer may end where it does, by its grammar."""
    constraint = llm._session._preparation.prepare(case.request).request.constraint
    assert constraint is not None
    tokenizer = llm._session.tokenizer
    mask = np.zeros(-(-llm._session.config.vocab_size // 32), np.uint32)
    for token_id in given.token_ids:
        if token_id in tokenizer.eos_ids:
            break
        mask.fill(0)
        constraint.fill_mask(mask)
        if not mask[token_id // 32] >> np.uint32(token_id % 32) & 1:
            return False
        constraint.accept(token_id)
    mask.fill(0)
    constraint.fill_mask(mask)
    return any(mask[end // 32] >> np.uint32(end % 32) & 1 for end in tokenizer.eos_ids)


@dataclass
class Tally:
    """Counts: requests; comparisons, and wrong ones; answers that were cut, that are whole, and that do not say so."""

    requests: int = 0
    compared: int = 0
    wrong: int = 0
    cut: int = 0
    whole: int = 0
    untold: int = 0


def compare(llm: LLM, cases: Sequence[Case], more: Sequence[int], fewer: Sequence[int] = ()) -> dict[str, Tally]:
    """Answer each case with as many tokens as it needs and `more`, and with a share in percent of that (`fewer`)."""
    tallies = {kind: Tally() for kind in KINDS}
    for case, free in zip(cases, answer(llm, (case.ask(MOST_TOKENS) for case in cases)), strict=True):
        tally, needed = tallies[case.kind], free.usage.completion_tokens
        assert free.error is None, (case, free.error)
        has_end = free.finish_reason is not FinishReason.LENGTH
        if has_end:
            tally.requests += 1
            for given in answer(llm, (case.ask(needed + extra) for extra in more)):
                tally.compared += 1
                tally.wrong += read_bytes(given) != read_bytes(free)
        cuts = sorted({max(1, share * (needed - 1) // 100) for share in fewer} - {needed - 1, needed})
        for given in answer(llm, map(case.ask, cuts)):
            tally.cut += 1
            tally.untold += given.finish_reason is not FinishReason.LENGTH
            tally.whole += is_whole(llm, case, given)
    return tallies
