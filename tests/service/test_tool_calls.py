"""Calls of tools in a stream of text: every format, however it is cut; other text stays text; the grammars."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cuts import cut_text, merge
from hypothesis import given
from hypothesis import strategies as st
from service_models import open_demo

from mlxr.service.grammar import GrammarCompiler
from mlxr.service.requests import Tool
from mlxr.service.tools import ToolFormat, find_format
from mlxr.service.tools.blocks import Gemma4Format
from mlxr.service.tools.format import CallPiece
from mlxr.service.tools.marked_json import GenericFormat, HermesFormat, Llama3Format, SmolLM3Format
from mlxr.service.tools.mistral import CohereFormat, MistralFormat, Phi4Format
from mlxr.service.tools.pythonic import Olmo3Format

WEATHER = Tool("weather", "The weather", {"properties": {"city": {"type": "string"}}, "required": ["city"]})
NOW = Tool("now")
TOOLS = (WEATHER, NOW)
FORMATS: dict[str, ToolFormat] = {
    "hermes": HermesFormat(),
    "llama3": Llama3Format(),
    "generic": GenericFormat(),
    "mistral": MistralFormat(has_args_marker=False),
    "mistral-args": MistralFormat(has_args_marker=True),
    "phi4": Phi4Format("<|tool_call|>", "<|/tool_call|>"),
    "granite3": Phi4Format("<|tool_call|>", ""),
    "nemotron": Phi4Format("<TOOLCALL>", "</TOOLCALL>"),
    "cohere": CohereFormat(),
    "olmo3": Olmo3Format(),
    "gemma4": Gemma4Format(),
}
CITY = '{"city": "Köln \\"}{ [x]"}'
CALL = f'{{"name": "weather", "arguments": {CITY}}}'
NOW_CALL = '{"name": "now", "arguments": {}}'
ACTIONS = f"""[
    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {CITY}}},
    {{"tool_call_id": "1", "tool_name": "now", "parameters": {{}}}}
]"""
GEMMA4_CALL = """<|tool_call>call:weather{city:<|"|>Köln "}{ [x]<|"|>}<tool_call|>"""
GEMMA4_NESTED = """<|tool_call>call:now{a:[1,-2.5,true,{<|"|>k <|"|>:null}],b_c:{},d:[]}<tool_call|>"""
FIRST = CallPiece(0, json.dumps(json.loads(CITY), ensure_ascii=False), "weather")
SECOND = CallPiece(1, "{}", "now")


def read(
    format_name: str,
    pieces: list[str],
    *,
    is_enforced: bool = False,
    max_calls: int | None = None,
    answered: frozenset[tuple[str, str]] = frozenset(),
) -> list[object]:
    parser = FORMATS[format_name].open_parser(TOOLS, is_enforced=is_enforced)
    parser.max_calls, parser.answered = max_calls, answered
    found = [part for piece in pieces for part in parser.push(piece)]
    return merge(found + parser.flush())


# Text, and what there is in it.
CASES: list[tuple[str, str, list[object]]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", [FIRST]),
    (
        "hermes",
        f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{NOW_CALL}\n</tool_call>\n",
        ["Let me see.", FIRST, SECOND],
    ),
    ("hermes", f"<tool_call>{CALL}</tool_call> and so", [FIRST, " and so"]),
    ("hermes", f"<tool_call>{CALL}<tool_call>{NOW_CALL}", [FIRST, SECOND]),  # end markers forgotten
    ("hermes", '<tool_call>{"arguments": "{}", "name": "now"}</tool_call>', [CallPiece(0, "{}", "now")]),
    ("hermes", '```json\n{"name": "now", "arguments": {}}\n```', [CallPiece(0, "{}", "now")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [CallPiece(0, "{}", "now")]),
    ("llama3", '{"name": "now", "parameters": ""}', [CallPiece(0, "{}", "now")]),
    ("generic", '{"name": "now", "arguments": "none"}', ['{"name": "now", "arguments": "none"}']),
    ("llama3", '{"name": "weather", "parameters": {"city": "x"}}', [CallPiece(0, '{"city": "x"}', "weather")]),
    ("llama3", f"<|python_tag|>{CALL}; {NOW_CALL}", [FIRST, SECOND]),
    ("generic", f"{CALL}\n{NOW_CALL}\n", [FIRST, SECOND]),
    ("generic", f"```json\n{CALL}\n```", [FIRST]),
    ("mistral", f"[TOOL_CALLS][{CALL}, {NOW_CALL}]", [FIRST, SECOND]),
    ("mistral", f"Well: [TOOL_CALLS] [{CALL}]", ["Well:", FIRST]),
    ("mistral", f"[TOOL_CALLS]{CALL}", [FIRST]),
    ("mistral-args", f"[TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{{}}", [FIRST, SECOND]),
    ("mistral-args", f"Well: [TOOL_CALLS]weather{CITY}", ["Well:", FIRST]),
    ("phi4", f"<|tool_call|>[{CALL}, {NOW_CALL}]<|/tool_call|>", [FIRST, SECOND]),
    ("phi4", f"Well: <|tool_call|>{CALL}<|/tool_call|>\n<|tool_call|> {NOW_CALL}", ["Well:", FIRST, SECOND]),
    ("phi4", f"<|tool_call|>[{CALL}] <|/tool_call|> and so", [FIRST, " and so"]),
    ("granite3", f"<|tool_call|>[{CALL}, {NOW_CALL}]", [FIRST, SECOND]),
    ("nemotron", f"Well: <TOOLCALL>[{CALL}, {NOW_CALL}]</TOOLCALL>", ["Well:", FIRST, SECOND]),
    ("cohere", f"<|START_ACTION|>{ACTIONS}<|END_ACTION|>", [FIRST, SECOND]),
    ("olmo3", f"<function_calls>weather(city={CITY[9:-1]})\nnow()</function_calls>", [FIRST, SECOND]),
    ("olmo3", f"Well: <function_calls>\nweather(city={CITY[9:-1]})\n", ["Well:", FIRST]),
    (
        "olmo3",
        "<function_calls>now(a=true, b=[1, -2.5, null], c={'d': False})\nnow(from=\"x\", a-b={})</function_calls>",
        [
            CallPiece(0, '{"a": true, "b": [1, -2.5, null], "c": {"d": false}}', "now"),
            CallPiece(1, '{"from": "x", "a-b": {}}', "now"),
        ],
    ),
    ("cohere", f"Well: <|START_ACTION|>{ACTIONS}", ["Well:", FIRST, SECOND]),
    ("gemma4", f"Well: {GEMMA4_CALL}<|tool_call>call:now{{}}<tool_call|>", ["Well:", FIRST, SECOND]),
    ("gemma4", f"{GEMMA4_CALL[:-12]} ", [FIRST]),  # the end marker forgotten
    (
        "gemma4",
        GEMMA4_NESTED,
        [CallPiece(0, '{"a": [1, -2.5, true, {"k ": null}], "b_c": {}, "d": []}', "now")],
    ),
]
# Calls that a grammar would not allow, but that are read all the same.
LOOSE: list[tuple[str, str, list[object]]] = [
    # Brackets that are missing or too many, and several calls between one pair of markers.
    ("hermes", CALL[:-1], [FIRST]),
    ("hermes", f"<tool_call>\n{CALL[:-1]}\n</tool_call>\n<tool_call>\n{NOW_CALL}\n</tool_call>", [FIRST, SECOND]),
    ("hermes", f"<tool_call>\n{CALL}}}\n</tool_call> so", [FIRST, " so"]),
    ("hermes", f"<tool_call>\n{CALL}\n{NOW_CALL}\n</tool_call>", [FIRST, SECOND]),
    ("hermes", f"{CALL[:-1]}\n</tool_call>\n{NOW_CALL}\n</tool_call>", [FIRST, SECOND]),
    ("hermes", f"{CALL}\n<tool_call>\n{NOW_CALL}\n</tool_call>\nso", [FIRST, SECOND, "\nso"]),
    ("hermes", f"```json\n{CALL}\n```\n```json\n{NOW_CALL}\n```", [FIRST, SECOND]),
    ("generic", f"{CALL}\n{NOW_CALL[:-1]}\n", [FIRST, SECOND]),
    # Small mistakes, and values that JSON cannot spell.
    (
        "hermes",
        '{"name": "now", "arguments": {"a": "x\ny", "b": [1,], }}',
        [CallPiece(0, r'{"a": "x\ny", "b": [1]}', "now")],
    ),
    (
        "generic",
        r'{"name": "now", "arguments": {"a": "\ud83d", "\ude00": 1}}',
        [CallPiece(0, '{"a": "\ufffd", "\ufffd": 1}', "now")],
    ),
    ("mistral-args", '[TOOL_CALLS]now[ARGS]{"a": "x\ty"}', [CallPiece(0, r'{"a": "x\ty"}', "now")]),
]
# Text that only looks like a call comes back as it was.
TEXTS: list[tuple[str, str]] = [
    ("hermes", "<tool_call>no json</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> then'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {'),
    ("hermes", "a <tool_cal"),
    ("hermes", "<tool_call> "),
    ("hermes", '{"name": "then", "arguments": {}}'),
    ("hermes", "```python\nx = 1\n```"),
    ("llama3", "The answer is {}"),
    ("llama3", '{"name": "nobody", "parameters": {}}'),
    ("llama3", '{"answer": 42} and more'),
    ("llama3", '<|python_tag|>print("x")'),
    ("llama3", '  {"name": "now", "parameters": {'),
    ("llama3", '{"name": "now"'),
    ("generic", '{"name": "now", "arguments": {"a": NaN}}'),
    ("generic", '{"name": "now", "arguments": {"a": [-Infinity]}}'),
    ("hermes", '{"name": "now", "arguments": {"a": 1e999}}'),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {"a": -1e999}}]'),
    ("mistral-args", '[TOOL_CALLS]now[ARGS]{"a": NaN}'),
    ("cohere", '<|START_ACTION|>[{"tool_name": "now", "parameters": {"a": NaN}}]<|END_ACTION|>'),
    ("generic", "```json\n[1, 2]\n```"),
    ("generic", "``"),
    ("generic", "\n plain words"),
    ("generic", '{"name": "now" "arguments": {}}'),
    ("mistral", "[TOOL_CALLS] nothing"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", '[TOOL_CALLS][{"name": 1}]'),
    ("mistral", '[TOOL_CALLS][{"name": "now", '),
    ("mistral-args", "[TOOL_CALLS]nobody[ARGS]{}"),
    ("mistral-args", "[TOOL_CALLS]now[ARGS]{]"),
    ("mistral-args", "[TOOL_CALLS]now[ARGS]"),
    ("mistral", "[TOOL_"),
    ("phi4", "<|tool_call|>no list<|/tool_call|>"),
    ("phi4", '<|tool_call|>[{"name": "nobody"}]<|/tool_call|>'),
    ("phi4", "<|tool_call|>[]<|/tool_call|>"),
    ("granite3", "a <|tool_ca"),
    ("olmo3", "<function_calls></function_calls>"),
    ("olmo3", "<function_calls>nobody()</function_calls>"),
    ("olmo3", "<function_calls>now(__import__('os').abort())</function_calls>"),
    ("olmo3", "<function_calls>now(a=b)</function_calls> then"),
    ("olmo3", "<function_calls>now(**{})"),
    ("olmo3", "<function_calls>now(a={1: 2})</function_calls>"),
    ("olmo3", "<function_calls>now(a=1"),
    ("olmo3", "<function_calls>now(a=1e999)</function_calls>"),
    ("olmo3", f"<function_calls>now(a=0x{'f' * 9999})</function_calls>"),
    ("olmo3", f"<function_calls>now(a={'[' * 99999})</function_calls>"),
    ("olmo3", f"<function_calls>now(a={'-' * 99999}1)</function_calls>"),
    ("olmo3", "a <function_cal"),
    ("gemma4", "<|tool_call>call:nobody{}<tool_call|> then"),
    ("gemma4", "<|tool_call>call:now<tool_call|>"),
    ("gemma4", "<|tool_call>call:now{a}<tool_call|>"),
    ("gemma4", "<|tool_call>call:now{a:1 2}<tool_call|>"),
    ("gemma4", "<|tool_call>call:now{a:1.}<tool_call|>"),
    ("gemma4", "<|tool_call>call:now{a:1e999}<tool_call|>"),
    ("gemma4", "<|tool_call>call:now{a:1b:2}<tool_call|>"),
    ("gemma4", '<|tool_call>call:now{<|"|>a<|"|>1}<tool_call|>'),
    ("gemma4", '<|tool_call>call:now{a:<|"|>x}<tool_call|>'),
    ("gemma4", "<|tool_call>call:now{a:" + "[" * 500 + "<tool_call|>"),
    ("gemma4", "<|tool_call>call:now{a:[1}<tool_call|>"),
    ("gemma4", "a <|tool_ca"),
    ("cohere", "<|START_ACTION|>[]<|END_ACTION|>"),
    ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "nobody", "parameters": {}}]<|END_ACTION|>'),
]


