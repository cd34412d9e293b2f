"""Every format of tool calls: no cut of a text changes what is read, and a value ends where the grammar ends it."""

from __future__ import annotations

import json

import pytest
from amounts import choose_amount
from cuts import cut_text, merge
from hypothesis import given, settings
from hypothesis import strategies as st
from whole_answers import load_demo, takes

from mlxr.service.answer import OutputParser
from mlxr.service.reasoning import TAGS, ReasoningSplitter
from mlxr.service.requests import Tool
from mlxr.service.schema import enforce
from mlxr.service.tools import ToolFormat
from mlxr.service.tools.blocks import DEEPSEEK, KIMI, OLD_DEEPSEEK, Gemma4Format, SectionFormat
from mlxr.service.tools.format import CallPiece
from mlxr.service.tools.harmony import HarmonyFormat
from mlxr.service.tools.marked_json import GenericFormat, HermesFormat, Llama3Format, SmolLM3Format
from mlxr.service.tools.mistral import CohereFormat, MistralFormat, Phi4Format
from mlxr.service.tools.pythonic import Lfm2Format, Olmo3Format
from mlxr.service.tools.xml import MINIMAX_START, SEED_START, GlmFormat, QwenXmlFormat, Spelling

SAY = Tool("say", "", {"type": "object", "properties": {"t": {"type": "string"}, "n": {"type": "number"}}})
NOW = Tool("now", "", {"type": "object", "properties": {}})
FORMATS: dict[str, ToolFormat] = {
    "hermes": HermesFormat(),
    "smollm3": SmolLM3Format(),
    "xml": QwenXmlFormat(),
    "seed": QwenXmlFormat(Spelling(SEED_START, breaks_lines=False)),
    "minimax": QwenXmlFormat(Spelling(MINIMAX_START, breaks_lines=False, names=True)),
    "glm": GlmFormat(breaks_lines=True),
    "glm-line": GlmFormat(breaks_lines=False),
    "harmony": HarmonyFormat(),
    "lfm2": Lfm2Format(shows_calls=False),
    "olmo3": Olmo3Format(),
    "mistral": MistralFormat(has_args_marker=False),
    "mistral-args": MistralFormat(has_args_marker=True),
    "llama3": Llama3Format(),
    "gemma4": Gemma4Format(),
    "phi4": Phi4Format("<|tool_call|>", "<|/tool_call|>"),
    "granite3": Phi4Format("<|tool_call|>", ""),
    "nemotron": Phi4Format("<TOOLCALL>", "</TOOLCALL>"),
    "cohere": CohereFormat(),
    "hunyuan": Phi4Format("<tool_calls>", "</tool_calls>"),
    "kimi": SectionFormat(KIMI),
    "deepseek": SectionFormat(DEEPSEEK),
    "old-deepseek": SectionFormat(OLD_DEEPSEEK),
    "generic": GenericFormat(),
}
DEEPSEEK_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
COHERE = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "%s", "parameters": %s}\n]<|END_ACTION|>'
JSON_CALLS = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "smollm3": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "harmony": "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s",
    "mistral": '[TOOL_CALLS][{"name": "%s", "arguments": %s}]',
    "mistral-args": "[TOOL_CALLS]%s[ARGS]%s",
    "llama3": '{"name": "%s", "parameters": %s}',
    "phi4": '<|tool_call|>[{"name": "%s", "arguments": %s}]<|/tool_call|>',
    "granite3": '<|tool_call|>[{"name": "%s", "arguments": %s}]',
    "nemotron": '<TOOLCALL>[{"name": "%s", "arguments": %s}]</TOOLCALL>',
    "cohere": COHERE,
    "hunyuan": '<tool_calls>[{"name": "%s", "arguments": %s}]</tool_calls>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>%s"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek": DEEPSEEK_CALL % "%s<｜tool▁sep｜>%s",
    "old-deepseek": DEEPSEEK_CALL % "function<｜tool▁sep｜>%s\n```json\n%s\n```",
    "generic": '{"name": "%s", "arguments": %s}',
}


