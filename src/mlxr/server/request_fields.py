"""Fields of requests that several dialects share: sampling parameters, formats of answers, samplers, prompts.

The classes of parameters are made from the one table of them (`core/sampling`), under each dialect's spellings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model

from mlxr.core.errors import InvalidRequest, TemplateError
from mlxr.core.sampling import BY_SPELLING, Dialect, Parameter
from mlxr.core.types import MAX_INT, PARAMETERS, Grammar
from mlxr.server.routes import JsonObject, RequestModel, Text, dump_json
from mlxr.service.requests import ChatRequest, Prompt
from mlxr.service.session import Session
from mlxr.service.sight import read_base64


class ParameterFields(RequestModel):
    """A request with a field for every name of every sampling parameter; null counts as not given."""

    def list_given(self) -> dict[str, object]:
        """Return the values that the request sets, by their names; of two names of one parameter the preferred last."""
        names = [name for name in type(self).model_fields if name in BY_SPELLING]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def read(self, name: str, default: Any) -> Any:
        """Return the value of one of the fields, `default` if it is absent or null."""
        value = getattr(self, name)
        return default if value is None else value


def make_fields(title: str, *dialects: Dialect) -> type[ParameterFields]:
    """Make a base class for the requests of these dialects."""
    fields: dict[str, Any] = {
        name: (_type_of(row) | None, Field(None, description=row.help))
        for row in PARAMETERS
        for name in row.list_names(*dialects)
    }
    return create_model(title, __base__=ParameterFields, __module__=__name__, **fields)


def _type_of(row: Parameter) -> Any:
    if row.kind == "texts":
        return Text | Annotated[list[Text], Field(max_length=int(row.high))]
    if row.kind == "flag":
        return bool
    low = min([row.low, *row.stands_for])
    bounds = Field(gt=low, le=row.high) if row.open_low else Field(ge=low, le=row.high)
    return Annotated[float if row.kind == "float" else int, bounds]


if TYPE_CHECKING:

    class OpenAIParameters(ParameterFields):
        """OpenAI's names, and llama.cpp's, whose server takes them there too."""

    class ResponsesParameters(ParameterFields):
        """The names of OpenAI's Responses."""

    class AnthropicParameters(ParameterFields):
        """The sampling parameters under Anthropic's names."""

    class LlamacppParameters(ParameterFields):
        """The names of llama.cpp's own routes."""
