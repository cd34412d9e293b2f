"""Two hundred JSON schemas on the demo model at temperature 1, side by side: every finished answer validates."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import closing

import pytest
from jsonschema import Draft202012Validator
from schema_maker import make_schema

from mlxr.core.settings import Settings, resolve
from mlxr.core.types import FinishReason, Grammar, SamplingParams
from mlxr.engine.request import EngineRequest
from mlxr.loading import LoadedModel
from mlxr.service.grammar import GrammarCompiler
from mlxr.service.opening import build_engine, open_model

SCHEMAS, MAX_TOKENS, WANTED_SHARE = 200, 256, 0.8


def answer_all(loaded: LoadedModel, settings: Settings, compiler: GrammarCompiler) -> dict[int, str]:
    """Return the texts of the answers that ended by themselves, by the number of their schema."""
    texts: dict[int, list[int]] = defaultdict(list)
    reasons, ids, tokenizer = {}, {}, loaded.tokenizer
    with closing(build_engine(loaded, settings)) as engine:
        for index in range(SCHEMAS):
            constraint = compiler.compile(Grammar("json_schema", json.dumps(make_schema(index))))
            params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=index)
            ids[engine.submit(EngineRequest(tokenizer.encode("As JSON:\n"), params, constraint=constraint))] = index
        while engine.has_work:
            for event in engine.step():
                assert event.error is None, (ids[event.sequence_id], event.error)
                if event.token_id is not None:
                    texts[ids[event.sequence_id]].append(event.token_id)
                if event.finish_reason is not None:
                    reasons[ids[event.sequence_id]] = event.finish_reason
    return {index: tokenizer.decode(texts[index]) for index in texts if reasons[index] is FinishReason.STOP}


@pytest.mark.slow
def test_finished_answers_validate() -> None:
    settings = resolve({"context_tokens": 512, "max_sequences": 64})
    with open_model("demo", settings) as loaded:
        known = loaded.tokenizer, loaded.tokenizer.eos_ids, loaded.config.vocab_size
        finished = answer_all(loaded, settings, GrammarCompiler(*known, loaded.ctx))
        assert finished == answer_all(loaded, settings, GrammarCompiler(*known))  # masks made in the engine's thread
    assert len(finished) >= WANTED_SHARE * SCHEMAS
    for index, text in finished.items():
        schema = make_schema(index)
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        errors = [error.message for error in validator.iter_errors(json.loads(text))]
        assert not errors, (index, schema, text, errors)
    assert len(set(finished.values())) > SCHEMAS // 2  # not all of them the same few words