def write_call(format_name: str, name: str, **values: str) -> str:
    """Write a call as the format's grammar has it; texts stand as they are, and `n` is a number."""
    plain = {key: value if key == "n" else json.dumps(value, ensure_ascii=False) for key, value in values.items()}
    if format_name in JSON_CALLS:
        pairs = ", ".join(f'"{key}": {value}' for key, value in plain.items())
        return JSON_CALLS[format_name] % (name, f"{{{pairs}}}")
    if format_name in ("xml", "seed"):
        line, tag = ("\n", "tool_call") if format_name == "xml" else ("", "seed:tool_call")
        body = "".join(f"<parameter={key}>{line}{value}{line}</parameter>\n" for key, value in values.items())
        return f"<{tag}>\n<function={name}>\n{body}</function>\n</{tag}>"
    if format_name == "minimax":
        body = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
        return f'<minimax:tool_call>\n<invoke name="{name}">\n{body}</invoke>\n</minimax:tool_call>'
    if format_name.startswith("glm"):
        line = "\n" if format_name == "glm" else ""
        pair = f"<arg_key>%s</arg_key>{line}<arg_value>%s</arg_value>{line}"
        return f"<tool_call>{name}{line}{''.join(pair % item for item in values.items())}</tool_call>"
    if format_name == "gemma4":
        quoted = {key: value if key == "n" else f'<|"|>{value}<|"|>' for key, value in values.items()}
        return f"<|tool_call>call:{name}{{{','.join(f'{key}:{value}' for key, value in quoted.items())}}}<tool_call|>"
    call = f"{name}({', '.join(f'{key}={value}' for key, value in plain.items())})"
    start, end = FORMATS[format_name].markers
    return f"{start}[{call}]{end}" if format_name == "lfm2" else f"{start}{call}{end}"


