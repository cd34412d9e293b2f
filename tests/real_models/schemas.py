"""Fifty schemas of the kinds that people send, each with a question that asks for such an answer."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
SHORT: Schema = {"type": "string", "maxLength": 40}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}


def record(required: str | None = None, /, **properties: Schema) -> Schema:
    """An object whose properties are all required, or those named."""
    names = list(properties) if required is None else required.split()
    return {"type": "object", "properties": properties, "required": names}


def some(items: Schema, low: int = 1, high: int = 3, **more: object) -> Schema:
    """A schema for an array of `low` to `high` items."""
    return {"type": "array", "items": items, "minItems": low, "maxItems": high, **more}


def one_of(*values: object) -> Schema:
    return {"enum": list(values)}


def between(low: float, high: float) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


PERSON = record(name=SHORT, age=between(0, 120), email={"type": "string", "format": "email"})
ADDRESS = record(street=SHORT, city=SHORT, zip={"type": "string", "pattern": "^[0-9]{5}$"})
MOMENT: Schema = {"type": "string", "format": "date-time"}
HEADERS: Schema = {"type": "object", "additionalProperties": SHORT, "maxProperties": 2}
DAY = record(day=SHORT, high=INTEGER, low=INTEGER)
NODE = {
    "$defs": {"node": record("name", name=SHORT, children=some({"$ref": "#/$defs/node"}, 0, 2))},
    "$ref": "#/$defs/node",
}
EVENTS = [
    {"properties": {"kind": {"const": "click"}, "x": INTEGER, "y": INTEGER}, "required": ["kind", "x", "y"]},
    {"properties": {"kind": {"const": "key"}, "key": SHORT}, "required": ["kind", "key"]},
]
PYDANTIC = {
    "$defs": {
        "Priority": {"enum": ["low", "high"], "title": "Priority", "type": "string"},
        "Step": {**record(explanation=SHORT, output=SHORT), "title": "Step"},
    },
    "properties": {
        "priority": {"$ref": "#/$defs/Priority"},
        "note": {"anyOf": [SHORT, {"type": "null"}], "default": None, "title": "Note"},
        "steps": {"items": {"$ref": "#/$defs/Step"}, "title": "Steps", "type": "array", "maxItems": 2},
    },
    "required": ["priority", "steps"],
    "title": "Plan",
    "type": "object",
}
DRAFT_7 = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "definitions": {"point": {"type": "array", "items": [NUMBER, NUMBER], "minItems": 2, "additionalItems": False}},
    **record(start={"$ref": "#/definitions/point"}, end={"$ref": "#/definitions/point"}),
}
SHARED = {"$defs": {"base": record(id=between(1, 9999))}, "allOf": [{"$ref": "#/$defs/base"}, record(title=SHORT)]}

SCHEMAS: list[tuple[str, Schema]] = [
    ("Describe a person named Ada.", PERSON),
    ("Give an address in Berlin.", ADDRESS),
    ("Describe a person with an address.", record(person=PERSON, address=ADDRESS)),
    ("Name three colors.", record(colors=some(SHORT, 3, 3))),
    ("Is Python typed dynamically?", record(answer=FLAG)),
    ("What is 17 + 25?", record(result=INTEGER)),
    ("How warm is it in Rome in July?", record(celsius=NUMBER)),
    ("Sentiment of: I love this phone.", record(sentiment=one_of("positive", "neutral", "negative"))),
    ("Rate the text 'nice work' from 1 to 5.", record(rating=between(1, 5))),
    ("Classify: 'my invoice is wrong'.", record(label=one_of("billing", "bug", "other"), confidence=NUMBER)),
    ("Today's date is 2024-05-06. Repeat it.", record(date={"type": "string", "format": "date"})),
    ("Make up a meeting.", record(title=SHORT, start=MOMENT, minutes=between(5, 90))),
    ("Make up a UUID.", record(id={"type": "string", "format": "uuid"})),
    ("Address of localhost?", record(ip={"type": "string", "format": "ipv4"})),
    ("Homepage of Python?", record(url={"type": "string", "format": "uri"})),
    ("A product code such as ABC-123.", record(code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{3}$"})),
    ("A phone number in the USA.", record(phone={"type": "string", "pattern": r"^\+1 \d{3} \d{3} \d{4}$"})),
    ("A version number.", record(version={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"})),
    ("A hexadecimal color.", record(color={"type": "string", "pattern": "^#[0-9a-f]{6}$"})),
    ("A short user name.", record(user={"type": "string", "minLength": 3, "maxLength": 12})),
    ("The first five primes.", some(INTEGER, 5, 5)),
    ("Two shopping items with prices.", some(record(item=SHORT, price=NUMBER), 2, 2)),
    ("Extract names: Tom met Ann in Oslo.", record(people=some(SHORT), places=some(SHORT))),
    ("Summarize: cats sleep a lot.", record(summary=SHORT, keywords=some(SHORT, 1, 4))),
    ("Translate 'good morning' to French and German.", record(fr=SHORT, de=SHORT)),
    ("A recipe for tea.", record(name=SHORT, steps=some(SHORT, 2, 4), minutes=between(1, 60))),
    ("Plan: learn SQL.", PYDANTIC),
    ("A folder with files as a tree.", NODE),
    ("A click at 3, 4.", {"type": "object", "oneOf": EVENTS}),
    ("An event.", record(event={"type": "object", "anyOf": EVENTS})),
    ("A line from 0,0 to 1,2.", DRAFT_7),
    ("A book with an id.", SHARED),
    ("A value or nothing.", record(value={"type": ["string", "null"], "maxLength": 20})),
    ("A number or a word.", record(value={"anyOf": [INTEGER, SHORT]})),
    ("Constants.", record(version={"const": 2}, kind={"const": "report"}, ok={"const": True}, none={"const": None})),
    ("Counts of fruit.", {"type": "object", "additionalProperties": between(0, 99), "maxProperties": 3}),
    ("Settings.", {"type": "object", "patternProperties": {"^x_[a-z]{1,5}$": FLAG}, "maxProperties": 2}),
    ("Optional fields.", record("", a=INTEGER, b=SHORT, c=FLAG)),
    ("A tuple.", {"type": "array", "prefixItems": [SHORT, INTEGER, FLAG], "items": False, "minItems": 3}),
    ("A matrix of 2 by 2.", some(some(INTEGER, 2, 2), 2, 2)),
    ("A multiple of five.", record(n={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500})),
    ("A share between 0 and 1.", record(share={"type": "number", "minimum": 0, "maximum": 1})),
    ("SQL for all users.", record(sql={"type": "string", "maxLength": 80}, safe=FLAG)),
    ("Review: def f(x): return x+1", record(issues=some(record(line=between(1, 9), message=SHORT), 0, 2), ok=FLAG)),
    ("A commit message.", record(type=one_of("feat", "fix", "docs"), scope=SHORT, subject=SHORT, breaking=FLAG)),
    ("A calendar entry.", record("what", what=SHORT, where={"$ref": "#/$defs/place"}) | {"$defs": {"place": ADDRESS}}),
    ("An HTTP response.", record(status=one_of(200, 404, 500), headers=HEADERS)),
    ("A quiz question.", record(question=SHORT, options=some(SHORT, 4, 4), answer=between(0, 3))),
    ("A weather report.", record(city=SHORT, unit=one_of("C", "F"), days=some(DAY, 2, 2))),
    ("Deep.", record(a=record(b=record(c=record(d=record(e=SHORT)))))),
]  # fmt: skip
