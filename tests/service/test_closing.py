"""JSON that would be cut by `max_tokens` is closed: whatever is drawn, the answer is whole if there is any way."""

from __future__ import annotations

import json
from collections.abc import Iterable

import jsonschema
import numpy as np
import pytest
from whole_answers import load_demo

from mlxr.core.events import Event, TextDelta
from mlxr.core.types import FinishReason, Grammar, SamplingParams
from mlxr.engine.constraint import MaskSource
from mlxr.llm import LLM

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
    """A random answer of at most so many tokens, and whether it was cut."""
    demo, compiler = load_demo()
    masks = MaskSource(compiler.compile(grammar), demo.vocab_size, most_tokens)
    draw, text = np.random.default_rng(seed), b""
    for _ in range(most_tokens):
        masks.fill()
        assert masks.error is None
        allowed = np.flatnonzero(np.unpackbits(masks.mask.view(np.uint8), bitorder="little"))
        token_id = int(draw.choice(allowed))
        if token_id in demo.eos_ids:
            break
        masks.accept(token_id)
        text += demo.token_bytes(token_id)
    return text.decode(), masks.is_cut


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


def test_the_reason_stays_length() -> None:
    """And text, reason and tokens are the same in a batch with others."""
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
