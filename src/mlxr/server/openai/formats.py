"""`response_format` and `text.format`: what an answer must look like, as a Grammar.

Besides OpenAI's types, `regex` and `grammar` (Lark) are understood.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mlxr.core.types import Grammar
from mlxr.server.json_models import JsonObject, RequestModel, Text, dump_json


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """A JSON object, of the given schema if there is one."""

    type: Literal["json_object"]
    json_schema: JsonObject | None = Field(None, alias="schema")


class NamedSchema(RequestModel):
    """A JSON schema with a name. It is always enforced, whether `strict` or not."""

    name: Text
    description: str | None = None
    json_schema: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(RequestModel):
    """JSON of a schema, as chat completions spell it."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatJsonSchemaFormat(RequestModel):
    """JSON of a schema, as Responses spell it."""

    type: Literal["json_schema"]
    name: Text
    description: str | None = None
    json_schema: JsonObject = Field(alias="schema")
    strict: bool | None = None


class RegexFormat(RequestModel):
    """Text that a regular expression matches as a whole."""

    type: Literal["regex"]
    regex: Text


class GrammarFormat(RequestModel):
    """Text of a grammar in Lark's notation."""

    type: Literal["grammar"]
    grammar: Text


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat, Field(discriminator="type")
]
FlatFormat = Annotated[
    TextFormat | JsonObjectFormat | FlatJsonSchemaFormat | RegexFormat | GrammarFormat, Field(discriminator="type")
]


def make_grammar(wanted: ResponseFormat | FlatFormat | None, field: str) -> Grammar | None:
    """The grammar for a format, None for any text; raises InvalidRequest naming `field` where a schema is no JSON."""
    match wanted:
        case None | TextFormat():
            return None
        case RegexFormat():
            return Grammar("regex", wanted.regex)
        case GrammarFormat():
            return Grammar("lark", wanted.grammar)
        case JsonSchemaFormat():
            schema = wanted.json_schema.json_schema
        case _:
            schema = wanted.json_schema
    return Grammar("json_object") if schema is None else Grammar("json_schema", dump_json(schema, field))
