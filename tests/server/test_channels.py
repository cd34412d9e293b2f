"""Models that answer in channels, as gpt-oss does: the demo model under such a template, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from running_server import RunningServer

from mlxr.registry import Changes

TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}\n"
    "{% if tools %}{{ tools[0].function.name }}{% endif %}<|end|>"
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% if message.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking }}<|end|>{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}<|end|>"
    "{% else %}{{ '<|start|>' + message.role + '<|message|>' + message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
BEGUN = [*QUESTION, {"role": "assistant", "content": "", "reasoning_content": "It joins"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {"name": "count", "description": "Counts", "parameters": SCHEMA}
USER_TOOL = {"type": "function", "function": TOOL}


@pytest.fixture(scope="module")
def model(running: RunningServer) -> str:
    registry = running.app.state.parts.registry
    registry.derive("channels", registry.get("demo"), Changes(template=TEMPLATE))
    return "channels"


@pytest.fixture(scope="module")
def ai(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_api(server: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        yield client


def chat(ai: openai.OpenAI, model: str, messages: Any = QUESTION, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 120, **options}
    return ai.chat.completions.create(model=model, messages=messages, **options)


def check(arguments: str) -> None:
    assert list(json.loads(arguments)) == ["n"]


def test_a_call_in_a_chat(ai: openai.OpenAI, model: str) -> None:
    options = {"tools": [USER_TOOL], "tool_choice": "required"}
    (choice,) = chat(ai, model, **options).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert call.function.name == "count"
    check(call.function.arguments)
    deltas = [chunk.choices[0].delta for chunk in chat(ai, model, stream=True, **options)]
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    assert pieces[0].function.name == "count"
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert not any(delta.content for delta in deltas)


def test_a_call_in_a_response(ai: openai.OpenAI, model: str) -> None:
    options: Any = {"tools": [{"type": "function", "strict": True, **TOOL}], "tool_choice": "required"}
    reply = ai.responses.create(model=model, input="Count", temperature=0, max_output_tokens=120, **options)
    (item,) = reply.output
    assert (item.type, item.name) == ("function_call", "count")
    check(item.arguments)


def test_a_call_in_a_message(anthropic_api: anthropic.Anthropic, model: str) -> None:
    options: Any = {
        "tools": [{"name": "count", "description": "Counts", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
        "extra_body": {"temperature": 0},
    }
    reply = anthropic_api.messages.create(model=model, messages=QUESTION, max_tokens=120, **options)  # type: ignore[arg-type]
    (block,) = reply.content
    assert (block.type, reply.stop_reason) == ("tool_use", "tool_use")
    check(json.dumps(block.input))
    with anthropic_api.messages.stream(model=model, messages=QUESTION, max_tokens=120, **options) as events:  # type: ignore[arg-type]
        assert events.get_final_message().content[0].input == block.input


def test_a_schema_holds_for_the_answer_alone(
    ai: openai.OpenAI, anthropic_api: anthropic.Anthropic, server: str, model: str
) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    text = chat(ai, model, response_format=format_).choices[0].message.content
    check(text)
    streamed = chat(ai, model, response_format=format_, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
    body = {"model": model, "messages": QUESTION, "format": SCHEMA, "stream": False, "options": {"temperature": 0}}
    assert httpx.post(f"{server}/api/chat", json=body).json()["message"]["content"] == text
    output = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "temperature": 0}
    reply = anthropic_api.messages.create(model=model, messages=QUESTION, max_tokens=120, extra_body=output)  # type: ignore[arg-type]
    assert reply.content[0].text == text


def test_what_is_thought_is_told_from_what_is_said(ai: openai.OpenAI, server: str, model: str) -> None:
    """An answer that continues a thought is a thought, in every dialect."""
    message = chat(ai, model, BEGUN, max_tokens=8).choices[0].message
    assert (message.content, len(message.reasoning_content) > 0) == ("", True)
    chunks = chat(ai, model, BEGUN, max_tokens=8, stream=True)
    thoughts = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks]
    assert "".join(thoughts) == message.reasoning_content
    said = [*QUESTION, {"role": "assistant", "content": "", "thinking": "It joins"}]
    body = {"model": model, "messages": said, "stream": False, "options": {"temperature": 0, "num_predict": 8}}
    reply = httpx.post(f"{server}/api/chat", json=body).json()["message"]
    assert (reply["content"], reply["thinking"]) == ("", message.reasoning_content)


@pytest.mark.parametrize(
    ("effort", "level"), [("none", "low"), ("minimal", "low"), ("high", "high"), ("xhigh", "high"), (None, "medium")]
)
def test_efforts_become_levels(server: str, model: str, effort: str | None, level: str) -> None:
    body = {"model": model, "messages": QUESTION, "reasoning_effort": effort}
    prompt = httpx.post(f"{server}/apply-template", json=body).json()["prompt"]
    assert f"Reasoning: {level}\n" in prompt


@pytest.mark.parametrize("think", [True, False, "low", "high"])
def test_ollama_may_say_how_much_to_think(server: str, model: str, think: bool | str) -> None:
    body = {"model": model, "messages": QUESTION, "stream": False, "think": think, "options": {"num_predict": 1}}
    assert httpx.post(f"{server}/api/chat", json=body).status_code == 200