else:
    OpenAIParameters = make_fields("OpenAIParameters", "llamacpp", "openai")
    ResponsesParameters = make_fields("ResponsesParameters", "responses")
    AnthropicParameters = make_fields("AnthropicParameters", "anthropic")
    LlamacppParameters = make_fields("LlamacppParameters", "llamacpp")


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
        """Return the grammars of the given fields, and None for the others."""
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
    """The top-level fields by which llama.cpp and vLLM constrain the form of an answer."""

    grammar: str | None = Field(None, description="A grammar in GBNF or Lark.")
    json_schema: JsonObject | None = Field(None, description="A JSON schema.")
    guided_json: Schema | None = Field(None, description="A JSON schema.")
    guided_regex: Text | None = Field(None, description="A regular expression.")
    guided_choice: Choices | None = Field(None, description="One of these texts.")
    guided_grammar: Text | None = Field(None, description="A grammar in GBNF or Lark.")
    structured_outputs: StructuredOutputs | None = None

    def make_grammar(self, wanted: ResponseFormat | FlatFormat | None = None, field: str = "") -> Grammar | None:
        """Return the grammar that the request asks for, also by `wanted`, its field `field`; None for any text.

        Raises InvalidRequest for a schema that is no JSON, and if two fields ask for different grammars.
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
    """Return the grammar for a format, None for any text; raises InvalidRequest naming `field` for a bad schema."""
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
    """Return the grammar for a JSON schema, which may also come as text; raises InvalidRequest naming `field`."""
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


# llama.cpp's names in the order of its default, and the values with which the rule does nothing.
RULES: Mapping[str, Mapping[str, Any]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
}
_LETTERS = dict(zip("edskypmxt", RULES, strict=True))
_ALIASES = {"temp": "temperature", "nucleus": "top_p", "typ": "typ_p", "typical": "typ_p", "typicalp": "typ_p"}
_ALIASES |= {name.replace("_", ""): name for name in RULES}
_FEELS_TEMPERATURE = frozenset({"typ_p", "top_p", "min_p", "xtc"})


class SamplerFields(ParameterFields):
    """Sampling parameters that `samplers` can switch off."""

    samplers: Annotated[list[str], Field(max_length=64)] | Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Rules in the order in which they choose a token; the others are off."
    )

    def list_given(self) -> dict[str, object]:
        """Return the values that the request sets, with those that switch off rules missing in `samplers`."""
        given = super().list_given()
        if self.samplers is None or given.get("mirostat"):
            return given
        chain = read_samplers(self.samplers)
        off = {name: value for rule, values in RULES.items() if rule not in chain for name, value in values.items()}
        kept = {name: value for name, value in given.items() if BY_SPELLING[name].name not in off}
        if "temperature" in chain:
            kept.setdefault("temperature_last", comes_last(chain))
        return {**kept, **off}

    def list_left_out(self) -> Iterator[str]:
        """Yield the samplers that do not exist here."""
        for name in self.samplers or ():
            if _find_rule(name, is_letter=isinstance(self.samplers, str)) is None:
                yield f"samplers.{name}"


def read_samplers(samplers: Sequence[str]) -> list[str]:
    """Return the rules of a list of names, or of a text of letters; those that do not exist here are left out.

    Raises InvalidRequest for an order other than ours.
    """
    found = (_find_rule(name, is_letter=isinstance(samplers, str)) for name in samplers)
    chain = [rule for rule in found if rule is not None]
    others = [rule for rule in chain if rule != "temperature"]
    in_order = others == [rule for rule in RULES if rule in others]
    if not in_order or chain.count("temperature") > 1 or comes_last(chain) is None:
        raise InvalidRequest(
            "samplers",
            f"must be in the order {', '.join(RULES)}, each at most once; the temperature may come before the rules "
            "that leave tokens out",
        )
    return chain


def comes_last(chain: Sequence[str]) -> bool | None:
    """Return True if the temperature comes after the rules that it changes; None if it stands among them."""
    if "temperature" not in chain:
        return False
    place = chain.index("temperature")
    before, after = (not _FEELS_TEMPERATURE.isdisjoint(part) for part in (chain[:place], chain[place:]))
    return None if before and after else not after


def _find_rule(name: str, *, is_letter: bool) -> str | None:
    return _LETTERS.get(name) if is_letter else _ALIASES.get(name.lower().replace("_", "").replace("-", ""))


MAX_PROMPTS = 2048
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
Mixed = list[TokenId | str]
Prompts = Annotated[
    str | JsonObject | Annotated[list[TokenId | str | Mixed | JsonObject], Field(max_length=MAX_PROMPTS * 1024)],
    Field(description="Text, token ids, both mixed, an object with `prompt_string`, or a list of these."),
]


def split_prompts(given: object, field: str) -> tuple[list[object], bool]:
    """Return the prompts one by one, and whether they came as a list; raises InvalidRequest for an empty list."""
    if not isinstance(given, list):
        return [given], False
    if not given:
        raise InvalidRequest(field, "is an empty list")
    kinds = set(map(type, given))  # quick, as there may be very many
    if int in kinds and kinds <= {int, str}:
        return [given], False
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(field, f"has {len(given)} prompts; at most {MAX_PROMPTS} are taken")
    return given, True


def read_prompt(
    session: Session, prompt: object, field: str, *, parse_special: bool = True, takes_pictures: bool = False
) -> Prompt:
    """Return one prompt for the service; texts between token ids are encoded without the tokens that begin a text.

    `read_media` reads pictures beside a text, if a route `takes_pictures`.
    """
    if isinstance(prompt, dict):
        return _read_object(prompt, field, takes_pictures=takes_pictures)
    if not isinstance(prompt, list):
        return str(prompt)
    return _join_parts(session, prompt, parse_special)


def _join_parts(session: Session, parts: Sequence[object], parse_special: bool) -> list[int]:
    ids: list[int] = []
    for place, part in enumerate(parts):
        if not isinstance(part, str):
            ids.append(part)  # type: ignore[arg-type]  # checked by the request's model
        elif part:
            ids += session.tokenizer.encode(part, add_special=place == 0, parse_special=parse_special)
    return ids


def _read_object(prompt: JsonObject, field: str, *, takes_pictures: bool) -> str:
    """Return the text of an object: `prompt_string`, or `content` with parts of text. Other media are refused."""
    if prompt.get("multimodal_data") and not takes_pictures:
        raise InvalidRequest(f"{field}.multimodal_data", "is not supported here: only /completion takes pictures")
    text = prompt.get("prompt_string")
    if isinstance(text, str):
        return text
    parts = prompt.get("content")
    if not isinstance(parts, list):
        raise InvalidRequest(field, "must hold `prompt_string`, a text, or `content`, a list of text parts")
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(one, str) for one in texts):
        raise InvalidRequest(f"{field}.content", "must be a list of text parts; models read text only")
    return "".join(str(one) for one in texts)


def read_media(prompt: object, field: str) -> list[bytes]:
    """Return the pictures of an object, which come in base64 (`multimodal_data`); none for another prompt."""
    given = prompt.get("multimodal_data") if isinstance(prompt, dict) else None
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise InvalidRequest(f"{field}.multimodal_data", "must be a list of pictures in base64")
    return [read_base64(str(one), f"{field}.multimodal_data[{index}]") for index, one in enumerate(given)]


ANSWER_SHARE = 4  # if turns must go, at least a quarter of the context is left for the answer
_SYSTEM = ("system", "developer")


def explain_service_tool(kind: str) -> InvalidRequest:
    """Return the refusal of a tool that only the service of a dialect has, such as web_search."""
    text = f"{kind!r} runs at its own service, not here; offer a function that your program runs in its place"
    return InvalidRequest("tools[0].type", text)


def drop_oldest(session: Session, wanted: ChatRequest) -> ChatRequest:
    """Return the conversation without its oldest turns, if it is too long; system messages and the last message stay.

    From the last turn the oldest calls with their results go, and finally the user's question, if nothing else helps.
    If the rest is still too long, its prompt is cut later, or refused. A conversation that fits is rendered once; for
    others a binary search over their turns is needed.
    """
    tokens = session.context_tokens if wanted.window is None else wanted.window.tokens
    if len(session.encode_chat(wanted)) < tokens:
        return wanted
    turns, parts = _list_droppable(wanted.messages)
    answer_tokens = min(wanted.params.max_tokens or tokens, tokens // ANSWER_SHARE)

    def drop(count: int) -> ChatRequest:
        gone = set(chain.from_iterable([*turns, *parts][:count]))
        return replace(wanted, messages=[message for place, message in enumerate(wanted.messages) if place not in gone])

    def fits(count: int, most_tokens: int) -> bool:
        try:
            return len(session.encode_chat(drop(count))) <= most_tokens
        except TemplateError:  # the template took the whole conversation, so it may take a shorter one
            return False

    found = _find_first(1, len(turns), lambda count: fits(count, tokens - answer_tokens))
    found = found or _find_first(max(len(turns), 1), len(turns) + len(parts), lambda count: fits(count, tokens - 1))
    return drop(found or len(turns) + len(parts))


def _find_first(low: int, last: int, fits: Callable[[int], bool]) -> int | None:
    """Return the first number from `low` to `last` that fits, if all after it do, too; None if none does."""
    high = last + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low if low <= last else None


def _list_droppable(messages: Sequence[Mapping[str, object]]) -> tuple[list[list[int]], list[list[int]]]:
    """List places of messages that are dropped together, in that order: whole turns, and then parts of the last."""
    turns: list[list[int]] = []
    before: object = None
    for place, message in enumerate(messages):
        role = message.get("role")
        if role not in _SYSTEM:
            if not turns or (role == "user" and before != "user"):
                turns.append([])
            turns[-1].append(place)
            before = role
    if not turns:
        return [], []
    *older, last = turns
    asked = [place for place in last if messages[place].get("role") == "user"]
    rounds: list[list[int]] = []  # the assistant's messages, with the results of their calls
    for place in last[len(asked) :]:
        if not rounds or messages[place].get("role") == "assistant":
            rounds.append([])
        rounds[-1].append(place)
    questions = [[place] for place in (asked if rounds else asked[:-1])]
    return older, [*rounds[:-1], *questions]
