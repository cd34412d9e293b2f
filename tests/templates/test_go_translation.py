"""Go templates become Jinja templates that write the same text as Go; others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from go_templates import LLAMA3_TOOLS, LONG, MISTRAL, QWEN

from mlxr.core.errors import InvalidRequest
from mlxr.service.catalogue import find_capabilities
from mlxr.templates.go_translation import translate
from mlxr.tokenizers import ChatTemplate

SYSTEM = {"role": "system", "content": "S"}
FIRST = {"role": "user", "content": "U1"}
ANSWER = {"role": "assistant", "content": "A1"}
SECOND = {"role": "user", "content": "U2"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a < b",
        "parameters": {
            "type": "object",
            "required": ["y"],
            "properties": {"y": {"type": "integer", "description": "why"}, "x": {"type": "string"}},
        },
    },
}
TOOL_TEXT = (
    '{"type":"function","function":{"name":"add","description":"a \\u003c b","parameters":{"type":"object",'
    '"required":["y"],"properties":{"y":{"type":"integer","description":"why"},"x":{"type":"string"}}}}}'
)
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"y": 2, "x": "é"}}}],
}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"}


def render(source: str, *messages: dict[str, Any], tools: list[Any] | None = None, **extra: object) -> str:
    template = ChatTemplate(translate(source), bos_token="", eos_token="", name="t")
    return template.render(messages, tools=tools, extra=extra)


@pytest.mark.parametrize("name", LONG)
def test_published_templates_write_conversations(name: str) -> None:
    source, expected = LONG[name]
    assert render(source, SYSTEM, FIRST, ANSWER, SECOND) == expected


@pytest.mark.parametrize("name", LONG)
def test_a_question_alone_and_text_that_looks_like_a_template(name: str) -> None:
    question = {"role": "user", "content": "{{ .System }} {% raw %} {# x #} \\n' \" 'é"}
    text = render(LONG[name][0], question)
    assert question["content"] in text
    assert text.count("\\n'") == 1
    assert "S\n" not in text


@pytest.mark.parametrize("name", ["phi3", "chatml", "gemma", "qwen"])
def test_messages_of_one_role_in_a_row_are_one(name: str) -> None:
    source = LONG[name][0]
    joined = [SYSTEM, {"role": "user", "content": "U1\n\nU2"}, ANSWER, SECOND]
    assert render(source, SYSTEM, FIRST, SECOND, ANSWER, SECOND) == render(source, *joined)
    many = [{"role": "user", "content": str(index)} for index in range(300)]
    assert render(source, *many) == render(source, {"role": "user", "content": "\n\n".join(map(str, range(300)))})


def test_an_answer_at_the_end_is_continued() -> None:
    assert render(LONG["phi3"][0], FIRST, ANSWER).endswith("<|assistant|>\nA1")
    assert render(LONG["qwen"][0], FIRST, ANSWER).endswith("<|im_start|>assistant\nA1")


def test_tools_calls_and_results() -> None:
    function = TOOL_TEXT.removeprefix('{"type":"function","function":').removesuffix("}")
    arguments = '{"y":2,"x":"é"}'
    assert render(QWEN, FIRST, CALL, RESULT, tools=[TOOL]) == (
        "<|im_start|>system\n\n# Tools\n\n<tools>\n"
        f'{{"type": "function", "function": {function}}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nU1<|im_end|>\n"
        f'<|im_start|>assistant\n<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    question = "[INST] U1[/INST] "
    assert render(MISTRAL, FIRST, tools=[TOOL]) == f"[AVAILABLE_TOOLS] [{TOOL_TEXT}][/AVAILABLE_TOOLS]{question}"
    assert render(MISTRAL, FIRST, CALL, RESULT) == (
        f'[INST] U1[/INST][TOOL_CALLS] [{{"name": "add", "arguments": {arguments}}}]</s>'
        '[TOOL_RESULTS] {"content": 3}[/TOOL_RESULTS] '
    )
    assert render(LLAMA3_TOOLS, FIRST, tools=[TOOL]).endswith(
        f"its value}}.\n\n{TOOL_TEXT}\n\nQuestion: U1<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert f'<|end_header_id|>\n\n{{"name": "add", "parameters": {arguments}}}<|eot_id|>' in render(
        LLAMA3_TOOLS, FIRST, CALL, RESULT
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a {{- /* a comment */ -}} b{{ .Prompt }}", "abU1"),
        ("{{ with .System }}<{{ . }}>{{ else with .Prompt }}[{{ . }}]{{ end }}", "[U1]"),
        ('{{ "{%" }}{%{{ `\\n` }}{{ "\\"\\n" }}{#{{ .Prompt }}{', '{%{%\\n"\n{#U1{'),
        (
            "{{ range $n, $p := (index .Tools 0).Function.Parameters.Properties }}{{ $n }}:{{ $p.Type }} {{ end }}"
            "{{ if .Messages }}!{{ end }}",
            "x:string y:integer !",
        ),
        (
            '{{ range .Messages }}{{ if eq .Role "user" }}{{ continue }}{{ end }}{{ else }}none{{ end }}',
            "",
        ),
        ("{{ $x := 1 }}{{ if .Messages }}{{ $x := 2 }}{{ $x }}{{ end }}{{ $x }}", "21"),
        ("{{ $x := 1 }}{{ range .Messages }}{{ $x = 2 }}{{ end }}{{ $x }}", "2"),
        (
            '{{ (index .Messages 0).Role | json }}{{ or .System .Prompt "c" }}{{ eq 1 1 }}{{ not .Messages }}',
            '"user"ctruefalse',
        ),
        (
            "{{ if and .IsThinkSet (not .Think) }}/no_think{{ end }}{{ range .Messages }}{{ .Content }}{{ end }}\n",
            "U1\n",
        ),
        ("{{ if gt (len .Messages) 0 }}{{ $.Messages | len }}{{ end }}", "1"),
    ],
)
def test_what_the_language_has(source: str, expected: str) -> None:
    assert render(source, FIRST, tools=[TOOL]) == expected


def test_thinking_follows_the_request() -> None:
    source = (
        "{{ if and .IsThinkSet (not .Think) }}<think></think>{{ end }}{{ range .Messages }}{{ .Thinking }}{{ end }}"
    )
    assert render(source, FIRST, enable_thinking=False) == "<think></think>"
    assert render(source, FIRST, enable_thinking=True) == ""
    assert "thinking" in find_capabilities(translate(source))
    assert "enable_thinking" in ChatTemplate(translate(source), bos_token="", eos_token="", name="t").variables


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('{{ define "x" }}{{ end }}', "line 1 of the Go template: {{ define }} is not supported"),
        ('\n{{ template "x" . }}', "line 2 of the Go template: {{ template }} is not supported"),
        ('{{ printf "%s" .Prompt }}', "the function printf is not supported"),
        ("{{ .Prompt }}{{ .Nonsense }}", ".Nonsense is not supported"),
        ("{{ range .Messages }}{{ .Nonsense }}{{ end }}", ".Nonsense of a message is not supported"),
        ("{{ .Messages }}", "a value of the kind messages cannot be written out"),
        ("{{ . }}", "the dot stands for everything"),
        ("{{ if .Prompt }}", "{{ if }} without {{ end }}"),
        ("{{ end }}", "{{ end }} without a beginning"),
        ("{{ .Prompt", "{{ is not closed"),
        ("{{ .Prompt | }}", "a value is missing"),
        ("{{ (.Prompt }}", "( is not closed"),
        ("{{ $x }}", "$x is not declared"),
        ("{{ $x = .Prompt }}", "$x is assigned and not declared"),
        ("{{ .Prompt .System }}", "a value that is no function gets arguments"),
        ("{{ range .Prompt }}{{ end }}", "{{ range }} goes through lists and maps"),
        ("{{ len .Prompt }}", "len of a text counts bytes"),
        ("{{ 1.5 }}", "is not supported"),
        ("{{ and }}", "and takes at least one argument"),
        ("{{ if .Prompt }}" * 60 + "{{ end }}" * 60, "nested more than 50 deep"),
        ("{{ " + "(" * 60 + ".Prompt" + ")" * 60 + " }}", "nested more than 50 deep"),
        ("{{" + " " * 200_000, "{{ is not closed"),
        ("{{ " + '\\"' * 100_000, "{{ is not closed"),
    ],
)
def test_what_has_no_equal_is_refused_by_name(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        translate(source)
    assert reason in str(caught.value)
