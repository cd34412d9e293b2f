"""Answers that go on with the assistant's last message."""

from __future__ import annotations

from pathlib import Path

import pytest
from service_models import open_demo

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import Grammar, SamplingParams
from mlxr.service.chat import Chat
from mlxr.service.requests import ChatRequest, Tool
from mlxr.tokenizers import ChatTemplate

TEMPLATES = Path(__file__).parents[1] / "tokenizers" / "templates"
USER = {"role": "user", "content": "Count."}
OPENS = "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" + OPENS
THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
    + OPENS
    + "{% if add_generation_prompt %}<think>{% endif %}"
)


def make_chat(source: str) -> Chat:
    return Chat(open_demo().tokenizer, ChatTemplate(source, bos_token="<s>", eos_token="</s>", name="test"))


def continued(text: str, **options: object) -> ChatRequest:
    message = {
        "role": "assistant",
        "content": text,
        **({"reasoning": options.pop("reasoning")} if "reasoning" in options else {}),
    }
    return ChatRequest([USER, message], SamplingParams(), ending="continued", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_published_templates_end_where_the_message_does(path: Path) -> None:
    chat = make_chat(path.read_text())
    try:
        text = chat.render(continued("1, 2, <3"))
    except InvalidRequest as error:
        pytest.fail(str(error))
    assert text.endswith("1, 2, <3")
    assert "Count." in text


def test_spaces_at_the_end_stay() -> None:
    assert make_chat(THINKS).render(continued("1, ")) == "<user>Count.</user><assistant>1, "


def test_the_answer_to_a_continued_message_has_no_thoughts() -> None:
    turn = make_chat(THINKS).encode(continued("1, "))
    assert (turn.is_thinking, turn.has_thought) == (False, True)
    thinking = make_chat(THINKS).encode(continued("", reasoning="Well"))
    assert (thinking.is_thinking, thinking.has_thought) == (True, False)
    assert make_chat(THINKS).render(continued("", reasoning="Well")).endswith("<assistant><think>Well")


def test_control_tokens_in_it_are_text() -> None:
    tokenizer = open_demo().tokenizer
    turn = make_chat(PLAIN).encode(continued("a<|im_end|>b"))
    assert tokenizer.token_id("<|im_end|>") not in turn.token_ids
    assert tokenizer.decode(turn.token_ids).endswith("a<|im_end|>b")


def test_what_cannot_be_continued() -> None:
    chat = make_chat(PLAIN)
    with pytest.raises(InvalidRequest, match="nothing to continue"):
        chat.render(ChatRequest([USER], SamplingParams(), ending="continued"))
    with pytest.raises(InvalidRequest, match="leaves out"):
        make_chat("{% for m in messages %}{{ m.role }}{% endfor %}").render(continued("1"))
    with pytest.raises(InvalidRequest, match="has begun"):
        chat.write_rules(continued("1", grammar=Grammar("json_object")))
    with pytest.raises(InvalidRequest, match="has begun"):
        chat.write_rules(continued("1", tools=[Tool("f")], tool_choice="required"))
    chat.write_rules(continued("1", tools=[Tool("f")]))  # text may go on


def test_nothing_is_added_behind_a_closed_conversation() -> None:
    assert make_chat(PLAIN).render(ChatRequest([USER], SamplingParams(), ending="closed")) == "<user>Count."
