# ruff: noqa: E501 (one conversation to a line)
"""Conversations in orders that strict templates refuse: they are answered, and no text of theirs is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service_models import open_demo

from mlxr.core.errors import InvalidRequest, TemplateError
from mlxr.core.types import SamplingParams
from mlxr.service.chat import Chat
from mlxr.service.requests import ChatRequest, Tool
from mlxr.tokenizers import ChatTemplate

TEMPLATES = Path(__file__).parents[1] / "tokenizers" / "templates"
ALTERNATING = ("gemma2", "gemma3", "llama2", "mistral", "mistral-tools")
STRICT = (*ALTERNATING, "qwen3.5")
ALL = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
TOOL = Tool("weather", "Tells the weather", {"type": "object", "properties": {"city": {"type": "string"}}})
Talk = list[dict[str, Any]]


@cache
def open_chat(name: str) -> Chat:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    return Chat(open_demo().tokenizer, ChatTemplate(source, bos_token="<s>", eos_token="</s>", name=name))


def make_talk(letters: str) -> Talk:
    """A conversation with a word of its own in every message: s and d are instructions, u and a texts, c calls of a
    tool by the assistant, t results.
    """
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
    talk: Talk = []
    for number, letter in enumerate(letters):
        word = f"{letter}{number:02}w"
        message: dict[str, Any] = {"role": roles[letter], "content": word}
        if letter == "c":
            function = {"name": "weather", "arguments": {"city": word}}
            message |= {"content": "", "tool_calls": [{"id": f"call_{number}", "function": function}]}
        if letter == "t":
            message["tool_call_id"] = f"call_{number - 1}"
        talk.append(message)
    return talk


def render(name: str, letters: str, **options: Any) -> str:
    if "c" in letters or "t" in letters:
        options.setdefault("tools", [TOOL])
    return open_chat(name).render(ChatRequest(make_talk(letters), SamplingParams(), **options))


def find_words(text: str, letters: str = "sduact") -> list[str]:
    return re.findall(rf"[{letters}]\d\dw", text)


def list_words(letters: str) -> list[str]:
    return [f"{letter}{number:02}w" for number, letter in enumerate(letters)]


@pytest.mark.parametrize("name", STRICT)
@pytest.mark.parametrize(
    "letters",
    [
        "us", "sus", "suas", "suasu", "uadu", "sdus", "uasau", "usa" + "usa" * 3 + "u",  # instructions in the middle
        "uu", "uuu", "uuau", "uaau", "suaauu", "aauu",  # neighbours of one role
        "a", "au", "sau", "asau", "aua", "sa",  # shortened, so that the assistant begins
        "s", "d", "ss", "sd",  # nobody asks
        "ucta", "uctau", "uctctau", "uact", "uctu", "uctsau", "ucstau", "ucttau", "uctctctu", "sucu", "ucu",
        "tau", "ctau", "stu", "t", "uatau", "uctauctuu",  # results whose calls are gone
    ],
)  # fmt: skip
def test_every_order_is_answered_and_nothing_is_lost(name: str, letters: str) -> None:
    words = find_words(render(name, letters))
    assert sorted(words) == sorted(list_words(letters))


@pytest.mark.parametrize("name", ALL)
@given(letters=st.text("sduact", min_size=1, max_size=9))
@settings(max_examples=40, deadline=None)
def test_any_order_is_answered_by_any_template(name: str, letters: str) -> None:
    words, given_words = find_words(render(name, letters)), list_words(letters)
    assert sorted(words) == sorted(given_words)
    assert [word for word in words if word[0] in "ua"] == [word for word in given_words if word[0] in "ua"]


@pytest.mark.parametrize(
    ("name", "letters", "expected"),
    [
        ("gemma3", "suu", "<s><start_of_turn>user\ns00w\n\nu01w\n\nu02w<end_of_turn>\n<start_of_turn>model\n"),
        ("gemma2", "sau", "<s><start_of_turn>user\ns00w<end_of_turn>\n<start_of_turn>model\na01w<end_of_turn>\n"
         "<start_of_turn>user\nu02w<end_of_turn>\n<start_of_turn>model\n"),
        ("gemma3", "usau", "<s><start_of_turn>user\nu00w\n\ns01w<end_of_turn>\n<start_of_turn>model\na02w<end_of_turn>\n"
         "<start_of_turn>user\nu03w<end_of_turn>\n<start_of_turn>model\n"),
        ("mistral", "au", "<s>[INST] [/INST] a00w</s>[INST] u01w[/INST]"),
        ("mistral", "suasu", "<s>[INST] u01w[/INST] a02w</s>[INST] s00w\n\ns03w\n\nu04w[/INST]"),
        ("llama2", "suaau", "<s>[INST] <<SYS>>\ns00w\n<</SYS>>\n\nu01w [/INST] a02w\n\na03w </s><s>[INST] u04w [/INST]"),
        ("qwen3.5", "sus", "<|im_start|>system\ns00w<|im_end|>\n<|im_start|>user\nu01w<|im_end|>\n"
         "<|im_start|>user\ns02w<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        ("qwen3.5", "s", "<|im_start|>user\ns00w<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        ("chatml", "suas", "<|im_start|>system\ns00w<|im_end|>\n<|im_start|>user\nu01w<|im_end|>\n<|im_start|>assistant\n"
         "a02w<|im_end|>\n<|im_start|>system\ns03w<|im_end|>\n<|im_start|>assistant\n"),
    ],
)  # fmt: skip
def test_what_a_conversation_becomes(name: str, letters: str, expected: str) -> None:
    assert render(name, letters) == expected


def test_calls_of_tools_stay_calls_where_the_template_can_show_them() -> None:
    text = render("mistral-tools", "uctuasct")
    assert text.count("[TOOL_CALLS]") == text.count("[TOOL_RESULTS]") == 2
    assert "[/TOOL_RESULTS] </s>[INST] u03w[/INST]" in text  # an empty turn stands between
    words = find_words(text)
    assert words == list_words("uctuasct")
    plain = render("mistral-tools", "tau")  # a result without a call
    assert "[TOOL_RESULTS]" not in plain or plain.index("[INST]") < plain.index("[TOOL_RESULTS]")


def test_turns_without_a_word_say_dots_where_none_may_be_empty() -> None:
    source = (TEMPLATES / "mistral-tools.jinja").read_text()
    check = "{% for m in messages if not m.content and not m.tool_calls %}{{ raise_exception('empty') }}{% endfor %}"
    chat = Chat(open_demo().tokenizer, ChatTemplate(check + source, bos_token="<s>", eos_token="</s>", name="full"))
    text = chat.render(ChatRequest(make_talk("uctu"), SamplingParams(), tools=[TOOL]))
    assert "[/TOOL_RESULTS] …</s>[AVAILABLE_TOOLS]" in text
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "b"}]
    assert chat.render(ChatRequest(talk, SamplingParams())) == "<s>[INST] a[/INST] …</s>[INST] b[/INST]"


@pytest.mark.parametrize("name", STRICT)
@pytest.mark.parametrize("letters", ["a", "uaa", "sua", "auua", "uasa", "ucta", "uctua"])
def test_what_was_begun_is_continued(name: str, letters: str) -> None:
    text = render(name, letters, ending="continued")
    assert text.endswith(list_words(letters)[-1])
    assert sorted(find_words(text)) == sorted(list_words(letters))


class Counting(ChatTemplate):
    """A template that records the roles it is given."""

    def __init__(self, source: str) -> None:
        super().__init__(source, bos_token="<s>", eos_token="</s>", name="counting")
        self.roles: list[str] = []

    def render(self, messages: Sequence[Any], **options: Any) -> str:
        """Render, and remember."""
        self.roles.append("".join(message["role"][0] for message in messages))
        return super().render(messages, **options)


def test_a_conversation_that_is_taken_costs_one_rendering() -> None:
    template = Counting((TEMPLATES / "gemma3.jinja").read_text())
    chat = Chat(open_demo().tokenizer, template)
    chat.warm_up()
    template.roles.clear()
    for letters in ("u", "uau", "suauau"):
        chat.render(ChatRequest(make_talk(letters), SamplingParams()))
    assert template.roles == ["u", "uau", "suauau"]
    for numbers in range(4):  # what was found out once is known from then on
        template.roles.clear()
        chat.render(ChatRequest(make_talk("suusau" + "au" * numbers), SamplingParams()))
    assert template.roles == ["suauauauau"]


def test_what_was_asked_before_changes_no_prompt() -> None:
    talks = ["suus", "usau", "uu", "uau", "aau", "suctu"]
    for name in ("gemma3", "mistral-tools", "qwen3.5"):
        source = (TEMPLATES / f"{name}.jinja").read_text()
        fresh = [render_anew(source, letters) for letters in talks]
        assert fresh == [render(name, letters) for letters in talks]
        assert fresh == [render(name, letters) for letters in reversed(talks)][::-1]


def render_anew(source: str, letters: str) -> str:
    chat = Chat(open_demo().tokenizer, ChatTemplate(source, bos_token="<s>", eos_token="</s>", name="new"))
    tools = [TOOL] if "c" in letters else []
    return chat.render(ChatRequest(make_talk(letters), SamplingParams(), tools=tools))


def test_what_leaves_out_later_instructions_gets_them_as_text() -> None:
    """The template raises no error, so only its text shows what it does with a message in the middle."""
    source = (
        "{% if messages[0].role == 'system' %}S:{{ messages[0].content }}\n{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}U:{{ m.content }}\n{% elif m.role == 'assistant' %}A:{{ m.content }}\n{% endif %}{% endfor %}"
    )
    chat = Chat(open_demo().tokenizer, ChatTemplate(source, bos_token="", eos_token="", name="silent"))
    assert chat.render(ChatRequest(make_talk("suasu"), SamplingParams())) == "S:s00w\nU:u01w\nA:a02w\nU:s03w\nU:u04w\n"


@pytest.mark.parametrize("letters", ["us", "sus", "suas", "uad", "suasa", "usuct", "susu", "sua", "ss"])
def test_what_shows_instructions_only_with_the_last_question_gets_them_as_text(letters: str) -> None:
    """Ollama's Go template for Mistral does so."""
    source = (
        "{%- set system = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | join(' ') %}"
        "{% for m in messages if m.role != 'system' %}"
        "{% if loop.last and m.role == 'user' and messages[-1].role == 'user' %}S:{{ system }}\n{% endif %}"
        "{{ m.role }}:{{ m.content }}{{ m.tool_calls }}\n{% endfor %}{{ tools }}"
    )
    chat = Chat(open_demo().tokenizer, ChatTemplate(source, bos_token="", eos_token="", name="late"))
    tools = [TOOL] if "c" in letters else []
    words = find_words(chat.render(ChatRequest(make_talk(letters), SamplingParams(), tools=tools)))
    assert sorted(words) == sorted(list_words(letters))


