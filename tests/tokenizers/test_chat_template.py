# ruff: noqa: E501 (one template to a line)
"""Chat templates: parts of real ones work, errors name template and line, sources are found in files and folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mlxr.core.errors import InvalidRequest, TemplateError
from mlxr.tokenizers import (
    ChatTemplate,
    Tokenizer,
    chat_template_from_folder,
    chat_template_from_gguf,
    to_gguf_metadata,
)

MakeFolder = Callable[[dict[str, Any]], Path]
Source = Callable[[str], str]
USER = {"role": "user", "content": "Hi"}
TOOL = {
    "type": "function",
    "function": {"name": "wetter", "description": "Für <Ort> & Zeit", "parameters": {"type": "object"}},
}


def make(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", name="test", **options)


def test_chatml(template_source: Source) -> None:
    template = make(template_source("chatml"))
    assert template.render([USER]) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    talk = [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "Yo"}]
    assert template.render(talk, add_generation_prompt=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    )


def test_llama3_with_date_and_tools(template_source: Source) -> None:
    template = make(template_source("llama3"), read_clock=lambda: datetime(2025, 3, 4, tzinfo=UTC))
    head = "<s><|start_header_id|>system<|end_header_id|>\n\nToday: 04 Mar 2025\n\n"
    tail = "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    assert template.render([USER]) == head + "<|eot_id|>" + tail
    talk = [{"role": "system", "content": " S \n"}, USER]
    tools = "You may call:\n\n" + json.dumps(TOOL, indent=4, ensure_ascii=False) + "\n\n"
    assert template.render(talk, tools=[TOOL]) == head + tools + "S<|eot_id|>" + tail
    assert (
        template.render([USER], extra={"date_string": "1 Jan"})
        == head.replace("04 Mar 2025", "1 Jan") + "<|eot_id|>" + tail
    )


def test_what_firefunction_reads_is_there() -> None:
    template = make(
        "{{ '\n' + functions + 'Today is ' + datetime }}", read_clock=lambda: datetime(2025, 3, 4, tzinfo=UTC)
    )
    assert template.render([USER]) == "\nToday is Mar 04 2025"
    assert template.render([USER], extra={"functions": "[]"}) == "\n[]Today is Mar 04 2025"


def test_llama3_tool_calls(template_source: Source) -> None:
    template = make(template_source("llama3"))
    call = {"function": {"name": "wetter", "arguments": {"ort": "Köln", "n": [1, None, True]}}}
    talk = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": {"grad": 7}}]
    text = template.render(talk, extra={"date_string": "x"})
    assert '{"name": "wetter", "parameters": {"ort": "Köln", "n": [1, null, true]}}<|eot_id|>' in text
    assert '<|start_header_id|>ipython<|end_header_id|>\n\n{"grad": 7}<|eot_id|>' in text
    talk[1]["tool_calls"] = [call, call]
    with pytest.raises(TemplateError, match=r"chat template test, line \d+: This model calls one tool at a time"):
        template.render(talk)


def test_mistral_refuses_what_it_cannot_say(template_source: Source) -> None:
    template = make(template_source("mistral"))
    talk = [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": " A "}, USER]
    assert template.render(talk) == "<s>[INST] Hi[/INST] A</s>[INST] S\n\nHi[/INST]"
    with pytest.raises(TemplateError, match="line 10: Conversation roles must alternate"):
        template.render([USER, USER])


def test_qwen3_with_macro_loop_controls_and_thinking(template_source: Source) -> None:
    template = make(template_source("qwen3"))
    assert template.render([USER], extra={"enable_thinking": False}).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    call = {"type": "function", "function": {"name": "wetter", "arguments": {"ort": "Bonn"}}}
    talk = [
        {"role": "system", "content": "S"},
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nlet me see", "tool_calls": [call, call]},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "8"},
    ]
    assert template.render(talk, tools=[TOOL]) == (
        "<|im_start|>system\nS\n\n# Tools\n\n<tools>\n"
        + json.dumps(TOOL, ensure_ascii=False)
        + "\n</tools><|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nlet me see\n"
        '<tool_call>\n{"name": "wetter", "arguments": {"ort": "Bonn"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "wetter", "arguments": {"ort": "Bonn"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0]['content'] | tojson }}", '"<b>ü&\'"'),
        ("{{ messages[0] | tojson(indent=2) }}", '{\n  "role": "user",\n  "content": "<b>ü&\'"\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ messages[0].content }}", "<b>ü&'"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}", "0134"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ tools is none }} {{ documents is none }} {{ tools is defined }}", "True True True"),
        ("{{ 'a' ~ 1 ~ none }}|{{ 'x' * 3 }}|{{ 2 ** 5 }}|{{ '%02d' % 7 }}|{{ '{:>3}'.format(7) }}", "a1None|xxx|32|07|  7"),
        ("{{ 'a,b' .split(',') | join('+') }}{{ [1, 2] + [3] }}{{ 'abc'[1:] }}{{ 'a-b'.replace('-', '') }}", "a+b[1, 2, 3]bcab"),
        ("{{ messages | map(attribute='role') | list }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "['user']1"),
        ("{{ messages | rejectattr('role', '==', 'user') | list }}{{ [3, 1] | sort | first }}{{ {'k': 'v'} | items | list }}", "[]1[('k', 'v')]"),
        ("{{ missing | default('d') }}{{ '  x ' | trim }}{{ 'x\ny' | indent(2) }}{{ 'ab' | upper }}{{ [1,2] | sum }}", "dxx\n  yAB3"),
        ("{% macro f(x, y='z') %}{{ x }}{{ y }}{% endmacro %}{{ f('a') }}{{ f('a', y='b') }}", "azab"),
        ("{% generation %}{% set inner = 1 %}g{% endgeneration %}{{ inner is defined }}", "gFalse"),
        ("{% set x %}block{% endset %}{{ x }}{% filter upper %}f{% endfilter %}", "blockF"),
        ("{{ strftime_now('%Y') | int > 2000 }}{{ bos_token }}{{ eos_token }}{{ unknown_thing }}", "True<s></s>"),
        ("{% for a, b in {'x': 1}.items() %}{{ loop.index }}{{ a }}{{ b }}{{ loop.last }}{% else %}none{% endfor %}", "1x1True"),
        ("{{ dict(a=1) | dictsort }}{{ [1, [2]] | string }}{{ 'a' in 'abc' }}{{ messages[-1].role }}", "[('a', 1)][1, [2]]Trueuser"),
        ("{% call(x) f() %}<{{ x }}>{% endcall %}{% macro f() %}{% endmacro %}", None),
    ],
)  # fmt: skip
def test_what_templates_use(source: str, expected: str | None) -> None:
    template = make(source)
    messages = [{"role": "user", "content": "<b>ü&'"}]
    if expected is None:
        with pytest.raises(TemplateError, match="'f' is undefined"):
            template.render(messages)
    else:
        assert template.render(messages) == expected


def test_a_broken_template_fails_when_it_is_used_and_says_where() -> None:
    template = make("ok\n{% if %}\n{% endif %}")  # made without complaint: the model can still continue text
    with pytest.raises(
        TemplateError, match=r"^chat template test, line 2: Expected an expression, got 'end of statement"
    ):
        template.render([USER])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n\n{{ raise_exception('no\nsuch role') }}", "line 3: no such role"),
        ("{{ 1 }}\n{{ messages[0].content.missing.deep }}", "line 2: 'str object' has no attribute 'missing'"),
        ("{{ 1 // 0 }}", r"line 1: .* \(ZeroDivisionError\)"),
        ("{{ 'x' | urlize }}", "line 1: No filter named 'urlize'"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{% include 'x' %}", "line 1: no loader for this environment specified"),
        ("{{ messages.append(1) }}", "line 1: .*append.* unsafe"),
        ("{{ ''.__class__.__mro__ }}", "line 1: access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "line 1: access to attribute '__init__' of 'type' object is unsafe"),
        ("{{ ('{0.__class__.x}').format(1) }}", "line 1: access to attribute '__class__' of 'int' object is unsafe"),
        ("{{ 'a'.translate({97: 'b'}) }}", "line 1: translate is not available to chat templates"),
        ("{{ [1] | map('nothing') | list }}", "line 1: No filter named 'nothing'"),
        ("{{ strftime_now(3) }}", "line 1: .*TypeError"),
        ("{" * 3 + "%" * 5, "line 1"),
        ("(" * 10 + "{{ " + "(" * 20_000 + " }}", "nested too deeply"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply, or calls itself without end"),
    ],
)
def test_errors_name_template_line_and_reason(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=rf"^chat template test.*{message}") as caught:
        make(source).render([USER])
    assert "\n" not in str(caught.value)


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": ["a"]}]
    with pytest.raises(TemplateError, match="unsafe"):
        make("{{ messages[0].update({'role': 'system'}) }}").render(messages)
    make("{% set messages = messages + [1] %}{{ messages | length }}").render(messages)
    assert messages == [{"role": "user", "content": ["a"]}]


def test_extra_variables_do_not_replace_the_conversation() -> None:
    with pytest.raises(InvalidRequest, match=r"extra\.messages: is a variable that the template gets"):
        make("x").render([USER], extra={"messages": []})
    assert make("{{ own }}").render([USER], extra={"own": 3}) == "3"


def test_the_tool_template_is_used_for_tools() -> None:
    template = make("plain", tool_source="tools: {{ tools | length }}{{ broken.x }}")
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[]) == "plain"
    with pytest.raises(TemplateError, match=r"^chat template test \(tool_use\), line 1: 'broken' is undefined"):
        template.render([USER], tools=[TOOL])


def test_threads_share_a_template(template_source: Source) -> None:
    template = make(template_source("qwen3"))
    with ThreadPoolExecutor(8) as pool:
        talks = [[{"role": "user", "content": str(index)}] for index in range(200)]
        texts = list(pool.map(template.render, talks))
    assert texts == [f"<|im_start|>user\n{index}<|im_end|>\n<|im_start|>assistant\n" for index in range(200)]


def test_templates_of_gguf_files(vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies["llama3"]
    assert chat_template_from_gguf({}, tokenizer) is None
    metadata: dict[str, object] = {
        "tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}",
        "tokenizer.ggml.eos_token_id": tokenizer.token_id("<|end_of_text|>"),
        "tokenizer.chat_template.tool_use": "tools",
    }
    template = chat_template_from_gguf(metadata, tokenizer)
    assert template is not None
    assert template.render([USER]) == "<|begin_of_text|>|<|end_of_text|>"
    assert template.render([USER], tools=[TOOL]) == "tools"
    template = chat_template_from_gguf({"tokenizer.chat_template": "{{ x.y }}", "general.name": "Big"}, tokenizer)
    assert template is not None
    with pytest.raises(TemplateError, match=r"^chat template Big, line 1"):
        template.render([USER])
    with pytest.raises(TemplateError, match="must be a string"):
        chat_template_from_gguf({"tokenizer.chat_template": 3}, tokenizer)


def test_a_vocabulary_without_bos_writes_none(vocabularies: dict[str, Tokenizer]) -> None:
    template = chat_template_from_gguf({"tokenizer.chat_template": "[{{ bos_token }}]"}, vocabularies["qwen2"])
    assert template is not None
    assert template.render([USER]) == "[]"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "A{{ eos_token }}", "eos_token": "<|eot_id|>"}}, "A<|eot_id|>"),
        ({"tokenizer_config.json": {"chat_template": "A"}, "chat_template.jinja": "B"}, "B"),
        ({"chat_template.json": {"chat_template": "C"}}, "C"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "D"}]}}, "D"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "E"}]}}, "E"),
        ({"chat_template.jinja": "F", "additional_chat_templates/rag.jinja": "G"}, "F"),
    ],
)
def test_templates_of_folders(
    files: dict[str, Any], expected: str | None, make_folder: MakeFolder, vocabularies: dict[str, Tokenizer]
) -> None:
    template = chat_template_from_folder(make_folder(files), vocabularies["llama3"])
    assert (template.render([USER]) if template else None) == expected


def test_a_converted_model_keeps_its_templates(
    make_folder: MakeFolder, golden_folder: Path, vocabularies: dict[str, Tokenizer]
) -> None:
    files = {path.name: path.read_text() for path in (golden_folder / "llama3").iterdir()}
    files |= {"chat_template.jinja": "{{ eos_token }}", "additional_chat_templates/tool_use.jinja": "T"}
    folder = make_folder(files)
    template = chat_template_from_gguf(to_gguf_metadata(folder), vocabularies["llama3"])
    assert template is not None
    assert template.render([USER]) == "<|eot_id|>"
    assert template.render([USER], tools=[TOOL]) == "T"
    read = chat_template_from_folder(folder, vocabularies["llama3"])
    assert read is not None
    assert (read.source, read.tool_source) == (template.source, template.tool_source)
