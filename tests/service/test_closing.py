"""JSON that `max_tokens` would cut is closed: whatever is drawn, the answer is whole if there is any way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace

import amounts
import jsonschema
import numpy as np
import pytest
from closed_answers import KINDS, MORE_TOKENS, MOST_TOKENS, answer, compare, is_whole, list_cases, read_bytes
from whole_answers import load_demo, takes

from mlxr.core.types import Event, FinishReason, Grammar, SamplingParams, TextDelta
from mlxr.engine.request import MaskSource
from mlxr.llm import LLM
from mlxr.service.closing import _Search

TEXT = {"type": "string"}
ITEM = {
    "type": "object",
    "properties": {"name": TEXT, "size": {"type": "integer", "minimum": 100}, "kind": {"enum": ["large", "small"]}},
    "required": ["name", "size", "kind"],
}
SCHEMAS = [
    {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "required": ["a", "b"]},
    {"type": "object", "properties": {"items": {"type": "array", "items": ITEM}}, "required": ["items"]},
    {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{3,}-[0-9]{4}$"}},
    {"$defs": {"n": {"properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}}, "$ref": "#/$defs/n"},
]


def walk(grammar: Grammar, most_tokens: int, seed: int) -> tuple[str, bool]:
    """Draw an answer of at most so many tokens; return it, and True if tokens were taken back. Shown ones must stay."""
    demo, compiler = load_demo()
    masks = MaskSource(compiler.compile(grammar), demo.vocab_size, most_tokens)
    draw, drawn, shown = np.random.default_rng(seed), list[int](), 0
    while len(drawn) < most_tokens:
        masks.fill()
        assert masks.error is None
        allowed = np.flatnonzero(np.unpackbits(masks.mask.view(np.uint8), bitorder="little"))
        token_id = int(draw.choice(allowed))
        if token_id in demo.eos_ids:
            return b"".join(map(demo.token_bytes, drawn)).decode(), False
        masks.accept(token_id)
        drawn.append(token_id)
        assert shown <= len(drawn) - masks.held_tokens
        shown = len(drawn) - masks.held_tokens
    answer = [*drawn[:shown], *masks.close()]
    assert len(answer) <= most_tokens
    return b"".join(map(demo.token_bytes, answer)).decode(), shown < len(drawn)


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
@pytest.mark.parametrize("most_tokens", [60, 120])
def test_every_walk_ends_in_time(schema: dict[str, object], most_tokens: int) -> None:
    grammar = Grammar("json_schema", json.dumps(schema))
    walks = [walk(grammar, most_tokens, seed) for seed in range(6)]
    for text, _ in walks:
        jsonschema.validate(json.loads(text), schema)
    assert walks == [walk(grammar, most_tokens, seed) for seed in range(6)]
    assert any(is_cut for _, is_cut in walks) or "$defs" in schema


def test_any_json_ends_in_time() -> None:
    for grammar in (Grammar("json_object"), Grammar("gbnf", 'root ::= "[" ("\\"" [a-z]* "\\"" ",")* "0]"')):
        for seed in range(8):
            json.loads(walk(grammar, 50, seed)[0])


def test_what_has_no_end_in_time_and_what_needs_none_stay_as_they_are() -> None:
    text, is_cut = walk(Grammar("regex", "[a-z]{80}"), 40, 1)
    assert not is_cut
    assert len(text) >= 40
    text, is_cut = walk(Grammar("regex", "(?s:.*)"), 40, 1)
    assert not is_cut


@pytest.mark.parametrize(
    "lark",
    [
        'start: "<call>" "\\n" CALL "\\n" "</call>" ("\\n" "<call>" CALL "</call>")*\nCALL: /[a-z]{3}[(][0-9]*[)]/',
        'start: call ("<and>" call)*\ncall: "<value>" text "</call>"\ntext[suffix="\\n</value>\\n"]: /(?s:.*)/',
        'start: TEXT "[end]"\nTEXT: /[A-Za-z ]+/',
        'start: "[" item (",\\n " item)* "\\n]" "<|END|>"\nitem: /[a-z]+/ "=" %json {"type": "string"}',
    ],
)
def test_marks_lead_out_of_texts(lark: str) -> None:
    grammar = Grammar("lark", lark)
    for seed in range(4):
        text, _ = walk(grammar, 60, seed)
        assert takes(text, grammar), text


@pytest.mark.parametrize("most_tokens", [300, 1000])
def test_nothing_is_held_back_while_there_is_room(most_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    demo, compiler = load_demo()
    looks = []
    run = _Search.run
    monkeypatch.setattr(_Search, "run", lambda self, *rest: looks.append(rest) or run(self, *rest))
    masks = MaskSource(compiler.compile(Grammar("json_schema", json.dumps(SCHEMAS[2]))), demo.vocab_size, most_tokens)
    draw = np.random.default_rng(1)
    for _ in range(100):
        masks.fill()
        allowed = np.flatnonzero(np.unpackbits(masks.mask.view(np.uint8), bitorder="little"))
        goes_on = [token_id for token_id in allowed if b"]" not in demo.token_bytes(token_id)]
        masks.accept(int(draw.choice(goes_on)))
        assert not masks.held_tokens
    assert len(looks) <= 3


@pytest.mark.parametrize("most_tokens", [24, 60, 90, 120, 200, 1000])
@pytest.mark.parametrize("schema", [SCHEMAS[0], {"type": "array", "items": ITEM, "minItems": 12}], ids=["few", "many"])
def test_searches_are_bounded_by_token_and_by_look(
    schema: dict[str, object], most_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the end takes about all the tokens that are left: then most searches fail."""
    demo, compiler = load_demo()
    steps, masks, looks, step, choose = [0], [0], [], _Search._step, _Search._choose_by_mask
    monkeypatch.setattr(_Search, "_step", lambda self: steps.append(steps.pop() + 1) or step(self))
    monkeypatch.setattr(_Search, "_choose_by_mask", lambda self: masks.append(masks.pop() + 1) or choose(self))
    source = MaskSource(compiler.compile(Grammar("json_schema", json.dumps(schema))), demo.vocab_size, most_tokens)
    drawn, draw = 0, np.random.default_rng(most_tokens)
    while drawn < most_tokens:
        source.fill()
        allowed = np.flatnonzero(np.unpackbits(source.mask.view(np.uint8), bitorder="little"))
        token_id = int(draw.choice(allowed))
        if token_id in demo.eos_ids:
            break
        before = steps[0]
        source.accept(token_id)
        drawn += 1
        looks.append(steps[0] - before)
    assert 0 < steps[0] <= 160 + 6 * drawn
    assert masks[0] <= steps[0] // 2
    assert max(looks) <= 140


