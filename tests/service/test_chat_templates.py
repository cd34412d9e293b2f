# ruff: noqa: E501 (one prompt to a line)
"""Templates that users bring: by a setting, by name, and with a request."""

from __future__ import annotations

from pathlib import Path

import pytest
from service_models import open_demo

from mlxr import LLM, SamplingParams
from mlxr.core.errors import InvalidRequest, SettingError, TemplateError
from mlxr.core.settings import Settings, resolve
from mlxr.service.chat import Chat
from mlxr.service.chat_templates import check_template, choose_template, find_source
from mlxr.service.opening import open_model
from mlxr.service.preparation import MAX_BROUGHT_TEMPLATES, Preparation
from mlxr.service.requests import ChatRequest
from mlxr.tokenizers import ChatTemplate
from mlxr.tokenizers.chat_template import NAMED, find_named

TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": " U "},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "{} V"},
]
USER = [{"role": "user", "content": "Hi"}]


def make_chat(source: str) -> Chat:
    return Chat(open_demo().tokenizer, ChatTemplate(source, bos_token="<s>", eos_token="</s>", name="test"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "chatml",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n U <|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
            "<|im_start|>user\n{} V<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("llama2", "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s><s>[INST] {} V [/INST]"),
        (
            "llama3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU"
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user"
            "<|end_header_id|>\n\n{} V<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "gemma",
            "<s><start_of_turn>user\nS\n\n U<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n<start_of_turn>user\n"
            "{} V<end_of_turn>\n<start_of_turn>model\n",
        ),
        ("mistral-v1", "<s> [INST] S\n\n U  [/INST] A</s> [INST] {} V [/INST]"),
        ("mistral", "<s>[INST] S\n\n U [/INST] A</s>[INST] {} V[/INST]"),
        ("mistral-v3-tekken", "<s>[INST]S\n\n U [/INST]A</s>[INST]{} V[/INST]"),
        ("mistral-v7-tekken", "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST] U [/INST]A</s>[INST]{} V[/INST]"),
        ("phi3", "<|system|>\nS<|end|>\n<|user|>\n U <|end|>\n<|assistant|>\nA<|end|>\n<|user|>\n{} V<|end|>\n<|assistant|>\n"),
        ("deepseek3", "<s>S<｜User｜> U <｜Assistant｜>A</s><｜User｜>{} V<｜Assistant｜>"),
        ("vicuna", "S USER:  U  ASSISTANT: A</s>USER: {} V ASSISTANT:"),
    ],
)  # fmt: skip
def test_what_named_templates_write(name: str, text: str) -> None:
    source = find_named(name)
    assert source is not None
    assert make_chat(source).render(ChatRequest(TALK, SamplingParams())) == text


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("roles", ["usau", "au", "uu", "s", "sa", "uatu", "usas"])
def test_named_templates_take_every_order(name: str, roles: str) -> None:
    words = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    talk = [{"role": words[role], "content": f"w{place}"} for place, role in enumerate(roles)]
    source = find_named(name)
    assert source is not None
    text = make_chat(source).render(ChatRequest(talk, SamplingParams()))
    assert all(f"w{place}" in text for place in range(len(roles)))


