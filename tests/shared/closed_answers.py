"""Requests under a grammar of every kind, and how their answers change with the number of tokens that they may have.

An answer that ends by itself in k tokens must be the same for every `max_tokens` from k on; one that is cut must be
whole nevertheless, and say `length`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product, takewhile
from typing import Any

import numpy as np
from shortest_texts import TokenSearch

from mlxr.core.types import FinishReason, Grammar, SamplingParams
from mlxr.llm import LLM
from mlxr.service.requests import ChatRequest, Tool
from mlxr.service.streams import Completion, fold_events

MOST_TOKENS = 200
MORE_TOKENS = 70

Schema = dict[str, Any]

ANSWER: Schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
PERSON: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
ORDER: Schema = {
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
CODE: Schema = {"type": "string", "pattern": "^[A-Z]{2,3}-[0-9]{2,4}$"}
WEATHER: Schema = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
}
PAIR: Schema = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}

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

# Regular expressions of all texts that the grammars permit. Where parentheses nest, these need not match, which only
# permits more texts.
GBNF_PATTERNS = (
    " yes| no| maybe",
    "[1-9][0-9]?(, [1-9][0-9]?)*",
    r"\(+[a-z]{1,8}\)*( \(*[a-z]{1,8}\)*)*\)",
    "- [A-Za-z ,]{3,30}(\n- [A-Za-z ,]{3,30}){1,2}\n",
)
LARK_PATTERNS = (
    "red|green|blue and yellow",
    "<answer>[A-Za-z ]{1,40}</answer>",
    r"\(*[1-9][0-9]{0,2}\)*(\+\(*[1-9][0-9]{0,2}\)*)*",
    r"Answer: (true|false) because [a-z ]{4,60}\.",
)


@dataclass(frozen=True)
class Case:
    """One request but for its `max_tokens`. It has grammar `number` of those of its kind."""

    kind: str
    number: int
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
        cases.append(Case(kind, number, _make_request(kind, number, text, params)))
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


@dataclass(frozen=True)
class JsonStyle:
    """The patterns of what stands between the signs of a JSON text."""

    space: str
    comma: str
    colon: str


_SPACE = r"( |\n[ \t]{0,40})?"
SPACED = JsonStyle(_SPACE, f"{_SPACE},{_SPACE}", f"{_SPACE}:{_SPACE}")
ON_ONE_LINE = JsonStyle("", ", ", ": ")
_TEXT = r'"([ !#-\[\]-~\x80-\xff]|\\["\\/bfnrt]|\\u[0-9A-Fa-f]{4})*"'


def write_json_pattern(schema: Schema, style: JsonStyle) -> str:
    """Return the pattern of the texts that fit a schema, all of whose properties are required."""
    if "enum" in schema:
        return f"({'|'.join(re.escape(json.dumps(value)) for value in schema['enum'])})"
    match schema["type"]:
        case "object":
            pairs = schema["properties"].items()
            members = [f'"{name}"{style.colon}{write_json_pattern(part, style)}' for name, part in pairs]
            return rf"\{{{style.space}{style.comma.join(members)}{style.space}\}}"
        case "array":
            item, least = write_json_pattern(schema["items"], style), schema.get("minItems", 0)
            items = f"{item}({style.comma}{item}){{{max(0, least - 1)},{schema['maxItems'] - 1}}}"
            return rf"\[{style.space}({items}){'' if least else '?'}{style.space}\]"
        case "string":
            return f'"{schema["pattern"][1:-1]}"' if "pattern" in schema else _TEXT
        case "integer":
            return "-?(0|[1-9][0-9]*)"
        case "boolean":
            return "(true|false)"
    raise AssertionError(schema)


def write_pattern(kind: str, number: int) -> str:
    """Return a regular expression of all texts that a grammar permits. Calls are written as Qwen 2.5 writes them."""
    if kind == "schema":
        return write_json_pattern(SCHEMAS[number], SPACED)
    if kind != "tools":
        patterns = {"gbnf": GBNF_PATTERNS, "lark": LARK_PATTERNS, "regex": REGEX, "choice": CHOICES}
        return patterns[kind][number]
    calls = []
    for tool in TOOLS[number]:
        arguments = write_json_pattern(dict(tool.parameters), ON_ONE_LINE)
        calls.append(rf'\{{"name": "{tool.name}", "arguments": {arguments}\}}')
    block = f"<tool_call>\\n({'|'.join(calls)})\\n</tool_call>"
    return rf"{block}(\n{block})*" if number % 2 == 1 else block


class ShortestAnswers:
    """Finds for each case the permitted text that has the fewest tokens of one model."""

    def __init__(self, llm: LLM) -> None:
        tokenizer = llm._session.tokenizer
        texts = (index for index in range(tokenizer.vocab_size) if not tokenizer.is_special(index))
        self._tokens = {index: tokenizer.token_bytes(index) for index in texts}
        self._known: dict[tuple[str, int], tuple[int, ...]] = {}

    def open_search(self, case: Case) -> TokenSearch:
        """Return a search through all texts that the grammar of a case permits."""
        return TokenSearch(write_pattern(case.kind, case.number), self._tokens)

    def find(self, case: Case) -> tuple[int, ...]:
        """Return the tokens of a shortest text that the grammar of a case permits: none has fewer."""
        key = case.kind, case.number
        if key not in self._known:
            self._known[key] = self.open_search(case).find_shortest()
        return self._known[key]


def answer(llm: LLM, requests: Iterable[ChatRequest]) -> list[Completion]:
    """Return the whole answers to all of them, computed side by side."""
    streams = [llm._session.ask(request) for request in requests]
    return [fold_events(stream) for stream in streams]


def read_bytes(given: Completion) -> tuple[object, ...]:
    """Return all of an answer that may not change: text, calls, tokens, and why it ended."""
    calls = tuple((call.name, call.arguments) for call in given.tool_calls)
    return given.text, calls, given.token_ids, given.finish_reason, given.stop, given.usage.completion_tokens


def is_whole(llm: LLM, case: Case, given: Completion) -> bool:
    """Return True if the grammar of a case takes the answer, and it may end there or has the only call it may have.

    Such a call ends the answer: the mark behind it is not given out. The masks are not asked about the tokens: where a
    grammar leaves no choice they allow one way to spell the text, and an answer may be closed in another.
    """
    constraint = llm._session._preparation.prepare(case.request).request.constraint
    assert constraint is not None
    ends = llm._session.tokenizer.eos_ids
    text = list(takewhile(lambda token_id: token_id not in ends, given.token_ids))
    if constraint.count_allowed(text) < len(text):
        return False
    if not case.request.parallel_tool_calls and has_whole_call(given):
        return True
    for token_id in text:
        constraint.accept(token_id)
    mask = np.zeros(-(-llm._session.config.vocab_size // 32), np.uint32)
    constraint.fill_mask(mask)
    return any(mask[end // 32] >> np.uint32(end % 32) & 1 for end in ends)


def has_whole_call(given: Completion) -> bool:
    """Return True if the arguments of the answer's last call are a whole JSON text."""
    try:
        return bool(given.tool_calls) and json.loads(given.tool_calls[-1].arguments) is not None
    except ValueError:
        return False