def list_words(format_name: str) -> list[str]:
    """List the parts of a format's texts: calls, some of them broken, and the words and signs that mean something."""
    say, number = write_call(format_name, "say", t="a\nb é"), write_call(format_name, "say", t="x", n="1e999")
    tricky = write_call(format_name, "say", t=f"{say[:30]}\n{say[-12:]}\"'\\")
    calls = [say, say, tricky, number, write_call(format_name, "now"), write_call(format_name, "nobody")]
    halves = [
        part for call in (say, number) for at in (9, len(call) // 2, len(call) - 3) for part in (call[:at], call[at:])
    ]
    bad = [
        say.replace("é", "\\ud83d"),
        say.replace('"', "'"),
        number.replace("1e999", "NaN"),
        number.replace("1e999", "1,"),
    ]
    signs = [*FORMATS[format_name].markers, "</parameter>\n", "<parameter=t>\n", "</function>", "```json\n", "```"]
    return [
        *calls,
        *halves,
        *bad,
        *signs,
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        "\\",
        ",",
        ";",
        " ",
        "\n",
        "text",
        "<",
        "(",
        ")",
    ]


WORDS = {format_name: list_words(format_name) for format_name in FORMATS}


@pytest.mark.parametrize("format_name", FORMATS)
@settings(max_examples=choose_amount(160))
@given(data=st.data())
def test_no_cut_of_a_text_changes_what_is_read(format_name: str, data: st.DataObject) -> None:
    """With calls, repeats, halves, markers within texts, bad JSON and thoughts; enforced or not."""
    words = data.draw(st.lists(st.sampled_from(WORDS[format_name]), max_size=7))
    thought = data.draw(st.sampled_from(["", "<think>\nhm", "<think>\nhm\n</think>\n\n", "</think>\n"]))
    text = thought + "".join(words)
    is_enforced, is_thinking = data.draw(st.booleans()), data.draw(st.booleans())
    limit, drops_repeats = data.draw(st.sampled_from([None, 1, 2])), data.draw(st.booleans())
    answered = data.draw(st.sampled_from([frozenset(), frozenset({("say", '{"t": "a\\nb é"}'), ("now", "{}")})]))

    def read(pieces: list[str]) -> list[object]:
        calls = FORMATS[format_name].open_parser((SAY, NOW), is_enforced=is_enforced)
        calls.max_calls, calls.answered = limit, answered
        tags = None if FORMATS[format_name].marks_answers else ReasoningSplitter(TAGS[1], is_open=is_thinking)
        parser = OutputParser(tags, calls, drops_repeats=drops_repeats)
        return merge([part for piece in pieces for part in parser.push(piece)] + parser.flush())

    found = read([text])
    assert read(data.draw(cut_text(text))) == found
    assert read(list(text)) == found
    for part in found:
        if isinstance(part, CallPiece) and not is_enforced:
            arguments = json.loads(part.arguments, parse_constant=pytest.fail, parse_float=float)
            assert float("inf") not in arguments.values()
            part.arguments.encode()


@pytest.mark.parametrize("format_name", ["generic", "hermes", "xml", "seed"])
def test_a_run_of_calls_that_must_come_has_each_once(format_name: str) -> None:
    """A model that has to call repeats the same call until its tokens run out; new calls after it are kept."""
    a, b, c = (write_call(format_name, "say", t=text) for text in ("a", "b", "abc"))
    for calls, texts, is_over in (
        ([a, a, b], "a b", False),
        ([a, a, b, a, c], "a b abc", False),
        ([c, a, a, a, b], "abc a", True),
        ([a, b, a, b, c], "a b", True),
    ):
        text = "\n".join(calls)
        for pieces in ([text], list(text)):
            parser = OutputParser(None, FORMATS[format_name].open_parser((SAY,), is_enforced=True), drops_repeats=True)
            found = merge([part for piece in pieces for part in parser.push(piece)] + parser.flush())
            assert [part.call for part in found] == list(range(len(found)))
            assert [json.loads(part.arguments)["t"] for part in found] == texts.split()
            assert parser.is_over is is_over


ENDS = {
    "seed": ["</parameter", "\n", "</function>", "<parameter=n>", "</seed:tool_call>"],
    "minimax": ["</parameter>", "\n", "</invoke>", '<parameter name="n">', "</minimax:tool_call>"],
    "xml": ["</parameter>", "\n</parameter>\n", "</function>", "<parameter=n>", "<function=say>", "</tool_call>"],
    "glm": ["<arg_value>", "</arg_value", "<arg_key>n</arg_key>", "</tool_call>", "</arg_"],
    "gemma4": ['<|"|', "|>", "<tool_call|>", "<|tool_call>", "}", ",n:1"],
    "lfm2": ["<|tool_call_end|>", '")]<|tool_call_end|>', '"', "\\", ", n=1", ")]", "'"],
    "olmo3": ["</function_calls>", '")</function_calls>', '"', "\\", ", n=1", ")\n", "'"],
    "harmony": ["<|call|>", "<|end|>", "<|start|>assistant<|channel|>final<|message|>", '"', "\\"],
    "hermes": ["</tool_call>", "<tool_call>", '"}}', '"', "\\"],
    "kimi": ["<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>", '"}', '"', "\\"],
    "old-deepseek": ["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>", "\n```", '"}', '"', "\\"],
    "mistral": ["[TOOL_CALLS]", "]", '"}}]', '"', "\\"],
}
LARK = {
    name: FORMATS[name].write_grammar((SAY, NOW), must_call=True, is_parallel=True, specials={}) or "" for name in ENDS
}


@pytest.mark.parametrize("format_name", ENDS)
@settings(max_examples=choose_amount(80))
@given(data=st.data())
def test_a_value_ends_where_the_grammar_ends_it(format_name: str, data: st.DataObject) -> None:
    """Whatever a text holds, a call that the grammar allows is read as the call that was written."""
    words = st.sampled_from([*ENDS[format_name], "a", "\n", " ", "x = 1", "é"])
    value = "".join(data.draw(st.lists(words, max_size=5)))
    number = data.draw(st.sampled_from(["1", "-2.5", "1e999"]))
    number = "2" if format_name == "gemma4" and "e" in number else number
    text = write_call(format_name, "say", t=value, n=number)
    if not takes(text, LARK[format_name]):
        return
    for pieces in ([text], list(text)):
        parser = FORMATS[format_name].open_parser((SAY, NOW), is_enforced=True)
        (call,) = merge([part for piece in pieces for part in parser.push(piece)] + parser.flush())
        arguments = json.loads(call.arguments)
        assert (call.name, arguments["t"]) == ("say", value)
        assert arguments["n"] == float(number) or 1e300 < arguments["n"] < float("inf")


def test_the_texts_of_this_test_are_those_of_the_grammars() -> None:
    for format_name, lark in LARK.items():
        for call in (write_call(format_name, "say", t="x", n="2"), write_call(format_name, "now")):
            assert takes(call, lark), (format_name, call)


DEFINITIONS = {
    "Addr": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    "Unit": {"enum": ["1", "2"], "type": "string"},
    "Text": {"type": "string"},
    "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}},
}
NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"anyOf": [{"$ref": "#/$defs/Addr"}, NULL]}, {'{"name": "x"}': {"name": "x"}, "null": None}, ["John", "1"]),
        ({"oneOf": [{"$ref": "#/$defs/Addr"}, NULL]}, {"null": None}, ["Third City", '{"name": 1}']),
        ({"anyOf": [{"$ref": "#/$defs/Unit"}, NULL]}, {"1": "1", "2": "2", "null": None}, ["3", "{}", ""]),
        ({"enum": ["1", "2", None]}, {"1": "1", "null": None}, ["3"]),
        ({"anyOf": [{"const": "1"}, {"type": "integer"}, NULL]}, {"7": 7, "null": None}, ["x"]),
        ({"allOf": [{"$ref": "#/$defs/Unit"}], "default": "1"}, {"2": "2"}, ["12"]),
        ({"type": "string", "anyOf": [{"enum": ["1"]}, {"enum": ["2", 3]}]}, {"2": "2"}, ["3"]),
        ({"allOf": [{"$ref": "#/definitions/Text"}]}, {"12": "12", "null": "null"}, []),
        ({"$ref": "#/definitions/Text"}, {"12": "12"}, []),
        ({"anyOf": [{"$ref": "#/definitions/Text"}, NULL]}, {"12": "12", "null": None, '{"a": 1}': '{"a": 1}'}, []),
        ({"pattern": "^[0-9]+$"}, {"12": "12"}, []),
        ({"anyOf": [{"$ref": "#/$defs/Node"}, NULL]}, {'{"next": {}}': {"next": {}}}, ["x", '{"next": 1}']),
        ({"type": ["integer", "null"]}, {"3": 3, "null": None}, ["x", "1.5"]),
        ({"$ref": "#/properties/other"}, {"true": True}, ["yes"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("format_name", ["xml", "seed", "glm", "glm-line"])
def test_references_are_enforced_and_typed(
    format_name: str, schema: dict[str, object], good: dict[str, object], bad: list[str]
) -> None:
    """The parser uses the client's schema, the grammar the library's version of it."""
    parameters = {
        "type": "object",
        "properties": {"t": schema, "other": {"type": "boolean"}},
        "required": ["t"],
        "$defs": DEFINITIONS,
        "definitions": {"Text": {"type": "string"}},
    }
    enforced = Tool("say", "", enforce(json.dumps(parameters)).schema)
    lark = FORMATS[format_name].write_grammar([enforced], must_call=True, is_parallel=False, specials={})
    assert lark is not None
    for text, value in good.items():
        call = write_call(format_name, "say", t=text)
        assert takes(call, lark), text
        for is_enforced in (False, True):
            parser = FORMATS[format_name].open_parser([Tool("say", "", parameters)], is_enforced=is_enforced)
            (found,) = [*parser.push(call), *parser.flush()]
            assert isinstance(found, CallPiece)
            assert json.loads(found.arguments) == {"t": value}
    for text in bad:
        assert not takes(write_call(format_name, "say", t=text), lark), text


@pytest.mark.parametrize("format_name", ["xml", "glm", "lfm2", "gemma4"])
def test_arguments_may_be_described_anywhere_below_the_root(format_name: str) -> None:
    part = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    root = {"allOf": [{"$ref": "#/$defs/part"}, {"properties": {"t": {"type": "string"}}}], "$defs": {"part": part}}
    enforced = Tool("say", "", enforce(json.dumps(root)).schema)
    lark = FORMATS[format_name].write_grammar([enforced], must_call=True, is_parallel=False, specials={})
    assert lark is not None
    assert takes(write_call(format_name, "say", n="1", t="2"), lark)
    assert format_name == "gemma4" or not takes(write_call(format_name, "say", t="2"), lark)
    parser = FORMATS[format_name].open_parser([Tool("say", "", root)], is_enforced=True)
    (found,) = [*parser.push(write_call(format_name, "say", n="1", t="2")), *parser.flush()]
    assert isinstance(found, CallPiece)
    assert json.loads(found.arguments) == {"n": 1, "t": "2"}


@pytest.mark.parametrize("format_name", ["glm", "gemma4"])
def test_a_text_cannot_spell_the_token_that_ends_it(format_name: str) -> None:
    """If the marker is a control token, the parser could not tell the token from its spelling."""
    token, marker = "<|im_start|>", {"glm": "</arg_value>", "gemma4": '<|"|>'}[format_name]
    specials = {marker: f"<[{load_demo()[0].token_id(token)}]>"}
    lark = FORMATS[format_name].write_grammar((SAY,), must_call=True, is_parallel=False, specials=specials)
    assert lark is not None
    for inner, fits in ((marker[:-1], True), (marker, False)):
        call = write_call(format_name, "say", t="a{}b").replace(marker, token).replace("{}", inner)
        assert takes(call, lark, parse_special=True) is fits