def test_a_setting_means_a_file_a_name_or_a_template(tmp_path: Path) -> None:
    jinja, go = tmp_path / "own.jinja", tmp_path / "go.txt"
    jinja.write_text("\ufeff{{ messages[-1].content }}", encoding="utf-8")
    go.write_text("{{ .Prompt }}!")
    assert find_source(resolve({})) is None
    assert find_source(resolve({"chat_template": jinja})) == "{{ messages[-1].content }}"
    assert find_source(resolve({"chat_template": "chatml"})) == find_named("chatml")
    assert find_source(resolve({"chat_template": "{{ 'x' }}"})) == "{{ 'x' }}"
    source = find_source(resolve({"chat_template": str(go)}))
    assert source is not None
    assert make_chat(source).render(ChatRequest(USER, SamplingParams())) == "Hi!"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"chat_template": "chatlm"}, "chat_template: chatlm is no file, and none of chatml, "),
        ({"chat_template": "{% if %}"}, "chat_template: .*line 1: Expected an expression"),
        ({"chat_template": "x" * 5000}, "chat_template: x{80} cannot be read: "),
        ({"chat_template": "/"}, "chat_template: / is no file"),
        ({"chat_template_kwargs": '{"messages": []}'}, "chat_template_kwargs: messages is what the template gets"),
    ],
)
def test_settings_that_mean_nothing_are_refused_before_a_model_is_read(given: dict[str, object], reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        check_template(resolve(given))


@pytest.mark.parametrize("given", ["[1]", "no", "{", 3, [["a", 1]], {"a": object()}])
def test_variables_are_an_object(given: object) -> None:
    with pytest.raises(SettingError, match="chat_template_kwargs: must be an object in JSON"):
        resolve({"chat_template_kwargs": given})


def test_a_model_is_used_with_the_template_of_the_settings() -> None:
    shown = "{{ mood }}{{ enable_thinking }}: {% for m in messages %}{{ m.role }} {{ m.content }}, {% endfor %}</think>"
    values = {"mood": "merry", "enable_thinking": False}
    loaded = open_model("demo", resolve({"chat_template": shown, "chat_template_kwargs": values}))
    try:
        assert loaded.chat_template is not None
        chat = Chat(loaded.tokenizer, loaded.chat_template)
        assert chat.render(ChatRequest(USER, SamplingParams())) == "merryFalse: user Hi, </think>"
        wanted = ChatRequest(USER, SamplingParams(), think=True, template_values={"mood": "sad"})
        assert chat.render(wanted) == "sadTrue: user Hi, </think>"
    finally:
        loaded.close()
    with LLM("demo", chat_template="chatml", chat_template_kwargs={"a": 1}, context_tokens=64) as llm:
        assert llm.chat(USER, SamplingParams(max_tokens=1)).usage.completion_tokens == 1


def open_preparation() -> Preparation:
    loaded = open_demo()
    return Preparation(
        loaded.tokenizer,
        loaded.chat_template,
        vocab_size=loaded.config.vocab_size,
        context_tokens=512,
        model_name="demo",
        system="Own.",
    )


def test_a_request_may_bring_a_template() -> None:
    preparation = open_preparation()
    own = preparation.render_chat(ChatRequest(USER, SamplingParams()))
    brought = ChatRequest(USER, SamplingParams(), chat_template="{{ messages[0].content }}|{{ messages[1].content }}")
    assert preparation.render_chat(brought) == "Own.|Hi"
    named = ChatRequest(USER, SamplingParams(), chat_template="zephyr", think="high")
    assert preparation.render_chat(named).endswith("<|user|>\nHi<|im_end|>\n<|assistant|>\n")
    assert len(preparation.prepare(named).request.token_ids) != len(
        preparation.prepare(ChatRequest(USER, SamplingParams())).request.token_ids
    )
    for number in range(2 * MAX_BROUGHT_TEMPLATES):
        preparation.encode_chat(ChatRequest(USER, SamplingParams(), chat_template=f"{{{{ {number} }}}}"))
    assert len(preparation._chats) == MAX_BROUGHT_TEMPLATES
    assert preparation.render_chat(ChatRequest(USER, SamplingParams())) == own


@pytest.mark.parametrize("given", ["/etc/passwd", "chatlm", "{% if %}", "{{ .Nonsense }}"])
def test_what_a_request_brings_must_be_a_template(given: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        choose_template(given, "chat_template")
    assert refused.value.field in ("chat_template", "template")


def test_a_model_without_a_template_takes_one_that_is_brought() -> None:
    loaded = open_demo()
    preparation = Preparation(
        loaded.tokenizer, None, vocab_size=loaded.config.vocab_size, context_tokens=512, model_name="bare"
    )
    assert (
        preparation.render_chat(ChatRequest(USER, SamplingParams(), chat_template="chatml")).count("<|im_start|>") == 2
    )
    with pytest.raises(TemplateError, match="bare has no chat template"):
        preparation.render_chat(ChatRequest(USER, SamplingParams()))
    assert Settings().chat_template is None
