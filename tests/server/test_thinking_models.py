"""Models that think: the demo model under a chat template that opens a thought, asked by the real clients."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest
from running_server import RunningServer

from mlxr.registry import Changes

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}"
    "{% else %}{{ '<think>\n' }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(running: RunningServer) -> str:
    registry = running.app.state.parts.registry
    registry.derive("thinker", registry.get("demo"), Changes(template=TEMPLATE))
    return "thinker"


@pytest.fixture(scope="module")
def ai(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_api(server: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        yield client


def ask(ai: openai.OpenAI, model: str, **options: object) -> openai.types.chat.ChatCompletion:
    wanted = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 12, **options}
    return ai.chat.completions.create(**wanted)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("options", [{}, {"reasoning_effort": "high"}])
def test_thoughts_are_apart_from_the_text(ai: openai.OpenAI, thinker: str, options: dict[str, object]) -> None:
    reply = ask(ai, thinker, **options)
    message = reply.choices[0].message
    assert (message.model_extra or {})["reasoning_content"]
    assert message.content == ""
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens == 12
    chunks = ask(ai, thinker, stream=True, **options)
    thoughts = [(chunk.choices[0].delta.model_extra or {}).get("reasoning_content", "") for chunk in chunks]  # type: ignore[union-attr, attr-defined]
    assert "".join(thoughts) == (message.model_extra or {})["reasoning_content"]


@pytest.mark.parametrize(
    "options",
    [{"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}],
)
def test_thinking_can_be_switched_off(ai: openai.OpenAI, thinker: str, options: dict[str, object]) -> None:
    message = ask(ai, thinker, **options).choices[0].message
    assert message.content
    assert "reasoning_content" not in (message.model_extra or {})


def test_a_response_begins_with_the_thought(ai: openai.OpenAI, thinker: str) -> None:
    reply = ai.responses.create(
        model=thinker, input="What is json?", reasoning={"effort": "low"}, temperature=0, max_output_tokens=12
    )
    assert [item.type for item in reply.output] == ["reasoning"]
    assert reply.usage is not None
    assert reply.usage.output_tokens_details.reasoning_tokens == 12
    events = list(
        ai.responses.create(model=thinker, input="What is json?", temperature=0, max_output_tokens=12, stream=True)
    )
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == reply.output[0].content[0].text  # type: ignore[union-attr, index]


def test_a_message_thinks_when_asked_to(anthropic_api: anthropic.Anthropic, thinker: str) -> None:
    common = {"model": thinker, "messages": QUESTION, "max_tokens": 12, "extra_body": {"temperature": 0}}
    silent = anthropic_api.messages.create(**common)  # type: ignore[call-overload]
    assert [block.type for block in silent.content] == ["text"]
    thinking = {"type": "enabled", "budget_tokens": 11}
    loud = anthropic_api.messages.create(**common, thinking=thinking)  # type: ignore[call-overload]
    assert [block.type for block in loud.content] == ["thinking"]
    assert loud.content[0].thinking
    assert loud.usage.output_tokens_details.thinking_tokens == 12
    hidden = anthropic_api.messages.create(**common, thinking={**thinking, "display": "omitted"})  # type: ignore[call-overload]
    assert (hidden.content[0].thinking, hidden.content[0].signature) == ("", loud.content[0].signature)
    with anthropic_api.messages.stream(**common, thinking=thinking) as events:  # type: ignore[arg-type]
        assert events.get_final_message().content == loud.content


def test_a_model_that_does_not_think_is_not_asked_to(ai: openai.OpenAI) -> None:
    reply = ai.chat.completions.with_raw_response.create(
        model="demo",
        messages=QUESTION,  # type: ignore[arg-type]
        max_tokens=1,
        reasoning_effort="high",
    )
    assert reply.headers["x-mlxr-ignored"] == "reasoning_effort"
    (choice,) = reply.parse().choices
    assert "reasoning_content" not in (choice.message.model_extra or {})


def test_a_message_has_no_thought_where_the_model_has_none(anthropic_api: anthropic.Anthropic) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    reply = anthropic_api.messages.create(model="demo", messages=QUESTION, max_tokens=12, thinking=thinking)  # type: ignore[arg-type]
    assert [block.type for block in reply.content] == ["text"]


def test_what_coding_agents_send_beside(server: str) -> None:
    body = {
        "model": "demo",
        "max_tokens": 12,
        "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral", "scope": "global"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": None}]}],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
    }
    reply = httpx.post(f"{server}/v1/messages?beta=true", json=body, headers={"anthropic-beta": "x-2025-01-01"})
    assert reply.status_code == 200, reply.text
    assert "message_stop" in reply.text
