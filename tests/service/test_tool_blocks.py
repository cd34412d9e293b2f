"""Calls that are not JSON: those of Qwen3-Coder and Nemotron 3, GLM 4.5 to 4.7 and LFM 2, read, enforced and shown."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cuts import cut_text, merge
from hypothesis import given
from hypothesis import strategies as st
from whole_answers import takes

from mlxr.core.types import Grammar
from mlxr.service.requests import Tool
from mlxr.service.tools import ToolFormat, find_format
from mlxr.service.tools.arguments import read_value
from mlxr.service.tools.format import CallPiece
from mlxr.service.tools.marked_json import HermesFormat
from mlxr.service.tools.pythonic import Lfm2Format
from mlxr.service.tools.xml import GlmFormat, QwenXmlFormat

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "dry": {"type": "boolean"},
    "unit": {"enum": ["c", "f"]},
    "place": {"$ref": "#/$defs/place"},
}
DEFINITIONS = {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}}
WEATHER = Tool("weather", "", {"properties": PROPERTIES, "required": ["city"], "$defs": DEFINITIONS})
NOW = Tool("now")
TOOLS = (WEATHER, NOW)
FORMATS: dict[str, ToolFormat] = {
    "xml": QwenXmlFormat(),
    "seed": find_format("<seed:tool_call>\n<function=x>\n<parameter=y>z</parameter> tools", takes_tools=True),
    "glm": GlmFormat(breaks_lines=True),
    "glm-line": GlmFormat(breaks_lines=False),
    "lfm2": Lfm2Format(shows_calls=False),
}
XML_CITY, XML_END = "<tool_call>\n<function=weather>\n<parameter=city>\nx", "</function>\n</tool_call>"
JOINTS = {"xml": "\n", "seed": "\n", "glm": "\n"}
ALL = {"city": "Köln", "days": 3, "dry": True, "unit": "c", "place": {"x": 0.5}}
TEXTS = {"city": "Köln", "days": "3", "dry": "true", "unit": "c", "place": '{"x": 0.5}'}


def write_xml(name: str, *, texts: dict[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def write_seed(name: str, *, texts: dict[str, str]) -> str:
    body = "".join(f"<parameter={key}>{text}</parameter>\n" for key, text in texts.items())
    return f"<seed:tool_call>\n<function={name}>\n{body}</function>\n</seed:tool_call>"


def write_glm(name: str, *, texts: dict[str, str], line: str = "\n") -> str:
    pairs = (f"<arg_key>{k}</arg_key>{line}<arg_value>{v}</arg_value>{line}" for k, v in texts.items())
    return f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>"


def write_lfm2(name: str, *, texts: dict[str, str]) -> str:
    values = {key: f'"{text}"' if key in ("city", "unit") else text for key, text in texts.items()}
    return f"<|tool_call_start|>[{name}({', '.join(f'{k}={v}' for k, v in values.items())})]<|tool_call_end|>"


def write(format_name: str, name: str, **texts: str) -> str:
    if format_name == "xml":
        return write_xml(name, texts=texts)
    if format_name == "seed":
        return write_seed(name, texts=texts)
    if format_name == "lfm2":
        return write_lfm2(name, texts=texts)
    return write_glm(name, texts=texts, line="\n" if format_name == "glm" else "")


def called(name: str, number: int = 0, **arguments: object) -> CallPiece:
    return CallPiece(number, json.dumps(arguments, ensure_ascii=False), name)


def read(format_name: str, pieces: list[str], *, limit: int | None = None, is_enforced: bool = False) -> list[Any]:
    parser = FORMATS[format_name].open_parser(TOOLS, is_enforced=is_enforced)
    parser.max_calls = limit
    found = [part for piece in pieces for part in parser.push(piece)]
    return merge(found + parser.flush())


@pytest.mark.parametrize("format_name", FORMATS)
def test_values_are_of_the_types_that_the_tool_wants(format_name: str) -> None:
    call, now = write(format_name, "weather", **TEXTS), write(format_name, "now")
    for text, expected in (
        (call, [called("weather", **ALL)]),
        (f"Well.\n{call}\n{now}\n", ["Well.", called("weather", **ALL), called("now", 1)]),
        (f"{now} and so", [called("now"), " and so"]),
        (call.replace("true", "True"), [called("weather", **ALL)]),
    ):
        assert read(format_name, [text]) == expected
        assert read(format_name, list(text)) == expected
    assert read(format_name, [f"{now}{call}"], limit=1) == [called("now")]


@pytest.mark.parametrize(
    ("format_name", "text", "expected"),
    [
        # Values may hold anything, also text that looks like a marker.
        ("xml", write_xml("weather", texts={"city": f"a\n{XML_END}b"}), {"city": f"a\n{XML_END}b"}),
        ("xml", write_xml("weather", texts={"city": "\n  x\n"}), {"city": "\n  x\n"}),
        ("xml", write_xml("weather", texts={"city": ""}), {"city": ""}),
        ("seed", write_seed("weather", texts={"city": "\n  x\n"}), {"city": "\n  x\n"}),
        ("seed", write_seed("weather", texts={"city": "a</seed:tool_call>"}), {"city": "a</seed:tool_call>"}),
        ("seed", "<seed:tool_call>\n<function=weather>\n<parameter=city>x</parameter>", {"city": "x"}),
        ("glm", write_glm("weather", texts={"city": "a</tool_call>"}), {"city": "a</tool_call>"}),
        ("glm-line", write_glm("weather", texts={"city": " x\n"}, line=""), {"city": " x\n"}),
        ("lfm2", "<|tool_call_start|>[weather(city='it\\'s, \"(')]<|tool_call_end|>", {"city": "it's, \"("}),
        ("lfm2", "<|tool_call_start|>[weather(city='a'b, c', days=2)]<|tool_call_end|>", {"city": "a'b, c", "days": 2}),
        # Cases that the schema leaves open.
        ("xml", write_xml("weather", texts={"more": "[1, null]", "other": "a b"}), {"more": [1, None], "other": "a b"}),
        ("glm", write_glm("weather", texts={"more": "None", "other": '"x"'}), {"more": None, "other": '"x"'}),
        ("xml", write_xml("weather", texts={"days": "many"}), {"days": "many"}),
        ("xml", write_xml("weather", texts={"days": "NaN"}), {"days": "NaN"}),
        ("lfm2", "<|tool_call_start|>[weather(a={'b': [True, None]})]<|tool_call_end|>", {"a": {"b": [True, None]}}),
        # Ends and beginnings that are forgotten.
        ("xml", f"<function=weather>\n<parameter=city>\nx\n</parameter>\n{XML_END}", {"city": "x"}),
        ("xml", f"{XML_CITY}\n{XML_END}", {"city": "x"}),
        ("xml", f"{XML_CITY}\n<parameter=days>\n2\n</parameter>\n</function>", {"city": "x", "days": 2}),
        ("xml", XML_CITY, {"city": "x"}),
        ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>x", {"city": "x"}),
        ("lfm2", '<|tool_call_start|>weather(city="x")', {"city": "x"}),
    ],
)  # fmt: skip
def test_values_are_read_as_they_are(format_name: str, text: str, expected: dict[str, object]) -> None:
    for pieces in ([text], list(text)):
        assert read(format_name, pieces) == [called("weather", **expected)]


@pytest.mark.parametrize(
    ("format_name", "text"),
    [
        ("xml", "<tool_call>\n<function=nobody>\n</function>\n</tool_call>"),
        ("xml", "<tool_call>no function</tool_call>"),
        ("xml", "<tool_call>\n<function=now>\nwords\n</function>"),
        ("xml", "a <tool_ca"),
        ("glm", "<tool_call>nobody\n</tool_call>"),
        ("glm", "<tool_call>now\n<arg_key>x</tool_call> then"),
        ("glm", '<tool_call>{"name": "now"}</tool_call>'),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[nobody()]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[now(a=b)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[now(1)]<|tool_call_end|> x"),
        ("lfm2", f"<|tool_call_start|>[now(a={'[' * 9999})]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[weather(city='a'b', other=x)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[now(a='a'b')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[now(a=1e999)]<|tool_call_end|>"),
    ],
)
def test_what_is_no_call_stays_text(format_name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(format_name, pieces) == [text]


PIECES = st.lists(
    st.sampled_from(
        [
            *(write(name, "weather", **TEXTS) for name in FORMATS),
            *(write(name, "now") for name in FORMATS),
            *(
                "<tool_call>",
                "</tool_call>",
                "<function=",
                "now>",
                "</function>",
                "<parameter=a>\n",
                "\n</parameter>\n",
            ),
            *("<arg_key>", "a</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call_start|>", "<|tool_call_end|>"),
            *("[", "]", "now(", ")", "a=", "'", '"', "text", " ", "\n", "<tool_", "call>", "<func", ",", "\\"),
        ]
    ),
    max_size=9,
)


@pytest.mark.parametrize("format_name", FORMATS)
@given(parts=PIECES, limit=st.sampled_from([None, 1]), is_enforced=st.booleans(), data=st.data())
def test_the_cut_of_the_text_does_not_matter(
    format_name: str, parts: list[str], limit: int | None, is_enforced: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    options = {"limit": limit, "is_enforced": is_enforced}
    assert read(format_name, data.draw(cut_text(text)), **options) == read(format_name, [text], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "string"}, "3"),
        ("3", {"type": ["string", "integer"]}, 3),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("nil", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "nil"),
        ("3", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "3"),
        ("3", {"type": "number"}, 3),
        ("3", {"type": ["number", "string"]}, 3),
        (" [1]\n", {"type": "array"}, [1]),
        ('"x"', {"type": "object"}, "x"),
        ('"x"', {}, '"x"'),
        ("True", {"const": True}, True),
        ("True", {"enum": ["True", 1]}, "True"),
        ("1", {"enum": ["True", 1]}, 1),
        ("x", "no schema", "x"),
        ("[" * 99999, {}, "[" * 99999),
    ],
)
def test_a_value_is_what_its_schema_says(text: str, schema: object, value: object) -> None:
    assert read_value(text, schema) == value


def write_grammar(format_name: str, *, must: bool = True, parallel: bool = True, answer: str | None = None) -> str:
    lark = FORMATS[format_name].write_grammar(TOOLS, must_call=must, is_parallel=parallel, specials={}, answer=answer)
    assert lark is not None
    return lark


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_grammar_allows_calls_and_nothing_else(format_name: str) -> None:
    many, one = write_grammar(format_name), write_grammar(format_name, parallel=False)
    free = write_grammar(format_name, must=False)
    whole, now = write(format_name, "weather", **TEXTS), write(format_name, "now")
    short = write(format_name, "weather", city="x", unit="f")
    both = f"{short}{JOINTS.get(format_name, '')}{now}"
    if format_name == "lfm2":
        both = f"{short.partition(']')[0]}, {now.partition('[')[2]}"
    for lark, good in ((one, whole), (one, short), (one, now), (many, both), (free, f"Well: {both}"), (free, "Well.")):
        assert takes(good, lark), good
        assert len(read(format_name, [good])) == good.count("weather") + good.count("now") + ("Well" in good)
    bad = [
        (one, both),
        (many, "Well"),
        (many, f"{now} and"),
        (many, write(format_name, "nobody")),
        (many, write(format_name, "weather", days="3")),
        (many, write(format_name, "weather", city="x", days="many")),
        (many, write(format_name, "weather", city="x", unit="k")),
        (many, write(format_name, "weather", city="x", place='{"x": true}')),
        (free, f"Well: {write(format_name, 'nobody')}"),
    ]
    for lark, text in bad:
        assert not takes(text, lark), text


@pytest.mark.parametrize("format_name", FORMATS)
def test_an_answer_is_a_call_or_of_the_format(format_name: str) -> None:
    lark, answer = write_grammar(format_name, must=False, answer="@answer"), Grammar("regex", "[A-Z]+")
    assert takes(write(format_name, "now"), lark, answer)
    assert takes("YES", lark, answer)
    assert not takes("Yes", lark, answer)


def test_texts_end_with_a_control_token_where_the_marker_is_one() -> None:
    markers = GlmFormat.markers
    specials = {marker: f"<[{index + 5}]>" for index, marker in enumerate(markers)}
    for must in (True, False):
        lark = FORMATS["glm"].write_grammar(TOOLS, must_call=must, is_parallel=True, specials=specials)
        assert lark is not None
        assert takes("Well", lark) is not must


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("<tool_call>\n<function=x>\n<parameter=y> tools", QwenXmlFormat),
        ("<tool_call>{name}\n<arg_key>k</arg_key>\n<arg_value>", GlmFormat),
        ("List of tools: <|tool_list_start|>[", Lfm2Format),
        ("List of tools: [ <|tool_call_start|>", Lfm2Format),
        ('<tool_call>\n{"name": <function-name>', HermesFormat),
    ],
)
def test_the_format_is_that_of_the_template(source: str, kind: type) -> None:
    assert isinstance(find_format(source, takes_tools=True), kind)


def test_the_calls_of_lfm_2_are_the_text_of_its_message() -> None:
    function = {"name": "weather", "arguments": {"city": 'a "b"', "dry": False, "more": [None, {"x": 1.5}]}}
    message = {
        "role": "assistant",
        "content": "Well. ",
        "tool_calls": [{"function": function}, {"function": {"name": "now", "arguments": {}}}],
    }
    shown, kept = (Lfm2Format(shows_calls=shows).prepare_messages([message], ()) for shows in (False, True))
    text = '<|tool_call_start|>[weather(city="a \\"b\\"", dry=False, more=[None, {"x": 1.5}]), now()]<|tool_call_end|>'
    assert shown[0]["content"] == f"Well. {text}"
    assert read("lfm2", [text]) == [called("weather", **function["arguments"]), called("now", 1)]  # type: ignore[arg-type]
    assert kept == [message]


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_long_value_is_looked_through_once(format_name: str) -> None:
    """Token by token, a value of 140,000 characters takes a moment, not minutes."""
    parser = FORMATS[format_name].open_parser(TOOLS, is_enforced=False)
    start = write(format_name, "weather", city="?").partition("?")[0]
    assert parser.push(start) == []
    text = "a <b> \n"
    for _ in range(20_000):
        parser.push(text)
    (call,) = parser.flush() if format_name != "lfm2" else parser.push('")]<|tool_call_end|>')
    assert isinstance(call, CallPiece)
    assert len(json.loads(call.arguments)["city"]) > 130_000