PARTS = 4 if amounts.is_exhaustive else 1  # of 75 cases each, which take minutes


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", arena_bytes=1 << 27, max_sequences=72, threads=2, context_tokens=1024) as opened:
        yield opened


@pytest.mark.parametrize("part", range(PARTS))
def test_more_tokens_change_no_answer_that_ends_by_itself(llm: LLM, part: int) -> None:
    """Grammars of every kind, at temperature 0 and sampled."""
    if amounts.is_thorough:
        cases = list_cases(PARTS * 75)[75 * part : 75 * (part + 1)]
        more = range(0, MORE_TOKENS + 1, 1 if amounts.is_exhaustive else 7)
        tallies = compare(llm, cases, more, fewer=range(10, 100, 10))
        assert sum(tally.requests for tally in tallies.values()) >= 60
    else:
        tallies = compare(llm, list_cases(12), (0, 1, 20, MORE_TOKENS), fewer=(80,))
    assert all(tally.requests for tally in tallies.values())
    for tally in tallies.values():
        assert (tally.wrong, tally.untold) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_tokens(llm: LLM, kind: str) -> None:
    """From one token on, cut answers are whole as soon as one can be; once the answer fits, it stays the same."""
    stride = 1 if amounts.is_thorough or kind == "gbnf" else 7
    case = list_cases(1, [kind])[0]
    free = answer(llm, [case.ask(MOST_TOKENS)])[0]
    needed = free.usage.completion_tokens
    for given in answer(llm, map(case.ask, range(needed, needed + MORE_TOKENS + 1, stride))):
        assert read_bytes(given) == read_bytes(free)
    cut = answer(llm, map(case.ask, range(needed - 1, 0, -stride)))[::-1]
    assert all(given.finish_reason is FinishReason.LENGTH for given in cut)
    whole = [is_whole(llm, case, given) for given in cut]
    assert whole == sorted(whole)
    assert whole[-1:] in ([], [True])


def test_what_is_streamed_is_what_comes_whole(llm: LLM) -> None:
    """A stream never shows a token that is taken back: a cut answer begins with its first deltas."""
    case = next(case for case in list_cases(24, ["schema"]) if case.request.params.temperature)
    for most_tokens in (24, 32, 40):
        (whole,) = answer(llm, [case.ask(most_tokens)])
        text = ""
        for event in llm._session.ask(case.ask(most_tokens)):
            text += event.text if isinstance(event, TextDelta) else ""
            assert whole.text.startswith(text)
        assert text == whole.text


def test_a_stop_string_ends_an_answer_before_its_tokens_run_out(llm: LLM) -> None:
    """Wherever it comes, also in tokens that would be taken back."""
    case = list_cases(1, ["gbnf"])[0]
    ask = replace(case.request, grammar=Grammar("gbnf", 'root ::= "(" [a-z ]+ "; and so on; and so forth)"'))
    params = replace(ask.params, temperature=1.0, stop=("e",))
    request = replace(case, request=replace(ask, params=params))
    free = answer(llm, [request.ask(MOST_TOKENS)])[0]
    assert (free.finish_reason, free.stop) == (FinishReason.STOP, "e")
    needed = free.usage.completion_tokens
    for given in answer(llm, map(request.ask, range(needed, needed + MORE_TOKENS, 5))):
        assert read_bytes(given) == read_bytes(free)


def test_the_reason_stays_length() -> None:
    """Text, reason and tokens are the same in a batch with others."""
    schema = SCHEMAS[1]
    grammar = Grammar("json_schema", json.dumps(schema))
    ask = [{"role": "user", "content": "List some items."}]
    with LLM("demo", arena_bytes=1 << 26, threads=1) as llm:
        alone = {}
        for most_tokens in (12, 20):
            params = SamplingParams(max_tokens=most_tokens, temperature=1.0, seed=3)
            answer = llm.chat(ask, params, grammar=grammar)
            jsonschema.validate(json.loads(answer.text), schema)
            assert answer.finish_reason is FinishReason.LENGTH
            alone[most_tokens] = answer.text
        streams = {
            most: llm.stream_chat(ask, SamplingParams(max_tokens=most, temperature=1.0, seed=3), grammar=grammar)
            for most in (12, 20)
        }
        assert {most: collect(stream) for most, stream in streams.items()} == alone


def collect(stream: Iterable[Event]) -> str:
    return "".join(event.text for event in stream if isinstance(event, TextDelta))