def test_developers_that_a_template_only_mentions_are_system() -> None:
    source = (
        "{# no developer #}{% for m in messages if m.role != 'developer' %}{{ m.role }} {{ m.content }}\n{% endfor %}"
    )
    chat = Chat(open_demo().tokenizer, ChatTemplate(source, bos_token="", eos_token="", name="silent"))
    assert (
        chat.render(ChatRequest(make_talk("sdud"), SamplingParams())) == "system s00w\n\nd01w\nuser u02w\nsystem d03w\n"
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no ' ~ messages[0].role ~ ' today') }}", "no user today"),
        ("{% for m in messages %}{% if 'picture' in m.content %}{{ raise_exception('no pictures') }}{% endif %}"
         "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}{% endfor %}", "no pictures"),
    ],
)  # fmt: skip
def test_what_is_refused_in_every_shape_is_told_as_it_was(source: str, reason: str) -> None:
    chat = Chat(open_demo().tokenizer, ChatTemplate(source, bos_token="", eos_token="", name="never"))
    talk = [{"role": "system", "content": "x"}, *({"role": "user", "content": "a picture"} for _ in range(2))]
    with pytest.raises(TemplateError, match=reason) as refused:
        chat.encode(ChatRequest(talk, SamplingParams()))
    assert not isinstance(refused.value, InvalidRequest)


def test_a_template_that_overruns_is_tried_once() -> None:
    template = Counting("{{ 'long' * 100000000 }}")
    chat = Chat(open_demo().tokenizer, template)
    with pytest.raises(TemplateError, match="it was stopped"):
        chat.render(ChatRequest(make_talk("uu"), SamplingParams(), ending="closed"))
    assert len(template.roles) == 2  # the second is what was found out about neighbours