@pytest.mark.parametrize(("format_name", "text", "expected"), [*CASES, *LOOSE])
def test_calls_are_found(format_name: str, text: str, expected: list[object]) -> None:
    assert read(format_name, [text]) == expected
    assert read(format_name, list(text)) == expected


@pytest.mark.parametrize("format_name", ["hermes", "generic", "llama3"])
def test_a_call_that_was_answered_again_and_again_is_text(format_name: str) -> None:
    """Text after it is kept, and while a grammar is enforced every call is a call."""
    answered = frozenset({("weather", FIRST.arguments)})
    now = [CallPiece(0, "{}", "now")]
    for text, expected in (
        (CALL, [CALL]),
        (f"{CALL}\n{CALL}", [f"{CALL}\n{CALL}"]),
        (NOW_CALL, now),
        (f"{CALL}\n{NOW_CALL}", [CALL, *now]),
        (f"{NOW_CALL}\n{CALL}\n{NOW_CALL}", [*now, f"\n{CALL}", CallPiece(1, "{}", "now")]),
    ):
        for pieces in ([text], list(text)):
            assert read(format_name, pieces, answered=answered) == expected
    marked = CALL if format_name != "hermes" else f"<tool_call>{CALL}</tool_call>"
    for pieces in ([marked], list(marked)):
        assert read(format_name, pieces, answered=answered, is_enforced=True) == [FIRST]


