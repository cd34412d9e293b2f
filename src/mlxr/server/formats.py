"""Reads what an answer must look like, however a dialect says it, as one Grammar.

Here are OpenAI's `response_format` and `text.format`, with `regex` and `grammar` as additions; the fields `grammar` and
`json_schema` of llama.cpp; `guided_json` and its kin and `structured_outputs` of vLLM; and schemas as Ollama and
Anthropic send them. A grammar is GBNF if it has rules with `::=`, else Lark.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import Grammar
from mlxr.server.json_models import JsonObject, RequestModel, Text, dump_json

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
Schema = JsonObject | Text
Choices = Annotated[list[Text], Field(min_length=1, max_length=10_000)]


class TextFormat(RequestModel):
    """The answer may be any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """A JSON object, of the given schema if there is one."""

    type: Literal["json_object"]
    json_schema: JsonObject | None = Field(None, alias="schema")


class NamedSchema(RequestModel):
    """A JSON schema with a name. It is always enforced, whether `strict` or not."""

    name: str | None = None
    description: str | None = None
    json_schema: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(RequestModel):
    """JSON of a schema, as chat completions spell it; llama.cpp's clients leave out the object around the schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema | None = None
    flat: JsonObject | None = Field(None, alias="schema")


class FlatJsonSchemaFormat(NamedSchema):
    """JSON of a schema, as Responses spell it."""

    type: Literal["json_schema"]


class RegexFormat(RequestModel):
    """Text that a regular expression matches as a whole."""

    type: Literal["regex"]
    regex: Text


class GrammarFormat(RequestModel):
    """Text of a grammar, in GBNF or in Lark's notation."""

    type: Literal["grammar"]
    grammar: Text


class StructuredOutputs(RequestModel):
    """vLLM's `structured_outputs`: one of these."""

    json_schema: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None

    def list_grammars(self) -> list[Grammar | None]:
        """Return what is asked for, and None for what is not."""
        place = "structured_outputs"
        return [
            make_schema_grammar(self.json_schema, f"{place}.json"),
            _read_regex(self.regex, f"{place}.regex"),
            _read_choice(self.choice, f"{place}.choice"),
            _read_grammar(self.grammar, f"{place}.grammar"),
            Grammar("json_object", field=f"{place}.json_object") if self.json_object else None,
        ]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat, Field(discriminator="type")
]
FlatFormat = Annotated[
    TextFormat | JsonObjectFormat | FlatJsonSchemaFormat | RegexFormat | GrammarFormat, Field(discriminator="type")
]


class GrammarFields(RequestModel):
    """Fields at the top of a request by which llama.cpp and vLLM say what the answer must look like."""

    grammar: str | None = Field(None, description="A grammar in GBNF or Lark.")
    json_schema: JsonObject | None = Field(None, description="A JSON schema.")
    guided_json: Schema | None = Field(None, description="A JSON schema.")
    guided_regex: Text | None = Field(None, description="A regular expression.")
    guided_choice: Choices | None = Field(None, description="One of these texts.")
    guided_grammar: Text | None = Field(None, description="A grammar in GBNF or Lark.")
    structured_outputs: StructuredOutputs | None = None

    def make_grammar(self, wanted: ResponseFormat | FlatFormat | None = None, field: str = "") -> Grammar | None:
        """The grammar that the request asks for, also by `wanted`, its field `field`; None for any text.

        Raises InvalidRequest for a schema that is no JSON, and where two fields ask for different things.
        """
        found = [
            make_format_grammar(wanted, field),
            _read_grammar(self.grammar, "grammar"),
            make_schema_grammar(self.json_schema, "json_schema"),
            make_schema_grammar(self.guided_json, "guided_json"),
            _read_regex(self.guided_regex, "guided_regex"),
            _read_choice(self.guided_choice, "guided_choice"),
            _read_grammar(self.guided_grammar, "guided_grammar"),
            *(self.structured_outputs.list_grammars() if self.structured_outputs else ()),
        ]
        grammars = [grammar for grammar in found if grammar is not None]
        if len(set(grammars)) > 1:
            raise InvalidRequest(grammars[1].field, f"cannot hold together with {grammars[0].field}")
        return grammars[0] if grammars else None


def make_format_grammar(wanted: ResponseFormat | FlatFormat | None, field: str) -> Grammar | None:
    """The grammar for a format, None for any text; raises InvalidRequest naming `field` where a schema is no JSON."""
    match wanted:
        case None | TextFormat():
            return None
        case RegexFormat():
            return _read_regex(wanted.regex, field)
        case GrammarFormat():
            return _read_grammar(wanted.grammar, field)
        case JsonSchemaFormat():
            if wanted.json_schema is None and wanted.flat is None:
                raise InvalidRequest(f"{field}.json_schema", "is missing")
            schema = wanted.flat if wanted.json_schema is None else wanted.json_schema.json_schema
        case _:
            schema = wanted.json_schema
    return Grammar("json_object", field=field) if schema is None else make_schema_grammar(schema, field)


def make_schema_grammar(schema: JsonObject | str | None, field: str) -> Grammar | None:
    """The grammar for a JSON schema, which may also come as text; raises InvalidRequest naming `field`."""
    if schema is None:
        return None
    return Grammar("json_schema", schema if isinstance(schema, str) else dump_json(schema, field), field)


def _read_grammar(text: str | None, field: str) -> Grammar | None:
    if not text:
        return None  # llama.cpp's clients send an empty one for none
    return Grammar("gbnf" if _GBNF_RULE.search(text) else "lark", text, field)


def _read_regex(text: str | None, field: str) -> Grammar | None:
    return None if text is None else Grammar("regex", text, field)


def _read_choice(choices: list[str] | None, field: str) -> Grammar | None:
    return None if choices is None else Grammar("regex", "|".join(map(re.escape, choices)), field)
