"""Two hundred JSON schemas on the demo model at temperature 1, side by side: whatever is finished validates."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import closing

from jsonschema import Draft202012Validator
from schema_maker import make_schema

from mlxr.core.settings import resolve
from mlxr.core.types import FinishReason, Grammar, SamplingParams
from mlxr.service.grammar import GrammarCompiler
from mlxr.service.opening import build_engine, open_model

SCHEMAS, MAX_TOKENS, WANTED_SHARE = 200, 256, 0.8


def test_finished_answers_validate() -> None:
    settings = resolve({"context_tokens": 512, "max_sequences": 64})
    texts: dict[int, list[int]] = defaultdict(list)
    reasons = {}
    with open_model("demo", settings) as loaded, closing(build_engine(loaded, settings)) as engine:
        tokenizer = loaded.tokenizer
        compiler = GrammarCompiler(tokenizer, tokenizer.eos_ids, loaded.config.vocab_size)
        ids = {}
        for index in range(SCHEMAS):
            constraint = compiler.compile(Grammar("json_schema", json.dumps(make_schema(index))))
            params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=index)
            ids[engine.submit(tokenizer.encode("As JSON:\n"), params, constraint=constraint)] = index
        while engine.has_work:
            for event in engine.step():
                assert event.error is None, (ids[event.sequence_id], event.error)
                if event.token_id is not None:
                    texts[ids[event.sequence_id]].append(event.token_id)
                if event.finish_reason is not None:
                    reasons[ids[event.sequence_id]] = event.finish_reason
        finished = {index: tokenizer.decode(texts[index]) for index in texts if reasons[index] is FinishReason.STOP}
    assert len(finished) >= WANTED_SHARE * SCHEMAS
    for index, text in finished.items():
        schema = make_schema(index)
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        errors = [error.message for error in validator.iter_errors(json.loads(text))]
        assert not errors, (index, schema, text, errors)
    assert len(set(finished.values())) > SCHEMAS // 2  # not all of them the same few words
