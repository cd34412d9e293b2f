"""Tools beside a format for the answer: the model writes either calls, or text of that format."""

from __future__ import annotations

import json

import pytest
from whole_answers import takes

from mlxr.core.types import Grammar
from mlxr.service.requests import Tool
from mlxr.service.tools import ToolFormat
from mlxr.service.tools.marked_json import GenericFormat, HermesFormat, Llama3Format
from mlxr.service.tools.mistral import MistralFormat

ADD = Tool(
    "add", "", {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
)
NAME = Tool("name", "", {"type": "object", "properties": {"name": {"type": "string"}}})
SCHEMA = Grammar("json_schema", json.dumps({"type": "object", "properties": {"name": {"type": "string"}}}))
CALL = '{"name": "add", "%s": {"a": 1}}'


@pytest.mark.parametrize(
    ("tool_format", "call"),
    [
        (HermesFormat(), f"<tool_call>\n{CALL % 'arguments'}\n</tool_call>"),
        (MistralFormat(has_args_marker=False), f"[TOOL_CALLS] [{CALL % 'arguments'}]"),
        (MistralFormat(has_args_marker=True), '[TOOL_CALLS]add[ARGS]{"a": 1}'),
        (Llama3Format(), CALL % "parameters"),
        (GenericFormat(), CALL % "arguments"),
    ],
)
@pytest.mark.parametrize("answer", [SCHEMA, Grammar("regex", "[A-Z][a-z]+"), Grammar("json_object")])
def test_an_answer_is_a_call_or_of_the_format(tool_format: ToolFormat, call: str, answer: Grammar) -> None:
    options = {"is_parallel": True, "specials": {}}
    lark = tool_format.write_grammar([ADD, NAME], must_call=False, answer="@answer", **options)
    assert lark is not None
    assert takes(call, lark, answer)
    text = "Hello" if answer.kind == "regex" else '{"name": "add"}'
    assert takes(text, lark, answer)
    assert not takes("no JSON", lark, answer)
    must = tool_format.write_grammar([ADD, NAME], must_call=True, answer="@answer", **options)
    assert must is not None
    assert takes(call, must, answer)
    assert not takes(text, must, answer)