@dataclass
class Tally:
    """Counts: requests; comparisons, and wrong ones; answers that were cut, that are whole, and that do not say so.

    Of the cut answers, `fitting` are those that could be whole, as some permitted text has no more tokens than they may
    have; `lost` describes those of them that are not whole.
    """

    requests: int = 0
    compared: int = 0
    wrong: int = 0
    cut: int = 0
    whole: int = 0
    untold: int = 0
    fitting: int = 0
    lost: list[str] = field(default_factory=list)


def compare(
    llm: LLM,
    cases: Sequence[Case],
    more: Sequence[int],
    fewer: Sequence[int] = (),
    shortest: ShortestAnswers | None = None,
) -> dict[str, Tally]:
    """Answer each case with as many tokens as it needs and `more`, and with a share in percent of that (`fewer`).

    `shortest` tells which of the answers that are cut could be whole; without it none is counted as such.
    """
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
        for most_tokens, given in zip(cuts, answer(llm, map(case.ask, cuts)), strict=True):
            tally.cut += 1
            tally.untold += given.finish_reason is not FinishReason.LENGTH
            is_given_whole = is_whole(llm, case, given)
            tally.whole += is_given_whole
            if shortest is not None and len(shortest.find(case)) <= most_tokens:
                tally.fitting += 1
                if not is_given_whole:
                    tally.lost.append(describe(llm, case, most_tokens, given, shortest.find(case)))
    return tallies


def describe(llm: LLM, case: Case, most_tokens: int, given: Completion, shortest: Sequence[int]) -> str:
    """Return a line about an answer of at most `most_tokens` tokens that is not whole, and about a shortest one."""
    cut, whole = (b"".join(map(llm._session.tokenizer.token_bytes, ids)) for ids in (given.token_ids, shortest))
    return f"{case.kind} {case.number}: {cut!r} in {most_tokens} tokens, where {whole!r} has {len(shortest)}"
