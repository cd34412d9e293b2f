"""Which schema the grammar library takes for the one that a client sent. Imports the library, which takes a while."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection
from dataclasses import replace

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mlxr.service.schema import Enforceable, make_enforceable
from mlxr.service.schema_document import Schema, SchemaError
from mlxr.service.schema_size import measure

MAX_KEPT = 64
MAX_REASON_CHARACTERS = 300
_LIMITS = LLParserLimits(verbose_errors=False)


@functools.lru_cache(MAX_KEPT)
def enforce(text: str) -> Enforceable:
    """The schema to hold an answer to, for the JSON text of the one that was asked for.

    Raises SchemaError for text that is no schema, and for a schema that no value fits or that is too large.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"the schema is not JSON: {error}") from None
    try:
        closed = make_enforceable(schema, find_fault, has_more_names)
        reason = find_fault(closed.schema, coerces=True)
        sizes = measure(closed.schema)
        if not reason and math.isinf(sizes.whole):
            raise SchemaError("no value fits the schema, as it asks for itself without end")
        if not reason:
            return replace(closed, heaviest=sizes.heaviest)
        # Where objects are joined by going round in circles, they cannot be closed.
        open_one = make_enforceable(schema, find_fault, has_more_names, closes=False)
        if find_fault(open_one.schema, coerces=True):
            raise SchemaError(reason)
        return Enforceable(open_one.schema, (*open_one.relaxed, "additionalProperties"), sizes.heaviest)
    except RecursionError:
        raise SchemaError("the schema is nested too deeply") from None


def find_fault(schema: Schema, *, coerces: bool = False) -> str:
    """Why the library refuses a schema, in one line; empty if it takes it. With `coerces` oneOf counts as anyOf."""
    options = {"x-guidance": {"coerce_one_of": True}} if coerces else {}
    grammar = json.dumps({"grammars": [{"json_schema": {**schema, **options}}]})
    return summarize(LLMatcher.validate_grammar(grammar, None, limits=_LIMITS))


def has_more_names(names: Collection[str], patterns: Collection[str]) -> bool:
    """Whether an object that has all properties of these names may have others, by these patterns of names."""
    null = {"type": "null"}
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, null),
        "patternProperties": dict.fromkeys(patterns, null),
        "required": list(names),
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    tokenizer = _open_bytes()
    matcher = LLMatcher(tokenizer, json.dumps({"grammars": [{"json_schema": schema}]}), limits=_LIMITS, log_level=0)
    text = "{" + "".join(json.dumps(name, ensure_ascii=False) + ":null," for name in names) + '"'
    token_ids = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(token_ids) != len(token_ids) - 1


@functools.cache
def _open_bytes() -> LLTokenizer:
    """A vocabulary of single bytes."""
    return LLTokenizer("byte")


def summarize(text: str) -> str:
    """Return what the library says, without the lines that show the grammar."""
    lines = text.splitlines() or [""]
    reasons = [line for line in lines[1:] if line.startswith("error: ")]
    return " ".join([lines[0], *reasons])[:MAX_REASON_CHARACTERS]
