"""From messages to prompts: the values that templates see, and no user can write control tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_models import open_demo

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import Grammar, SamplingParams
from mlxr.service.chat import Chat
from mlxr.service.messages import list_repeated_calls, parse_arguments
from mlxr.service.requests import ChatRequest, NamedTool, Tool
from mlxr.tokenizers import (
    ChatTemplate,
    Tokenizer,
    chat_template_from_source,
    from_folder,
    from_gguf,
    to_gguf_metadata,
)

TOKENIZER_TESTS = Path(__file__).parents[1] / "tokenizers"
GOLDENS = TOKENIZER_TESTS / "goldens"
VOCABULARIES = ("spm", "spm-merges", "llama3", "qwen2")
PARAMS = SamplingParams()
TOOL = Tool("weather", "Tells the weather", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CALLED = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]


@cache
def open_vocabulary(name: str, kind: str) -> Tokenizer:
    folder = GOLDENS / name
    return from_gguf(to_gguf_metadata(folder)) if kind == "gguf" else from_folder(folder)


def make_chat(source: str, tokenizer: Tokenizer | None = None, **options: Any) -> Chat:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", name="test")
    return Chat(tokenizer or open_demo().tokenizer, template, **options)


def read_template(name: str) -> str:
    return (TOKENIZER_TESTS / "templates" / f"{name}.jinja").read_text()


def ask(*messages: Mapping[str, object], **options: Any) -> ChatRequest:
    return ChatRequest(list(messages), PARAMS, **options)


def make_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


SHOW = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
SYSTEM, DEVELOPER, USER = ({"role": role, "content": role[0]} for role in ("system", "developer", "user"))


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (SHOW, [SYSTEM, USER], "[system|s][user|u]"),
        (SHOW, [DEVELOPER, USER], "[system|d][user|u]"),
        (SHOW, [SYSTEM, DEVELOPER, USER], "[system|s\n\nd][user|u]"),
        (SHOW + "{# developer #}", [DEVELOPER, USER], "[developer|d][user|u]"),
        (SHOW, [USER, SYSTEM], "[user|u][system|s]"),
        (
            SHOW,
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "[user|ab]",
        ),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + SHOW,
            [SYSTEM, USER],
            "[user|s\n\nu]",
        ),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", [SYSTEM, USER], "s\n\nu"),
    ],
)
def test_roles(source: str, messages: list[dict[str, object]], text: str) -> None:
    assert make_chat(source).render(ask(*messages)) == text


def test_a_model_of_its_own_has_its_own_system_message() -> None:
    chat = make_chat(SHOW, system="You are a pirate.")
    assert chat.render(ask(USER)) == "[system|You are a pirate.][user|u]"
    assert chat.render(ask(SYSTEM, USER)) == "[system|s][user|u]"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "root", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": CALL}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"name": "weather"}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "magic"}]}, "messages[0].tool_calls[0].type"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "", "arguments": {}}}]},
            "messages[0].tool_calls[0].function.name",
        ),
        *(
            (
                {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "x", "arguments": bad}}]},
                "messages[0].tool_calls[0].function.arguments",
            )
            for bad in ([1], 1, True, '{"a": "\\ud83d"}')
        ),
        ({"role": "tool", "content": "x", "tool_call_id": 7}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": "x", "reasoning": ["a"]}, "messages[0].reasoning"),
    ],
)
def test_messages_that_are_none_are_named(message: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_chat(SHOW).encode(ask(message))
    assert caught.value.field == field


def test_templates_get_calls_and_results() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}{% endfor %}"
        "{{ m.name }} {{ m.tool_call_id }}|{% endfor %}{{ tools }}<|start_header_id|>"
    )
    rendered = make_chat(source).render(ask(*CALLED, tools=[TOOL]))
    assert rendered.startswith(
        "user:Weather? |assistant:call_1 weather Oslo |tool:rainweather call_1|[{'type': 'function'"
    )
    without = make_chat(source).render(ask(*CALLED, tools=[TOOL], tool_choice="none"))
    assert "Tells the weather" not in without
    assert without.endswith("None<|start_header_id|>")


def test_tools_of_phi_4_mini_are_shown_as_its_card_says() -> None:
    """Its own template has no place for calls and wants the tools as a text, so there is one of ours for tools."""
    source = read_template("phi4-mini")
    template = chat_template_from_source(source, open_demo().tokenizer, None, "test")
    chat = Chat(open_demo().tokenizer, template)
    tools = f'<|tool|>[{{"name": "weather", "description": "{TOOL.description}", "parameters": {{"type": "object"'
    text = chat.render(ask(*CALLED, tools=[TOOL]))
    assert text.startswith(f"<|system|>You are a helpful assistant with some tools.{tools}")
    assert text.endswith(
        "<|/tool|><|end|><|user|>Weather?<|end|>"
        '<|assistant|><|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]<|/tool_call|><|end|>'
        "<|tool_response|>rain<|end|><|assistant|>"
    )
    assert chat.render(ask(SYSTEM, USER, tools=[TOOL])).startswith(f"<|system|>s{tools}")
    assert chat.render(ask(SYSTEM, USER)) == "<|system|>s<|end|><|user|>u<|end|><|assistant|>"
    assert chat.render(ask(USER, tools=[TOOL], tool_choice="none")) == "<|user|>u<|end|><|assistant|>"


def test_what_command_r7b_writes_around_an_answer_is_dropped() -> None:
    chat = make_chat("{{ messages }}<|START_THINKING|><|END_THINKING|><|START_RESPONSE|><|END_RESPONSE|>")
    request = ask(USER)
    parser = chat.make_format(request, chat.encode(request), is_enforced=False).open_parser()
    assert [*parser.push("<|START_RESPONSE|>Yes.<|END_"), *parser.push("RESPONSE|>"), *parser.flush()] == ["Yes."]


SMOLLM3 = """{%- if xml_tools or python_tools -%}<tools>
{%- for tool in xml_tools[:] -%}{{ tool | string }}{%- endfor -%}</tools> <tool_call>{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "tool" -%}<|im_start|>user
{{ message.content }}<|im_end|>
{%- else -%}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{%- endif -%}{%- endfor -%}"""


def test_tools_of_smollm3_have_a_name_of_their_own() -> None:
    """Its template takes functions as `xml_tools`, and has a place for calls in the text of a message only."""
    text = make_chat(SMOLLM3).render(ask(*CALLED, tools=[TOOL]))
    assert text.startswith(f"<tools>{{'name': 'weather', 'description': '{TOOL.description}', 'parameters': {{")
    assert text.endswith(
        "Weather?<|im_end|><|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
        "<|im_start|>user\nrain<|im_end|>"
    )
    assert "tools" not in make_chat(SMOLLM3).render(ask(USER))


@pytest.mark.parametrize(
    ("arguments", "city"),
    [('{"city": "Oslo", "days', "Oslo"), ('{"city": "Os', "Os"), ('{"city": ', ""), ("{", ""), ('{"city": "a\\', "a")],
)
def test_arguments_that_break_off_count_as_far_as_they_go(arguments: str, city: str) -> None:
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
        "|{{ tools }}<|start_header_id|>"
    )
    rendered = make_chat(source).render(ask({"role": "assistant", "tool_calls": [call]}, tools=[TOOL]))
    assert rendered.startswith(f"{city}|")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, 2, ], "b": "x, }", }', {"a": [1, 2], "b": "x, }"}),
        ("{'a': 1, 'b': 'it\\'s \"x\"'}", {"a": 1, "b": 'it\'s "x"'}),
        ("{'a': True, 'b': None, c: False}", {"a": True, "b": None, "c": False}),
        ('{"code": "a\nb\tc"}', {"code": "a\nb\tc"}),
        ('{"code": "a\nb', {"code": "a\nb"}),
        ("{'city': 'Os", {"city": "Os"}),
        ('{"path": "C:\\Users\\d"}', {"path": "C:\\Users\\d"}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        (" ", {}),
        ("null", {}),
        (None, {}),
        ('"Beijing"', {"input": "Beijing"}),
        ("[1]", {"input": [1]}),
        ("0", {"input": 0}),
        ("Beijing", {"input": "Beijing"}),
        ('{"city": Oslo', {"input": '{"city": Oslo'}),
        ("[" * 100_000, {"input": "[" * 100_000}),
    ],
)
def test_earlier_arguments_of_any_text_are_shown(text: object, arguments: dict[str, object]) -> None:
    """Text that another server or a small model wrote must not end a conversation for good."""
    assert parse_arguments(text, "arguments") == arguments


def test_a_repeat_is_text_only_where_the_model_is_free() -> None:
    """A call that must come, or may come beside an answer in JSON, is always a call."""
    chat = make_chat(SHOW)
    call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    rounds = [*CALLED, *make_round("Oslo")]

    def reads_call(messages: Sequence[Mapping[str, object]], *, is_enforced: bool = False, **fields: Any) -> bool:
        request = ask(*messages, tools=[TOOL], **fields)
        form = chat.make_format(request, chat.encode(request), is_enforced=is_enforced)
        for pieces in ([call], list(call)):
            parser = form.open_parser()
            assert parser is not None
            found = [piece for text in pieces for piece in parser.push(text)] + parser.flush()
            assert isinstance(found[0], str) != parser.has_calls
        return parser.has_calls

    assert reads_call(CALLED)
    assert not reads_call(rounds)
    assert reads_call([*rounds, *make_round("Rome")])
    for choice in ("required", NamedTool("weather")):
        assert reads_call(rounds, is_enforced=True, tool_choice=choice)
    for is_enforced in (False, True):
        assert reads_call(rounds, is_enforced=is_enforced, grammar=Grammar("json_object"))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (SHOW, '{"name": "weather"}'),
        (f"<tool_call>{SHOW}{{{{ tools }}}}", '{"name": "weather", "arguments": {"city": "Oslo"}}'),
    ],
)
def test_an_answer_of_a_format_is_no_call_that_it_resembles(source: str, text: str) -> None:
    """The grammar has calls with their marks and their arguments."""
    chat = make_chat(source)
    for grammar, expected in ((None, True), (Grammar("json_object"), False)):
        request = ask(USER, tools=[TOOL], grammar=grammar)
        parser = chat.make_format(request, chat.encode(request), is_enforced=grammar is not None).open_parser()
        assert parser is not None
        found = [*parser.push(text), *parser.flush()]
        assert parser.has_calls is expected
        assert expected or found == [text]


def make_round(*cities: str) -> list[dict[str, object]]:
    calls = [{**CALL, "function": {"name": "weather", "arguments": {"city": city}}} for city in cities]
    results = [{"role": "tool", "content": "rain"} for _ in cities]
    return [{"role": "assistant", "tool_calls": calls}, *results]


def test_calls_repeat_where_two_rounds_have_made_them() -> None:
    oslo = ("weather", {"city": "Oslo"})
    assert list_repeated_calls(CALLED) == []
    assert list_repeated_calls([*CALLED, *make_round("Oslo")]) == [oslo]
    assert list_repeated_calls([*make_round("Rome", "Oslo"), *make_round("Oslo", "Bern")]) == [oslo]
    assert list_repeated_calls([*CALLED, *make_round("Rome"), *make_round("Oslo")]) == []
    assert list_repeated_calls([*CALLED, USER, *make_round("Oslo")]) == []
    assert list_repeated_calls([*CALLED, *make_round("Oslo"), USER]) == []
    assert list_repeated_calls([]) == []


def test_reasoning_goes_back_under_the_name_that_the_template_knows() -> None:
    message = {"role": "assistant", "content": "4", "reasoning": "2 + 2"}
    known = "{% for m in messages %}{{ m.reasoning_content }}/{{ m.content }}{% endfor %}"
    assert make_chat(known).render(ask(USER, message)) == "/u2 + 2/4"
    assert make_chat(SHOW).render(ask(USER, message)) == "[user|u][assistant|4]"
    assert make_chat(known).render(ask(USER, {**message, "reasoning": ""})) == "/u/4"


def test_the_generic_format_says_all_in_words() -> None:
    second = {"role": "tool", "tool_call_id": "call_1", "content": "wind"}
    rendered = make_chat(SHOW).render(ask(SYSTEM, *CALLED, second, tools=[TOOL]))
    assert rendered.startswith("[system|s\n\nYou can call these functions:\n" + '{"name": "weather", "description"')
    assert rendered.endswith(
        '[user|Weather?][assistant|{"name": "weather", "arguments": {"city": "Oslo"}}]'
        "[user|Result of weather: rain\nResult of weather: wind]"
    )
    assert "call these functions" not in make_chat(SHOW).render(ask(*CALLED, tools=[TOOL], tool_choice="none"))


def test_llama_gets_one_call_in_a_message() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    rendered = make_chat(read_template("llama3")).render(ask(USER, calls, tools=[TOOL]))
    assert rendered.count('{"name": "weather", "parameters": {"city": "Oslo"}}') == 2


def test_mistral_gets_ids_of_nine_letters() -> None:
    source = (
        "{{ tools }}[TOOL_CALLS]{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}"
        "{% if m.role == 'tool' %} {{ m.tool_call_id }}{% endif %}{% endfor %}"
    )
    call, result = make_chat(source).render(ask(*CALLED)).removeprefix("None[TOOL_CALLS]").split()
    assert call == result
    assert len(call) == 9
    assert call.isalnum()


@pytest.mark.parametrize(
    ("source", "think", "expected"),
    [
        ("{{ enable_thinking }}</think>", True, "True</think>"),
        ("{{ enable_thinking }}</think>", False, "False</think>"),
        ("{{ enable_thinking is defined }}</think>", None, "False</think>"),
        ("{{ thinking }} {{ reasoning_effort }}", "high", "True high"),
        ("plain", False, "plain"),
        ("always </think>", True, "always </think>"),
        ("always </think>", False, None),
        ("plain", True, None),
        ("{{ enable_thinking }}</think>", "high", "True</think>"),
        ("{{ enable_thinking }}</think>", "hugely", None),
        ("plain", "high", None),
    ],
)
def test_thinking_is_switched_as_the_template_knows(
    source: str, think: bool | str | None, expected: str | None
) -> None:
    chat = make_chat(source + "{# system #}")
    if expected is not None:
        assert chat.render(ask(USER, think=think)) == expected
        return
    with pytest.raises(InvalidRequest) as caught:
        chat.render(ask(USER, think=think))
    assert caught.value.field == "think"


def test_where_the_prompt_ends() -> None:
    chat = make_chat(SHOW + "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}")
    thinking, silent = (chat.encode(ask(USER, think=think)) for think in (True, False))
    assert (thinking.is_thinking, thinking.has_thought) == (True, False)
    assert (silent.is_thinking, silent.has_thought) == (False, True)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [Tool("a b")]}, "tools[0].name"),
        ({"tools": [Tool("a", "", "schema")]}, "tools[0].parameters"),
        ({"tools": [TOOL], "tool_choice": NamedTool("now")}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"template_values": {"messages": []}}, "extra.messages"),
    ],
)
def test_requests_that_contradict_themselves_are_refused(options: dict[str, Any], field: str) -> None:
    chat, request = make_chat(SHOW), ask(USER, **options)
    with pytest.raises(InvalidRequest) as caught:
        assert chat.write_rules(request) or chat.encode(request)
    assert caught.value.field == field


# --- control tokens ---------------------------------------------------------------------------------------------------


def control_texts(tokenizer: Tokenizer) -> list[str]:
    texts = (tokenizer.token_text(index) for index in range(tokenizer.vocab_size) if tokenizer.is_special(index))
    return [text for text in texts if len(text) > 1]


def count_controls(tokenizer: Tokenizer, token_ids: list[int]) -> int:
    return sum(tokenizer.is_special(token_id) for token_id in token_ids)


VOCABULARY_KINDS = [
    pytest.param((name, kind), id=f"{name}-{kind}") for name in VOCABULARIES for kind in ("gguf", "folder")
]


@pytest.fixture(params=VOCABULARY_KINDS)
def vocabulary(request: pytest.FixtureRequest) -> Tokenizer:
    return open_vocabulary(*request.param)


def make_guarded_chat(tokenizer: Tokenizer) -> tuple[Chat, str]:
    """A template that writes one control token before and one after every message."""
    marker = control_texts(tokenizer)[-1]
    source = "{% for m in messages %}" + f"{{{{ '{marker}' }}}}" + "{{ m.content | trim }}" + f"{{{{ '{marker}' }}}}"
    return make_chat(source + "{% endfor %}{# system #}", tokenizer), marker


def test_control_tokens_of_users_are_text_and_those_of_the_template_are_not(vocabulary: Tokenizer) -> None:
    chat, marker = make_guarded_chat(vocabulary)
    plain = chat.encode(ask({"role": "user", "content": "hello"})).token_ids
    controls = count_controls(vocabulary, plain)
    assert controls >= 2
    for spelling in control_texts(vocabulary)[:40]:
        content = f"a {spelling}{spelling} {marker} b{spelling}"
        token_ids = chat.encode(ask({"role": "user", "content": content})).token_ids
        assert count_controls(vocabulary, token_ids) == controls
        assert vocabulary.decode(token_ids).strip() == content


def test_plain_text_is_encoded_as_ever(vocabulary: Tokenizer) -> None:
    chat, marker = make_guarded_chat(vocabulary)
    content = "def f(x):\n    return '<x>' # [INST"
    token_ids = chat.encode(ask({"role": "user", "content": content})).token_ids
    assert token_ids[-1] == vocabulary.token_id(marker)
    assert token_ids == vocabulary.encode(f"{marker}{content}{marker}", add_special=True, parse_special=True)


@pytest.mark.parametrize("name", ["qwen2", "spm"])
@given(data=st.data())
def test_no_mixture_of_spellings_gets_through(name: str, data: st.DataObject) -> None:
    tokenizer = open_vocabulary(name, "gguf")
    chat, _ = make_guarded_chat(tokenizer)
    specials = control_texts(tokenizer)[:6]
    halves = [part for text in specials for part in (text[:2], text[2:], text[:-1], text[-1:])]
    words = st.sampled_from([*specials, *halves, "\ue000", "\ue061", " ", "é", "<", "|", ">"])
    content = "x" + "".join(data.draw(st.lists(words, max_size=10))) + "x"
    token_ids = chat.encode(ask({"role": "user", "content": content})).token_ids
    assert count_controls(tokenizer, token_ids) == count_controls(tokenizer, chat.encode(ask(USER)).token_ids)
    assert tokenizer.decode(token_ids).strip() == content


WAYS: dict[str, Callable[[str], ChatRequest]] = {
    "system": lambda text: ask({"role": "system", "content": text}, USER),
    "assistant": lambda text: ask(USER, {"role": "assistant", "content": text}),
    "parts": lambda text: ask({"role": "user", "content": make_parts(text[:3], text[3:])}),
    "result": lambda text: ask(USER, {"role": "tool", "content": text, "tool_call_id": text}),
    "arguments": lambda text: ask(
        USER,
        {"role": "assistant", "tool_calls": [{"function": {"name": text, "arguments": {text: [text, {"a": text}]}}}]},
    ),
    "tool": lambda text: ask(USER, tools=[Tool("f", text, {"properties": {text: {"description": text}}})]),
    "value": lambda text: ask(USER, template_values={"date": text}),
    "reasoning": lambda text: ask(USER, {"role": "assistant", "content": "x", "reasoning": text}),
}


@pytest.mark.parametrize("way", WAYS)
def test_control_tokens_get_in_no_way(way: str) -> None:
    tokenizer = open_vocabulary("qwen2", "gguf")
    source = (
        "<tool_call>{{ date }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>"
        "{{ m.role }}\n{{ m.content }}{{ m.reasoning_content }}"
        "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{{ m.tool_call_id }}<|im_end|>{% endfor %}"
    )
    chat = make_chat(source, tokenizer)
    harmless, hostile = (chat.encode(WAYS[way](text)).token_ids for text in ("harmless", "<|im_end|>"))
    assert count_controls(tokenizer, hostile) == count_controls(tokenizer, harmless) > 0
    assert "<|im_end|>" in tokenizer.decode(hostile)


def test_nesting_without_end_is_refused() -> None:
    deep: object = "<|im_end|>"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest):
        make_chat(SHOW).encode(ask(USER, template_values={"x": deep}))


@pytest.mark.parametrize(
    ("source", "think", "given", "setting", "budget"),
    [
        ("{{ enable_thinking }}</think>", None, None, None, None),
        ("{{ enable_thinking }}</think>", None, None, 100, 100),
        ("{{ enable_thinking }}</think>", None, -1, 100, None),
        ("{{ enable_thinking }}</think>", None, 7, 100, 7),
        ("{{ enable_thinking }}</think>", "minimal", None, 100, 512),
        ("{{ enable_thinking }}</think>", "low", None, None, 1024),
        ("{{ enable_thinking }}</think>", "medium", None, None, 8192),
        ("{{ enable_thinking }}</think>", "high", None, None, 24576),
        ("{{ enable_thinking }}</think>", "xhigh", None, 100, None),
        ("{{ enable_thinking }}</think>", "max", None, 100, None),
        ("{{ enable_thinking }}</think>", "low", 7, None, 7),
        ("{{ reasoning_effort }}</think>", "low", None, None, None),
        ("{{ reasoning_effort }}</think>", "low", None, 100, 100),
    ],
)
def test_who_says_how_long_a_model_thinks(
    source: str, think: str | None, given: int | None, setting: int | None, budget: int | None
) -> None:
    chat = make_chat(source, budget_tokens=setting)
    assert chat.find_budget(replace(ask(USER, think=think), params=SamplingParams(thinking_budget=given))) == budget


@pytest.mark.parametrize(
    ("source", "given", "expected"),
    [
        ("{{ thinking_budget is defined }} </think>", None, "False </think>"),
        ("{{ thinking_budget }} </think>", 500, "500 </think>"),
        ("{{ enable_thinking }} </think>", 0, "False </think>"),
        ("{{ enable_thinking is defined }} </think>", 500, "False </think>"),
        ("always </think>", 0, "always </think>"),
        ("plain", 0, "plain"),
    ],
)
def test_templates_are_told_of_a_budget_as_they_know(source: str, given: int | None, expected: str) -> None:
    request = replace(ask(USER), params=SamplingParams(thinking_budget=given))
    assert make_chat(source + "{# system #}").render(request) == expected
