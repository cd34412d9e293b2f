"""Schemas as users write them: the part that the library gets, the rules that are left out, and refusals."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
from whole_answers import load_demo, takes

from mlxr.core.types import Grammar
from mlxr.engine.request import MaskSource
from mlxr.service.schema import SchemaError, enforce

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
A, B = {"a": {"type": "integer"}}, {"b": {"type": "boolean"}}
AB = {"properties": {**A, **B}}


NODE = {"type": "object", "properties": {"v": A["a"], "next": {"allOf": [{"$ref": "#/$defs/node"}]}}, "required": ["v"]}


@pytest.mark.parametrize(
    ("schema", "taken", "not_taken"),
    [
        ({"type": "object", "properties": A}, [{}, {"a": 1}], [{"x": 1}, {"a": 1, "x": 1}]),
        (AB, [{"a": 1, "b": True}], ["a", 7, {"c": 1}]),
        ({"type": "object", "properties": A, "required": ["c"]}, [{"a": 1, "c": "x"}], [{"a": 1, "c": 1, "d": 1}]),
        ({"type": "object", "properties": A, "additionalProperties": True}, [{"a": 1, "x": 1}], [{"a": "x"}]),
        ({"type": "object", "properties": A, "additionalProperties": B["b"]}, [{"a": 1, "x": True}], [{"x": 1}]),
        ({"type": "object"}, [{}, {"x": [1]}], [1]),
        ({"allOf": [{"properties": A}, {"properties": B}]}, [{"a": 1, "b": True}], [{"a": 1, "b": True, "c": 1}]),
        (
            {"$defs": {"base": {"type": "object", "properties": A}}, "$ref": "#/$defs/base", "properties": B},
            [{"a": 1, "b": True}],
            [{"a": 1, "c": 1}],
        ),
        (
            {
                "type": "object",
                "properties": {"kind": {"type": "string"}},
                "required": ["kind"],
                "oneOf": [
                    {"properties": {"kind": {"const": "one"}, **A}, "required": ["a"]},
                    {"properties": {"kind": {"const": "two"}, **B}},
                ],
            },
            [{"kind": "one", "a": 1}, {"kind": "two"}],
            [{"kind": "two", "a": 1}, {"kind": "one"}, {"kind": "one", "a": 1, "x": 1}],
        ),
        (
            {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
            [{"v": 1, "next": {"v": 2}}],
            [{"v": 1, "x": 2}, {"v": 1, "next": {"v": 2, "x": 1}}],
        ),
        ({"allOf": [AB], "unevaluatedProperties": False}, [{"a": 1}], [{"c": 1}]),
        ({"type": "object", "patternProperties": {"^x_": A["a"]}}, [{"x_y": 1}], [{"y": 1}]),
        (
            {"properties": A, "patternProperties": {"^a$": {"minimum": 5}}, "required": ["a"]},
            [{"a": 6}],
            [{"a": 4}, {}, {"a": 6, "a ": 6}],
        ),
        (
            {**AB, "patternProperties": {"^(a|b)$": True, "^x": False}, "additionalProperties": False},
            [{}, {"a": 1, "b": True}],
            [{"a": 1, "x": 1}, {"b": 1}],
        ),
        (
            {
                "type": "object",
                "allOf": [{"properties": A}, {"$ref": "#/$defs/p"}],
                "$defs": {"p": {"patternProperties": {"^a$": {"maximum": 7}}, "additionalProperties": False}},
            },
            [{}, {"a": 6}],
            [{"a": 8}, {"b": 1}],
        ),
        ({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}, **AB}, [{"a": 1}], [{"c": 1}]),
        (
            {"type": "object", "propertyNames": {"pattern": "^[xy]$"}, "additionalProperties": A["a"]},
            [{"x": 1}],
            [{"z": 1}, {"x": True}],
        ),
        ({"type": "object", "propertyNames": {"enum": ["x", "y"]}}, [{"x": 1}, {"x": 1, "y": 2}], [{"z": 1}]),
        (
            {"$schema": DRAFT_7, "items": [A["a"], B["b"]], "additionalItems": False},
            [[1, True]],
            [[1, True, 1], [True]],
        ),
        ({"$id": "http://e/s", "$ref": "#n", "$defs": {"x": {"$anchor": "n", **A["a"]}}}, [1], ["a"]),
        ({"$defs": {"x/y": A["a"]}, "items": {"$ref": "#/$defs/x~1y"}}, [[1]], [["a"]]),
        ({"type": "object", "properties": A, "if": AB, "then": {"required": ["c"]}}, [{"a": 1, "c": 2}], [{"d": 1}]),
    ],
    ids=str,
)
def test_objects_take_what_they_name(schema: object, taken: list[object], not_taken: list[object]) -> None:
    grammar = Grammar("json_schema", json.dumps(schema))
    for value in taken:
        jsonschema.validate(value, schema)  # type: ignore[arg-type]
        assert takes(json.dumps(value, separators=(",", ":")), grammar), value
    for value in not_taken:
        assert not takes(json.dumps(value, separators=(",", ":")), grammar), value


@pytest.mark.parametrize(
    ("schema", "relaxed"),
    [
        ({"type": "array", "items": A["a"], "uniqueItems": True}, ["uniqueItems"]),
        ({"type": "string", "not": {"const": "x"}}, ["not"]),
        ({"type": "object", "properties": A, "propertyNames": {"maxLength": 3}}, ["propertyNames"]),
        ({"type": "array", "contains": A["a"], "minContains": 2}, ["contains", "minContains"]),
        ({"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"minimum": 3}}, ["if"]),
        ({**AB, "dependentRequired": {"a": ["b"]}}, ["dependentRequired"]),
        ({**AB, "dependencies": {"a": ["b"]}}, ["dependencies"]),
        ({**AB, "dependentSchemas": {"a": {"required": ["b"]}}}, ["dependentSchemas"]),
        ({"type": "string", "format": "phone"}, ["format"]),
        ({"type": "string", "pattern": r"^(?!admin)[a-z]+$"}, ["pattern"]),
        ({"type": "string", "pattern": r"^(a|b)\1$"}, ["pattern"]),
        ({"type": "object", "patternProperties": {"^a": A["a"], "^ab": B["b"]}}, ["patternProperties"]),
        ({"type": "object", "patternProperties": {"^(?=a)": A["a"]}}, ["patternProperties"]),
        ({**AB, "type": "object", "minProperties": 2}, ["minProperties"]),
        ({"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 5}]}, ["oneOf"]),
        ({"$ref": "https://example.com/other.json"}, ["$ref"]),
        ({"oneOf": [{"type": "integer"}, {"type": "string", "format": "date"}], "x-order": 1, "example": 2}, []),
        (
            {"type": "string", "not": {}, "deprecated": True, "$schema": DRAFT_7},
            ["not"],
        ),
    ],
    ids=str,
)
def test_what_no_mask_can_hold_is_named(schema: object, relaxed: list[str]) -> None:
    text = json.dumps(schema)
    assert list(enforce(text).relaxed) == relaxed
    assert list(load_demo()[1].compile(Grammar("json_schema", text)).relaxed) == relaxed


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": 3}, "properties must be an object, got 3"),
        ({"properties": {"a": 3}}, "a schema must be an object or a boolean, got '3'"),
        ({"allOf": {}}, "allOf must be an array"),
        ({"$ref": 3}, r"\$ref must be a string"),
        ({"$ref": "#/$defs/nothing"}, r"\$ref '#/\$defs/nothing' leads nowhere"),
        ({"type": "string", "pattern": "(["}, r"pattern '\(\[' is no regular expression"),
        ({"patternProperties": {"([": {}}}, r"pattern '\(\[' is no regular expression"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "object", "properties": A, "required": "a"}, "required"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, r"minimum \(3\) is greater than maximum"),
        (
            {"$defs": {"x": {"items": {"$ref": "#/$defs/x"}, "minItems": 1, "type": "array"}}, "$ref": "#/$defs/x"},
            "end",
        ),
        ({**AB, "required": ["a", "c"], "additionalProperties": False}, "'c' is unsatisfiable"),
    ],
    ids=str,
)
def test_what_is_no_schema_is_refused_with_the_fault(schema: object, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        enforce(json.dumps(schema))


def test_large_hostile_schemas_take_little_time() -> None:
    enforce(json.dumps({"properties": {f"p{n}": {"type": "string", "pattern": f"^a{{{n}}}$"} for n in range(700)}}))
    chain = {f"d{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(99)}
    enforce(json.dumps({"$defs": {**chain, "d99": {"type": "null"}}, "$ref": "#/$defs/d0"}))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": A, "patternProperties": {"^a$": A["a"]}, "required": ["a"], "additionalProperties": False},
        {**AB, "patternProperties": {"^[ab]$": True, "^x": False}},
        {"type": "object", "allOf": [{"properties": A}, {"patternProperties": {"^a$": True}}]},
        {"$ref": "#/$defs/x", "$defs": {"x": {"properties": A, "patternProperties": {"^a$": True}}}},
        {"anyOf": [{"properties": A, "patternProperties": {"^a$": True}, "required": ["a"]}, {"type": "null"}]},
        {"properties": {'\u00e9"': A["a"]}, "patternProperties": {'^\u00e9"$': True}},
    ],
    ids=str,
)
def test_patterns_that_only_named_properties_match_leave_no_comma_behind_them(schema: dict[str, object]) -> None:
    demo, compiler = load_demo()
    constraint = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    for seed in range(12):
        masks, draw = MaskSource(constraint.fork(), demo.vocab_size), np.random.default_rng(seed)
        for _ in range(60):
            masks.fill()
            assert masks.error is None
            allowed = np.flatnonzero(np.unpackbits(masks.mask.view(np.uint8), bitorder="little"))
            token_id = int(draw.choice(allowed))
            if token_id in demo.eos_ids:
                break
            masks.accept(token_id)


def test_patterns_that_leave_names_stay() -> None:
    for pattern in ("^x-", "^[a-z_]+$", ".*", "^(a|c)$"):
        schema = {"properties": A, "patternProperties": {pattern: True}}
        assert "patternProperties" in enforce(json.dumps(schema)).schema