def test_what_stands_around_an_answered_call_stays() -> None:
    answered = frozenset({("weather", FIRST.arguments)})
    inner = '{"city": "<tool_call>{\\"name\\": \\"now\\"}</tool_call>"}'
    for text, expected in (
        (f"```json\n{CALL}\n```", [f"```json\n{CALL}\n```"]),
        (f"<tool_call>{CALL}</tool_call>", [FIRST]),
        (f"{CALL}\n<tool_call>{CALL}</tool_call>", [CALL, FIRST]),
    ):
        for pieces in ([text], list(text)):
            assert read("hermes", pieces, answered=answered) == expected
    call = f'{{"name": "weather", "arguments": {inner}}}'
    assert read("hermes", [call], answered=frozenset({("weather", inner)})) == [call]


@pytest.mark.parametrize(
    ("format_name", "text"),
    [
        ("hermes", f"<tool_call>\n{NOW_CALL}\n</tool_call>\n<tool_call>\n"),
        ("hermes", f"<tool_call>\n{NOW_CALL}\n</tool_call>\n<tool_"),
        ("mistral", f"[TOOL_CALLS][{NOW_CALL}, "),
        ("mistral-args", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]"),
        ("mistral-args", "[TOOL_CALLS]now[ARGS]{}[TOOL_"),
        ("phi4", f"<|tool_call|>[{NOW_CALL}]<|/tool_call|><|tool_call|>"),
        ("gemma4", "<|tool_call>call:now{}<tool_call|><|tool_call>"),
        ("olmo3", "<function_calls>now()</function_calls>\n<function_calls>"),
        ("cohere", f"<|START_ACTION|>[{NOW_CALL}]<|END_ACTION|>\n<|START_"),
    ],
)
@pytest.mark.parametrize("is_enforced", [False, True])
def test_a_marker_at_the_end_is_no_text_beside_calls(format_name: str, text: str, is_enforced: bool) -> None:
    """The answer ran out of tokens at the beginning of another call."""
    for pieces in ([text], list(text)):
        assert read(format_name, pieces, is_enforced=is_enforced) == [CallPiece(0, "{}", "now")]


@pytest.mark.parametrize(
    ("format_name", "text"),
    [
        ("hermes", "<tool_call>\n"),
        ("hermes", '<tool_call>\n{"name": "no'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] ["),
        ("mistral-args", "[TOOL_CALLS]weath"),
        ("mistral-args", "[TOOL_CALLS]now[AR"),
        ("phi4", "<|tool_call|>["),
        ("cohere", '<|START_ACTION|>[\n    {"tool_call_id": "0'),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>'),
        ("olmo3", '<function_calls>weather(city="'),
    ],
)
def test_an_enforced_call_that_is_cut_short_is_no_text(format_name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(format_name, pieces, is_enforced=True) == []


@pytest.mark.parametrize("format_name", ["hermes", "mistral-args", "generic"])
def test_enforced_arguments_are_json_for_every_client(format_name: str) -> None:
    """Grammars allow numbers beyond float64 and halves of surrogate pairs; a stream cannot take them back."""
    bad = r'{"a": [1e999, -2.5E+9999, 1E-9999], "b": "\ud83d \ud83d\ude00 \\ud83d", "c": 12.50}'
    good = r'{"a": [1e307, -2.5e307, 1E-9999], "b": "\ufffd \ud83d\ude00 \\ud83d", "c": 12.50}'
    leads = {"hermes": '<tool_call>\n{"name": "now", "arguments": ', "mistral-args": "[TOOL_CALLS]now[ARGS]"}
    lead = leads.get(format_name, '{"name": "now", "arguments": ')
    for pieces in ([lead + bad], list(lead + bad)):
        assert read(format_name, pieces, is_enforced=True) == [CallPiece(0, good, "now")]


@pytest.mark.parametrize(("format_name", "text"), TEXTS)
def test_what_is_no_call_stays_text(format_name: str, text: str) -> None:
    assert read(format_name, [text]) == [text]
    assert read(format_name, list(text)) == [text]


def test_a_broken_call_after_a_good_one_is_text() -> None:
    assert read("hermes", [f"<tool_call>{CALL}</tool_call><tool_call>x</tool_call>"]) == [
        FIRST,
        "<tool_call>x</tool_call>",
    ]
    assert read("generic", [f"{CALL} done"])[0] == FIRST


PIECES = st.lists(
    st.sampled_from(
        [
            *(
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
                "[ARGS]",
                "[CALL_ID]x",
                "<|tool_call|>",
                "<|/tool_call|>",
                "<|/tool",
                "<|tool_call>",
                "<tool_call|>",
                '<|"|>',
                "call:now{a:",
                "<|python_tag|>",
                "```json",
                "```",
            ),
            *(CALL, NOW_CALL, "{}", '{"a": {}}', CITY, "now", "weather", "{", "}", "[", "]", '"', "\\", ",", ";", " "),
            *("\n", "text", "<tool_", "call>", "[TOOL", "_CALLS]", '{"name": "now"', ', "arguments": '),
        ]
    ),
    max_size=10,
)


@pytest.mark.parametrize("format_name", FORMATS)
@given(
    parts=PIECES,
    max_calls=st.sampled_from([None, 1]),
    is_enforced=st.booleans(),
    answered=st.sampled_from([frozenset(), frozenset({("now", "{}")}), frozenset({("weather", FIRST.arguments)})]),
    data=st.data(),
)
def test_the_cut_of_the_text_does_not_matter(
    format_name: str,
    parts: list[str],
    max_calls: int | None,
    is_enforced: bool,
    answered: frozenset[tuple[str, str]],
    data: st.DataObject,
) -> None:
    text = "".join(parts)

    def read_pieces(pieces: list[str]) -> list[object]:
        return read(format_name, pieces, is_enforced=is_enforced, max_calls=max_calls, answered=answered)

    assert read_pieces(data.draw(cut_text(text))) == read_pieces([text])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("format_name", FORMATS)
@given(data=st.data())
def test_nothing_but_markers_and_space_is_lost(format_name: str, data: st.DataObject) -> None:
    words = data.draw(st.lists(st.sampled_from(["a", " b", "{", "}", "<", "[", "\n", "`"]), max_size=10))
    text = "".join(words)  # there is no call in this
    assert "".join(str(part) for part in read(format_name, data.draw(cut_text(text)))) == text


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("format_name", "text", "expected"), [case for case in CASES if 'arguments": "' not in case[1]]
)
@given(data=st.data())
def test_enforced_calls_stream(format_name: str, text: str, expected: list[object], data: st.DataObject) -> None:
    text = text.replace('"arguments": "{}", "name": "now"', '"name": "now", "arguments": {}')
    assert read(format_name, data.draw(cut_text(text)), is_enforced=True) == expected


@pytest.mark.parametrize("format_name", sorted(FORMATS.keys() - {"gemma4", "olmo3"}))  # whose calls come whole
def test_enforced_arguments_come_as_they_grow(format_name: str) -> None:
    leads = {"hermes": "<tool_call>\n", "mistral": "[TOOL_CALLS][", "mistral-args": "[TOOL_CALLS]"}
    leads |= {"cohere": "<|START_ACTION|>["} | dict.fromkeys(("phi4", "granite3"), "<|tool_call|>[")
    leads["nemotron"] = "<TOOLCALL>["
    lead = leads.get(format_name, "")
    heads = {"mistral-args": "now[ARGS]", "cohere": '{"tool_call_id": "0", "tool_name": "now", "parameters": '}
    head = heads.get(format_name, '{"name": "now", "arguments": ')
    parser = FORMATS[format_name].open_parser(TOOLS, is_enforced=True)
    first = parser.push(lead + head + '{"a"')
    assert merge(list(first)) == [CallPiece(0, '{"a"', "now")]
    assert parser.push(": 1") == [CallPiece(0, ": 1")]
    assert parser.calls == 0
    assert parser.flush() == []  # cut short: there is nothing to take back


def test_only_the_first_call_counts_where_one_is_allowed() -> None:
    text = f"<tool_call>{CALL}</tool_call> more <tool_call>{NOW_CALL}</tool_call>"
    for pieces in ([text], list(text)):
        assert read("hermes", pieces, max_calls=1) == [FIRST]


@pytest.mark.parametrize(
    ("source", "takes_tools", "kind"),
    [
        ("<tool_call> tools", True, HermesFormat),
        ("<tool_call><function=x> tools", True, GenericFormat),
        ("[TOOL_CALLS]", True, MistralFormat),
        ("<|tool_call|> tools", True, Phi4Format),
        ("<TOOLCALL> tools", True, Phi4Format),
        ("xml_tools <tool_call>", True, SmolLM3Format),
        ("<function_calls> tools", True, Olmo3Format),
        ("<|START_ACTION|> tools", True, CohereFormat),
        ("<|tool_call>call: tools", True, Gemma4Format),
        ("<|start_header_id|> tools", True, Llama3Format),
        ("<tool_call>", False, GenericFormat),
        ("anything", True, GenericFormat),
    ],
)
def test_the_format_is_that_of_the_template(source: str, takes_tools: bool, kind: type) -> None:
    assert isinstance(find_format(source, takes_tools=takes_tools), kind)


def accepts(compiler: GrammarCompiler, lark: str, text: str) -> bool:
    """Return True if the grammar allows all of `text`."""
    tokenizer = open_demo().tokenizer
    state = compiler.compile(lark).fork()
    for token_id in tokenizer.encode(text, add_special=False):
        mask = np.zeros(tokenizer.vocab_size // 32, np.uint32)
        state.fill_mask(mask)
        if not mask[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1):
            return False
        state.accept(token_id)
    return True


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    demo = open_demo()
    return GrammarCompiler(demo.tokenizer, demo.tokenizer.eos_ids, demo.config.vocab_size)


GOOD = '{"city": "Oslo"}'
EXAMPLES = {
    "hermes": ('<tool_call>\n{{"name": "weather", "arguments": {0}}}\n</tool_call>', "\n"),
    "llama3": ('{{"name": "weather", "parameters": {0}}}', "; "),
    "generic": ('{{"name": "weather", "arguments": {0}}}', "\n"),
    "mistral-args": ("[TOOL_CALLS]weather[ARGS]{0}", ""),
}
LISTS = {
    "phi4": ("<|tool_call|>", "<|/tool_call|>"),
    "granite3": ("<|tool_call|>", ""),
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    "mistral": ("[TOOL_CALLS]", ""),
}


@pytest.mark.parametrize("format_name", EXAMPLES)
def test_the_grammar_allows_calls_and_nothing_else(compiler: GrammarCompiler, format_name: str) -> None:
    call, separator = EXAMPLES[format_name]
    good, bad = call.format(GOOD), call.format('{"town": 1}')
    many = FORMATS[format_name].write_grammar(TOOLS, must_call=True, is_parallel=True, specials={})
    one = FORMATS[format_name].write_grammar(TOOLS, must_call=True, is_parallel=False, specials={})
    assert many is not None
    assert one is not None
    assert accepts(compiler, one, good)
    assert accepts(compiler, many, good + separator + good)
    for lark, text in ((one, bad), (one, "Well"), (one, good + separator + good), (many, bad), (many, "Well")):
        assert not accepts(compiler, lark, text)
    assert merge(
        [*(parser := FORMATS[format_name].open_parser(TOOLS, is_enforced=True)).push(good), *parser.flush()]
    ) == [CallPiece(0, GOOD, "weather")]


def test_the_grammar_of_cohere_allows_actions_and_nothing_else(compiler: GrammarCompiler) -> None:
    style = FORMATS["cohere"]
    one, many = (
        style.write_grammar(TOOLS, must_call=True, is_parallel=is_parallel, specials={})
        for is_parallel in (False, True)
    )
    assert one is not None
    assert many is not None
    good = f"<|START_ACTION|>{ACTIONS}<|END_ACTION|>"
    assert accepts(compiler, many, good)
    for lark, text in ((one, good), (many, "Well"), (many, good.replace("city", "town")), (many, f"{good} and")):
        assert not accepts(compiler, lark, text)
    assert style.write_grammar(TOOLS, must_call=False, is_parallel=True, specials={}) is None


def test_the_grammar_of_olmo_allows_calls_in_python_and_nothing_else(compiler: GrammarCompiler) -> None:
    more = {"days": {"type": "integer"}, "dry": {"type": "boolean"}}
    later = Tool("later", "", {"properties": {"city": {"type": "string"}, **more}, "required": ["city"]})
    loose = Tool("loose", "", {"properties": more})
    one, many, free = (
        Olmo3Format().write_grammar((later, loose, NOW), must_call=must, is_parallel=parallel, specials={})
        for must, parallel in ((True, False), (True, True), (False, True))
    )
    assert one is not None
    assert many is not None
    assert free is not None
    good = [
        'later(city="Oslo", days=3, dry=true)',
        'later(city="Oslo", dry=true)',
        "loose()",
        "loose(dry=false)",
        "now()",
    ]
    for call in good:
        assert accepts(compiler, one, f"<function_calls>{call}</function_calls>")
    block = "<function_calls>" + "\n".join(good) + "</function_calls>"
    assert accepts(compiler, many, block)
    assert accepts(compiler, free, f"Well: {block}")
    assert accepts(compiler, free, "Well.")
    for lark, text in (
        (one, block),
        (many, "Well"),
        (many, f"{block} and"),
        (many, "<function_calls>later(days=3)</function_calls>"),
        (many, "<function_calls>loose(days=3, )</function_calls>"),
        (many, '<function_calls>loose(days="x")</function_calls>'),
        (free, "Well: <function_calls>nobody()"),
    ):
        assert not accepts(compiler, lark, text)


def test_the_grammar_of_gemma_4_allows_calls_and_nothing_else(compiler: GrammarCompiler) -> None:
    one, many = (
        FORMATS["gemma4"].write_grammar(TOOLS, must_call=True, is_parallel=is_parallel, specials={})
        for is_parallel in (False, True)
    )
    assert one is not None
    assert many is not None
    call = '<|tool_call>call:weather{city:<|"|>a {<|"|>}<tool_call|>'
    for lark, text in ((one, call), (many, call + GEMMA4_NESTED), (one, GEMMA4_NESTED.replace('<|"|>k <|"|>', "k"))):
        assert accepts(compiler, lark, text.replace('<|"|>k <|"|>', "k"))
    for lark, text in ((one, call + call), (many, "Well"), (many, call.replace("city", "town")), (many, f"{call} and")):
        assert not accepts(compiler, lark, text)
    specials = {marker: f"<[{index + 5}]>" for index, marker in enumerate(Gemma4Format.markers)}
    for must_call in (False, True):
        lark = FORMATS["gemma4"].write_grammar(TOOLS, must_call=must_call, is_parallel=True, specials=specials)
        assert lark is not None
        assert accepts(compiler, lark, "Well") != must_call


@pytest.mark.parametrize("format_name", LISTS)
def test_the_grammar_allows_a_list_of_calls_and_nothing_else(compiler: GrammarCompiler, format_name: str) -> None:
    start, end = LISTS[format_name]
    call = f'{{"name": "weather", "arguments": {GOOD}}}'
    many, one = (
        FORMATS[format_name].write_grammar(TOOLS, must_call=True, is_parallel=is_parallel, specials={})
        for is_parallel in (True, False)
    )
    assert many is not None
    assert one is not None
    assert accepts(compiler, one, f"{start}[{call}]{end}")
    assert accepts(compiler, many, f"{start}[{call}, {call}]{end}")
    for lark, text in (
        (one, f"{start}[{call}, {call}]"),
        (one, f"{start}{call}"),
        (many, f"{start}[]"),
        (many, "Well"),
        (many, f"{start}[{call}]{end} and"),
        (many, f"{start}[{call.replace('city', 'town')}"),
    ):
        assert not accepts(compiler, lark, text)


@pytest.mark.parametrize("format_name", ["hermes", "mistral", "mistral-args", "phi4", "granite3"])
def test_with_a_marker_calls_are_kept_well_formed_without_being_required(
    compiler: GrammarCompiler, format_name: str
) -> None:
    lark = FORMATS[format_name].write_grammar(TOOLS, must_call=False, is_parallel=True, specials={})
    assert lark is not None
    marker, call = {
        "hermes": ("<tool_call>", f'\n{{"name": "weather", "arguments": {GOOD}}}\n</tool_call>'),
        "mistral": ("[TOOL_CALLS]", f'[{{"name": "weather", "arguments": {GOOD}}}]'),
        "mistral-args": ("[TOOL_CALLS]", f"weather[ARGS]{GOOD}"),
        "phi4": ("<|tool_call|>", f'[{{"name": "weather", "arguments": {GOOD}}}]<|/tool_call|>'),
        "granite3": ("<|tool_call|>", f'[{{"name": "weather", "arguments": {GOOD}}}]'),
    }[format_name]
    assert accepts(compiler, lark, "Plain words, <b> and [x].\n")
    assert accepts(compiler, lark, f"Let me see. {marker}{call}")
    assert not accepts(compiler, lark, f"Let me see. {marker}Well")
    assert not accepts(compiler, lark, f"{marker}{call.replace('city', 'town')}")


@pytest.mark.parametrize("format_name", ["llama3", "generic"])
def test_without_a_marker_nothing_is_enforced_unless_required(format_name: str) -> None:
    assert FORMATS[format_name].write_grammar(TOOLS, must_call=False, is_parallel=True, specials={}) is None


def test_markers_that_are_control_tokens_are_named_by_id(compiler: GrammarCompiler) -> None:
    demo = open_demo()
    marker = demo.tokenizer.token_id("<|im_start|>")
    lark = MistralFormat(has_args_marker=True).write_grammar(
        TOOLS, must_call=False, is_parallel=True, specials={"[TOOL_CALLS]": f"<[{marker}]>"}
    )
    assert lark is not None
    constraint = compiler.compile(lark).fork()
    for token_id in [*demo.tokenizer.encode("Well ", add_special=False), marker]:
        constraint.accept(token_id)  # type: ignore[arg-type]
    mask = np.zeros(demo.tokenizer.vocab_size // 32, np.uint32)
    constraint.fill_mask(mask)
    allowed = {index for index in range(demo.tokenizer.vocab_size) if mask[index // 32] >> np.uint32(index % 32) & 1}
    spelt = {demo.tokenizer.token_text(index) for index in allowed}
    assert {"w", "we", "n", "now"} & spelt
    assert all("weather".startswith(text) or "now".startswith(text) for text in spelt)
